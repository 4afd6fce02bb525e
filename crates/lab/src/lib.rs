//! uzswap's experiments, with the kernel's own swap as a peer.
//!
//! `uzswap lab kernel` does the same work under the kernel's zswap, the kernel's zram and uzswap, in one run, and compares them.
//! A *worker* does the work: it is this very binary, executed again, so the same code runs plain, in a memory cgroup, under
//! `uzswap run`, and in a region of the library.
//!
//! Read in this order: [`workload`] (what is done to memory, and how every read is verified), [`worker`] (the process that does
//! it), [`peers`] (sets up the kernel's side, and undoes it), [`kernel`] (the experiment), [`programs`] (the real programs),
//! [`table`] and [`json`] (the output).

/// Prints a line on stderr, like `eprintln!`. If nothing can be written there the line is lost and the lab goes on: a guard that
/// panicked would leave the machine as it is.
macro_rules! tell {
    ($($part:tt)*) => {{
        let _ = std::io::Write::write_all(&mut std::io::stderr(), (format!($($part)*) + "\n").as_bytes());
    }};
}

/// Prints a line on stdout, like `println!`, but ignores that a reader has closed its end.
macro_rules! show {
    ($($part:tt)*) => {{
        let _ = std::io::Write::write_all(&mut std::io::stdout(), (format!($($part)*) + "\n").as_bytes());
    }};
}

pub mod blocks;
pub mod bursts;
pub mod churn;
pub mod data;
pub mod experiment;
pub mod fallback;
pub mod highalloc;
pub mod images;
pub mod json;
pub mod kernel;
pub mod machine;
pub mod memory;
pub mod pagemap;
pub mod peers;
pub mod process;
pub mod programs;
pub mod report;
pub mod shrinker;
pub mod size;
pub mod stats;
pub mod table;
pub mod undo;
pub mod used;
pub mod usemem;
pub mod usemem_worker;
pub mod worker;
pub mod workload;

use clap::{CommandFactory, Parser, Subcommand};

/// `uzswap lab`.
#[derive(Parser)]
#[command(name = "uzswap lab", bin_name = "uzswap lab", about = "Measure uzswap on this machine, against its peers")]
struct Cli {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Subcommand)]
enum Experiment {
    /// The same work under the kernel's zswap and zram, and under uzswap, with the same limit
    Kernel(kernel::Args),
    /// Ratio and time by unit of compression, on memory of real programs
    Blocks(blocks::Args),
    /// Swap-in when contiguous frames are scarce, with and without the fall-back to four small folios
    Fallback(fallback::Args),
    /// Page state: whether it is exact, what it costs, how fast it is read
    Pagemap(pagemap::Args),
    /// How many huge blocks an ageing machine can give, under three rules of compaction
    Highalloc(highalloc::Args),
    /// Many processes that write more than the limit of their group: whole folios, split ones, and the kernel's zswap
    Usemem(usemem::Args),
    /// A process of `usemem` (used by the lab itself)
    #[command(hide = true)]
    UsememWorker(usemem_worker::Args),
    /// What goes to disk under each write-back policy, and under the kernel's zswap with its shrinker on
    Shrinker(shrinker::Args),
    /// A program with bursts (used by the lab itself)
    #[command(hide = true)]
    Bursts(bursts::Args),
    /// One process of an experiment (used by the lab itself)
    #[command(hide = true)]
    Worker(worker::Args),
}

/// The clap command of `uzswap lab`, for help, completions and manual pages.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs `uzswap lab ARGS…` (`args` is what follows `lab`) and returns the exit status.
///
/// 0: done, whatever the verdicts; 1: something failed or read wrong; 125: called wrongly, as with all of `uzswap`; 130:
/// interrupted.
#[must_use]
pub fn main(args: Vec<String>) -> i32 {
    let cli = match Cli::try_parse_from(std::iter::once("uzswap lab".to_owned()).chain(args)) {
        Ok(cli) => cli,
        Err(error) => {
            let printed = experiment::seen(error.print());
            let help = printed.map(|()| true).map_err(experiment::Stop::Failed);
            return if error.exit_code() != 0 { 125 } else { experiment::status(help, false) };
        }
    };
    match cli.experiment {
        Experiment::Kernel(args) => experiment::run(&args.common, || kernel::run(&args)),
        Experiment::Blocks(args) => experiment::run(&args.common, || blocks::run(&args)),
        Experiment::Fallback(args) => experiment::run(&args.common, || fallback::run(&args)),
        Experiment::Pagemap(args) => experiment::run(&args.common, || pagemap::run(&args)),
        Experiment::Highalloc(args) => experiment::run(&args.common, || highalloc::run(&args)),
        Experiment::Usemem(args) => experiment::run(&args.common, || usemem::run(&args)),
        Experiment::UsememWorker(args) => usemem_worker::main(&args),
        Experiment::Shrinker(args) => experiment::run(&args.common, || shrinker::run(&args)),
        Experiment::Bursts(args) => bursts::main(&args),
        Experiment::Worker(args) => worker::main(&args),
    }
}

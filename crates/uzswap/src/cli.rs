//! The command line.

use crate::folios::{FolioOptions, switch};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// Runs a program in less memory than it asks for.
#[derive(Parser)]
#[command(name = "uzswap", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Subcommand)]
pub enum Command {
    /// Run a program and its children within a limit of memory
    Run(Box<RunArgs>),
    /// Play a trace of `run --record` again, under each policy of what is written to disk
    Replay(ReplayArgs),
    /// Show or set the limits of a running group
    Ctl(CtlArgs),
    /// Print the counters of a running group in the kernel's file formats, or list the running groups
    Stat(StatArgs),
    /// Say whether this machine can do it, and what to change if not
    Doctor(DoctorArgs),
    /// Show what is in memory and what is out, of a process or a shared region
    Pagemap(PagemapArgs),
    /// Be told before a process under `uzswap run --track-writes` writes to its pages
    Protect(ProtectArgs),
    /// Serve guests' page faults from a compressed snapshot, in Firecracker's protocol
    Handover {
        /// The Unix socket to which monitors connect; made here
        socket: PathBuf,
        /// The memory file of the snapshot
        memory: PathBuf,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page of this command, or of a subcommand (roff)
    Man {
        /// The subcommand, such as `run` or `lab kernel`
        command: Vec<String>,
    },
    /// Measure uzswap and the kernel's own compressed swap side by side
    #[command(disable_help_flag = true)]
    Lab {
        /// The experiment and its arguments; `uzswap lab` alone lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

/// Options of `uzswap run`.
#[derive(Args)]
pub struct RunArgs {
    /// Memory for the program and its children: 512M, 1.5GiB, or 50% of what the machine or its cgroup has
    #[arg(short, long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Join the running group NAME, or create it with --memory (an equal --memory joins as well, another is refused); NAME/CHILD
    /// is a group inside another
    #[arg(short, long, value_name = "NAME")]
    pub group: Option<String>,
    /// When the limit is exceeded and nothing more can be taken out of memory: exceed (the default: go on and report it),
    /// wait (until there is room), kill (the member of the group that holds most)
    #[arg(long, value_name = "WHAT")]
    pub on_full: Option<String>,
    /// Compressor of the pool: lz4 (the default), zstd[:LEVEL], deflate[:LEVEL]
    #[arg(short, long, value_name = "NAME")]
    pub compressor: Option<String>,
    /// Disk for what does not compress into the limit: 4G (256 KiB to 256 GiB); or the memory of a server or cluster:
    /// redis://HOST:PORT/DB?size=4G, by TLS with rediss://. Without it nothing leaves memory
    #[arg(long, value_name = "SIZE")]
    pub swap: Option<String>,
    /// Directory of the swap file, which has no name there and is gone at the end [default: /var/tmp, or /tmp where that is in memory or cannot be written]
    #[arg(long, value_name = "DIR")]
    pub swap_dir: Option<PathBuf>,
    /// Allow a --swap-dir that is in memory
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub swap_in_ram: Option<bool>,
    /// What goes to disk first: balanced (the default), second-chance, decaying, fifo, s3-fifo or reuse
    #[arg(long, value_name = "NAME")]
    pub swap_policy: Option<String>,
    /// Encrypt what goes to disk, with a key that only the process which wrote it has
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub encrypt_swap: Option<bool>,
    /// Keep which pages were written to, for `uzswap pagemap --soft-dirty` and --clear-soft-dirty, and allow `uzswap protect`
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub track_writes: Option<bool>,
    /// Folios
    #[command(flatten)]
    pub folios: FolioOptions,
    /// Take options from a TOML file; the command line wins (--quiet=false over `quiet = true`)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// No summary at the end
    #[arg(short, long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub quiet: Option<bool>,
    /// Write what happened to FILE, as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Record faults, evictions and stores to FILE, for `uzswap replay`
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// The program and its arguments
    // (No `allow_hyphen_values`: with it options that are mistyped, or have their value attached, are taken for the program.
    // Behind the program everything is its own all the same.)
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// Options of `uzswap ctl`.
#[derive(Args)]
pub struct CtlArgs {
    /// The group, as `uzswap stat` lists it
    pub name: String,
    /// What to set: memory.high, memory.max, memory.zswap.max or memory.swap.max to a size, a percentage of what the machine or
    /// its cgroup has, or `max` for no limit;
    /// memory.zswap.writeback to 0 or 1; uzswap.on_full to exceed, wait or kill. Nothing: show them
    #[arg(value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
}

/// Options of `uzswap stat`.
#[derive(Args)]
pub struct StatArgs {
    /// The group; without it, the running groups are listed
    pub name: Option<String>,
    /// Only these files, such as memory.events
    #[arg(value_name = "FILE")]
    pub files: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `uzswap doctor`.
#[derive(Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `uzswap replay`.
#[derive(Args)]
pub struct ReplayArgs {
    /// The trace
    pub file: PathBuf,
    /// Who decides what is written to disk: balanced, second-chance, decaying, fifo, s3-fifo, reuse, several of them, or all
    #[arg(short, long, value_name = "NAME", default_value = "all")]
    pub policy: String,
    /// What the compressed pools may take together: 64M, or 30% of what they take without a disk [default: 50%]
    #[arg(long, value_name = "SIZE")]
    pub pool: Option<String>,
    /// A full pool is shrunk to this part of it
    #[arg(long, value_name = "PERCENT", default_value_t = 90, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub accept_threshold: u8,
    /// Microseconds a read of the disk takes, besides its bytes
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = clap::value_parser!(u64).range(0..=10_000_000))]
    pub read_latency: u64,
    /// What the disk reads or writes in a second, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub bandwidth: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `uzswap protect`.
#[derive(Args)]
pub struct ProtectArgs {
    /// The process
    pub pid: u32,
    /// What to protect at first: START-END in hexadecimal, as `uzswap pagemap --runs` shows it; all; or none
    #[arg(default_value = "all")]
    pub range: String,
}

/// Options of `uzswap pagemap`.
#[derive(Args)]
pub struct PagemapArgs {
    /// A process id, or the socket of a shared region
    pub target: String,
    /// Print the runs of pages in the same state
    #[arg(long)]
    pub runs: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Draw the address space to FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// First put a range out: all, FROM..TO of a shared region, such as 0..64M, or START-END of a process under `uzswap
    /// run` or with regions of the library, in hexadecimal, as --runs shows it
    #[arg(long, value_name = "RANGE")]
    pub page_out: Option<String>,
    /// First put out what is not touched within so many seconds from now, and say how much
    #[arg(long, value_name = "SECONDS")]
    pub idle: Option<f64>,
    /// First bring a range in: as --page-out
    #[arg(long, value_name = "RANGE")]
    pub page_in: Option<String>,
    /// First clear the soft-dirty bits of a range of a process under `uzswap run --track-writes`, as --page-out (all, where
    /// none is given): the next write to each of the pages sets its bit again. Which were set is shown with --runs and
    /// --json: no write is missed between the two
    #[arg(long, value_name = "RANGE", num_args = 0..=1, default_missing_value = "all")]
    pub clear_soft_dirty: Option<String>,
    /// Show only what is soft-dirty: written to since the bits were last cleared, or since the program began
    #[arg(long)]
    pub soft_dirty: bool,
}

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
    /// Replay a trace of `uzswap run --record`, and print what each write-back policy would have read and written
    Replay(ReplayArgs),
    /// Show or set the limits of a running group
    Ctl(CtlArgs),
    /// Print the counters of a running group in the kernel's file formats, or list the running groups
    Stat(StatArgs),
    /// Say whether this machine can run programs under uzswap, and what to change if not
    Doctor(DoctorArgs),
    /// Show which pages of a process or a shared region are in memory and which are out, and move them
    Pagemap(PagemapArgs),
    /// Tell a client before a process under `uzswap run --track-writes` writes to its pages
    Protect(ProtectArgs),
    /// Serve page faults of virtual machines restored from a snapshot, in Firecracker's protocol
    Handover {
        /// The Unix socket that monitors connect to; created here
        socket: PathBuf,
        /// The snapshot's memory file
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
    /// Measure uzswap next to the kernel's own compressed swap
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
    /// Limit for the program and its children together: 512M, 1.5GiB, or 50% of the memory of the machine or its cgroup
    #[arg(short, long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Join the running group NAME, or create it with --memory (to join, an equal --memory is accepted, another refused);
    /// NAME/CHILD is a group inside another
    #[arg(short, long, value_name = "NAME")]
    pub group: Option<String>,
    /// What to do when the limit is exceeded and nothing more can be taken out of memory: exceed (the default: go on and report
    /// it), wait (until there is room), kill (the process of the group that holds most)
    #[arg(long, value_name = "WHAT")]
    pub on_full: Option<String>,
    /// Compressor of the pool: lz4 (the default), zstd[:LEVEL], deflate[:LEVEL]
    #[arg(short, long, value_name = "NAME")]
    pub compressor: Option<String>,
    /// Swap file for data that does not compress into the limit: 4G (256 KiB to 256 GiB); or a Redis or Valkey server or cluster:
    /// redis://HOST:PORT/DB?size=4G, rediss:// for TLS. Without it, nothing is written to disk
    #[arg(long, value_name = "SIZE")]
    pub swap: Option<String>,
    /// Directory of the swap file, which has no name and is gone at the end [default: /var/tmp, or /tmp if that is in memory or
    /// cannot be written]
    #[arg(long, value_name = "DIR")]
    pub swap_dir: Option<PathBuf>,
    /// Allow a --swap-dir that is in memory
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub swap_in_ram: Option<bool>,
    /// What goes to disk first: balanced (the default), second-chance, decaying, fifo, s3-fifo or reuse
    #[arg(long, value_name = "NAME")]
    pub swap_policy: Option<String>,
    /// Encrypt what goes to disk; the key is only in the memory of the process that wrote it
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub encrypt_swap: Option<bool>,
    /// Track which pages are written to, for `uzswap pagemap --soft-dirty` and --clear-soft-dirty, and allow `uzswap protect`
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub track_writes: Option<bool>,
    /// Folios
    #[command(flatten)]
    pub folios: FolioOptions,
    /// Read these options from a TOML file; the command line wins (--quiet=false over `quiet = true`)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// No summary at the end
    #[arg(short, long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch, value_name = "true|false")]
    pub quiet: Option<bool>,
    /// Write a JSON report to FILE
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Record faults, evictions and stores to FILE, for `uzswap replay`
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// The program and its arguments
    // No `allow_hyphen_values`: with it, clap takes a mistyped option, or one with an attached value, for the program. Everything
    // behind the program is its own anyway.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// Options of `uzswap ctl`.
#[derive(Args)]
pub struct CtlArgs {
    /// The group, as `uzswap stat` lists it
    pub name: String,
    /// Limits to set: memory.high, memory.max, memory.zswap.max or memory.swap.max to a size, a percentage of the memory of the
    /// machine or its cgroup, or `max` for no limit; memory.zswap.writeback to 0 or 1; uzswap.on_full to exceed, wait or kill.
    /// Without any, show them
    #[arg(value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
}

/// Options of `uzswap stat`.
#[derive(Args)]
pub struct StatArgs {
    /// The group; without it, list the running groups
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
    /// Policies to compare, separated by commas: balanced, second-chance, decaying, fifo, s3-fifo, reuse; or all
    #[arg(short, long, value_name = "NAME", default_value = "all")]
    pub policy: String,
    /// What the compressed pools may take together: 64M, or 30% of what they take without a disk [default: 50%]
    #[arg(long, value_name = "SIZE")]
    pub pool: Option<String>,
    /// To what part of --pool full pools are shrunk
    #[arg(long, value_name = "PERCENT", default_value_t = 90, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub accept_threshold: u8,
    /// Latency of a disk read in microseconds, besides the transfer of its bytes
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = clap::value_parser!(u64).range(0..=10_000_000))]
    pub read_latency: u64,
    /// Bandwidth of the disk in MiB per second
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
    /// First page out a range: all; FROM..TO of a shared region, such as 0..64M; or START-END in hexadecimal, as --runs shows it,
    /// of a process under `uzswap run` or with regions of the library
    #[arg(long, value_name = "RANGE")]
    pub page_out: Option<String>,
    /// First page out what is not touched within SECONDS from now, and say how much
    #[arg(long, value_name = "SECONDS")]
    pub idle: Option<f64>,
    /// First page in a range: as --page-out
    #[arg(long, value_name = "RANGE")]
    pub page_in: Option<String>,
    /// First clear the soft-dirty bits of a range (as --page-out; default: all) of a process under `uzswap run --track-writes`:
    /// the next write to a page sets its bit again. --runs and --json show which were set; reading and clearing a bit is one
    /// step, so no write is missed
    #[arg(long, value_name = "RANGE", num_args = 0..=1, default_missing_value = "all")]
    pub clear_soft_dirty: Option<String>,
    /// Show only pages that are soft-dirty: written to since the bits were last cleared, or since the program began
    #[arg(long)]
    pub soft_dirty: bool,
}

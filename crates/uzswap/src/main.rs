//! The command `uzswap`: runs a program in less memory than it asks for.
//!
//! `cli` defines the command line; each subcommand has a module of its name. The others:
//!
//! | what | where |
//! |---|---|
//! | the options of `run`, and what can be wrong with them | `config`, `folios`, `check`, `elf` (the program), `machine` |
//! | how the program is started, and how the command lives beside it | `run`, `handed`, `addressed`, `signals`, `witness`, `stack`, `descriptors` |
//! | where its pages go | `swap` (a file), `remote` (a server) |
//! | what is reported of it | `totals`, `summary`, `report`, `record`, `output` |
//! | groups | `groups`, `group_name`; `ctl`, `stat` and `stat_files` |

/// Writes a line to stderr like `eprintln!`. If nothing can be written there (the disk is full, nobody reads the pipe any more)
/// the line is lost, and the command goes on and ends as it would.
///
/// The story: `eprintln!` panics there, and for a program that could not be run the command ended by SIGABRT instead of with
/// status 127.
macro_rules! say {
    ($($part:tt)*) => {
        $crate::summary::say(&(format!($($part)*) + "\n"))
    };
}

mod addressed;
mod check;
mod cli;
mod config;
mod ctl;
mod descriptors;
mod doctor;
mod elf;
mod folios;
mod group_name;
mod groups;
mod handed;
mod machine;
mod output;
mod pagemap;
mod protect;
mod record;
mod remote;
mod replay;
mod report;
mod run;
mod signals;
mod stack;
mod stat;
mod stat_files;
mod summary;
mod swap;
mod totals;
mod witness;

use clap::error::ErrorKind as Said;
use clap::{CommandFactory, Parser};
use cli::{Cli, Command};
use config::plain;
use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;

/// Exit status when uzswap itself refuses, as in `env` and `timeout`: the program was not started, or the command was called
/// wrongly.
const EXIT_OWN_FAILURE: u8 = 125;
/// Exit statuses for a program that cannot be run, and for one that does not exist.
const EXIT_CANNOT_RUN: u8 = 126;
const EXIT_NO_PROGRAM: u8 = 127;

/// Why a command did not do what it was asked, in one sentence.
#[derive(Debug, PartialEq)]
enum Failed {
    /// It cannot be done.
    Cannot(String),
    /// The command was called wrongly: the request makes no sense anywhere.
    Wrongly(String),
}

impl From<String> for Failed {
    fn from(sentence: String) -> Self {
        Self::Cannot(sentence)
    }
}

/// Prints what is wrong, and turns the result of a subcommand into an exit status.
fn own(result: Result<(), impl Into<Failed>>) -> ExitCode {
    let (sentence, status) = match result.map_err(Into::into) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failed::Cannot(sentence)) => (sentence, ExitCode::FAILURE),
        Err(Failed::Wrongly(sentence)) => (sentence, ExitCode::from(EXIT_OWN_FAILURE)),
    };
    say!("uzswap: {sentence}");
    status
}

fn main() -> ExitCode {
    let cli = match stack::roomy(Cli::try_parse) {
        Ok(cli) => cli,
        Err(error) => return explain(&error),
    };
    match cli.command {
        Command::Run(args) => match run::run(&args) {
            Ok(ended) => ended.leave(),
            Err(refused) => {
                say!("uzswap: {}", refused.sentence);
                ExitCode::from(refused.status)
            }
        },
        Command::Ctl(args) => own(ctl::ctl(&args)),
        Command::Stat(args) => own(stat::stat(&args)),
        Command::Lab { args } => ExitCode::from(uzswap_lab::main(args).clamp(0, 255) as u8),
        Command::Replay(args) => own(replay::replay(&args)),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Handover { socket, memory } => own(handover(&socket, &memory)),
        Command::Pagemap(args) => own(pagemap::pagemap(&args)),
        Command::Protect(args) => own(protect::protect(&args)),
        Command::Completions { shell } => own(output::print(&stack::roomy(|| {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut whole(), "uzswap", &mut script);
            script
        }))),
        Command::Man { command } => own(stack::roomy(|| man(&command)).and_then(|page| Ok(output::print(&page)?))),
    }
}

/// Prints clap's message for a command line that it could not parse, or that asked for help.
fn explain(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), Said::DisplayHelp | Said::DisplayVersion) {
        return own(output::seen(error.print()));
    }
    let _ = error.print();
    ExitCode::from(EXIT_OWN_FAILURE)
}

/// The command with all its subcommands, including those of `uzswap lab`, for completions and manual pages.
fn whole() -> clap::Command {
    let mut whole = Cli::command().mut_subcommand("lab", |_| uzswap_lab::command().name("lab"));
    whole.build();
    whole
}

/// `uzswap man`: one page, of the command or of the subcommand that `words` name.
fn man(words: &[String]) -> Result<Vec<u8>, Failed> {
    let whole = whole();
    let page = words.iter().try_fold(&whole, |of, name| {
        of.find_subcommand(name).ok_or_else(|| {
            let shown = of.get_subcommands().filter(|sub| !sub.is_hide_set());
            let names: Vec<&str> = shown.map(clap::Command::get_name).collect();
            Failed::Wrongly(match names.is_empty() {
                true => format!("no subcommand is called `{name}`: there are none below `{}`", of.get_name()),
                false => format!("no subcommand is called `{name}`: choose one of {}", names.join(", ")),
            })
        })
    })?;
    let mut text = Vec::new();
    let made = clap_mangen::Man::new(page.clone()).render(&mut text);
    made.map_err(|e| format!("the page cannot be created: {}", plain(&e)))?;
    Ok(text)
}

/// Listens at a socket. A socket that an ended command left is made anew, as nothing else removes it.
fn listen(socket: &std::path::Path) -> std::io::Result<UnixListener> {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = || std::fs::symlink_metadata(socket).is_ok_and(|m| m.file_type().is_socket());
    let is_left = || UnixStream::connect(socket).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused);
    match UnixListener::bind(socket) {
        Err(e) if e.kind() == ErrorKind::AddrInUse && is_socket() && is_left() => {
            std::fs::remove_file(socket)?;
            UnixListener::bind(socket)
        }
        bound => bound,
    }
}

/// `uzswap handover`: serves until it is stopped.
fn handover(socket: &std::path::Path, memory: &std::path::Path) -> Result<(), String> {
    let image = std::fs::File::open(memory)
        .and_then(|file| uzswap::handover::Image::read(&file))
        .map_err(|e| format!("the memory file `{}` cannot be read: {}", memory.display(), plain(&e)))?;
    if image.is_empty() {
        // A device reports a length of zero, too.
        return Err(format!("the memory file `{}` is empty: name the snapshot's memory file", memory.display()));
    }
    let listener =
        listen(socket).map_err(|e| format!("nothing can listen at `{}`: {}", socket.display(), plain(&e)))?;
    let (held, all) = (uzswap_mm::size::human(image.held() as u64), uzswap_mm::size::human(image.len()));
    say!("uzswap: {all} held in {held}; waiting for monitors at {}", socket.display());
    uzswap::handover::serve(&listener, &std::sync::Arc::new(image)).map_err(|e| plain(&e))
}

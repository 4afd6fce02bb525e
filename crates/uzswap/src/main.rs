//! The command `uzswap`: runs a program in less memory than it asks for.

mod check;
mod cli;
mod config;
mod ctl;
mod doctor;
mod elf;
mod folios;
mod groups;
mod machine;
mod pagemap;
mod protect;
mod record;
mod remote;
mod replay;
mod report;
mod run;
mod signals;
mod size;
mod stat;
mod stat_files;
mod summary;
mod swap;
mod totals;

use clap::{CommandFactory, Parser, error::ErrorKind};
use cli::{Cli, Command};
use config::plain;
use std::process::ExitCode;

/// Exit status of every failure of our own, as `env` and `timeout` have it: the program was not started.
const EXIT_OWN_FAILURE: u8 = 125;

/// Says what is wrong, in one sentence.
fn own(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("uzswap: {sentence}");
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if asked_for { ExitCode::SUCCESS } else { ExitCode::from(EXIT_OWN_FAILURE) };
        }
    };
    match cli.command {
        Command::Run(args) => match run::run(&args) {
            Ok(ended) => ended.leave(),
            Err(refused) => {
                eprintln!("uzswap: {}", refused.sentence);
                ExitCode::from(refused.status)
            }
        },
        Command::Ctl(args) => own(ctl::ctl(&args)),
        Command::Stat(args) => own(stat::stat(&args)),
        Command::Lab { args } => ExitCode::from(uzswap_lab::main(args).clamp(0, 255) as u8),
        Command::Replay(args) => replay::main(&args).unwrap_or_else(|sentence| {
            eprintln!("uzswap: {sentence}");
            ExitCode::from(EXIT_OWN_FAILURE)
        }),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Handover { socket, memory } => own(handover(&socket, &memory)),
        Command::Pagemap(args) => own(pagemap::pagemap(&args)),
        Command::Protect(args) => own(protect::protect(&args)),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut whole(), "uzswap", &mut std::io::stdout());
            ExitCode::SUCCESS
        }
        Command::Man { command } => own(man(&command)),
    }
}

/// The command with all its subcommands, those of `uzswap lab` too, as completions and manual pages know it.
fn whole() -> clap::Command {
    let mut whole = Cli::command().mut_subcommand("lab", |_| uzswap_lab::command().name("lab"));
    whole.build();
    whole
}

/// `uzswap man`: one page, of the command or of the subcommand that these words name.
fn man(words: &[String]) -> Result<(), String> {
    let whole = whole();
    let page = words.iter().try_fold(&whole, |of, name| {
        of.find_subcommand(name).ok_or_else(|| {
            let names: Vec<&str> = of.get_subcommands().map(clap::Command::get_name).collect();
            match names.is_empty() {
                true => format!("no subcommand is called `{name}`: there are none below `{}`", of.get_name()),
                false => format!("no subcommand is called `{name}`: choose one of {}", names.join(", ")),
            }
        })
    })?;
    let printed = clap_mangen::Man::new(page.clone()).render(&mut std::io::stdout());
    printed.map_err(|e| format!("the page cannot be printed: {}", plain(&e)))
}

/// `uzswap handover`: serves until it is stopped.
fn handover(socket: &std::path::Path, memory: &std::path::Path) -> Result<(), String> {
    let image = std::fs::File::open(memory)
        .and_then(|file| uzswap::handover::Image::read(&file))
        .map_err(|e| format!("the memory file `{}` cannot be read: {}", memory.display(), plain(&e)))?;
    let listener = std::os::unix::net::UnixListener::bind(socket)
        .map_err(|e| format!("nothing can listen at `{}`: {}", socket.display(), plain(&e)))?;
    let (held, all) = (size::human(image.held() as u64), size::human(image.len()));
    eprintln!("uzswap: {all} held in {held}; waiting for monitors at {}", socket.display());
    uzswap::handover::serve(&listener, &std::sync::Arc::new(image)).map_err(|e| plain(&e))
}

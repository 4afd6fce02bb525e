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
        Command::Handover { socket, memory } => handover(&socket, &memory),
        Command::Pagemap(args) => pagemap::pagemap(&args),
        Command::Protect(args) => own(protect::protect(&args)),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "uzswap", &mut std::io::stdout());
            ExitCode::SUCCESS
        }
        Command::Man => match clap_mangen::Man::new(Cli::command()).render(&mut std::io::stdout()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::from(EXIT_OWN_FAILURE),
        },
    }
}

/// `uzswap handover`: serves until it is stopped.
fn handover(socket: &std::path::Path, memory: &std::path::Path) -> ExitCode {
    let done = std::fs::File::open(memory)
        .and_then(|file| uzswap::handover::Image::read(&file))
        .map_err(|e| format!("`{}`: {e}", memory.display()))
        .and_then(|image| {
            let listener = std::os::unix::net::UnixListener::bind(socket)
                .map_err(|e| format!("cannot listen at `{}`: {e}", socket.display()))?;
            let (held, whole) = (size::human(image.held() as u64), size::human(image.len()));
            eprintln!("uzswap: {whole} held in {held}; waiting for monitors at {}", socket.display());
            uzswap::handover::serve(&listener, &std::sync::Arc::new(image)).map_err(|e| e.to_string())
        });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("uzswap: {sentence}");
            ExitCode::FAILURE
        }
    }
}

//! Environment variables that name the command by its pid but are meant for the program. systemd says with `LISTEN_PID` which
//! process the sockets it hands over are for, and with `WATCHDOG_PID` which one it wants to hear from. A process with another pid
//! ignores them.
//!
//! The program's pid is known only after the fork, when `Command` has made the environment already. So the program is executed
//! here, with an environment of its own.
//!
//! The story: a service that systemd starts with its sockets (`ExecStart=uzswap run … -- SERVER`) took none of them, and one with
//! a watchdog kept silent and was killed for it.

use std::env;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

const NAMES: [&str; 2] = ["LISTEN_PID", "WATCHDOG_PID"];

/// A program, its arguments and its environment, in the form that exec takes.
pub struct Addressed {
    program: Vec<u8>,
    /// Addresses of the strings in `_kept`, each list with a zero at its end.
    arguments: Vec<usize>,
    environment: Vec<usize>,
    _kept: Vec<Vec<u8>>,
    /// The variables that are to name the program, with room for its pid.
    named: [Option<Vec<u8>>; NAMES.len()],
}

impl Addressed {
    /// The program that `command` starts with `arguments`; None if no variable names this process.
    pub fn of(command: &Command, arguments: &[impl AsRef<OsStr>]) -> Option<Addressed> {
        let us = std::process::id().to_string();
        let named = NAMES.map(|name| (env::var_os(name)? == *us).then(|| text(&[name.as_bytes(), b"=", &[0; 20]])));
        named.iter().any(Option::is_some).then_some(())?;
        let mut kept: Vec<Vec<u8>> = arguments.iter().map(|argument| text(&[argument.as_ref().as_bytes()])).collect();
        let arguments = kept.len();
        let changed = |name: &OsStr| command.get_envs().any(|(other, _)| other == name);
        let inherited = env::vars_os().filter(|(name, _)| !changed(name));
        let set = command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
        // Newer versions of systemd's library go by this id of the process if it is set, else by the pid.
        let is_ours = |name: &OsStr| name == "LISTEN_PIDFDID" && named[0].is_some();
        let is_named = |name: &OsStr| NAMES.iter().zip(&named).any(|(other, own)| name == *other && own.is_some());
        kept.extend(
            inherited
                .chain(set)
                .filter(|(name, _)| !is_named(name) && !is_ours(name))
                .map(|(name, value)| text(&[name.as_bytes(), b"=", value.as_bytes()])),
        );
        let at = |string: &Vec<u8>| string.as_ptr() as usize;
        let (first, rest) = kept.split_at(arguments);
        Some(Addressed {
            program: text(&[Path::new(command.get_program()).as_os_str().as_bytes()]),
            arguments: first.iter().map(at).chain([0]).collect(),
            environment: rest.iter().map(at).chain(named.iter().flatten().map(at)).chain([0]).collect(),
            named,
            _kept: kept,
        })
    }

    /// Executes the program in the calling process; returns only if that fails. Allocates nothing: it runs between fork and exec.
    pub fn execute(&mut self) -> io::Error {
        for (name, own) in NAMES.iter().zip(&mut self.named) {
            if let Some(own) = own {
                // It fits: `of` made room for 20 digits.
                let _ = write!(&mut own[name.len() + 1..], "{}\0", std::process::id());
            }
        }
        // execvpe, like `Command`: it has the shell run a script that names no interpreter.
        // SAFETY: the strings end with a zero byte and live as long as `self`; the lists end with a null pointer.
        unsafe {
            libc::execvpe(
                self.program.as_ptr().cast(),
                self.arguments.as_ptr().cast(),
                self.environment.as_ptr().cast(),
            );
        }
        io::Error::last_os_error()
    }
}

/// The parts as one string that ends with a zero byte.
fn text(parts: &[&[u8]]) -> Vec<u8> {
    let mut text = parts.concat();
    text.push(0);
    text
}

//! Finds out what a program file is: dynamic or static, for which machine, or a script and its interpreter.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use uzswap_sys::loader;

/// How many scripts are followed to their interpreter, as in the kernel.
const SCRIPT_LEVELS: usize = 4;
/// The most program headers looked at; the kernel refuses more than 64 KiB of them.
const MAX_PHDRS: usize = 1170;

/// What a file is to execve.
#[derive(Debug, PartialEq)]
pub enum Kind {
    /// An ELF program for this machine with this dynamic loader, or the loader itself.
    Dynamic(PathBuf),
    /// An ELF program for this machine that names no loader.
    Static,
    /// An ELF program for another machine.
    Foreign(String),
    /// A script with this interpreter.
    Script(PathBuf),
    /// Unknown here; the kernel may know it (binfmt_misc).
    Unknown,
}

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// Says what a file is.
pub fn kind(file: &mut (impl Read + Seek)) -> io::Result<Kind> {
    let mut head = Vec::new();
    file.by_ref().take(256).read_to_end(&mut head)?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|&b| b == b'\n').next().unwrap_or_default();
        let word = line.split(|b| b" \t".contains(b)).find(|word| !word.is_empty());
        return Ok(word.map_or(Kind::Unknown, |word| Kind::Script(OsStr::from_bytes(word).into())));
    }
    if !head.starts_with(b"\x7fELF") {
        // execvp hands to the shell what the kernel refuses.
        let text = !head.is_empty() && !head.contains(&0);
        return Ok(if text { Kind::Script("/bin/sh".into()) } else { Kind::Unknown });
    }
    if head.len() < 64 {
        return Ok(Kind::Unknown);
    }
    let machine = u16_at(&head, 18);
    if head[4] != 2 || head[5] != 1 || machine != MACHINE {
        return Ok(Kind::Foreign(machine_name(head[4], head[5], machine)));
    }
    let (offset, size, count) = (u64_at(&head, 32), u16_at(&head, 54), u16_at(&head, 56));
    if size < 56 {
        return Ok(Kind::Static);
    }
    for i in 0..usize::from(count).min(MAX_PHDRS) {
        let Some(at) = offset.checked_add(i as u64 * u64::from(size)) else {
            break;
        };
        let mut phdr = [0u8; 56];
        file.seek(SeekFrom::Start(at))?;
        if file.read_exact(&mut phdr).is_err() {
            break;
        }
        const PT_INTERP: u32 = 3;
        if u32::from_le_bytes([phdr[0], phdr[1], phdr[2], phdr[3]]) == PT_INTERP {
            let mut name = Vec::new();
            file.seek(SeekFrom::Start(u64_at(&phdr, 8)))?;
            file.by_ref().take(u64_at(&phdr, 32).min(4096)).read_to_end(&mut name)?;
            let name = name.split(|&b| b == 0).next().unwrap_or_default();
            return Ok(Kind::Dynamic(OsStr::from_bytes(name).into()));
        }
    }
    Ok(Kind::Static)
}

/// Follows scripts from `path` to the file that is loaded in the end. Returns it with its kind.
pub fn resolve(path: &Path) -> io::Result<(PathBuf, Kind)> {
    let mut path = path.to_path_buf();
    for _ in 0..SCRIPT_LEVELS {
        match kind(&mut File::open(&path)?)? {
            Kind::Script(interpreter) => path = interpreter,
            Kind::Static => {
                let kind = loader_itself(&path).map_or(Kind::Static, Kind::Dynamic);
                return Ok((path, kind));
            }
            other => return Ok((path, other)),
        }
    }
    let kind = kind(&mut File::open(&path)?)?;
    Ok((path, kind))
}

/// If a file that names no loader is itself the loader, the name that it goes by.
fn loader_itself(path: &Path) -> Option<PathBuf> {
    let path = path.canonicalize().ok()?;
    let name = Path::new(OsStr::from_bytes(loader::name(path.as_os_str().as_bytes())?));
    Some(if path.ends_with(name) { path } else { name.into() })
}

fn machine_name(class: u8, data: u8, machine: u16) -> String {
    let machine = if data == 2 { machine.swap_bytes() } else { machine };
    let name = match machine {
        3 => "32-bit x86",
        8 => "MIPS",
        20 | 21 => "PowerPC",
        22 => "s390",
        40 => "32-bit Arm",
        62 => "x86-64",
        183 => "64-bit Arm",
        243 => "RISC-V",
        258 => "LoongArch",
        _ => return format!("another machine (ELF number {machine})"),
    };
    let x32 = if machine == 62 && class == 1 { " with 32-bit pointers" } else { "" };
    format!("{name}{x32}")
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::{Kind, MACHINE, kind, resolve};
    use proptest::prelude::*;
    use std::fs;
    use std::io::Cursor;
    use std::path::Path;

    /// An ELF header with one program header of type `phdr`, whose contents are `interp`.
    fn elf(machine: u16, phdr: u32, interp: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16] = 2;
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64..68].copy_from_slice(&phdr.to_le_bytes());
        bytes[72] = 120;
        bytes[96..104].copy_from_slice(&(interp.len() as u64).to_le_bytes());
        bytes.extend_from_slice(interp);
        bytes
    }

    fn kind_of(bytes: &[u8]) -> Kind {
        kind(&mut Cursor::new(bytes)).unwrap()
    }

    #[test]
    fn real_programs() {
        let (path, kind) = resolve(Path::new("/bin/true")).unwrap();
        assert_eq!(path, Path::new("/bin/true"));
        assert!(matches!(kind, Kind::Dynamic(loader) if loader.starts_with("/lib64") || loader.starts_with("/lib")));
        assert!(resolve(Path::new("/no/such/program")).is_err());
    }

    #[test]
    fn loaders_are_no_static_programs() {
        let dir = tempfile::tempdir().unwrap();
        let musl = dir.path().join("x86_64-linux-musl");
        fs::create_dir(&musl).unwrap();
        let file = |path: std::path::PathBuf| {
            fs::write(&path, elf(MACHINE, 1, b"")).unwrap();
            let path = path.canonicalize().unwrap();
            (resolve(&path).unwrap().1, path)
        };
        for name in ["ld-linux-x86-64.so.2", "ld-musl-x86_64.so.1"] {
            let (kind, path) = file(dir.path().join(name));
            assert_eq!(kind, Kind::Dynamic(path));
        }
        assert_eq!(file(musl.join("libc.so")).0, Kind::Dynamic("ld-musl".into()));
        assert_eq!(file(dir.path().join("libc.so")).0, Kind::Static);
    }

    #[test]
    fn made_by_hand() {
        assert_eq!(kind_of(&elf(MACHINE, 3, b"/lib/ld.so\0")), Kind::Dynamic("/lib/ld.so".into()));
        assert_eq!(kind_of(&elf(MACHINE, 1, b"")), Kind::Static);
        assert_eq!(kind_of(&elf(3, 1, b"")), Kind::Foreign("32-bit x86".into()));
        assert_eq!(kind_of(&elf(7777, 1, b"")), Kind::Foreign("another machine (ELF number 7777)".into()));
        assert_eq!(kind_of(&elf(MACHINE, 1, b"")[..40]), Kind::Unknown);
        assert_eq!(kind_of(b"#! /usr/bin/python3 -u\nx"), Kind::Script("/usr/bin/python3".into()));
        assert_eq!(kind_of(b"#!\n"), Kind::Unknown);
        assert_eq!(kind_of(b"echo hello\n"), Kind::Script("/bin/sh".into()));
        assert_eq!(kind_of(b""), Kind::Unknown);
        assert_eq!(kind_of(b"\0asm"), Kind::Unknown);
    }

    #[test]
    fn scripts_are_followed_four_levels() {
        let dir = tempfile::tempdir().unwrap();
        let mut interpreter = "/bin/true".to_owned();
        let mut ends = vec![];
        for level in 1..=5 {
            let path = dir.path().join(level.to_string());
            fs::write(&path, format!("#!{interpreter}\n")).unwrap();
            ends.push(resolve(&path).unwrap());
            interpreter = path.display().to_string();
        }
        assert!(ends[..4].iter().all(|(path, _)| path == Path::new("/bin/true")));
        assert!(matches!(ends[4].1, Kind::Script(_)), "too deep");
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = kind(&mut Cursor::new(&bytes));
        }

        #[test]
        fn damaged_headers_never_panic(at in 4usize..120, value in any::<u8>()) {
            let mut bytes = elf(MACHINE, 3, b"/lib/ld.so\0");
            bytes[at] = value;
            let _ = kind(&mut Cursor::new(&bytes));
        }
    }
}

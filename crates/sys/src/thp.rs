//! Transparent huge pages: the system's settings (/sys/kernel/mm/transparent_hugepage).
//!
//! Since Linux 6.8 each size has its own setting, which may defer to the old one for all sizes (`inherit`).

use crate::raw::read_file;

/// Which anonymous memory may have huge pages of 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Policy {
    /// None.
    Never,
    /// Memory for which the program advises it (MADV_HUGEPAGE).
    Advised,
    /// All memory, except where the program advises against it (MADV_NOHUGEPAGE).
    Always,
}

/// The system's policy; [`Policy::Never`] if it does not say.
pub fn policy() -> Policy {
    let read = |path: &[u8]| {
        let mut text = Vec::new();
        read_file(path, &mut text).map(|()| text).unwrap_or_default()
    };
    let of_size = read(b"/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled\0");
    parse(&of_size)
        .unwrap_or_else(|| parse(&read(b"/sys/kernel/mm/transparent_hugepage/enabled\0")).unwrap_or(Policy::Never))
}

/// The setting in a file; `None` for `inherit`, or if there is none.
fn parse(text: &[u8]) -> Option<Policy> {
    let from = text.iter().position(|c| *c == b'[')? + 1;
    let len = text[from..].iter().position(|c| *c == b']')?;
    match &text[from..from + len] {
        b"always" => Some(Policy::Always),
        b"madvise" => Some(Policy::Advised),
        b"never" => Some(Policy::Never),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_brackets_counts() {
        let said = [
            (&b"always [madvise] never\n"[..], Some(Policy::Advised)),
            (b"[always] madvise never\n", Some(Policy::Always)),
            (b"always inherit madvise [never]\n", Some(Policy::Never)),
            (b"always [inherit] madvise never\n", None),
            (b"always [madvise", None),
            (b"", None),
        ];
        for (text, policy) in said {
            assert_eq!(parse(text), policy, "{}", String::from_utf8_lossy(text));
        }
    }
}

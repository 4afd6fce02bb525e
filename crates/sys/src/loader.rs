//! Recognises dynamic loaders: when one is executed by name, it loads the program it is given, with what is preloaded
//! into that. Callers may be in a vfork child, or on a small stack, so nothing here allocates.

/// The name of the loader in the file `path` (without symbolic links in it), which begins with `ld-linux-` (glibc's) or
/// `ld-musl`; `None` if the file is no loader.
///
/// Debian has musl's loader under a name that others use for something else, `libc.so`, in a directory of musl's.
pub fn name(path: &[u8]) -> Option<&[u8]> {
    let name = path.rsplit(|c| *c == b'/').next()?;
    if name == b"libc.so" && path.windows(4).any(|part| part == b"musl") {
        return Some(b"ld-musl");
    }
    (name.starts_with(b"ld-linux-") || name.starts_with(b"ld-musl")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn loaders_are_told_by_their_names() {
        for (path, known) in [
            (&b"/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"[..], Some(&b"ld-linux-x86-64.so.2"[..])),
            (b"/lib/ld-musl-x86_64.so.1", Some(b"ld-musl-x86_64.so.1")),
            (b"/usr/lib/x86_64-linux-musl/libc.so", Some(b"ld-musl")),
            (b"/usr/lib/libc.so", None),
            (b"/usr/bin/ldd", None),
        ] {
            assert_eq!(name(path), known, "{}", path.escape_ascii());
        }
    }
}

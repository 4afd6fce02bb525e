//! /proc/self/maps: the parser, and which mappings can be managed.

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// The four letters, such as `rw-p`.
    pub perms: [u8; 4],
    /// Inode, 0 for anonymous memory.
    pub inode: u64,
    /// The name column, empty for plain anonymous memory.
    pub name: &'a [u8],
}

fn hex(s: &[u8]) -> Option<usize> {
    if s.is_empty() || s.len() > 16 {
        return None;
    }
    s.iter().try_fold(0usize, |v, c| Some((v << 4) | (*c as char).to_digit(16)? as usize))
}

fn parse_line(line: &[u8]) -> Option<Mapping<'_>> {
    let mut fields = line.splitn(6, |c| *c == b' ');
    let range = fields.next()?;
    let dash = range.iter().position(|c| *c == b'-')?;
    let (start, end) = (hex(&range[..dash])?, hex(&range[dash + 1..])?);
    let perms: [u8; 4] = fields.next()?.try_into().ok()?;
    let (_offset, _device) = (fields.next()?, fields.next()?);
    let inode = core::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let name = fields.next().unwrap_or(b"").trim_ascii();
    (start < end).then_some(Mapping { start, end, perms, inode, name })
}

/// Parses the text of a maps file; lines it does not understand are left out.
pub fn parse(text: &[u8]) -> impl Iterator<Item = Mapping<'_>> {
    text.split(|c| *c == b'\n').filter_map(parse_line)
}

impl Mapping<'_> {
    /// Whether this is private anonymous memory, not executable, that is not the kernel's or a stack.
    pub fn is_private_anonymous(&self) -> bool {
        self.perms[2] != b'x' && self.is_anonymous()
    }

    /// Whether this is private anonymous memory, executable or not, that is not the kernel's or a stack.
    pub fn is_anonymous(&self) -> bool {
        self.inode == 0
            && self.perms[3] == b'p'
            && (self.name.is_empty() || self.name == b"[heap]" || self.name.starts_with(b"[anon"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_parse() {
        let text = b"55d0-66e0 rw-p 00000000 00:00 0                          [heap]\n\
            7f00-7f10 r-xp 00001000 fe:00 123 /lib/a b.so\nnonsense\n8000-7000 rw-p 0 00:00 0 \n9000-a000 rw-p 0 00:00 0 \n";
        let all: Vec<_> = parse(text).collect();
        assert_eq!(all.len(), 3);
        assert!(all[0].is_private_anonymous() && all[0].name == b"[heap]" && all[0].end == 0x66e0);
        assert!(!all[1].is_private_anonymous() && all[1].name == b"/lib/a b.so");
        assert!(all[2].is_private_anonymous());
    }
}

//! The messages of a full group, or of a full region of the library.

use super::{Largest, Over};
use crate::group::{DEPTH, GroupPage, ON_FULL_KILL, ON_FULL_WAIT, bytes_in};
use crate::pager::Pager;
use crate::state::State;
use core::fmt::Write;

impl Pager {
    /// Reports that a group is full, and what happens now. `spares`: nobody is killed, as the limit was lowered.
    ///
    /// The story: in that case too the message said that a member was killed.
    pub(super) fn say_full(&self, s: &State, over: Over, (on_full, spares): (u32, bool)) {
        if self.own_frames {
            return self.say_region_full(s, over, on_full == ON_FULL_KILL && !spares);
        }
        let mut line = Line::default();
        let _ = write!(
            line,
            "uzswap: the group `{}` is full: {} are used of memory.max {}",
            Path(self.group, over.node),
            Mib(over.charge),
            Mib(over.max)
        );
        let _ = write!(line, ", {} too much, and nothing more can be taken out of memory", Mib(over.charge - over.max));
        let largest = self.largest(over.node, s);
        if self.zswap_is_full(s) {
            let pools: usize = self.others_within(over.node).map(|o| bytes_in(&o.pool) as usize).sum();
            let _ =
                write!(line, " (memory.zswap.max is full too: the pool holds {})", Mib(s.pool.held_bytes() + pools));
        } else {
            let Largest { pid, resident, pool } = largest;
            let _ = write!(
                line,
                " (of process {pid}, the largest: resident {}, pool {})",
                Mib(resident as usize),
                Mib(pool as usize)
            );
        }
        let what = match on_full {
            ON_FULL_KILL if spares => "nobody is killed, as it is full because its limit was lowered",
            ON_FULL_WAIT => "its threads wait until there is room (--on-full=wait)",
            ON_FULL_KILL => "the member that holds most is killed (--on-full=kill)",
            _ => "it goes on above its limit (--on-full=exceed)",
        };
        let _ = writeln!(line, "; {what}");
        self.say(line.text());
    }

    /// The same for a region of the library, which has no group that anybody could name, and no command line options.
    fn say_region_full(&self, s: &State, over: Over, kills: bool) {
        let (mut line, pool) = (Line::default(), s.pool.held_bytes());
        let what = if kills {
            "the process is killed, as it has chosen (set_kill_when_full)"
        } else {
            "it goes on above its limit"
        };
        let _ = writeln!(
            line,
            "uzswap: a region is full: {} are used of its limit of {}, {} too much, and nothing more can be taken out of memory (resident {}, pool {}); {what}",
            Mib(over.charge),
            Mib(over.max),
            Mib(over.charge - over.max),
            Mib(over.charge.saturating_sub(pool)),
            Mib(pool),
        );
        self.say(line.text());
    }

    /// Reports that a member is killed, which holds `charge` bytes.
    pub(super) fn say_killed(&self, pid: u32, charge: u64) {
        let mut line = Line::default();
        let _ = writeln!(line, "uzswap: process {pid} is killed, which holds {}", Mib(charge as usize));
        self.say(line.text());
    }
}

/// A group's full path in the tree.
struct Path<'a>(&'a GroupPage, usize);

impl core::fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (mut path, mut n) = ([0; DEPTH], 0);
        for (to, at) in path.iter_mut().zip(self.0.chain(self.1)) {
            (*to, n) = (at, n + 1);
        }
        for (i, at) in path[..n].iter().rev().enumerate() {
            let (name, len) = self.0.nodes[*at].name();
            let name = core::str::from_utf8(&name[..len]).ok().filter(|name| !name.contains(char::is_control));
            write!(f, "{}{}", if i == 0 { "" } else { "/" }, name.unwrap_or("?"))?;
        }
        Ok(())
    }
}

/// For tests: a group's full path as messages have it.
#[cfg(test)]
pub(super) fn name_for_test(group: &GroupPage, node: usize) -> String {
    Path(group, node).to_string()
}

/// A size (bytes), formatted in MiB.
struct Mib(usize);

impl core::fmt::Display for Mib {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let tenths = self.0 / (crate::frames::arena::PAGE * 256 / 10);
        write!(f, "{}.{} MiB", tenths / 10, tenths % 10)
    }
}

/// A line of text that needs no allocation; what does not fit is left out.
struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 512], len: 0 }
    }
}

impl Line {
    fn text(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Write for Line {
    fn write_str(&mut self, s: &str) -> core::fmt::Result {
        let n = s.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + n].copy_from_slice(&s.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_group_in_another_is_called_by_its_whole_name() {
        let group = testing::group();
        group.set_up(b"k");
        let sub = group.make_child(0, b"sub").expect("a group");
        let below = group.make_child(sub, b"below").expect("a group");
        let name = |node| Path(group, node).to_string();
        assert_eq!([0, sub, below].map(name), ["k", "k/sub", "k/sub/below"]);
    }

    #[test]
    fn lines_are_cut_not_overrun() {
        let mut line = Line::default();
        write!(line, "{} and {}", Mib(64 << 20), Mib(3 << 19)).unwrap();
        assert_eq!(line.text(), b"64.0 MiB and 1.5 MiB");
        write!(line, "{:600}", "x").unwrap();
        assert_eq!(line.text().len(), 512);
    }
}

//! The page table's tree: it finds the leaf of a page, for leaves of 256 KiB.
//!
//! ```text
//! root: 2048 × 64 GiB ─▶ 64 × 1 GiB ─▶ 64 × 16 MiB ─▶ 64 leaves of 64 pages
//! ```
//! Leaves and nodes are small because programs scatter: V8 asks for 256 KiB at a time, at addresses of its own choice
//! anywhere in the 46 bits there are. Leaves and nodes that become empty are freed. (The story: nodes of 64 KiB for
//! each 16 GiB cost Node.js 16 MiB. Leaves of 2 MiB and nodes of a page then cost 8 KiB for each such piece, 11 MiB for
//! a heap of 340 MiB under 90, and memory that had gone left as much again.)
//!
//! Invariant: every node has a child, and every leaf was requested with [`Tree::leaf_mut`] and not removed since.
//! Owner: the page table.

use super::{BLOCK_PAGES, LEAF_PAGES, Pte};

/// A bit for each page of a leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bits(u64);

impl Bits {
    /// Whether a page is in the set, by its number in the address space.
    pub fn has(self, vpn: u64) -> bool {
        self.0 & 1 << in_leaf(vpn) != 0
    }

    /// Puts a page into the set, or takes it out.
    pub fn put(&mut self, vpn: u64, is_in: bool) {
        let bit = 1 << in_leaf(vpn);
        self.0 = if is_in { self.0 | bit } else { self.0 & !bit };
    }
}

/// The entries and hints of 64 pages.
pub struct Leaf {
    /// Their entries.
    pub ptes: [Pte; LEAF_PAGES as usize],
    /// Hints of their blocks.
    pub hints: [u8; (LEAF_PAGES / BLOCK_PAGES) as usize],
    /// Pages that are clean: see [`super::PageTable::set_clean`].
    pub clean: Bits,
    /// Pages that are protected: see [`super::PageTable::set_protected`].
    pub protected: Bits,
}

impl Leaf {
    const EMPTY: Self = Self {
        ptes: [Pte::NONE; LEAF_PAGES as usize],
        hints: [0; (LEAF_PAGES / BLOCK_PAGES) as usize],
        clean: Bits(0),
        protected: Bits(0),
    };

    /// Whether all entries are empty and no page is clean or protected.
    pub fn is_empty(&self) -> bool {
        self.ptes.iter().all(|pte| *pte == Pte::NONE) && self.clean == Bits(0) && self.protected == Bits(0)
    }

    /// Clears the clean and protected bits of a page.
    pub fn forget(&mut self, vpn: u64) {
        self.clean.put(vpn, false);
        self.protected.put(vpn, false);
    }
}

/// The index of a page in its leaf.
pub fn in_leaf(vpn: u64) -> usize {
    (vpn % LEAF_PAGES) as usize
}

/// Children of a node.
const FANOUT: usize = 64;
/// Children of the root.
const ROOT: usize = 2048;
/// Leaves below a lower, a middle and an upper node.
const LOW: u64 = FANOUT as u64;
const MIDDLE: u64 = LOW * FANOUT as u64;
const HIGH: u64 = MIDDLE * FANOUT as u64;
/// Leaves of the address space.
pub const LEAVES: u64 = HIGH * ROOT as u64;

/// Pages below a node of the lowest level: a stretch.
pub const STRETCH_PAGES: u64 = LOW * LEAF_PAGES;

type Node<T> = [Option<Box<T>>; FANOUT];
type Lower = Node<Leaf>;
type Middle = Node<Lower>;
type Upper = Node<Middle>;

/// The path to a leaf: the indexes in the root and in the three nodes below it.
fn places(leaf: u64) -> (usize, usize, usize, usize) {
    let place = |below: u64| (leaf / below) as usize % FANOUT;
    ((leaf / HIGH) as usize, place(MIDDLE), place(LOW), place(1))
}

/// The tree.
#[derive(Default)]
pub struct Tree {
    /// Empty until there is a leaf: most processes never need one.
    root: Vec<Option<Box<Upper>>>,
    leaves: usize,
    nodes: usize,
}

/// The child at a place, created if there is none.
fn child<'a, T>(slot: &'a mut Option<Box<T>>, count: &mut usize, new: impl FnOnce() -> T) -> &'a mut T {
    slot.get_or_insert_with(|| {
        *count += 1;
        Box::new(new())
    })
}

/// Removes a node without children; returns whether it had none.
fn prune<T>(slot: &mut Option<Box<Node<T>>>, count: &mut usize) -> bool {
    let empty = slot.as_ref().is_some_and(|node| node.iter().all(Option::is_none));
    if empty {
        *slot = None;
        *count -= 1;
    }
    empty
}

impl Tree {
    /// A leaf by its number, if there is one.
    #[inline]
    pub fn leaf(&self, leaf: u64) -> Option<&Leaf> {
        let (i, j, k, l) = places(leaf);
        self.root.get(i)?.as_ref()?[j].as_ref()?[k].as_ref()?[l].as_deref()
    }

    /// The same, mutable.
    pub fn existing(&mut self, leaf: u64) -> Option<&mut Leaf> {
        let (i, j, k, l) = places(leaf);
        self.root.get_mut(i)?.as_mut()?[j].as_mut()?[k].as_mut()?[l].as_deref_mut()
    }

    /// The same, created if it is missing.
    ///
    /// # Panics
    /// When the leaf is beyond the address space.
    pub fn leaf_mut(&mut self, leaf: u64) -> &mut Leaf {
        let (i, j, k, l) = places(leaf);
        let nodes = &mut self.nodes;
        if self.root.is_empty() {
            self.root.resize_with(ROOT, || None);
        }
        let upper = child(&mut self.root[i], nodes, || [const { None }; FANOUT]);
        let middle = child(&mut upper[j], nodes, || [const { None }; FANOUT]);
        let lower = child(&mut middle[k], nodes, || [const { None }; FANOUT]);
        child(&mut lower[l], &mut self.leaves, || Leaf::EMPTY)
    }

    /// Removes a leaf, and the nodes above it that have no other child. Returns whether its stretch ([`STRETCH_PAGES`])
    /// has no leaf left.
    pub fn remove(&mut self, leaf: u64) -> bool {
        let (i, j, k, l) = places(leaf);
        let Some(upper) = self.root.get_mut(i).and_then(Option::as_mut) else { return false };
        let Some(middle) = upper[j].as_mut() else { return false };
        let Some(lower) = middle[k].as_mut() else { return false };
        if lower[l].take().is_none() {
            return false;
        }
        self.leaves -= 1;
        let nodes = &mut self.nodes;
        let alone = prune(&mut middle[k], nodes);
        let _ = alone && prune(&mut upper[j], nodes) && prune(&mut self.root[i], nodes);
        alone
    }

    /// The first leaf numbered `from` or higher, with its number.
    pub fn next(&self, from: u64) -> Option<(u64, &Leaf)> {
        let mut at = from;
        loop {
            let (i, j, k, l) = places(at);
            let Some(upper) = self.root.get(i)? else {
                at = (at / HIGH + 1) * HIGH;
                continue;
            };
            let Some(middle) = &upper[j] else {
                at = (at / MIDDLE + 1) * MIDDLE;
                continue;
            };
            let Some(lower) = &middle[k] else {
                at = (at / LOW + 1) * LOW;
                continue;
            };
            if let Some(leaf) = &lower[l] {
                return Some((at, leaf));
            }
            at += 1;
        }
    }

    /// Bytes of the tree.
    pub fn metadata_bytes(&self) -> usize {
        self.leaves * size_of::<Leaf>() + self.nodes * size_of::<Lower>() + self.root.len() * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whichever is missing: the node, or one of those above it.
    #[test]
    fn a_leaf_that_is_not_there_is_not_removed() {
        let mut tree = Tree::default();
        assert!(!tree.remove(0), "no root");
        tree.leaf_mut(0);
        let books = tree.metadata_bytes();
        for leaf in [1, LOW, MIDDLE, HIGH, LEAVES] {
            assert!(!tree.remove(leaf), "{leaf}");
        }
        assert!(tree.leaf(0).is_some() && tree.metadata_bytes() == books);
        assert!(tree.remove(0) && tree.leaf(0).is_none() && !tree.remove(0));
    }
}

//! Contents of the ageing machine's frames: pages of programs, pages of the pool, tables, huge blocks. It is separate from the
//! zone, so that compaction, which has the zone, can move what the frames hold.

use crate::data::Source;
use crate::size::PAGE;
use crate::workload::Random;
use std::collections::HashMap;
use uzswap_mm::compaction::Migrate;
use uzswap_mm::pagetable::{PageTable, Pte, Tag};
use uzswap_mm::zone::{BLOCK_FRAMES, Zone};
use uzswap_mm::zsmalloc::{Freed, Handle, Relocate};

/// What a frame is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Free,
    Page(u64),
    Pool(u32),
    Table,
    Huge,
}

/// Everything but the zone, so that compaction can move what the zone's frames hold.
pub struct World<'a> {
    pub source: &'a Source,
    pub start: u32,
    pub memory: Vec<u8>,
    pub owner: Vec<Owner>,
    /// For each frame, when its page came, and whether the page was touched since.
    pub birth: Vec<u16>,
    pub referenced: Vec<bool>,
    pub pt: PageTable,
    pub pool_frames: Vec<u32>,
    pub versions: HashMap<u64, u32>,
}

impl World<'_> {
    /// A frame's place in memory, in pages.
    pub fn at(&self, frame: u32) -> usize {
        (frame - self.start) as usize
    }
    /// The bytes of a frame.
    pub fn frame(&mut self, frame: u32) -> &mut [u8] {
        let at = self.at(frame) * PAGE;
        &mut self.memory[at..at + PAGE]
    }

    /// Reads bytes of the pool, wherever its pages are; with `write`, writes them.
    pub fn pool_bytes(&mut self, offset: usize, bytes: &mut [u8], write: bool) {
        let mut done = 0;
        while done < bytes.len() {
            let (page, into) = ((offset + done) / PAGE, (offset + done) % PAGE);
            let n = (PAGE - into).min(bytes.len() - done);
            let frame = self.pool_frames[page];
            let there = &mut self.frame(frame)[into..into + n];
            if write {
                there.copy_from_slice(&bytes[done..done + n]);
            } else {
                bytes[done..done + n].copy_from_slice(there);
            }
            done += n;
        }
    }

    /// The page of the real contents that a page holds.
    fn source_of(&self, vpn: u64) -> usize {
        Random::new(vpn).below(self.source.pages() as u64) as usize
    }

    fn content(&self, vpn: u64) -> &[u8] {
        self.source.page(self.source_of(vpn))
    }

    /// Fills a frame with the expected contents of a page.
    pub fn write_page(&mut self, vpn: u64, frame: u32) {
        let version = self.versions.get(&vpn).copied().unwrap_or(0);
        let at = self.at(frame) * PAGE;
        let index = self.source_of(vpn);
        let page = &mut self.memory[at..at + PAGE];
        page.copy_from_slice(self.source.page(index));
        page[..8].copy_from_slice(&vpn.to_le_bytes());
        page[8..12].copy_from_slice(&version.to_le_bytes());
    }

    /// Whether a frame holds the expected contents of a page.
    pub fn is_right(&self, vpn: u64, frame: u32) -> bool {
        let version = self.versions.get(&vpn).copied().unwrap_or(0);
        let at = self.at(frame) * PAGE;
        let page = &self.memory[at..at + PAGE];
        page[..8] == vpn.to_le_bytes() && page[8..12] == version.to_le_bytes() && page[12..] == self.content(vpn)[12..]
    }
}

impl Migrate for World<'_> {
    fn isolate(&mut self, _: &Zone, frame: u32) -> bool {
        matches!(self.owner[self.at(frame)], Owner::Page(_) | Owner::Pool(_))
    }

    fn extent(&self, frame: u32) -> u32 {
        if self.owner[self.at(frame)] == Owner::Huge { BLOCK_FRAMES } else { 1 }
    }

    fn migrate(&mut self, _: &mut Zone, from: u32, to: u32) -> bool {
        let (src, dst) = (self.at(from), self.at(to));
        self.memory.copy_within(src * PAGE..(src + 1) * PAGE, dst * PAGE);
        match self.owner[src] {
            Owner::Page(vpn) => self.pt.set(vpn, Pte::new(Tag::Resident, to)),
            Owner::Pool(page) => self.pool_frames[page as usize] = to,
            Owner::Free | Owner::Table | Owner::Huge => return false,
        }
        self.owner[dst] = std::mem::replace(&mut self.owner[src], Owner::Free);
        (self.birth[dst], self.referenced[dst]) = (self.birth[src], self.referenced[src]);
        true
    }

    fn putback(&mut self, _frame: u32) {}
}

/// Moves objects of the pool, and writes their new handles to the page table.
pub struct Mover<'a, 'b> {
    pub world: &'a mut World<'b>,
    pub freed: Vec<Freed>,
}

impl Relocate for Mover<'_, '_> {
    fn relocate(&mut self, from: Handle, to: Handle, len: usize) -> bool {
        let mut bytes = vec![0; len];
        self.world.pool_bytes(from.offset(), &mut bytes, false);
        let vpn = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let pte = self.world.pt.get(vpn);
        if pte.tag() != Tag::Compressed || pte.handle() != from.raw() {
            return false;
        }
        self.world.pool_bytes(to.offset(), &mut bytes, true);
        self.world.pt.set(vpn, Pte::compressed(to.raw(), 0, 0));
        true
    }

    fn freed(&mut self, pages: Freed) {
        self.freed.push(pages);
    }
}

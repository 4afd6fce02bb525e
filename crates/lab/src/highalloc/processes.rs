//! The programs on the ageing machine: each follows its trace step by step, and touches pages in between.

use super::aging::{Machine, SPACE};
use super::world::Owner;
use crate::workload::Random;
use std::collections::{BTreeMap, HashMap};
use uzswap_mm::compaction::policy::Policy;
use uzswap_mm::zone::MigrateType;

/// A running program.
pub(super) struct Process {
    pub(super) pid: u64,
    trace: usize,
    step: usize,
    /// Its pages in the order in which they came, and the place of each in that order.
    live: Vec<u32>,
    place: HashMap<u32, usize>,
    /// Frames of its page tables, by the part of the address space that they map.
    tables: BTreeMap<u64, u32>,
    /// Whether it stays when its trace is over.
    stays: bool,
}

impl<P: Policy> Machine<'_, P> {
    /// A number below `n`, drawn from the seed.
    fn draw(&mut self, n: usize) -> usize {
        self.random.below(n as u64) as usize
    }

    /// Starts a program; if `stays`, it does not end.
    fn start(&mut self, trace: usize, stays: bool) {
        let (live, place) = (Vec::new(), HashMap::new());
        // The lowest free number: the page table has room for 8192.
        let pid = (1..).find(|pid| self.processes.iter().all(|p| p.pid != *pid)).expect("there are many");
        self.processes.push(Process { pid, trace, step: 0, live, place, tables: BTreeMap::new(), stays });
    }

    /// Does one step of a process; returns false if none is left.
    fn step(&mut self, i: usize) -> bool {
        let traces = self.traces;
        let Some(step) = traces[self.processes[i].trace].steps.get(self.processes[i].step) else { return false };
        for page in step.went.iter().flat_map(|(first, n)| *first..first + n) {
            self.page_went(i, page);
        }
        for page in step.came.iter().flat_map(|(first, n)| *first..first + n) {
            self.page_came(i, page);
        }
        let base = self.processes[i].pid * SPACE;
        for page in step.touched.iter().flat_map(|(first, n)| *first..first + n) {
            self.touch(base + u64::from(page), page % 3 == 0);
        }
        self.processes[i].step += 1;
        true
    }

    /// Has every process do a step and touch pages. A process that has finished makes room for the next program.
    pub fn tick(&mut self, references: usize) {
        // Like `make -j`: start another while there are fewer pages than there should be.
        if self.live() < self.load {
            let trace = self.random.below(self.traces.len() as u64) as usize;
            self.start(trace, false);
        }
        for i in 0..self.processes.len() {
            if !self.step(i) && !self.processes[i].stays {
                let trace = self.random.below(self.traces.len() as u64) as usize;
                let mut done = self.processes.swap_remove(i);
                self.exit(&mut done);
                self.start(trace, false);
                let last = self.processes.len() - 1;
                self.processes.swap(i, last);
            }
            let (base, n) = (self.processes[i].pid * SPACE, self.processes[i].live.len());
            // A process that stays is mostly idle.
            let times = if self.processes[i].stays { references / 16 } else { references };
            for _ in 0..if n > 0 { times } else { 0 } {
                let recent = (n / 8).max(1);
                let at = if self.draw(4) > 0 { n - 1 - self.draw(recent) } else { self.draw(n) };
                let write = self.draw(3) == 0;
                self.touch(base + u64::from(self.processes[i].live[at]), write);
            }
        }
    }

    fn page_came(&mut self, i: usize, page: u32) {
        let (base, leaf) = (self.processes[i].pid * SPACE, u64::from(page) / 512);
        if !self.processes[i].tables.contains_key(&leaf) {
            let Some(table) = self.take_for_load(MigrateType::Unmovable, Owner::Table) else { return };
            self.processes[i].tables.insert(leaf, table);
        }
        if self.allocate(base + u64::from(page)) {
            let process = &mut self.processes[i];
            process.place.insert(page, process.live.len());
            process.live.push(page);
        }
    }

    fn page_went(&mut self, i: usize, page: u32) {
        let process = &mut self.processes[i];
        let Some(at) = process.place.remove(&page) else { return };
        process.live.swap_remove(at);
        if let Some(moved) = process.live.get(at) {
            process.place.insert(*moved, at);
        }
        let vpn = process.pid * SPACE + u64::from(page);
        self.drop_page(vpn);
    }

    fn exit(&mut self, process: &mut Process) {
        for page in process.live.drain(..) {
            self.drop_page(process.pid * SPACE + u64::from(page));
        }
        for table in std::mem::take(&mut process.tables).into_values() {
            self.give(table);
        }
    }

    /// Starts programs that stay, up to a tenth of the machine: they follow their trace and remain.
    pub fn start_residents(&mut self) {
        let (mut wanted, mut next) = (0, 0);
        while wanted < self.world.owner.len() / 10 {
            self.start(next % self.traces.len(), true);
            wanted += self.traces[next % self.traces.len()].peak / 2;
            next += 1;
        }
        let mut more = true;
        while std::mem::take(&mut more) {
            for i in 0..self.processes.len() {
                more |= self.step(i);
            }
        }
    }

    /// Starts programs until all together have `times` the machine's size, each somewhere in its trace. The same seed starts the
    /// same ones.
    pub fn start_load(&mut self, times: f64, seed: u64) {
        self.random = Random::new(seed);
        self.load = (self.world.owner.len() as f64 * times) as usize;
        while self.live() < self.load {
            let trace = self.draw(self.traces.len());
            self.start(trace, false);
            let (me, steps) = (self.processes.len() - 1, self.traces[trace].steps.len());
            for _ in 0..self.draw(steps) {
                self.step(me);
            }
        }
    }

    /// Pages of all processes, resident or not.
    fn live(&self) -> usize {
        self.processes.iter().map(|p| p.live.len()).sum()
    }

    /// Ends the programs that do not stay.
    pub fn stop_load(&mut self) {
        self.load = 0;
        let (stay, end): (Vec<_>, Vec<_>) = std::mem::take(&mut self.processes).into_iter().partition(|p| p.stays);
        self.processes = stay;
        for mut process in end {
            self.exit(&mut process);
        }
    }
}

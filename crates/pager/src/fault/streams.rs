//! Recognises faults that run in sequence, upwards or downwards, and decides how many pages each brings.
//!
//! A fault right behind, or right before, what an earlier one brought continues its stream. Each such fault brings four times as
//! much as the one before, up to [`WINDOW_PAGES`] (less where many share a limit: [`Streams::widest`]); any other fault brings
//! one page. (Stacks of work run downwards, and so do programs that fill an array from its end: GNU sort keeps its lines there,
//! and merges them that way.)
//!
//! A fault that follows nothing is remembered only for the next few faults. A proven stream is remembered, whatever comes in
//! between, until other streams take its place. Where the page table shows that a page continues others although no stream is
//! remembered, that is a stream too, but only of pages that were there before, not of untouched ones. Where pages behind those
//! brought are already present, the stream's next fault is behind them: when data is read over and over, parts of it stay here
//! and there. Owner: the pager's lock.

use crate::state::BLOCK_PAGES;

/// How many pages one fault brings at most. Mapping 64 KiB in one call costs 5 µs in all, 512 KiB 16; beyond that little is
/// gained.
pub const WINDOW_PAGES: usize = 128;
/// Two faults are near each other if they are in the same aligned run of so many pages.
const NEAR_PAGES: u64 = 4;
/// How many faults that follow nothing are remembered, as each may begin a stream.
const ENDS: usize = 8;
/// How many present pages behind those brought a stream is followed across.
const ACROSS_PAGES: u64 = 4096;
/// How many proven streams are remembered.
const STREAMS: usize = 8;

#[derive(Clone, Copy)]
struct Stream {
    /// The page behind those it brought last.
    above: u64,
    /// The first page from there on that was missing then.
    over: u64,
    /// The page before those it brought last.
    below: u64,
    /// The first page from there on, downwards, that was missing then.
    under: u64,
    /// How many pages its last fault was to bring, as a power of two.
    log: u8,
    /// The clock at its last fault.
    used: u64,
    /// Its direction; `Anew` while nothing has followed it.
    way: Way,
    /// Whether it is not known that untouched pages belong to it: see [`Streams::window`].
    known_only: bool,
    /// Whether its last fault was on an untouched page.
    new: bool,
}

const NOWHERE: u64 = u64::MAX;
const NONE: Stream = Stream {
    above: NOWHERE,
    over: NOWHERE,
    below: NOWHERE,
    under: NOWHERE,
    log: 0,
    used: 0,
    way: Way::Anew,
    known_only: false,
    new: false,
};

/// How a fault follows an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Not at all.
    Anew,
    /// Behind it.
    Up,
    /// Before it.
    Down,
}

/// What a fault is to bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Number of pages, the touched one included, which is the last of them for [`Way::Down`].
    pub pages: usize,
    /// Whether, and which way, the fault continues a stream.
    pub way: Way,
    /// Whether untouched pages do not belong to it.
    pub known_only: bool,
    /// The stream, for [`Streams::brought`].
    pub stream: usize,
}

/// The streams of recent faults.
pub struct Streams {
    /// First the recent faults that followed nothing, then the proven streams. Random faults in between end none of the latter.
    list: [Stream; ENDS + STREAMS],
    /// The latest of the first kind.
    last: usize,
    /// Counts faults.
    clock: u64,
    /// What the last window changed, for [`Streams::undo`].
    before: Before,
    /// How many pages one fault brings at most, as a power of two: [`WINDOW_PAGES`], or less where there is little memory.
    pub widest: u8,
}

/// The former values of what a window changed.
#[derive(Clone, Copy)]
struct Before {
    /// The stream.
    stream: (usize, Stream),
    /// The fault that became that stream.
    young: Option<(usize, Stream)>,
    last: usize,
}

impl Default for Streams {
    /// None yet.
    fn default() -> Self {
        let before = Before { stream: (0, NONE), young: None, last: 0 };
        Self { list: [NONE; ENDS + STREAMS], last: 0, clock: 0, before, widest: WINDOW_PAGES.ilog2() as u8 }
    }
}

impl Streams {
    /// The stream that a fault on `page` continues, and in which direction.
    fn of(&self, page: u64) -> Option<(usize, Way)> {
        let up = |stream: &Stream| (stream.above..=stream.over).contains(&page);
        let down = |stream: &Stream| (stream.under..=stream.below).contains(&page);
        let up = self.list.iter().position(up).map(|i| (i, Way::Up));
        up.or_else(|| self.list.iter().position(down).map(|i| (i, Way::Down)))
    }

    /// The place for a newly proven stream: that of the one that continued longest ago.
    fn place(&self) -> usize {
        (ENDS..ENDS + STREAMS).min_by_key(|i| self.list[*i].used).expect("there are some")
    }

    /// Decides what a fault on `page` brings, never across a boundary of its size. `new`: the page was never touched. `follows`
    /// is asked if no stream continues there.
    ///
    /// Untouched pages come at once only upwards, and only in a remembered stream. Where just the table showed the stream, or
    /// where it runs downwards, they come after two faults in a row on new pages. The story: some programs that filled memory,
    /// and became managed when half of it was there, had a fault for each page of the rest: the table said that the first of
    /// those continued what was found there. Programs that filled memory downwards always had (GNU sort with its lines: a fault
    /// for each page of 57 MiB).
    pub fn window(&mut self, page: u64, new: bool, follows: impl FnOnce() -> Way) -> Window {
        self.clock += 1;
        let (last_young, mut young) = (self.last, None);
        let (stream, way, log, known_only) = match self.of(page) {
            Some((i, way)) => {
                let last = self.list[i];
                let (stream, doubtful) = if i < ENDS {
                    young = Some((i, last));
                    self.list[i] = NONE;
                    (self.place(), way == Way::Down)
                } else {
                    (i, last.known_only)
                };
                (stream, way, self.wider(last.log), doubtful && !(new && last.new))
            }
            None => match follows() {
                Way::Anew => {
                    self.last = (self.last + 1) % ENDS;
                    (self.last, Way::Anew, 0, false)
                }
                way => (self.place(), way, self.wider(0), true),
            },
        };
        let border = BLOCK_PAGES.max(1 << log);
        let before = page as usize % border;
        let pages = (1 << log).min(if way == Way::Down { before + 1 } else { border - before });
        self.before = Before { stream: (stream, self.list[stream]), young, last: last_young };
        self.list[stream] = Stream { log, used: self.clock, way, known_only, new, ..self.list[stream] };
        Window { pages, way, known_only, stream }
    }

    /// Takes back the last window: its fault was not served, and will be asked about again.
    pub fn undo(&mut self) {
        let Before { stream, young, last } = self.before;
        for (i, was) in [Some(stream), young].into_iter().flatten() {
            self.list[i] = was;
        }
        self.last = last;
    }

    /// Completes a window: pages `[from, to)` came, or were there. `is_there` tells whether others are.
    pub fn brought(&mut self, stream: usize, from: u64, to: u64, is_there: impl Fn(u64) -> bool) {
        let stream = &mut self.list[stream];
        let (above, below) = (to, from.checked_sub(1).unwrap_or(NOWHERE));
        let over = || (above..above + ACROSS_PAGES).find(|page| !is_there(*page)).unwrap_or(above + ACROSS_PAGES);
        let under = || {
            let last = from.saturating_sub(ACROSS_PAGES);
            (last..from).rev().find(|page| !is_there(*page)).unwrap_or(last)
        };
        // A stream that runs one way does not turn round: meeting its other end again means nothing.
        let ends = match stream.way {
            Way::Anew => (above, above, below, below),
            Way::Up => (above, over(), NOWHERE, NOWHERE),
            Way::Down if from == 0 => (NOWHERE, NOWHERE, NOWHERE, NOWHERE),
            Way::Down => (NOWHERE, NOWHERE, below, under()),
        };
        (stream.above, stream.over, stream.below, stream.under) = ends;
    }

    /// Whether a page is near the end of a stream.
    pub fn is_near(&self, page: u64) -> bool {
        let near = |end: u64| end / NEAR_PAGES == page / NEAR_PAGES;
        self.list.iter().any(|stream| near(stream.above.wrapping_sub(1)) || near(stream.below.wrapping_add(1)))
    }

    /// How many pages a fault on `page` is likely to bring: a block, or what its stream continues with.
    pub fn expected(&self, page: u64) -> usize {
        self.of(page).map_or(BLOCK_PAGES, |(i, _)| BLOCK_PAGES.max(1 << self.wider(self.list[i].log)))
    }

    /// How many pages the next fault of a stream is to bring, as a power of two.
    fn wider(&self, log: u8) -> u8 {
        (log + 2).min(self.widest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs faults that follow each other; returns how many pages each brings.
    fn run(streams: &mut Streams, first: u64, faults: usize, down: bool) -> Vec<usize> {
        let mut page = first;
        let one = |_| {
            let w = streams.window(page, false, || Way::Anew);
            let (from, to) = match w.way {
                Way::Down => (page + 1 - w.pages as u64, page + 1),
                _ => (page, page + w.pages as u64),
            };
            streams.brought(w.stream, from, to, |_| false);
            page = if down { from - 1 } else { to };
            w.pages
        };
        (0..faults).map(one).collect()
    }

    #[test]
    fn sequences_widen_in_both_directions_up_to_borders() {
        assert_eq!(run(&mut Streams::default(), 1 << 20, 6, false), [1, 4, 11, 48, 64, 128]);
        assert_eq!(run(&mut Streams::default(), (1 << 20) - 1, 6, true), [1, 4, 11, 48, 64, 128]);
    }

    /// Where each of many has little memory.
    #[test]
    fn sequences_widen_up_to_what_is_set() {
        let mut streams = Streams { widest: 5, ..Streams::default() };
        assert_eq!(run(&mut streams, 1 << 20, 6, false), [1, 4, 11, 16, 32, 32]);
        assert_eq!(streams.expected((1 << 20) + 96), 32);
    }

    #[test]
    fn what_follows_nothing_brings_one_page() {
        let mut streams = Streams::default();
        let one = |stream| Window { pages: 1, way: Way::Anew, known_only: false, stream };
        assert_eq!(streams.window(1000, false, || Way::Anew), one(1));
        streams.brought(1, 1000, 1001, |_| false);
        assert_eq!(streams.window(1002, false, || Way::Anew), one(2));
        streams.brought(2, 1002, 1003, |_| false);
        assert!(streams.is_near(1001) && streams.is_near(1003) && !streams.is_near(1004));
        // Both are before 1001; behind comes first.
        assert_eq!(streams.window(1001, false, || Way::Anew).way, Way::Up);
        assert_eq!((streams.expected(999), streams.expected(5)), (BLOCK_PAGES, BLOCK_PAGES));
    }

    #[test]
    fn streams_run_side_by_side() {
        let mut streams = Streams::default();
        let mut pages = [1000, 5000, 9000, 13_000];
        for round in 0..5 {
            for (i, page) in pages.iter_mut().enumerate() {
                let down = i % 2 == 1;
                let w = streams.window(*page, false, || Way::Anew);
                let expected = [Way::Anew, if down { Way::Down } else { Way::Up }][usize::from(round > 0)];
                assert_eq!(w.way, expected, "round {round}, stream {i}");
                let n = w.pages as u64;
                let (from, to) = if w.way == Way::Down { (*page + 1 - n, *page + 1) } else { (*page, *page + n) };
                streams.brought(w.stream, from, to, |_| false);
                *page = if down { from - 1 } else { to };
            }
        }
    }

    #[test]
    fn faults_at_random_in_between_end_no_stream() {
        let mut streams = Streams::default();
        let at_random = |streams: &mut Streams| {
            for i in 0..100 {
                let w = streams.window(1_000_000 + 1000 * i, false, || Way::Anew);
                assert_eq!((w.pages, w.way), (1, Way::Anew));
                streams.brought(w.stream, 1_000_000 + 1000 * i, 1_000_001 + 1000 * i, |_| false);
            }
        };
        // A beginning is forgotten, but the table shows that the page follows others.
        assert_eq!(run(&mut streams, 64, 1, false), [1]);
        at_random(&mut streams);
        assert_eq!(streams.window(65, false, || Way::Anew).way, Way::Anew);
        let w = streams.window(66, false, || Way::Up);
        assert_eq!((w.pages, w.way), (4, Way::Up));
        streams.brought(w.stream, 66, 70, |_| false);
        at_random(&mut streams);
        assert_eq!(run(&mut streams, 70, 3, false), [10, 48, 128]);
        let w = streams.window(5000, false, || Way::Down);
        assert_eq!((w.pages, w.way), (4, Way::Down));
    }

    /// The story: when memory was read over and over, a page here and there of each window had stayed. Each was taken for the end
    /// of the sequence, which started over behind it with one page: five faults where one had done.
    #[test]
    fn what_is_there_already_ends_no_stream() {
        let mut streams = Streams::default();
        run(&mut streams, 64, 2, false);
        // Some pages behind those brought are present, and one of them leaves before the program gets to it.
        for (page, there) in [(69, 80..84), (82, 100..110), (110, 128..1 << 20)] {
            let w = streams.window(page, false, || Way::Anew);
            assert_eq!(w.way, Way::Up, "page {page}");
            streams.brought(w.stream, page, there.start, |page| there.contains(&page));
        }
        // The search for missing pages ends somewhere.
        let w = streams.window(128 + ACROSS_PAGES, false, || Way::Anew);
        assert_eq!(w.way, Way::Up);
        streams.brought(w.stream, 128 + ACROSS_PAGES, 256 + ACROSS_PAGES, |_| true);
        assert_eq!(streams.window(257 + 2 * ACROSS_PAGES, false, || Way::Anew).way, Way::Anew);
    }

    #[test]
    fn what_is_there_already_ends_no_stream_downwards() {
        let mut streams = Streams::default();
        run(&mut streams, 1000, 3, true);
        let w = streams.window(977, false, || Way::Anew);
        assert_eq!(w.way, Way::Anew, "nothing was said to be there");
        let mut streams = Streams::default();
        run(&mut streams, 1000, 2, true);
        let w = streams.window(995, false, || Way::Anew);
        assert_eq!(w.way, Way::Down);
        streams.brought(w.stream, 990, 996, |page| page >= 980);
        assert_eq!(streams.window(979, false, || Way::Anew).way, Way::Down);
        let w = streams.window(3, false, || Way::Down);
        streams.brought(w.stream, 0, 4, |_| true);
        assert_eq!(streams.window(0, false, || Way::Anew).way, Way::Anew, "there is nothing below the first page");
    }

    /// See `Pager::serve`: a fault that was not served continues where it was.
    #[test]
    fn who_asks_again_is_told_the_same() {
        let mut streams = Streams::default();
        let mut page = 64;
        for fault in 0..6 {
            let first = streams.window(page, false, || Way::Anew);
            for _ in 0..2 * ENDS {
                streams.brought(first.stream, page, page + first.pages as u64, |_| false);
                streams.undo();
                assert_eq!(streams.window(page, false, || Way::Anew), first, "fault {fault}");
            }
            page += first.pages as u64;
            streams.brought(first.stream, page - 1, page, |_| false);
        }
    }

    /// A fault that brings one page; `follows`: what the table shows.
    fn one_page(streams: &mut Streams, page: u64, new: bool, follows: Way) -> Window {
        let w = streams.window(page, new, || follows);
        streams.brought(w.stream, page, page + 1, |_| false);
        w
    }

    /// See `Streams::window`.
    #[test]
    fn downwards_two_faults_on_new_pages_prove_what_was_never_touched() {
        let mut streams = Streams::default();
        let mut known_only = |page: u64, new: bool| one_page(&mut streams, page, new, Way::Anew).known_only;
        assert!(!known_only(1000, false), "no stream");
        assert!(known_only(999, true), "the end of what is known, perhaps");
        assert!(!known_only(998, true));
        // New from the start.
        assert_eq!([2000, 1999].map(|page| known_only(page, true)), [false, false]);
        // Never on new pages.
        assert_eq!([3000, 2999, 2998].map(|page| known_only(page, false)), [false, true, true]);
    }

    /// See `Streams::window`.
    #[test]
    fn what_the_table_told_is_proved_by_two_faults_on_new_pages() {
        let mut streams = Streams::default();
        let mut known_only = |page: u64, new: bool| {
            let w = one_page(&mut streams, page, new, Way::Up);
            assert_eq!(w.way, Way::Up);
            w.known_only
        };
        assert_eq!([64, 65, 66].map(|page| known_only(page, false)), [true; 3]);
        assert!(known_only(67, true), "the end of what is known, perhaps");
        assert!(!known_only(68, true));
        assert!(!known_only(69, false), "once and for all");
    }
}

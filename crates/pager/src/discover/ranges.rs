//! Non-overlapping address ranges, ordered by start.
//!
//! Each mapping that a look finds, and each that the program takes away, is looked up in the managed ranges, and programs have
//! tens of thousands of mappings (a guard page behind each block makes two). The story: the ranges were in a list. A program with
//! 30,000 mappings took 318 s under a limit, and 0.5 without.

use std::collections::BTreeMap;

/// Address ranges, half open, no two of which overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    /// Adds a range that overlaps none of them.
    pub fn push(&mut self, (start, end): (usize, usize)) {
        debug_assert!(self.last_of(start, end).is_none());
        self.0.insert(start, end);
    }

    /// Whether exactly this range is among them.
    pub fn has(&self, start: usize, end: usize) -> bool {
        self.0.get(&start) == Some(&end)
    }

    /// The range that contains an address.
    pub fn holding(&self, at: usize) -> Option<(usize, usize)> {
        self.last_of(at, at + 1)
    }

    /// The range that contains an address, or the next one above it.
    pub fn next_from(&self, at: usize) -> Option<(usize, usize)> {
        self.holding(at).or_else(|| self.0.range(at..).next().map(|(a, b)| (*a, *b)))
    }

    fn last_of(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        self.overlapping(start, end).next()
    }

    /// The ranges that overlap a given one, from last to first.
    pub fn overlapping(&self, start: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
        self.0.range(..end).rev().map(|(a, b)| (*a, *b)).take_while(move |(_, b)| *b > start)
    }

    /// Whether they cover all of a range.
    pub fn covers(&self, start: usize, mut end: usize) -> bool {
        for (a, b) in self.overlapping(start, end) {
            if b < end || a <= start {
                return b >= end;
            }
            end = a;
        }
        start >= end
    }

    /// Removes a range; the parts of overlapping ranges outside it stay.
    pub fn cut(&mut self, start: usize, end: usize) {
        while let Some((a, b)) = self.last_of(start, end) {
            self.0.remove(&a);
            if a < start {
                self.0.insert(a, start);
            }
            if b > end {
                self.0.insert(end, b);
            }
        }
    }

    /// All ranges, ascending.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        self.0.iter().map(|(a, b)| (*a, *b))
    }

    /// Removes all ranges.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::mix;

    /// Against a flag for each address.
    #[test]
    fn agrees_with_a_flat_model() {
        const N: usize = 64;
        for seed in 0..200 {
            let (mut ranges, mut model) = (Ranges::default(), [0u32; N]);
            for step in 0..60 {
                let random = mix(seed * 1000 + step) as usize;
                let start = random % N;
                let end = start + 1 + random / N % (N - start);
                match random / 10_000 % 3 {
                    added @ (0 | 1) => {
                        ranges.cut(start, end);
                        // The part right of the cut is a range of its own.
                        let right =
                            (end..N).take_while(|i| start > 0 && model[*i] != 0 && model[*i] == model[start - 1]);
                        let right: Vec<usize> = right.collect();
                        right.iter().for_each(|i| model[*i] = 2 * step as u32 + 1);
                        model[start..end].fill(0);
                        if added == 0 {
                            ranges.push((start, end));
                            model[start..end].fill(2 * step as u32 + 2);
                        }
                    }
                    _ => {
                        let want = (start..end).any(|i| model[i] != 0);
                        assert_eq!(ranges.overlapping(start, end).next().is_some(), want, "seed {seed}");
                        let all = model[start..end].iter().all(|of| *of != 0);
                        assert_eq!(ranges.covers(start, end), all, "seed {seed}, {start} to {end}");
                    }
                }
                for (i, of) in model.iter().enumerate() {
                    let range = ranges.holding(i);
                    let next = (i..N).find(|at| model[*at] != 0);
                    let found = ranges.next_from(i);
                    assert_eq!(found.map(|(a, _)| a.max(i)), next, "seed {seed}, from {i} on");
                    assert_eq!(range.is_some(), *of != 0, "seed {seed}, address {i}");
                    if let Some((a, b)) = range {
                        assert!(ranges.has(a, b) && model[a..b].iter().all(|other| other == of), "seed {seed}");
                    }
                }
                assert_eq!(ranges.iter().count() == 0, ranges.is_empty());
            }
        }
    }
}

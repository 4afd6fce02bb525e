//! A set of pages out of 2 MiB, a bit for each: pages of a unit of compression.

/// Pages that a set can have.
pub const MOST: usize = 512;

/// A set of page numbers below [`MOST`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSet([u64; MOST / 64]);

impl PageSet {
    /// The first `n` pages.
    ///
    /// # Panics
    /// When `n` is more than [`MOST`].
    pub fn first(n: usize) -> Self {
        let mut set = Self::default();
        (0..n).for_each(|page| set.put(page, true));
        set
    }

    /// Whether a page is in the set.
    ///
    /// # Panics
    /// When the page is not below [`MOST`]; so do all functions that take a page.
    #[inline]
    pub fn has(&self, page: usize) -> bool {
        self.0[page / 64] & 1 << (page % 64) != 0
    }

    /// Puts a page into the set, or takes it out.
    #[inline]
    pub fn put(&mut self, page: usize, is_in: bool) {
        let bit = 1 << (page % 64);
        let word = &mut self.0[page / 64];
        *word = if is_in { *word | bit } else { *word & !bit };
    }

    /// Whether no page is in it.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; MOST / 64]
    }

    /// How many pages are in it.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Its pages, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MOST / 64).flat_map(move |word| {
            let mut left = self.0[word];
            core::iter::from_fn(move || {
                let bit = left.checked_ilog2().map(|_| left.trailing_zeros() as usize)?;
                left &= left - 1;
                Some(64 * word + bit)
            })
        })
    }

    /// The pages among the first 16, a bit each.
    pub fn first_16(&self) -> u16 {
        self.0[0] as u16
    }

    /// Reads a set from bytes: a bit for each page, the lowest first. Missing bytes count as zero.
    pub fn read(bytes: &[u8]) -> Self {
        let mut set = Self::default();
        for (i, byte) in bytes.iter().enumerate().take(MOST / 8) {
            set.0[i / 8] |= u64::from(*byte) << (8 * (i % 8));
        }
        set
    }

    /// Writes as much of the set as fits into `bytes`.
    pub fn write(&self, bytes: &mut [u8]) {
        let words = self.0.iter().flat_map(|word| word.to_le_bytes());
        bytes.iter_mut().zip(words).for_each(|(to, byte)| *to = byte);
    }
}

impl From<u16> for PageSet {
    fn from(first_16: u16) -> Self {
        let mut set = Self::default();
        set.0[0] = u64::from(first_16);
        set
    }
}

impl FromIterator<usize> for PageSet {
    fn from_iter<T: IntoIterator<Item = usize>>(pages: T) -> Self {
        let mut set = Self::default();
        pages.into_iter().for_each(|page| set.put(page, true));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_was_put_in_and_round_trips() {
        let pages = [0, 3, 15, 16, 63, 64, 200, 511];
        let mut set: PageSet = pages.into_iter().collect();
        assert!(set.iter().eq(pages) && set.len() == pages.len());
        assert!((0..MOST).all(|page| set.has(page) == pages.contains(&page)));
        let mut bytes = [0xff; MOST / 8];
        set.write(&mut bytes);
        assert_eq!(PageSet::read(&bytes), set);
        assert_eq!(PageSet::read(&[&bytes[..], &[0xff; 8]].concat()), set, "of more bytes than it has pages");
        assert_eq!((set.first_16(), PageSet::read(&bytes[..2])), (0x8009, PageSet::from(0x8009)));
        pages.into_iter().for_each(|page| set.put(page, false));
        assert!(set.is_empty() && PageSet::first(0).is_empty() && PageSet::first(MOST).len() == MOST);
        assert_eq!(PageSet::first(16), PageSet::from(u16::MAX));
    }
}

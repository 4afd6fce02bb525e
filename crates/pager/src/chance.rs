//! Pseudo-random decisions that are the same in each run: which faults are timed, which pages stay, which failures are injected.

/// Hashes a number to random bits: one step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the published generator, from seed 0.
    #[test]
    fn as_published() {
        let state = |n: u64| 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(n);
        assert_eq!([0, 1].map(|n| mix(state(n))), [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }
}

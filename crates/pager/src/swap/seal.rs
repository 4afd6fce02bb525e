//! Encryption of what goes to disk (`--encrypt-swap`).
//!
//! ```text
//! nonce (24) │ tag (16) │ encrypted: first page's number, object, padding
//! ```
//! The cipher is XChaCha20-Poly1305, from the RustCrypto crate. The key is drawn when the process starts, and is only in its
//! memory, which is left out of core dumps; when the process ends, what it wrote is unreadable. A forked child has its parent's
//! pages on disk, and therefore its key. No nonce is used twice with a key: its first 16 bytes are drawn anew in each process,
//! and the others count. The place on disk is authenticated too, so a block that comes back from another place, from a server
//! that mixes them up, is refused. (An older block of the same place does not match the checksum.) What does not authenticate
//! counts as a failed read: the page is read again, and in the end lost, and its process is told.

use chacha20poly1305::{AeadInPlace, KeyInit, Tag, XChaCha20Poly1305, XNonce};
use uzswap_mm::swapfile::Place;
use uzswap_sys::raw;

const NONCE: usize = 24;
const TAG: usize = 16;
/// Bytes in front of the encrypted data.
pub(super) const SEAL: usize = NONCE + TAG;

/// A key, and the nonces not used yet.
pub(super) struct Seal {
    cipher: XChaCha20Poly1305,
    /// Belongs to this process alone.
    salt: [u8; 16],
    count: u64,
}

impl Seal {
    /// Draws a new key; None if the kernel gives no random numbers.
    pub(super) fn new() -> Option<Self> {
        let mut key = [0; 32];
        raw::random(&mut key).ok()?;
        let mut seal = Self { cipher: XChaCha20Poly1305::new(&key.into()), salt: [0; 16], count: 0 };
        seal.renew().then_some(seal)
    }

    /// In a forked child: switches to nonces that its parent does not use; false if there are no random numbers; nothing may be
    /// sealed then.
    #[must_use]
    pub(super) fn renew(&mut self) -> bool {
        self.count = 0;
        raw::random(&mut self.salt).is_ok()
    }

    /// Encrypts in place what follows the first [`SEAL`] bytes.
    ///
    /// # Panics
    /// If there are fewer bytes.
    pub(super) fn close(&mut self, space: &mut [u8], place: Place) {
        self.count += 1;
        let (front, body) = space.split_at_mut(SEAL);
        let (nonce, tag) = front.split_at_mut(NONCE);
        nonce[..16].copy_from_slice(&self.salt);
        nonce[16..].copy_from_slice(&self.count.to_le_bytes());
        let made = self.cipher.encrypt_in_place_detached(XNonce::from_slice(nonce), &place.to_le_bytes(), body);
        tag.copy_from_slice(&made.expect("an object is far below the cipher's limit of 256 GiB"));
    }

    /// Decrypts in place what follows the first [`SEAL`] bytes; false if it was not closed with this key for this place.
    pub(super) fn open(&self, space: &mut [u8], place: Place) -> bool {
        if space.len() < SEAL {
            return false;
        }
        let (front, body) = space.split_at_mut(SEAL);
        let (nonce, tag) = front.split_at(NONCE);
        let (nonce, tag) = (XNonce::from_slice(nonce), Tag::from_slice(tag));
        self.cipher.decrypt_in_place_detached(nonce, &place.to_le_bytes(), body, tag).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object() -> Vec<u8> {
        (0..SEAL + 5000).map(|i| (i * 7 % 251) as u8).collect()
    }

    #[test]
    fn what_was_closed_opens_and_is_not_readable_meanwhile() {
        let (mut seal, plain) = (Seal::new().unwrap(), object());
        let mut space = plain.clone();
        seal.close(&mut space, 5);
        assert_ne!(space[SEAL..], plain[SEAL..]);
        assert!(seal.open(&mut space, 5));
        assert_eq!(space[SEAL..], plain[SEAL..]);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let mut seal = Seal::new().unwrap();
        let mut closed = object();
        seal.close(&mut closed, 5);
        for at in (0..closed.len()).step_by(97).chain(0..SEAL) {
            let mut space = closed.clone();
            space[at] ^= 1 << (at % 8);
            assert!(!seal.open(&mut space, 5), "byte {at}");
        }
        assert!(!seal.open(&mut closed[..SEAL - 1].to_vec(), 5), "too short");
        assert!(!seal.open(&mut closed.clone(), 6), "another place");
        assert!(seal.open(&mut closed, 5));
    }

    #[test]
    fn no_nonce_comes_twice_in_a_process_or_its_child() {
        let mut seal = Seal::new().unwrap();
        let mut nonces = std::collections::BTreeSet::new();
        for process in 0..3 {
            for _ in 0..1000 {
                let mut space = object();
                seal.close(&mut space, 5);
                assert!(nonces.insert(space[..NONCE].to_vec()), "process {process}");
            }
            assert!(seal.renew());
        }
    }

    #[test]
    fn another_process_s_key_opens_nothing_and_a_childs_opens_its_parents() {
        let mut parent = Seal::new().unwrap();
        let mut space = object();
        parent.close(&mut space, 5);
        assert!(!Seal::new().unwrap().open(&mut space.clone(), 5));
        assert!(parent.renew());
        assert!(parent.open(&mut space, 5));
    }
}

//! Where a node says that a slot is.

/// Slots of a cluster.
pub const SLOTS: u16 = 16_384;

/// What a node answers that does not have the slot of a key.
#[derive(Debug, Clone, PartialEq)]
pub struct Redirect {
    /// For this time only, and the node is to be told so.
    pub ask: bool,
    /// The slot that was asked for, below [`SLOTS`].
    pub slot: u16,
    /// Its host is empty where it is that of who answered.
    pub host: String,
    /// And its port.
    pub port: u16,
}

impl Redirect {
    /// The redirect that an error is: its code, and what follows.
    pub fn parse(code: &str, details: &str) -> Option<Self> {
        let ask = match code {
            "MOVED" => false,
            "ASK" => true,
            _ => return None,
        };
        let (slot, node) = details.split_once(' ')?;
        let (host, port) = node.trim().rsplit_once(':')?;
        let slot = slot.parse().ok().filter(|slot| *slot < SLOTS)?;
        Some(Self { ask, slot, host: host.trim_matches(['[', ']']).to_owned(), port: port.parse().ok()? })
    }
}

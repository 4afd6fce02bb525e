//! The redirect with which a node answers when another has the slot.

/// Slots in a cluster.
pub const SLOTS: u16 = 16_384;

/// The answer of a node that does not have the key's slot.
#[derive(Debug, Clone, PartialEq)]
pub struct Redirect {
    /// Whether this is for one time only; the other node must then be told so (ASKING).
    pub ask: bool,
    /// The key's slot, below [`SLOTS`].
    pub slot: u16,
    /// The other node's host; empty if it is that of the node that answered.
    pub host: String,
    /// The other node's port.
    pub port: u16,
}

impl Redirect {
    /// Parses an error's code and what follows it.
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

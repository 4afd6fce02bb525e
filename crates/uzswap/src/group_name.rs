//! Names of groups: `web`, `web/worker`.

use uzswap_pager::group::{DEPTH, NAME_BYTES};

/// Splits a name into its components, and checks them. The error is one sentence.
pub fn components(name: &str) -> Result<Vec<&str>, String> {
    let parts: Vec<&str> = name.split('/').collect();
    let good = |part: &str| {
        let plain = part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        (1..=NAME_BYTES).contains(&part.len()) && plain && !part.starts_with('.')
    };
    if !parts.iter().all(|part| good(part)) || parts.len() > DEPTH {
        return Err(format!(
            "`{name}` is not a name for a group: use letters, digits, `-`, `_` and `.`, up to {NAME_BYTES} each, not beginning with `.`, and `/` for a group inside another, at most {DEPTH} deep"
        ));
    }
    Ok(parts)
}

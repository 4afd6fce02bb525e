//! Reads reports of `uzswap run` (`--report FILE`), to judge a run by them.

use crate::size::mib;
use serde_json::Value;
use std::path::Path;

/// Reads a report; `None` if there is none that can be read.
#[must_use]
pub fn read(path: &Path) -> Option<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()
}

/// Bytes of the pools at the time when most was stored.
#[must_use]
pub fn pool(report: &Value) -> Option<u64> {
    report.pointer("/counters/pool_total_size")?.as_u64()
}

/// The highest charge against the limit, in bytes: what the kernel said when members looked, without the pool if that is not
/// charged.
#[must_use]
pub fn peak(report: &Value) -> Option<u64> {
    report.get("peak")?.as_u64()
}

/// The most metadata, in bytes.
#[must_use]
pub fn metadata(report: &Value) -> Option<u64> {
    report.pointer("/counters/metadata_size")?.as_u64().filter(|bytes| *bytes > 0)
}

/// A note if something was not limited at all, so its speed says nothing. It held `counted` bytes that count against its limit,
/// of the `whole` that it works on.
#[must_use]
pub fn unlimited(name: &str, counted: u64, whole: u64) -> Option<String> {
    (counted as f64 > 0.95 * whole as f64)
        .then(|| format!("{name} held {} of {} in memory: it was not limited", mib(counted), mib(whole)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::MIB;
    use serde_json::json;

    #[test]
    fn what_a_report_says() {
        let report = json!({"peak": 9, "counters": {"metadata_size": 4096, "pool_total_size": 7}});
        assert_eq!((metadata(&report), pool(&report), peak(&report)), (Some(4096), Some(7), Some(9)));
        assert_eq!(metadata(&json!({"counters": {"metadata_size": 0}})), None);
        assert_eq!((metadata(&json!([1])), pool(&json!([1])), peak(&json!([1]))), (None, None, None));
        assert_eq!(read(Path::new("/nonexistent")), None);
    }

    #[test]
    fn nearly_all_in_memory_is_no_limit() {
        assert_eq!(unlimited("x", 60 * MIB, 64 * MIB), None);
        let said = unlimited("uzswap run", 62 * MIB, 64 * MIB).unwrap();
        assert!(said.starts_with("uzswap run held") && said.ends_with("not limited"), "{said}");
    }
}

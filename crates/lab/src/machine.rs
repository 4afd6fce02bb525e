//! The machine that figures were measured on.

use serde_json::{Map, Value, json};
use std::fs;

/// Describes the machine: processor, memory, kernel, and the kernel's settings that matter here.
#[must_use]
pub fn describe() -> Map<String, Value> {
    let read = |path: &str| fs::read_to_string(path).map(|s| s.trim().to_owned()).unwrap_or_default();
    let field = |text: &str, name: &str| {
        text.lines()
            .find_map(|l| l.split_once(':').filter(|(key, _)| key.trim() == name).map(|(_, v)| v.trim().to_owned()))
            .unwrap_or_default()
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let kib: u64 = memory.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let value = json!({
        "cpu": field(&read("/proc/cpuinfo"), "model name"),
        "cpus": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
        "memory_bytes": kib * 1024,
        "kernel": read("/proc/sys/kernel/osrelease"),
        "virtualised": field(&read("/proc/cpuinfo"), "flags").split(' ').any(|flag| flag == "hypervisor"),
        "transparent_hugepage": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "page_cluster": read("/proc/sys/vm/page-cluster"),
        "swappiness": read("/proc/sys/vm/swappiness"),
        "zswap_shrinker": read("/sys/module/zswap/parameters/shrinker_enabled"),
        "zswap_max_pool_percent": read("/sys/module/zswap/parameters/max_pool_percent"),
    });
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

//! Folios under `uzswap run`: options, counters, and huge pages across a swap cycle.

use crate::cli::{python, skip, uzswap};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Runs a Python program under a limit; returns its output and the report.
fn run(python: &Path, memory: &str, options: &[&str], script: &str) -> (String, serde_json::Value) {
    let dir = TempDir::new().unwrap();
    let report = dir.path().join("report");
    let mut command = uzswap();
    command.args(["run", "--quiet", "--memory", memory, "--report"]).arg(&report).args(options);
    let output = command.arg("--").arg(python).args(["-c", script]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    (text, serde_json::from_slice(&fs::read(report).unwrap()).unwrap())
}

/// Writes 96 MiB in sequence and reads it back; wrong bytes are an error.
const SEQUENTIAL: &str = "
b = bytearray(96 << 20)
page = lambda i: (b'%016x' % (i * 2654435761)) * 128 + bytes(2048)
for i in range(len(b) >> 12): b[i << 12:(i + 1) << 12] = page(i)
for i in range(len(b) >> 12): assert b[i << 12:(i + 1) << 12] == page(i), i
";

fn sum(report: &serde_json::Value, counter: &str) -> u64 {
    let folios = report["folios"].as_object().unwrap();
    folios.iter().filter(|(name, _)| name.starts_with("hugepages-")).map(|(_, o)| o[counter].as_u64().unwrap()).sum()
}

/// The report of a run that had large folios to put out, as `counter` shows. How many a program has depends on how much it had
/// filled before its memory was managed.
fn met_large(python: &Path, options: &[&str], counter: &str) -> serde_json::Value {
    for _ in 0..10 {
        let (_, report) = run(python, "48M", options, SEQUENTIAL);
        if sum(&report, counter) > 16 {
            return report;
        }
    }
    panic!("no run of ten counted {counter} {options:?}");
}

/// A5, A6: the switch and the counters by order, as users see them.
#[test]
fn a5_a6_the_switch_and_the_counters_of_a_program() {
    let Some(python) = python() else { return };
    let on = met_large(&python, &[], "zswpout");
    assert_eq!(sum(&on, "swpout_fallback"), 0);
    let off = met_large(
        &python,
        &["--large-folios", "off", "--verify-compression", "--compaction", "pivot"],
        "swpout_fallback",
    );
    assert_eq!(sum(&off, "zswpout"), 0);
    assert_eq!(off["folios"]["block_write"], 0);
    assert_eq!(off["folios"]["reject_verify_fail"], 0);
}

/// A2, A4: stores are refused at every step of a program under a limit; its bytes stay right.
#[test]
fn a2_refused_folios_of_a_program_lose_nothing() {
    let Some(python) = python() else { return };
    let dir = TempDir::new().unwrap();
    let report = dir.path().join("report");
    let mut command = uzswap();
    command.env("UZSWAP_TEST_FAULTS", "seed=5,pool=1/50,index=1/400,limit=1/20,compress=1/100,frames=1/4,charge=1/4");
    command.args(["run", "--quiet", "--memory", "48M", "--verify-compression", "--report"]).arg(&report);
    let output = command.arg("--").arg(python).args(["-c", SEQUENTIAL]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    for site in ["pool", "index", "limit", "compress", "frames"] {
        assert!(report["injected"][site].as_u64().unwrap() > 0, "{site} never failed: {report:#}");
    }
    assert_eq!(report["counters"]["poisoned"], 0);
    assert!(report["folios"]["reject_verify_fail"].as_u64().unwrap() > 0);
}

/// A program with huge pages has huge pages again after they were out and came back. (The kernel's own swap-in splits them.)
#[test]
fn huge_pages_stay_huge_across_a_swap_cycle() {
    const SCRIPT: &str = "
import mmap
N = 20
def huge():
    with open('/proc/self/smaps') as f: return sum(int(l.split()[1]) for l in f if l.startswith('AnonHugePages'))
m = mmap.mmap(-1, N << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m.madvise(mmap.MADV_HUGEPAGE)
part = lambda i: (b'%08x' % (i * 40503 + 7)) * (1 << 18)
for i in range(N): m[i << 21:(i + 1) << 21] = part(i)
before = huge()
b = bytearray(160 << 20)
for i in range(0, len(b), 4096): b[i:i + 8] = b'%08x' % i
out = huge()
for i in range(N): assert m[i << 21:(i + 1) << 21] == part(i), i
print(before >> 10, out >> 10, huge() >> 10)
";
    let Some(python) = python() else { return };
    let (text, report) = run(&python, "128M", &[], SCRIPT);
    let mib: Vec<u64> = text.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let folios = &report["folios"];
    println!("huge pages: {} MiB before, {} while out, {} after; {folios:#}", mib[0], mib[1], mib[2]);
    if mib[0] < 30 {
        return skip("the kernel gave the program no huge pages");
    }
    assert!(mib[1] <= mib[0] / 2, "they were not taken out");
    assert!(mib[2] >= mib[0] / 4 * 3, "they came back small");
    assert!(folios["thp_move_out"].as_u64().unwrap() >= 10 && folios["thp_move_in"].as_u64().unwrap() >= 10);
    assert!(folios["hugepages-2048kB"]["zswpout"].as_u64().unwrap() >= 10);
    assert!(folios["hugepages-2048kB"]["zswpin"].as_u64().unwrap() >= 10);
}

/// A managed program's new memory comes as huge pages where the kernel would give it some. Small pages come where it advised
/// against them, or did not ask for them although the system wants that. It reads what it filled.
#[test]
fn new_memory_comes_as_huge_pages_where_they_are_wanted() {
    const SCRIPT: &str = "
import mmap
def huge():
    with open('/proc/self/smaps') as f: return sum(int(l.split()[1]) for l in f if l.startswith('AnonHugePages')) >> 10
b = bytearray(200 << 20)
for i in range(0, len(b), 4096): b[i:i + 8] = b'%08x' % i
del b
for advice in mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE:
    before = huge()
    m = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m.madvise(advice)
    for i in range(0, len(m), 4096): m[i:i + 8] = b'%08x' % i
    for i in range(0, len(m), 4096): assert m[i:i + 4096] == b'%08x' % i + bytes(4088), i
    print(huge() - before)
    m.close()
";
    let Some(python) = python() else { return };
    let policy = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !policy.contains("[madvise]") && !policy.contains("[always]") {
        return skip("the system allows no huge pages");
    }
    let (text, report) = run(&python, "192M", &[], SCRIPT);
    let mib: Vec<u64> = text.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let brought = report["folios"]["hugepages-2048kB"]["anon_fault_alloc"].as_u64().unwrap();
    println!("huge pages: {mib:?} MiB, of which {brought} came by faults");
    assert_eq!(mib[0], 0, "it did not want them");
    // One fault brings several.
    assert!(mib[1] >= 40 && brought >= 4, "it wanted them");
}

/// A5: with a swap file, folios that may not enter the pool go there whole, and come back with their contents.
#[test]
fn a5_what_may_not_enter_the_pool_goes_to_disk_whole() {
    let Some(python) = python() else { return };
    // If little was filled before memory was managed, few whole 64 KiB lie together; and the disk may be too slow for all.
    let options = ["--swap", "1G", "--large-folios", "off"];
    let report = met_large(&python, &options, "swpout");
    let (folios, counters) = (&report["folios"], &report["counters"]);
    println!("{folios:#}\n{counters:#}");
    assert_eq!(sum(&report, "zswpout"), 0);
    assert!(folios["hugepages-64kB"]["swpout"].as_u64().unwrap() > 0);
    assert!(folios["hugepages-64kB"]["swpin"].as_u64().unwrap() > 0, "blocks of 64 KiB are read as such");
    assert_eq!(folios["thp_swpout"], folios["hugepages-2048kB"]["swpout"]);
    assert_eq!(counters["poisoned"], 0);
    // As huge pages if there are any: with a limit of 128 MiB, folios may be that large.
    let huge = "
import mmap
m = mmap.mmap(-1, 96 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m.madvise(mmap.MADV_HUGEPAGE)
part = lambda i: (b'%08x' % (i * 40503 + 7)) * (1 << 18)
for i in range(48): m[i << 21:(i + 1) << 21] = part(i)
b = bytearray(160 << 20)
for i in range(0, len(b), 4096): b[i:i + 8] = b'%08x' % i
for i in range(48): assert m[i << 21:(i + 1) << 21] == part(i), i
for i in range(0, len(b), 4096): assert b[i:i + 8] == b'%08x' % i, i
";
    let (_, report) = run(&python, "128M", &options, huge);
    let folios = &report["folios"];
    println!("{folios:#}");
    assert_eq!(sum(&report, "zswpout"), 0);
    let large =
        ["64", "128", "256", "512", "1024", "2048"].map(|kib| folios[format!("hugepages-{kib}kB")]["swpout"].as_u64());
    assert!(large.iter().flatten().sum::<u64>() > 16, "{large:?}");
    if folios["thp_move_out"].as_u64().unwrap() > 8 {
        assert!(folios["thp_swpout"].as_u64().unwrap() > 0);
    }
}

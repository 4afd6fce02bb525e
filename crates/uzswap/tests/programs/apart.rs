//! Programs in PID or time namespaces other than their group's: they are not members of it.

use crate::harness::*;
use crate::python;

/// Keeps 40 MiB that do not compress, and checks all of it three times.
const NOISE: &str = "import hashlib, sys\n\
    def page(n): return hashlib.shake_128(b'%s %d' % (sys.argv[1].encode(), n)).digest(4096)\n\
    memory = [page(n) for n in range(10240)]\n\
    for i in range(3): assert all(memory[n] == page(n) for n in range(10240))\n\
    print(sys.argv[1], 'right')\n";

const TOLD: &str = "it is in a PID namespace";

/// The story: a program in a PID namespace that still had the former /proc took the numbers there for its own, and found no
/// process by the group's numbers. It took a living member's slot, and had that member's clusters of the swap file given to
/// others: pages were lost.
#[test]
fn who_has_other_numbers_or_clocks_takes_nothing_from_the_group() {
    let _beside = beside();
    let (Some(python), Some(sh), Some(unshare)) = (python(), need("sh"), need("unshare")) else { return };
    for apart in ["--pid --fork", "--time --boottime 100000 --fork"] {
        if !std::process::Command::new(&unshare).args(apart.split(' ')).arg("true").status().is_ok_and(|s| s.success())
        {
            skip(&format!("unshare {apart} is not allowed here"));
            continue;
        }
        let script =
            format!("\"$1\" -c \"$2\" one & unshare {apart} \"$1\" -c \"$2\" two && wait $! && \"$1\" -c \"$2\" three");
        let subject = Subject::new("apart", &[&sh, &"-c", &script, &"sh", &python, &NOISE]).with(&["--swap", "256M"]);
        let run = subject.start_limited(24 * MIB).finish();
        let said = run.stdout.text();
        let right = ["one", "two", "three"].iter().all(|name| said.contains(&format!("{name} right\n")));
        assert!(run.status.success() && right && number(&run, "poisoned") == 0, "{apart}\n{}", run.describe());
        assert_eq!(run.stderr.text().matches(TOLD).count(), 1, "{apart}\n{}", run.describe());
        assert!(number(&run, "engaged") >= 2, "{apart}\n{}", run.describe());
    }
}

/// A process whose children will be in another namespace is let go of, as they cannot be members.
#[test]
fn a_child_with_another_number_has_its_memory() {
    let _beside = beside();
    let Some(python) = python() else { return };
    let script = "import ctypes, os\n\
        memory = [bytes([n % 251]) * 4096 for n in range(10240)]\n\
        if ctypes.CDLL(None).unshare(0x20000000): raise SystemExit(77)\n\
        def right(): return all(page == bytes([n % 251]) * 4096 for n, page in enumerate(memory))\n\
        child = os.fork()\n\
        if child == 0: os._exit(os.getpid() != 1 or not right())\n\
        print(os.waitpid(child, 0)[1], right())";
    let run = Subject::new("numbers", &[&python, &"-c", &script]).start_limited(24 * MIB).finish();
    if run.status.code() == Some(77) {
        return skip("unshare --pid is not allowed here");
    }
    assert!(run.status.success() && run.stdout.text() == "0 True\n", "{}", run.describe());
    assert_eq!(run.stderr.text().matches("without a limit from now on").count(), 1, "{}", run.describe());
}

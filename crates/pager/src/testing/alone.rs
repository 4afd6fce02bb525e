//! Tests that say why they cannot run, and tests that have a process for themselves. The integration tests include it too.

/// Says why a test cannot run on this machine, or with these rights; on standard error itself, which the test runner does not
/// capture. (What can be installed is not checked here: the command's tests need it, and fail without it where everything is
/// required.)
pub(crate) fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("    SKIPPED {test}: {reason}\n"));
}

/// Whether this test has a process to itself, so that what it sees of the process (memory, descriptors, threads) is its own. If
/// not, it is run in a process started for it; when this returns false, it has passed there.
pub(crate) fn by_itself(test: &str) -> bool {
    const SET: &str = "UZSWAP_TEST_BY_ITSELF";
    if std::env::var_os(SET).is_some_and(|name| name == test) {
        return true;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let done = command.args(["--exact", test, "--nocapture"]).env(SET, test).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    println!("{said}");
    assert!(done.status.success() && said.contains("1 passed"), "{}", String::from_utf8_lossy(&done.stderr));
    false
}

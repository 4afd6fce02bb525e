//! Programs with a userfaultfd of their own: uzswap cedes to it what it has registered.

use crate::harness::*;
use crate::injected::with_faults;

/// Such a program uses 64 MiB; an eighth of that cannot be taken out while it is registered.
const LIMIT: u64 = 32 * MIB;

/// The program, which tries each registration so often. None if it cannot be built, or has no userfaultfd here.
fn subject(name: &'static str, tries: &str, more: &[&str]) -> Option<(Subject, String)> {
    let program = compile_c("userfaults")?;
    let mut subject = Subject::new(name, &[&program, &tries]);
    subject.argv.extend(more.iter().map(|argument| argument.into()));
    let plain = subject.start_plain().finish();
    if plain.status.code() == Some(77) {
        skip(plain.stdout.text().trim());
        return None;
    }
    let said = plain.stdout.text();
    assert!(plain.status.success() && said.ends_with("576 missing, 1024 told, 0 strange\n"), "{}", plain.describe());
    Some((subject, said))
}

/// The story: a program that registered memory with a userfaultfd of its own got EBUSY, as uzswap had registered it first.
#[test]
fn what_the_program_registers_is_ceded() {
    let _beside = beside();
    for (name, more) in [("userfaults", &[][..]), ("userfaults, huge pages", &["huge"][..])] {
        let Some((subject, said)) = subject(name, "1", more) else { return };
        for (how, faults) in [("", "seed=1"), (", without MOVE", "seed=1,move=never")] {
            for options in [&[][..], &["--swap", "256M"][..]] {
                let run = with_faults(&subject.clone().with(options), LIMIT, faults);
                assert!(run.status.success() && run.stdout.text() == said, "{name}{how}\n{}", run.describe());
                assert!(number(&run, "zswpout") > 0 && number(&run, "engaged") > 0, "{name}{how}\n{}", run.describe());
                assert!(run.stderr.text().contains("refused 0 times"), "{name}{how}\n{}", run.describe());
            }
        }
    }
    let Some((subject, said)) = subject("userfaults", "1", &[]) else { return };
    let run = subject.with(&["--track-writes"]).start_limited(LIMIT).finish();
    assert!(run.status.success() && run.stdout.text() == said, "{}", run.describe());
}

/// A registration that cannot be ceded is refused as before, and nothing is lost; when tried again it succeeds.
#[test]
fn what_cannot_be_ceded_is_refused() {
    let _beside = beside();
    let Some((often, said)) = subject("userfaults", "100", &[]) else { return };
    // There are 16 pieces at a time, and one registration in eight is not tried twice.
    let faults = "cede=1/8,move_in=1/20,copy=1/20,event=1/100";
    for faults in [faults.to_owned(), format!("{faults},move=never")] {
        let refused = (0..10).any(|_| {
            let run = with_faults(&often, LIMIT, &faults);
            assert!(run.status.success() && run.stdout.text() == said, "{faults}\n{}", run.describe());
            assert_eq!(number(&run, "poisoned"), 0, "{faults}\n{}", run.describe());
            number(&run, "cede") > 0
        });
        assert!(refused, "{faults}: nothing was ever refused");
    }
    let Some((once, _)) = subject("userfaults", "1", &[]) else { return };
    let run = with_faults(&once, LIMIT, "cede=1/1");
    assert!(run.status.success(), "{}", run.describe());
    assert_eq!(
        run.stdout.text(),
        "filled: 0 wrong, 0 missing, 0 told\nrefused: 0 wrong, 0 missing, 0 told\n",
        "{}",
        run.describe()
    );
}

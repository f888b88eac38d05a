//! The last test of a run (`.config/nextest.toml`): says how many tests were skipped and why, and fails
//! if one was that may not be.
//!
//! `mount-scripts/test.sh` names the file with a line for each skip, `KVFS_SKIPS`; a run that has none has
//! nothing to count. `KVFS_SKIPS_ALLOWED` (a comma list, may be empty) has the words whose absence is
//! known where these tests run; without it every skip may be.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/skips.rs"]
#[allow(dead_code, reason = "the words are all that is needed")]
mod words;

use std::collections::BTreeMap;

/// Per word: the tests and the reason of the last one.
type Skips = BTreeMap<String, (usize, String)>;

fn count(lines: &str) -> Skips {
    let mut skips = Skips::new();
    for line in lines.lines() {
        let mut fields = line.split('\t');
        let [word, test, reason] = [(); 3].map(|()| fields.next().unwrap_or_default());
        assert!(words::WORDS.contains(&word), "a line that no skip wrote: {line}");
        let entry = skips.entry(word.to_owned()).or_default();
        *entry = (entry.0 + 1, format!("{reason} ({test})"));
    }
    skips
}

/// The words of skips that may not be.
fn forbidden<'a>(skips: &'a Skips, allowed: &str) -> Vec<&'a str> {
    let allowed: Vec<&str> = allowed.split(',').map(str::trim).collect();
    for word in allowed.iter().filter(|word| !word.is_empty()) {
        assert!(
            words::WORDS.contains(word),
            "KVFS_SKIPS_ALLOWED has {word}, which no test asks for"
        );
    }
    skips.keys().map(String::as_str).filter(|word| !allowed.contains(word)).collect()
}

#[test]
fn only_what_may_be_skipped_was() {
    let Some(path) = std::env::var_os("KVFS_SKIPS") else {
        eprintln!("nobody counts: KVFS_SKIPS names no file");
        return;
    };
    // No test was skipped where nobody made the file.
    let skips = count(&std::fs::read_to_string(path).unwrap_or_default());
    eprintln!("skipped: {}", skips.values().map(|(count, _)| count).sum::<usize>());
    for (word, (count, last)) in &skips {
        eprintln!("  {count} without {word}: {last}");
    }
    let Ok(allowed) = std::env::var("KVFS_SKIPS_ALLOWED") else {
        return;
    };
    assert_eq!(forbidden(&skips, &allowed), [""; 0], "see above, and {allowed:?} may be missing");
}

#[test]
fn a_skip_that_may_not_be_is_told() {
    let skips =
        count("nfs\tremote directory::nfs\tno client\nfio\tx fio\tno fio\nfio\ty fio\tno\n");
    assert_eq!(skips["fio"], (2, "no (y fio)".to_owned()));
    assert_eq!(forbidden(&skips, "nfs, fio"), [""; 0]);
    assert_eq!(forbidden(&skips, "nfs"), ["fio"]);
    assert_eq!(forbidden(&skips, ""), ["fio", "nfs"]);
}

#[test]
#[should_panic(expected = "fuze")]
fn a_word_of_nobody_is_an_error() {
    forbidden(&Skips::new(), "nfs,fuze");
}

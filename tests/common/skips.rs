//! Skips: a test that lacks something says so and passes, unless `KVFS_REQUIRE` promises it. Each skip
//! is a line in the file that `KVFS_SKIPS` names, for the runner itself counts a skip as passed.

use std::io::Write;

/// What tests ask for. A word that is not here is nobody's, neither in a test nor in `KVFS_REQUIRE`.
pub(crate) const WORDS: [&str; 44] = [
    // The machine and who runs the tests.
    "fuse",
    "root",
    "loop",
    "io_uring",
    "cgroup",
    "descriptors",
    "overlay",
    "tmpfs_attributes",
    "x86_64",
    "xfs",
    "nfs",
    "nfs_server",
    // Programs of the system.
    "c++",
    "cc",
    "chromium",
    "dpkg",
    "faketime",
    "fincore",
    "fio",
    "fusermount3",
    "git",
    "nm",
    "python",
    "python3",
    "rsync",
    "setfattr",
    "setpriv",
    "strace",
    "stress-ng",
    "systemd-analyze",
    "tar",
    "unshare",
    "zstd",
    // What mount-scripts/test.sh fetches.
    "fsx",
    "llama",
    "llama_releases",
    "nfs_machine",
    "nvrtc",
    "pjdfstest",
    "rpc",
    "s3",
    "safetensors",
    "wheel",
    "xllamacpp",
];

/// The words of `KVFS_REQUIRE`.
fn promised() -> Vec<String> {
    let text = std::env::var("KVFS_REQUIRE").unwrap_or_default();
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    let words: Vec<String> = words.map(str::to_owned).collect();
    for word in &words {
        assert!(WORDS.contains(&word.as_str()), "KVFS_REQUIRE has {word}, which no test asks for");
    }
    words
}

/// Whether a test may go on. If something is missing, this says so, or panics if it is promised.
#[track_caller]
pub(crate) fn is_there(what: &str, missing: Option<String>) -> bool {
    assert!(WORDS.contains(&what), "{what} is not among the words of KVFS_REQUIRE");
    let promised = promised();
    let Some(missing) = missing else {
        return true;
    };
    let is_promised = promised.iter().any(|word| word == what);
    assert!(!is_promised, "KVFS_REQUIRE has {what}, but: {missing}");
    eprintln!("skipped: {missing}");
    note(what, &missing);
    false
}

/// One write for each line, so that tests that skip at once do not tear lines.
fn note(what: &str, missing: &str) {
    let Some(path) = std::env::var_os("KVFS_SKIPS") else {
        return;
    };
    let test = std::env::var("NEXTEST_TEST_NAME").ok();
    let thread = std::thread::current();
    let test = test.as_deref().or(thread.name()).unwrap_or("?");
    let binary = std::env::var("NEXTEST_BINARY_ID").unwrap_or_default();
    let reason = missing.replace(['\n', '\t'], " ");
    let line = format!("{what}\t{binary} {test}\t{reason}\n");
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let outcome = file.and_then(|mut file| file.write_all(line.as_bytes()));
    outcome.unwrap_or_else(|error| panic!("KVFS_SKIPS, {}: {error}", path.display()));
}

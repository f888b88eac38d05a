//! Skips, and how they become failures.

use std::path::Path;

/// Whether the machine has something that a test needs. If not, says so, or panics if the
/// environment promises it.
pub(crate) fn available(what: &str) -> bool {
    // `loop` can only be named as a raw identifier.
    let what = what.strip_prefix("r#").unwrap_or(what);
    let Some(missing) = missing(what) else {
        return true;
    };
    let required = std::env::var("KVFS_REQUIRE").unwrap_or_default();
    let promised = required.split(',').any(|word| word.trim() == what);
    assert!(!promised, "KVFS_REQUIRE has {what}, but: {missing}");
    eprintln!("skipped: {missing}");
    false
}

/// Why something cannot be used.
fn missing(what: &str) -> Option<String> {
    match what {
        "fuse" => {
            let opened = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
            opened.err().map(|error| format!("no /dev/fuse: {error}"))
        }
        "root" => (!nix::unistd::geteuid().is_root()).then(|| "not root".to_owned()),
        "loop" => (!Path::new("/dev/loop-control").exists()).then(|| "no loop devices".to_owned()),
        "python" => missing_program("python3"),
        "safetensors" => missing_python_packages(),
        program => missing_program(program),
    }
}

/// The packages that mount-scripts/test.sh installs for `KVFS_TEST_PYTHON`.
fn missing_python_packages() -> Option<String> {
    let program = std::env::var("KVFS_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut python = std::process::Command::new(program);
    let ran = python.args(["-c", "import numpy, safetensors, xxhash"]).output();
    let there = ran.is_ok_and(|output| output.status.success());
    (!there).then(|| "no Python with numpy, safetensors and xxhash".to_owned())
}

fn missing_program(name: &str) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|directory| directory.join(name).is_file());
    (!found).then(|| format!("no program {name}"))
}

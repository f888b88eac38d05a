//! One user at every limit at once, and another who wants to read a file.
//!
//! A hundred processes of an unprivileged user (`attack.py`) open files, ask questions, draft blocks, nest
//! directories, set attributes, write sparse files, rename what is no page, contend for locks, sync, write the longest
//! paths, links, `positions.json` and tokens, and begin slots that they never end,
//! while an honest program opens a file and reads 64 KiB of it. `KVFS_NEIGHBOUR_SECONDS` (8) says how long,
//! `KVFS_SEED` what they choose. `KVFS_NEIGHBOUR_FACTOR` holds the honest program to that many times its
//! idle 99.9th percentile; without it the bound is what tests beside this one leave room for. The same attack on a
//! plain directory tells what a hundred busy processes cost without a daemon, and `waiting` which part of the tail
//! is waiting for a processor.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "the figures are the result")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
mod waiting;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::forks::spawn;
use common::{Mode, Model, Mount, fill};
use waiting::{Latencies, READ_BYTES, Reader};

const PROCESSES: u32 = 100;
const USER: u32 = 65534;
/// What other tests on the same processors cost the slowest of a thousand.
const NOISE: Duration = Duration::from_millis(300);

in_both_modes!(an_honest_program_reads_on);

fn an_honest_program_reads_on(mode: Mode) {
    require!(python3, root);
    let seconds = number("KVFS_NEIGHBOUR_SECONDS", 8);
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let (floor, _) = attacked(&plain(&mount), None, seconds);
    for directory in [mount.files("hostile"), model.directory(&mount).join("sequences")] {
        open_to_everybody(&directory);
    }
    open_to_everybody(&model.directory(&mount));
    let honest = mount.files("honest");
    std::fs::write(&honest, fill(1, READ_BYTES)).unwrap();
    let reader = Reader::new(honest, Some(mount.pid()));
    let idle = reader.read(Duration::from_secs(seconds.min(4)), || false);
    let (busy, told) = attacked(mount.path(), Some(mount.pid()), seconds);

    println!("idle {idle}\nattacked {busy}: {told}\nplain, attacked {floor}");
    let times = |other: &Latencies| {
        busy.percentile(999).as_secs_f64() / other.percentile(999).as_secs_f64()
    };
    println!("p99.9: {:.1} times idle, {:.1} times plain", times(&idle), times(&floor));
    assert!(!told.contains("\"died\""), "a hostile process died: {told}");
    let granted = told.matches("granted").count();
    assert!(granted >= 10, "most kinds of attack did nothing: {told}");
    assert_refused(&told);
    let bound = match std::env::var("KVFS_NEIGHBOUR_FACTOR") {
        Ok(factor) => idle.percentile(999) * factor.parse().unwrap(),
        Err(_) => idle.percentile(999) * 3 + NOISE,
    };
    assert!(busy.percentile(999) <= bound, "idle {idle}, attacked {busy}");
    // What was refused is told of, and nothing else.
    let is_of_the_attack = |line: &String| line.contains("/blocks/") || line.contains("hostile");
    assert!(mount.errors().iter().all(is_of_the_attack), "{:?}", mount.errors());
    assert_eq!(mount.status("state"), "ok");
}

/// Each limit that was reached says so by its number.
fn assert_refused(told: &str) {
    let told: serde_json::Value = serde_json::from_str(told).unwrap();
    for (kind, errno) in [
        ("questions", "EAGAIN"),
        ("long_paths", "ENAMETOOLONG"),
        ("symlinks", "ENAMETOOLONG"),
        ("attributes", "ENOSPC"),
        ("endless_slots", "EAGAIN"),
    ] {
        assert!(told[kind][errno].as_u64() > Some(0), "{kind}: {}", told[kind]);
    }
}

/// A plain directory that looks like the mount to the hostile processes, on the filesystem of the store.
fn plain(mount: &Mount) -> PathBuf {
    let place = mount.beside("plain");
    for directory in [
        "files/hostile",
        "models/small/blocks",
        "models/small/sequences",
        "models/small/prefixes",
        "models/small/slots",
    ] {
        open_to_everybody(&place.join(directory));
    }
    let questions = place.join("models/small/prefixes/match");
    std::fs::write(&questions, "").unwrap();
    std::fs::set_permissions(&questions, Permissions::from_mode(0o666)).unwrap();
    std::fs::write(place.join("files/honest"), fill(1, READ_BYTES)).unwrap();
    place
}

fn open_to_everybody(directory: &Path) {
    std::fs::create_dir_all(directory).unwrap();
    std::fs::set_permissions(directory, Permissions::from_mode(0o1777)).unwrap();
}

/// Reads while a place is attacked; also what the hostile processes tell.
fn attacked(place: &Path, daemon: Option<u32>, seconds: u64) -> (Latencies, String) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/neighbour/attack.py");
    let mut attack = Command::new("python3");
    attack.arg(script).arg(place).args(
        [u64::from(USER), u64::from(PROCESSES), seconds, number("KVFS_SEED", 1)]
            .map(|number| number.to_string()),
    );
    attack.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut attack = spawn(&mut attack).unwrap();
    let reader = Reader::new(place.join("files/honest"), daemon);
    let is_over = || attack.try_wait().unwrap().is_some();
    let latencies = reader.read(Duration::from_secs(seconds + 60), is_over);
    let ended = attack.wait_with_output().unwrap();
    let told = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "the attack itself failed: {told}");
    (latencies, told)
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

//! One user at every limit at once, and another who wants to read a file.
//!
//! A hundred processes of an unprivileged user (`attack.py`) open files, ask questions, draft blocks, nest
//! directories, set attributes, write sparse files, rename what is no page, contend for locks and sync,
//! while an honest program opens a file and reads 64 KiB of it. `KVFS_NEIGHBOUR_SECONDS` (8) says how long,
//! `KVFS_SEED` what they choose. `KVFS_NEIGHBOUR_FACTOR` holds the honest program to that many times its
//! idle 99.9th percentile; without it the bound is what tests beside this one leave room for.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "the figures are the result")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

use std::fs::{File, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::forks::spawn;
use common::{Mode, Model, Mount, fill};

const PROCESSES: u32 = 100;
const USER: u32 = 65534;
const READ_BYTES: usize = 64 << 10;
/// What other tests on the same processors cost the slowest of a thousand.
const NOISE: Duration = Duration::from_millis(300);
/// Between two reads: an honest program has other things to do.
const PAUSE: Duration = Duration::from_micros(500);

in_both_modes!(an_honest_program_reads_on);

fn an_honest_program_reads_on(mode: Mode) {
    require!(python3, root);
    let seconds = number("KVFS_NEIGHBOUR_SECONDS", 8);
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let everybody = Permissions::from_mode(0o1777);
    std::fs::create_dir(mount.files("hostile")).unwrap();
    for directory in [mount.files("hostile"), model.directory(&mount).join("sequences")] {
        std::fs::set_permissions(directory, everybody.clone()).unwrap();
    }
    std::fs::set_permissions(model.directory(&mount), everybody).unwrap();
    let honest = mount.files("honest");
    std::fs::write(&honest, fill(1, READ_BYTES)).unwrap();

    let idle = latencies(&honest, Duration::from_secs(seconds.min(4)), || false);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/neighbour/attack.py");
    let mut attack = Command::new("python3");
    attack.arg(script).arg(mount.path()).args(
        [u64::from(USER), u64::from(PROCESSES), seconds, number("KVFS_SEED", 1)]
            .map(|number| number.to_string()),
    );
    attack.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut attack = spawn(&mut attack).unwrap();
    let is_over = || attack.try_wait().unwrap().is_some();
    let busy = latencies(&honest, Duration::from_secs(seconds + 60), is_over);
    let ended = attack.wait_with_output().unwrap();

    let told = String::from_utf8(ended.stdout).unwrap();
    println!("idle {}, attacked {}: {told}", shown(&idle), shown(&busy));
    assert!(ended.status.success(), "the attack itself failed: {told}");
    assert!(!told.contains("\"died\""), "a hostile process died: {told}");
    let granted = told.matches("granted").count();
    assert!(granted >= 6, "most kinds of attack did nothing: {told}");
    let bound = match std::env::var("KVFS_NEIGHBOUR_FACTOR") {
        Ok(factor) => percentile(&idle, 999) * factor.parse().unwrap(),
        Err(_) => percentile(&idle, 999) * 3 + NOISE,
    };
    assert!(percentile(&busy, 999) <= bound, "idle {}, attacked {}", shown(&idle), shown(&busy));
    // What was refused is told of, and nothing else.
    let is_of_the_attack = |line: &String| line.contains("/blocks/") || line.contains("/hostile/");
    assert!(mount.errors().iter().all(is_of_the_attack), "{:?}", mount.errors());
    assert_eq!(mount.status("state"), "ok");
}

/// How long each open and read took, until it is over or the time is; sorted.
fn latencies(path: &Path, longest: Duration, mut is_over: impl FnMut() -> bool) -> Vec<Duration> {
    let begun = Instant::now();
    let mut found = Vec::new();
    let mut bytes = vec![0; READ_BYTES];
    while begun.elapsed() < longest && !is_over() {
        let asked = Instant::now();
        File::open(path).unwrap().read_exact(&mut bytes).unwrap();
        found.push(asked.elapsed());
        std::thread::sleep(PAUSE);
    }
    assert!(found.len() > 20, "{} reads in {:?}", found.len(), begun.elapsed());
    found.sort();
    found
}

/// Of sorted durations, the one that so many of a thousand do not exceed.
fn percentile(sorted: &[Duration], of_thousand: usize) -> Duration {
    sorted[(sorted.len() * of_thousand / 1000).min(sorted.len() - 1)]
}

fn shown(sorted: &[Duration]) -> String {
    let [half, most] = [500, 999].map(|of_thousand| percentile(sorted, of_thousand));
    let slowest = sorted[sorted.len() - 1];
    format!("p50 {half:.1?} p99.9 {most:.1?} slowest {slowest:.1?} of {}", sorted.len())
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

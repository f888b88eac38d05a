//! The daemon is killed while programs write: at random moments, and at each system call that changes
//! the disk. Between two of those nothing happens that a killed daemon could leave half done.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::injection::Injection;
use crate::common::random::Random;
use crate::common::{Mode, Model, Mount, forks};
use crate::ledger::Ledger;
use crate::setting;
use crate::writers::{is_written_once, prepare, rows_go_on, write_during};

/// Of each kind, unless `KVFS_KILLS` says otherwise.
const KILLS: u64 = 100;
const LIFE_MS_MAX: usize = 60;
/// A call that is not made within this time is not waited for.
const CALL_WITHIN: Duration = Duration::from_millis(500);
const OPTIONS: [&str; 4] = ["--commit-interval", "0.02", "--ram", "8M"];

/// Calls that change the disk, or decide that they will.
const CALLS: [&str; 8] =
    ["fsync", "fdatasync", "renameat", "unlinkat", "pwrite64", "openat2", "ftruncate", "utimensat"];

/// fsck finds nothing.
pub(crate) fn assert_sound(store: &Path) {
    let fsck = forks::output(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(store));
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
}

/// Kills the daemon again and again; how often `kill` met it at work.
fn kill_again_and_again(
    mode: Mode, what: &str, life_ms_max: usize,
    mut kill: impl FnMut(&mut Mount, &mut Random) -> bool,
) {
    let (kills, seed) = (setting("KVFS_KILLS", KILLS), setting("KVFS_SEED", 2));
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let model = Model::small();
    prepare(&mount, &model);
    let (mut ledger, mut random, mut met) = (Ledger::default(), Random::of(seed), 0);
    for round in 0..kills {
        let root = mount.path().to_owned();
        let life = Duration::from_millis(random.below(life_ms_max) as u64);
        write_during(&root, (&model, round), &mut ledger, life, || {
            met += u64::from(kill(&mut mount, &mut random));
        });
        mount.mount();
        ledger.check(&model, &root, &format!("{what}, {mode:?}, seed {seed}, kill {round}"));
        rows_go_on(&root, &model);
        ledger.retire(&root, is_written_once);
        assert_eq!(mount.status("errors"), "0");
    }
    println!(
        "{what}, {mode:?}, seed {seed}: {kills} kills, {met} of them as intended, {} acknowledged, {} \
         programs interrupted, 0 lost, 0 torn",
        ledger.acknowledged, ledger.interrupted
    );
    assert!(met * 2 >= kills, "only {met} of {kills} kills were as intended");
    assert!(ledger.interrupted >= kills, "only {} programs were interrupted", ledger.interrupted);
    assert!(ledger.acknowledged >= kills, "only {} acknowledged", ledger.acknowledged);
    assert!(mount.unmount().success());
    assert_sound(mount.store());
}

fn at_random(mount: &mut Mount, _random: &mut Random) -> bool {
    mount.kill();
    true
}

fn at_a_system_call(mount: &mut Mount, random: &mut Random) -> bool {
    let call = CALLS[random.below(CALLS.len())];
    let when = format!("signal=KILL:when={}", 1 + random.below(4));
    let injection = Injection::into(mount, call, &when);
    let deadline = Instant::now() + CALL_WITHIN;
    while !mount.has_ended() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    let has_ended = mount.has_ended();
    mount.kill();
    injection.end();
    has_ended
}

#[test]
fn random_moments_passthrough() {
    crate::require!(fuse, root);
    kill_again_and_again(Mode::Passthrough, "random moments", LIFE_MS_MAX, at_random);
}

#[test]
fn system_calls_served() {
    crate::require!(fuse, strace);
    kill_again_and_again(Mode::Served, "system calls", 1, at_a_system_call);
}

/// The records are lost with the daemon: what the objects say about themselves is as new.
fn rebuild_after_a_kill(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let (model, mut ledger) = (Model::small(), Ledger::default());
    prepare(&mount, &model);
    let root = mount.path().to_owned();
    write_during(&root, (&model, 0), &mut ledger, Duration::from_millis(500), || mount.kill());
    std::fs::remove_file(mount.store().join("meta.redb")).unwrap();
    let kvfs = env!("CARGO_BIN_EXE_kvfs");
    let rebuilt = forks::succeed(Command::new(kvfs).args(["fsck", "--rebuild"]).arg(mount.store()));
    assert!(rebuilt.contains("files are where they were"), "{rebuilt}");
    mount.mount();
    ledger.check(&model, &root, &format!("{mode:?}, rebuilt"));
    assert!(ledger.acknowledged > 0);
    assert!(mount.unmount().success());
    assert_sound(mount.store());
}

#[test]
fn rebuilt_passthrough() {
    crate::require!(fuse, root);
    rebuild_after_a_kill(Mode::Passthrough);
}

#[test]
fn rebuilt_served() {
    crate::require!(fuse);
    rebuild_after_a_kill(Mode::Served);
}

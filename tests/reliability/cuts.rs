//! The power of a real filesystem is cut (`EXT4_IOC_SHUTDOWN`, `XFS_IOC_GOINGDOWN`) under a daemon and
//! six programs that write: what its journal had not written is gone.

use std::process::Command;
use std::time::Duration;

use crate::common::disk::{Format, SmallDisk};
use crate::common::forks::output;
use crate::common::random::Random;
use crate::common::{Mode, Model, Mount};
use crate::ledger::Ledger;
use crate::setting;
use crate::writers::{is_written_once, prepare, rows_go_on, write_during};

/// Of each filesystem, unless `KVFS_POWER_CUTS` says otherwise.
const CUTS: u64 = 100;
/// Longest time between two cuts.
const LIFE_MS_MAX: usize = 60;

fn whatever_was_acknowledged_survives(format: Format, bytes: u64) {
    let (cuts, seed) = (setting("KVFS_POWER_CUTS", CUTS), setting("KVFS_SEED", 1));
    let disk = SmallDisk::with(format, bytes);
    let store = disk.mountpoint.join("store");
    let options = ["--commit-interval", "0.02", "--ram", "8M"];
    let mut mount = Mount::of_store_with(Mode::Passthrough, &options, &store);
    let model = Model::small();
    prepare(&mount, &model);
    let (mut ledger, mut random) = (Ledger::default(), Random::of(seed));
    for round in 0..cuts {
        let root = mount.path().to_owned();
        let life = Duration::from_millis(random.below(LIFE_MS_MAX) as u64);
        // Sometimes the daemon notices, sometimes it does not.
        let agony = Duration::from_millis(random.below(2) as u64 * 5);
        write_during(&root, (&model, round), &mut ledger, life, || {
            disk.cut_power();
            std::thread::sleep(agony);
            mount.kill();
        });
        // The dead mount keeps files of the disk open.
        output(Command::new("umount").arg("-l").arg(&root));
        disk.restore_power();
        mount.mount();
        ledger.check(&model, &root, &format!("{format:?}, seed {seed}, cut {round}"));
        rows_go_on(&root, &model);
        ledger.retire(&root, is_written_once);
    }
    println!(
        "{format:?}, seed {seed}: {cuts} power cuts, {} acknowledged, {} programs interrupted, 0 lost, \
         0 torn",
        ledger.acknowledged, ledger.interrupted
    );
    assert!(ledger.interrupted >= cuts, "only {} programs were interrupted", ledger.interrupted);
    assert!(ledger.acknowledged >= cuts, "only {} acknowledged", ledger.acknowledged);
    assert!(mount.unmount().success());
    crate::kills::assert_sound(&store);
}

#[test]
fn ext4() {
    crate::require!(fuse, root, r#loop);
    whatever_was_acknowledged_survives(Format::Ext4, 96 << 20);
}

#[test]
fn xfs() {
    crate::require!(fuse, root, r#loop, xfs);
    whatever_was_acknowledged_survives(Format::Xfs, 320 << 20);
}

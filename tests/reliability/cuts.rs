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

/// The power is back. The dead mount keeps files of the disk open, so it goes first.
fn mount_again(mount: &mut Mount, disk: &SmallDisk) {
    output(Command::new("umount").arg("-l").arg(mount.path()));
    disk.restore_power();
    mount.mount();
}

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
        mount_again(&mut mount, &disk);
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

/// Files of one commit: so many that the disk is asked to sync all of them at once.
const TOGETHER: usize = 300;

fn many_files_of_one_commit(format: Format, bytes: u64) {
    let disk = SmallDisk::with(format, bytes);
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(Mode::Passthrough, &["--commit-interval", "60"], &store);
    for round in 0..3 {
        let directory = mount.path().join("files").join(round.to_string());
        std::fs::create_dir(&directory).unwrap();
        for number in 0..TOGETHER {
            std::fs::write(directory.join(number.to_string()), format!("{round} {number}"))
                .unwrap();
        }
        std::fs::File::open(&directory).unwrap().sync_all().unwrap();
        disk.cut_power();
        mount.kill();
        mount_again(&mut mount, &disk);
        for number in 0..TOGETHER {
            let found = std::fs::read_to_string(directory.join(number.to_string()));
            let expected = format!("{round} {number}");
            assert_eq!(found.ok(), Some(expected), "{format:?}, cut {round}, file {number}");
        }
    }
    assert!(mount.unmount().success());
    crate::kills::assert_sound(&store);
}

/// Machines that have too much to do hear of a `close()` late, and each of these commits while others close.
#[test]
fn many_files_of_one_commit_on_a_busy_machine() {
    crate::require!(fuse, root, r#loop);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| many_files_of_one_commit(Format::Ext4, 96 << 20));
        }
    });
}

#[test]
fn many_files_of_one_commit_on_ext4() {
    crate::require!(fuse, root, r#loop);
    many_files_of_one_commit(Format::Ext4, 96 << 20);
}

#[test]
fn many_files_of_one_commit_on_xfs() {
    crate::require!(fuse, root, r#loop, xfs);
    many_files_of_one_commit(Format::Xfs, 320 << 20);
}

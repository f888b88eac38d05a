//! The power is cut at random moments while objects leave, come back and change: of this machine's
//! disk alone, or of the remote's too. What was acknowledged is there afterwards.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::disk::SmallDisk;
use crate::common::forks::output;
use crate::common::{Mode, Mount, eventually};
use crate::kills::{FILES, change_one, random, read_until_it_fails};
use crate::place::{BUDGET, FILE_BYTES, assert_same, tier};

const CUTS: u64 = 9;
/// All files, their new versions, and what is on its way.
const DISK_BYTES: u64 = 192 << 20;

fn write_files(mount: &Mount) -> Vec<(PathBuf, Vec<u8>)> {
    let write = |number| {
        let path = mount.files(format!("f{number}"));
        let bytes = crate::common::fill(number, FILE_BYTES);
        crate::common::sys::write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    };
    (0..FILES).map(write).collect()
}

fn count_away(files: &[(PathBuf, Vec<u8>)]) -> usize {
    files.iter().filter(|(path, _)| tier(path) == "remote").count()
}

/// Cuts the power, and brings everything back.
fn cut_power(mount: &mut Mount, disks: &[&SmallDisk]) {
    for disk in disks {
        disk.cut_power();
    }
    mount.kill();
    // The dead mount keeps files of the disk open.
    output(Command::new("umount").arg("-l").arg(mount.path()));
    for disk in disks {
        disk.restore_power();
    }
    mount.mount();
}

#[test]
fn every_file_survives_power_cuts_while_objects_move() {
    crate::require!(fuse, root, r#loop);
    let (disk, far_disk) = (SmallDisk::of(DISK_BYTES), SmallDisk::of(DISK_BYTES));
    let remote = far_disk.mountpoint.join("remote");
    std::fs::create_dir(&remote).unwrap();
    crate::common::sys::sync_directory(&far_disk.mountpoint).unwrap();
    let options = ["--remote", remote.to_str().unwrap(), "--ssd", BUDGET, "--ram", "8M"];
    let further = ["--commit-interval", "0.05", "--cold", "zstd:1"];
    let options = [&options[..], &further[..]].concat();
    let store: &Path = &disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(Mode::Passthrough, &options, store);
    let mut files = write_files(&mount);
    crate::common::sys::sync_directory(mount.path()).unwrap();
    eventually("objects to leave", || (count_away(&files) > 3).then_some(()));
    let mut away = 0;
    for seed in 0..CUTS {
        change_one(&mut files, seed);
        let paths: Vec<PathBuf> = files.iter().map(|(path, _)| path.clone()).collect();
        if seed % 2 == 0 {
            eventually("objects to leave", || (count_away(&files) > 3).then_some(()));
        }
        std::thread::scope(|scope| {
            scope.spawn(|| read_until_it_fails(&paths, random(seed, FILES)));
            std::thread::sleep(Duration::from_millis(random(seed + 1000, 150)));
            let disks: &[&SmallDisk] = if seed % 3 == 0 { &[&disk, &far_disk] } else { &[&disk] };
            cut_power(&mut mount, disks);
        });
        away += count_away(&files);
        assert_same(&files);
    }
    assert!(away > 0, "nothing was away after any of the cuts");
    eventually("a file to be away again", || (count_away(&files) > 0).then_some(()));
    assert!(mount.unmount().success());
    let fsck = Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(store).output().unwrap();
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
}

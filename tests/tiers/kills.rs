//! The daemon is killed at random moments while objects leave and come back.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::common::sys::{open, rename, sync_directory, write_and_close};
use crate::common::{Mode, eventually, fill, forks};
use crate::place::{FILE_BYTES, Place, tier};

in_both_modes!(every_file_survives_kills_while_objects_move);

const KILLS: u64 = 20;
/// More than twice what fits, so that something always moves.
pub(crate) const FILES: u64 = 10;

/// A number that depends on the seed alone.
pub(crate) fn random(seed: u64, below: u64) -> u64 {
    u64::from_le_bytes(fill(seed, 8).try_into().unwrap()) % below
}

fn every_file_survives_kills_while_objects_move(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--cold", "zstd:1"]);
    let mut files = place.write("f", FILES);
    place.wait_until_it_fits();
    for seed in 0..KILLS {
        change_one(&mut files, seed);
        let paths: Vec<PathBuf> = files.iter().map(|(path, _)| path.clone()).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| read_until_it_fails(&paths, random(seed, FILES)));
            if seed % 2 == 0 {
                eventually("an object to leave", || {
                    (place.mount.status_number("remote_only_objects") > 0).then_some(())
                });
            }
            std::thread::sleep(Duration::from_millis(random(seed + 1000, 120)));
            place.mount.crash();
        });
        for (path, bytes) in &files {
            assert!(std::fs::read(path).unwrap() == *bytes, "seed {seed}: {}", path.display());
        }
        assert_eq!(place.mount.status("errors"), "0", "seed {seed}");
    }
    eventually("a file to be away", || {
        files.iter().any(|(path, _)| tier(path) == "remote").then_some(())
    });
    place.mount.kill();
    let fsck =
        Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(place.mount.store()).output();
    let fsck = fsck.unwrap();
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
    let _ = forks::output(Command::new("umount").arg("-l").arg(place.mount.path()));
    place.mount.mount();
}

/// Keeps objects coming back, for a while.
pub(crate) fn read_until_it_fails(paths: &[PathBuf], first: u64) {
    for path in paths.iter().cycle().skip(usize::try_from(first).unwrap()).take(30) {
        if std::fs::read(path).is_err() {
            return;
        }
    }
}

/// A new version of a file, durable before the kill: demotion has something to do.
pub(crate) fn change_one(files: &mut [(PathBuf, Vec<u8>)], seed: u64) {
    let index = usize::try_from(random(seed + 2000, FILES)).unwrap();
    let (path, bytes) = &mut files[index];
    *bytes = fill(seed + 3000, FILE_BYTES);
    let staged = path.with_extension("new");
    write_and_close(&staged, bytes).unwrap();
    open(&staged, libc::O_RDONLY).unwrap().sync_all().unwrap();
    rename(&staged, &*path).unwrap();
    sync_directory(path.parent().unwrap()).unwrap();
}

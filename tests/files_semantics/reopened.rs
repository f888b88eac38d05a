//! A file that is read again and again shows what it has now: the kernel keeps it open for the next reader.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::random::{Random, seeds};
use crate::common::sys::{rename, sync_directory, write_and_close};
use crate::common::{Mode, Mount};

in_both_modes!(every_version_is_read, a_reader_sees_one_version_of_what_is_renamed_over);

/// Ways to change what a path holds.
#[derive(Clone, Copy, Debug)]
enum Change {
    NewVersion,
    InPlace,
    Cut,
    RenamedOver,
    RemovedAndMade,
}

const CHANGES: [Change; 5] =
    [Change::NewVersion, Change::InPlace, Change::Cut, Change::RenamedOver, Change::RemovedAndMade];

fn apply(change: Change, path: &Path, new: &[u8]) -> std::io::Result<()> {
    match change {
        Change::NewVersion => fs::write(path, new),
        Change::InPlace => {
            let file = fs::File::options().write(true).open(path)?;
            file.set_len(new.len() as u64)?;
            std::os::unix::fs::FileExt::write_all_at(&file, new, 0)
        }
        Change::Cut => {
            fs::File::options().write(true).open(path)?.set_len(0)?;
            let file = fs::File::options().append(true).open(path)?;
            std::io::Write::write_all(&mut &file, new)
        }
        Change::RenamedOver => {
            let beside = path.with_extension("tmp");
            write_and_close(&beside, new)?;
            rename(&beside, path)
        }
        Change::RemovedAndMade => {
            fs::remove_file(path)?;
            write_and_close(path, new)
        }
    }
}

fn every_version_is_read(mode: Mode) {
    let mount = Mount::new(mode);
    for seed in seeds(4) {
        let mut random = Random::of(seed);
        let path = mount.files(format!("file-{seed}"));
        write_and_close(&path, b"first").unwrap();
        let mut history = Vec::new();
        for _ in 0..150 {
            let change = *random.pick(&CHANGES);
            let length = 1 + random.below(3 * 4096);
            let new = random.bytes(length);
            history.push((change, new.len()));
            apply(change, &path, &new).unwrap();
            for _ in 0..random.below(4) {
                assert!(fs::read(&path).unwrap() == new, "seed {seed}: {history:?}");
            }
            if random.one_in(10) {
                sync_directory(mount.path()).unwrap();
            }
        }
    }
}

fn a_reader_sees_one_version_of_what_is_renamed_over(mode: Mode) {
    const LENGTH: usize = 3 * 4096;
    let mount = Mount::new(mode);
    let path = mount.files("file");
    write_and_close(&path, &[0; LENGTH]).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut last = 0;
                while !is_over.load(Ordering::Acquire) {
                    let found = fs::read(&path).unwrap();
                    assert_eq!(found.len(), LENGTH);
                    assert!(found.iter().all(|byte| *byte == found[0]), "two versions in one");
                    assert!(found[0] >= last, "version {} after {last}", found[0]);
                    last = found[0];
                }
            });
        }
        for version in 1..=250 {
            apply(Change::RenamedOver, &path, &[version; LENGTH]).unwrap();
        }
        is_over.store(true, Ordering::Release);
    });
}

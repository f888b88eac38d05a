//! Small files lie in memory until a commit: nobody can tell, and a crash takes no more than it ever did.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::{commit, fsck, packed, packing};
use crate::common::sys::{map_mut, open, rename};
use crate::common::{Mode, Mount, eventually, fill};

in_both_modes!(
    a_file_in_memory_is_one_in_every_way,
    a_file_that_grows_goes_on_on_the_disk,
    what_was_synced_survives_and_the_rest_is_gone_whole,
    what_is_written_again_while_commits_run_is_what_was_written_last,
);

/// A directory in which small files are made.
fn directory_of_small_files(mount: &Mount) -> PathBuf {
    let directory = mount.files("small");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("first"), b"small").unwrap();
    // Its release has arrived.
    commit(mount);
    directory
}

fn bytes_in_memory(mount: &Mount) -> u64 {
    mount.status_number("small_files_in_memory_bytes")
}

fn create(path: &PathBuf) -> File {
    OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap()
}

fn a_file_in_memory_is_one_in_every_way(mode: Mode) {
    let mount = packing(mode);
    let directory = directory_of_small_files(&mount);
    let path = directory.join("file");
    let file = create(&path);
    file.write_all_at(b"behind a hole", 100).unwrap();
    assert_eq!(bytes_in_memory(&mount), 113);
    assert!(mount.staging().is_empty());
    let expected = [&[0; 100][..], b"behind a hole"].concat();
    assert_eq!(std::fs::read(&path).unwrap(), expected);
    file.set_len(4096).unwrap();
    let mut map = map_mut(&file);
    map[..3].copy_from_slice(b"map");
    map.flush().unwrap();
    drop((map, file));
    let expected = [b"map", &expected[3..], &[0; 4096 - 113]].concat();
    assert_eq!(std::fs::read(&path).unwrap(), expected);
    // Opened again, under another name, and by a program that has only the descriptor.
    let again = OpenOptions::new().append(true).open(&path).unwrap();
    let (moved, linked) = (directory.join("moved"), directory.join("linked"));
    rename(&path, &moved).unwrap();
    std::fs::hard_link(&moved, &linked).unwrap();
    std::io::Write::write_all(&mut &again, b"end").unwrap();
    drop(again);
    let expected = [&expected[..], b"end"].concat();
    assert_eq!(std::fs::read(&linked).unwrap(), expected);
    let nameless = open(&linked, libc::O_RDWR).unwrap();
    std::fs::remove_file(&moved).unwrap();
    std::fs::remove_file(&linked).unwrap();
    nameless.write_all_at(b"MAP", 0).unwrap();
    let mut begin = [0; 3];
    nameless.read_exact_at(&mut begin, 0).unwrap();
    assert_eq!(&begin, b"MAP");
    drop(nameless);
    eventually("the last release", || {
        commit(&mount);
        let left = (packed(&mount), bytes_in_memory(&mount), mount.objects().len());
        (left == (1, 0, 0)).then_some(())
    });
}

fn a_file_that_grows_goes_on_on_the_disk(mode: Mode) {
    let mut mount = packing(mode);
    let directory = directory_of_small_files(&mount);
    let path = directory.join("file");
    let file = create(&path);
    file.write_all_at(&fill(1, 60_000), 0).unwrap();
    let reader = File::open(&path).unwrap();
    assert!(mount.staging().is_empty());
    file.write_all_at(&fill(2, 60_000), 60_000).unwrap();
    assert_eq!((bytes_in_memory(&mount), mount.staging().len()), (0, 1));
    let expected = [fill(1, 60_000), fill(2, 60_000)].concat();
    let mut seen = vec![0; 120_000];
    reader.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == expected, "whoever had it open reads on");
    drop((file, reader));
    assert!(std::fs::read(&path).unwrap() == expected);
    // The next one in that directory is not expected to be small.
    let next = create(&directory.join("next"));
    next.write_all_at(b"small after all", 0).unwrap();
    assert_eq!(bytes_in_memory(&mount), 0);
    drop(next);
    commit(&mount);
    mount.remount();
    assert!(std::fs::read(&path).unwrap() == expected);
    assert_eq!(std::fs::read(directory.join("next")).unwrap(), b"small after all");
}

fn what_was_synced_survives_and_the_rest_is_gone_whole(mode: Mode) {
    let mut mount = packing(mode);
    let directory = directory_of_small_files(&mount);
    let synced = create(&directory.join("synced"));
    synced.write_all_at(b"synced", 0).unwrap();
    synced.sync_all().unwrap();
    synced.write_all_at(b"SYNCED", 0).unwrap();
    synced.sync_data().unwrap();
    for number in 0..20 {
        std::fs::write(directory.join(format!("lost{number}")), fill(number, 4096)).unwrap();
    }
    mount.crash();
    assert_eq!(std::fs::read(directory.join("synced")).unwrap(), b"SYNCED");
    assert_eq!(std::fs::read(directory.join("first")).unwrap(), b"small");
    let mut names: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["first", "synced"]);
    mount.unmount();
    fsck(mount.store(), false);
}

/// Commits take files out of memory while they are opened, changed and read.
fn what_is_written_again_while_commits_run_is_what_was_written_last(mode: Mode) {
    let mut mount = packing(mode);
    let directory = directory_of_small_files(&mount);
    let ended = std::sync::atomic::AtomicBool::new(false);
    let last: Vec<u64> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                commit(&mount);
            }
        });
        let write = |number: u64| {
            let path = directory.join(format!("f{number}"));
            let mut version = 0;
            for round in 0..40 {
                version = number * 100 + round;
                match round % 3 {
                    0 => std::fs::write(&path, fill(version, 5000)).unwrap(),
                    1 => {
                        let file = open(&path, libc::O_RDWR).unwrap();
                        file.write_all_at(&fill(version, 5000), 0).unwrap();
                    }
                    _ => {
                        let other = directory.join(format!(".f{number}"));
                        std::fs::write(&other, fill(version, 5000)).unwrap();
                        rename(&other, &path).unwrap();
                    }
                }
                assert!(std::fs::read(&path).unwrap() == fill(version, 5000), "{version}");
            }
            version
        };
        let writers: Vec<_> = (0..4).map(|number| scope.spawn(move || write(number))).collect();
        let last = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        last
    });
    mount.remount();
    for (number, version) in last.into_iter().enumerate() {
        let path = directory.join(format!("f{number}"));
        assert!(std::fs::read(path).unwrap() == fill(version, 5000), "{version}");
    }
    mount.unmount();
    fsck(mount.store(), false);
}

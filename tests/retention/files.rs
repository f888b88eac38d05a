//! Whole files below `files/`.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::common::sys::{
    assert_errno, getxattr, listxattr, map, open, removexattr, setxattr, write_and_close,
};
use crate::common::{Mode, Mount, fill};
use crate::{FILE_BYTES, limit, removed, settle, wait_until_gone, write_files};

in_both_modes!(
    what_was_used_longest_ago_goes_first,
    what_is_used_or_pinned_stays,
    an_open_leaves_a_trace_unless_it_asks_for_none,
);
in_served_mode!(
    what_is_too_old_goes,
    what_was_just_copied_with_its_times_stays,
    a_file_has_a_time_to_live_of_its_own,
    a_name_that_went_can_be_made_again,
    limits_survive_a_crash,
    the_free_space_is_what_the_limit_leaves,
    an_engine_that_watches_the_free_space_removes_its_oldest_files_and_no_more,
    a_directory_below_counts_for_both,
    a_file_with_two_names_counts_once,
    names_elsewhere_let_no_more_files_go,
);

fn what_was_used_longest_ago_goes_first(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 10);
    let other = write_files(&mount, &mount.files(""), 3);
    limit(&directory, "quota", 5 * FILE_BYTES as u64);
    wait_until_gone(&files[5]);
    settle();
    // A twentieth of the limit is free then.
    let left: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [false, false, false, false, false, false, true, true, true, true]);
    assert!(other.iter().all(|path| path.exists()));
    assert_eq!(removed(&mount, "size"), 6);
    assert_eq!(removed(&mount, "age"), 0);
    let told = mount.status("quota files/cache");
    let held = 4 * FILE_BYTES;
    assert_eq!(
        told,
        format!(
            "size={} used_bytes={held} files=4 removed_bytes={} removed_files=6",
            5 * FILE_BYTES,
            6 * FILE_BYTES
        )
    );
    assert_eq!(getxattr(&directory, "user.kvfs.used_bytes").unwrap(), held.to_string());
    assert_eq!(mount.status_number("retention_removed_files"), 6);
    for (number, path) in (0..).zip(&files).skip(6) {
        assert!(fs::read(path).unwrap() == fill(number, FILE_BYTES));
    }
}

fn what_is_used_or_pinned_stays(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 6);
    setxattr(&files[0], "user.kvfs.pin", b"1").unwrap();
    let opened = open(&files[1], libc::O_RDONLY).unwrap();
    let mapped = {
        let file = open(&files[2], libc::O_RDONLY).unwrap();
        map(&file)
    };
    let writer = open(&files[3], libc::O_RDWR).unwrap();
    limit(&directory, "quota", FILE_BYTES as u64);
    wait_until_gone(&files[5]);
    settle();
    let left: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [true, true, true, true, false, false]);
    assert!(mapped[..] == fill(2, FILE_BYTES)[..]);
    assert!(mount.metric("kvfs_retention_kept_total{reason=\"in_use\"}") > 0);
    assert!(mount.metric("kvfs_retention_kept_total{reason=\"pinned\"}") > 0);
    drop((opened, mapped, writer));
    for path in &files[1..4] {
        wait_until_gone(path);
    }
    assert!(fs::read(&files[0]).unwrap() == fill(0, FILE_BYTES));
    removexattr(&files[0], "user.kvfs.pin").unwrap();
    limit(&directory, "quota", 10);
    wait_until_gone(&files[0]);
}

fn an_open_leaves_a_trace_unless_it_asks_for_none(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    // All of them keep within this one: none goes before the opens.
    limit(&directory, "quota", 6 * FILE_BYTES as u64);
    let files = write_files(&mount, &directory, 4);
    drop(open(&files[0], libc::O_RDONLY).unwrap());
    drop(open(&files[1], libc::O_RDONLY | libc::O_NOATIME).unwrap());
    limit(&directory, "quota", 3 * FILE_BYTES as u64);
    wait_until_gone(&files[2]);
    settle();
    let left: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [true, false, false, true]);
}

fn age_file(path: &Path, age: Duration) {
    let time = SystemTime::now() - age;
    let times = fs::FileTimes::new().set_accessed(time).set_modified(time);
    fs::File::options().write(true).open(path).unwrap().set_times(times).unwrap();
}

const HOUR: Duration = Duration::from_secs(3600);

fn what_is_too_old_goes(mode: Mode) {
    let mount = Mount::new(mode);
    for name in ["idle", "written", "written/longer"] {
        fs::create_dir(mount.files(name)).unwrap();
    }
    limit(&mount.files("written"), "ttl", 3600);
    limit(&mount.files("written/longer"), "ttl", 4 * 3600);
    let mut files = Vec::new();
    for name in ["idle", "written", "written/longer"] {
        files.extend(write_files(&mount, &mount.files(name), 2));
    }
    for path in &files {
        age_file(path, 2 * HOUR);
    }
    // Used, but not written.
    drop(open(&files[3], libc::O_RDONLY).unwrap());
    // Times that are set are no uses, and undo none: this one has to wait.
    limit(&mount.files("idle"), "age", 5);
    crate::common::eventually("a file to go", || {
        drop(open(&files[1], libc::O_RDONLY).unwrap());
        (!files[0].exists()).then_some(())
    });
    limit(&mount.files("idle"), "age", 3600);
    for gone in [0, 2, 3] {
        wait_until_gone(&files[gone]);
    }
    settle();
    let left: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [false, true, false, false, true, true]);
    assert_eq!((removed(&mount, "age"), removed(&mount, "ttl")), (1, 2));
    assert_eq!(mount.status("quota files/idle").split(' ').next(), Some("age=3600"));
}

/// As `cp -a` and `mv` make it, from another file system.
fn what_was_just_copied_with_its_times_stays(mode: Mode) {
    let mut mount = Mount::new(mode);
    let [age, renewed, size] = ["age", "renewed", "size"].map(|name| mount.files(name));
    for directory in [&age, &renewed, &size] {
        fs::create_dir(directory).unwrap();
    }
    limit(&age, "age", 30 * 86_400);
    setxattr(&renewed, "user.kvfs.ttl", b"2592000 renewed").unwrap();
    let before = write_files(&mount, &size, 3);
    let copies = [&age, &renewed, &size].map(|directory| directory.join("copy"));
    for path in &copies {
        fs::write(path, fill(9, FILE_BYTES)).unwrap();
        age_file(path, 2400 * HOUR);
    }
    limit(&size, "quota", 2 * FILE_BYTES as u64 + FILE_BYTES as u64 / 2);
    wait_until_gone(&before[1]);
    for _ in 0..2 {
        settle();
        for path in &copies {
            let shown = fs::metadata(path).unwrap();
            for time in [shown.accessed().unwrap(), shown.modified().unwrap()] {
                let old = time.elapsed().unwrap();
                assert!(old > 2399 * HOUR && old < 2401 * HOUR, "{old:?}");
            }
            assert_eq!(listxattr(path).unwrap(), [""; 0]);
        }
        assert!(before[2].exists());
        mount.remount();
    }
    mount.crash();
    settle();
    assert!(copies.iter().all(|path| fs::read(path).unwrap() == fill(9, FILE_BYTES)));
}

fn a_file_has_a_time_to_live_of_its_own(mode: Mode) {
    let mut mount = Mount::new(mode);
    let files = write_files(&mount, &mount.files(""), 3);
    limit(&mount.files(""), "ttl", 3 * 3600);
    limit(&files[0], "ttl", 3600);
    limit(&files[1], "ttl", 10 * 3600);
    assert_eq!(getxattr(&files[0], "user.kvfs.ttl").unwrap(), "3600");
    assert_eq!(listxattr(&files[0]).unwrap(), [""; 0]);
    // It goes with the file.
    let moved = mount.files("moved");
    crate::common::sys::rename(&files[0], &moved).unwrap();
    mount.remount();
    assert!(moved.exists());
    for path in [&moved, &files[1], &files[2]] {
        age_file(path, 4 * HOUR);
    }
    wait_until_gone(&moved);
    wait_until_gone(&files[2]);
    settle();
    assert!(files[1].exists());
    removexattr(&files[1], "user.kvfs.ttl").unwrap();
    wait_until_gone(&files[1]);
    assert_eq!(removed(&mount, "ttl"), 3);
}

fn a_name_that_went_can_be_made_again(mode: Mode) {
    let mount = Mount::new(mode);
    let files = write_files(&mount, &mount.files(""), 3);
    limit(&mount.files(""), "quota", 10);
    for path in &files {
        wait_until_gone(path);
    }
    assert_eq!(fs::read_dir(mount.files("")).unwrap().count(), 0);
    removexattr(mount.files(""), "user.kvfs.quota").unwrap();
    assert_errno(getxattr(mount.files(""), "user.kvfs.quota"), libc::ENODATA);
    assert_errno(removexattr(mount.files(""), "user.kvfs.quota"), libc::ENODATA);
    for path in &files {
        assert_errno(open(path, libc::O_RDONLY), libc::ENOENT);
        write_and_close(path, b"new").unwrap();
    }
    settle();
    assert!(files.iter().all(|path| fs::read(path).unwrap() == b"new"));
}

fn limits_survive_a_crash(mode: Mode) {
    let mut mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    limit(&directory, "quota", 3 * FILE_BYTES as u64);
    limit(&directory, "age", 86_400);
    crate::common::sys::sync_directory(mount.path()).unwrap();
    mount.crash();
    assert_eq!(getxattr(&directory, "user.kvfs.quota").unwrap(), (3 * FILE_BYTES).to_string());
    assert_eq!(listxattr(&directory).unwrap(), [""; 0]);
    let files = write_files(&mount, &directory, 4);
    wait_until_gone(&files[0]);
    crate::common::sys::sync_directory(mount.path()).unwrap();
    mount.crash();
    assert!(!files[0].exists() && files[3].exists());
    // A directory that goes takes its limits along.
    fs::remove_dir_all(&directory).unwrap();
    settle();
    assert!(!fs::read_to_string(mount.join(".kvfs/status")).unwrap().contains("quota files"));
}

fn the_free_space_is_what_the_limit_leaves(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir_all(directory.join("below")).unwrap();
    let space = |path: &Path| {
        let stat = nix::sys::statvfs::statvfs(path).unwrap();
        let block = stat.fragment_size();
        assert_eq!(block, 4096);
        (stat.blocks() * block, stat.blocks_available() * block)
    };
    let (whole, _) = space(&directory);
    write_files(&mount, &directory.join("below"), 2);
    limit(&directory, "quota", 10 << 20);
    let free = (10_u64 << 20) - 2 * FILE_BYTES as u64;
    crate::common::eventually("the free space to be known", || {
        (space(&directory).1 == free / 4096 * 4096).then_some(())
    });
    assert_eq!(space(&directory.join("below")), (10 << 20, free / 4096 * 4096));
    assert_eq!(space(&mount.files("")).0, whole);
}

/// As `SGLang` does: before each block it removes its oldest ones until `statvfs` tells of enough room.
fn an_engine_that_watches_the_free_space_removes_its_oldest_files_and_no_more(mode: Mode) {
    const LIMIT: usize = 12;
    const ROOM: usize = 4;
    const WAVE: usize = 3;
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    limit(&directory, "quota", (LIMIT * FILE_BYTES) as u64);
    let room = || {
        let stat = nix::sys::statvfs::statvfs(&directory).unwrap();
        stat.blocks_available() * stat.fragment_size()
    };
    let mut held = std::collections::VecDeque::new();
    let (mut removed_by_engine, mut fewest) = (0, usize::MAX);
    for number in 0..15 {
        while room() < (ROOM * FILE_BYTES) as u64 {
            fs::remove_file(held.pop_front().unwrap()).unwrap();
            removed_by_engine += 1;
            fewest = fewest.min(held.len());
        }
        let path = directory.join(format!("{number:064x}_model_1_0.bin"));
        let temporary = path.with_extension("7c1e.tmp");
        fs::write(&temporary, fill(number as u64, FILE_BYTES)).unwrap();
        crate::common::sys::rename(&temporary, &path).unwrap();
        held.push_back(path);
        if number % WAVE == WAVE - 1 {
            crate::common::eventually("the files to be counted", || {
                let used = getxattr(&directory, "user.kvfs.used_bytes").ok()?;
                (used == (held.len() * FILE_BYTES).to_string()).then_some(())
            });
        }
    }
    assert!(removed_by_engine >= 15 - LIMIT, "{removed_by_engine}");
    assert!(fewest >= LIMIT - ROOM - WAVE, "only {fewest} files were left");
    let mut left: Vec<_> = fs::read_dir(&directory).unwrap().map(|e| e.unwrap().path()).collect();
    left.sort_unstable();
    assert_eq!(left, Vec::from(held));
    assert_eq!(removed(&mount, "size"), 0, "the mount had nothing to remove");
}

fn a_directory_below_counts_for_both(mode: Mode) {
    let mount = Mount::new(mode);
    let (outer, inner) = (mount.files("outer"), mount.files("outer/inner"));
    fs::create_dir_all(&inner).unwrap();
    let first = write_files(&mount, &inner, 4);
    let second = write_files(&mount, &outer, 4);
    limit(&inner, "quota", 3 * FILE_BYTES as u64);
    wait_until_gone(&first[1]);
    limit(&outer, "quota", 4 * FILE_BYTES as u64);
    wait_until_gone(&first[3]);
    settle();
    let left: Vec<bool> = second.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [false, true, true, true]);
}

fn a_file_with_two_names_counts_once(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 2);
    fs::hard_link(&files[0], directory.join("link")).unwrap();
    limit(&directory, "quota", 3 * FILE_BYTES as u64);
    settle();
    assert_eq!(getxattr(&directory, "user.kvfs.used_bytes").unwrap(), (2 * FILE_BYTES).to_string());
    limit(&directory, "quota", FILE_BYTES as u64 * 5 / 4);
    wait_until_gone(&files[0]);
    wait_until_gone(&directory.join("link"));
    settle();
    assert!(files[1].exists());
}

/// As with a snapshot of hard links beside a directory with a limit.
fn names_elsewhere_let_no_more_files_go(mode: Mode) {
    let mount = Mount::new(mode);
    let (directory, beside) = (mount.files("cache"), mount.files("snapshot"));
    fs::create_dir(&directory).unwrap();
    fs::create_dir(&beside).unwrap();
    let files = write_files(&mount, &directory, 10);
    for path in &files {
        fs::hard_link(path, beside.join(path.file_name().unwrap())).unwrap();
    }
    limit(&directory, "quota", 5 * FILE_BYTES as u64);
    wait_until_gone(&files[5]);
    settle();
    let left: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [false, false, false, false, false, false, true, true, true, true]);
    assert_eq!(fs::read_dir(beside).unwrap().count(), 10);
    let used = getxattr(&directory, "user.kvfs.used_bytes").unwrap();
    assert_eq!(used, (4 * FILE_BYTES).to_string());
}

//! Clocks that jump, and uses that outlive a mount.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::common::sys::{setxattr, sync_directory};
use crate::common::{Mode, Mount, fill};
use crate::{FILE_BYTES, limit, settle, wait_until_gone, write_files};

in_served_mode!(what_was_read_before_the_first_limit_stays);

/// A library that shows a program another time.
fn fake_time() -> Option<PathBuf> {
    let found = crate::common::forks::succeed(
        std::process::Command::new("dpkg").args(["-L", "libfaketime"]),
    );
    found.lines().find(|line| line.ends_with("/libfaketime.so.1")).map(PathBuf::from)
}

/// What shows a daemon another time.
fn faked(time: &str) -> Vec<(String, String)> {
    let library = fake_time().unwrap();
    let variables = [
        ("LD_PRELOAD", library.to_str().unwrap()),
        ("FAKETIME", time),
        // Waiting in the kernel goes by that one.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ];
    variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
}

/// No directory has a limit, for which uses would be put on record as well.
#[test]
fn a_crash_forgets_no_more_than_the_last_uses() {
    crate::require!(fuse, faketime);
    // Its clock is a hundred times as fast: five minutes are three seconds.
    let options = ["--commit-interval", "0.05"];
    let mut mount = Mount::with_environment(Mode::Served, &options, faked("+0 x100"));
    let files = write_files(&mount, &mount.files(""), 2);
    sync_directory(mount.path()).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(fs::read(&files[1]).unwrap() == fill(1, FILE_BYTES));
    // A round, wherever it begins, and what makes it durable.
    std::thread::sleep(Duration::from_secs(8));
    mount.kill();
    mount.set_environment("FAKETIME", "+0");
    mount.mount();
    let [unused, used] =
        [0, 1].map(|number: usize| fs::metadata(&files[number]).unwrap().accessed().unwrap());
    let later = used.duration_since(unused).unwrap();
    assert!(later > Duration::from_secs(50), "{later:?}: its use is not on record");
}

#[test]
fn a_clock_that_is_ahead_deletes_nothing() {
    crate::require!(fuse, faketime);
    let mut mount = Mount::with_environment(Mode::Served, &[], faked("+0"));
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 5);
    limit(&directory, "age", 30 * 86_400);
    let own = write_files(&mount, &mount.files(""), 1);
    setxattr(&own[0], "user.kvfs.ttl", b"86400").unwrap();
    assert!(mount.unmount().success());

    // However often somebody mounts it with the wrong time, and writes.
    mount.set_environment("FAKETIME", "+60d");
    for round in 0..3 {
        mount.mount();
        settle();
        assert!(files.iter().chain(&own).all(|path| path.exists()));
        assert!(mount.status("retention_clock").starts_with("went ahead"), "{}", mount.log());
        fs::write(mount.files(format!("written-{round}")), b"later").unwrap();
        if round == 1 {
            crate::common::sys::sync_directory(mount.path()).unwrap();
            mount.kill();
        } else if round == 0 {
            assert!(mount.unmount().success());
        }
    }
    // Room is made all the same.
    limit(&directory, "quota", 1);
    wait_until_gone(&files[4]);
    assert!(mount.unmount().success());

    // The clock is right again.
    mount.set_environment("FAKETIME", "+0");
    mount.mount();
    settle();
    assert!(own[0].exists());
    assert!(mount.try_status("retention_clock").is_none());
    setxattr(&own[0], "user.kvfs.ttl", b"1").unwrap();
    wait_until_gone(&own[0]);
}

fn what_was_read_before_the_first_limit_stays(mode: Mode) {
    let mut mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 6);
    mount.remount();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(fs::read(&files[0]).unwrap() == fill(0, FILE_BYTES));
    mount.remount();
    limit(&directory, "quota", 2 * FILE_BYTES as u64);
    wait_until_gone(&files[4]);
    settle();
    let left: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [true, false, false, false, false, false], "a twentieth is free then");
    let told = mount.log();
    assert!(told.contains("files/cache: deleted beyond its limits"), "{told}");
}

//! System calls of the daemon fail, once or from then on. Whoever was told that something is durable
//! finds it; nothing is there by halves; the daemon goes on, if only for readers.

use std::time::{Duration, Instant};

use crate::common::injection::Injection;
use crate::common::{Mode, Model, Mount};
use crate::kills::assert_sound;
use crate::ledger::Ledger;
use crate::writers::{is_written_once, prepare, write_during};

/// Calls of the daemon and how they fail. EDQUOT stands for quotas, which do not bind root.
const FAILURES: [(&str, &str); 12] = [
    ("fsync", "EIO"),
    ("fdatasync", "EIO"),
    ("renameat", "EIO"),
    ("renameat", "ENOSPC"),
    ("pwrite64", "EIO"),
    ("pwrite64", "ENOSPC"),
    ("pwrite64", "EDQUOT"),
    ("openat2", "EDQUOT"),
    ("openat2", "EMFILE"),
    ("ftruncate", "EIO"),
    ("copy_file_range", "ENOSPC"),
    // No thread is to be had: not for a commit, not for whoever waits.
    ("clone3", "EAGAIN"),
];
/// While something fails, at least.
const LIFE: Duration = Duration::from_millis(120);
/// And as long as nothing did, since the machine is busy: not every call is made in each round.
const LIFE_UNMET_MAX: Duration = Duration::from_millis(600);

#[test]
fn a_call_that_fails_loses_nothing() {
    crate::require!(fuse, strace);
    let options = ["--commit-interval", "0.02"];
    let model = Model::small();
    let mut injected = Vec::new();
    let mut mount = Mount::with_options(Mode::Served, &options);
    prepare(&mount, &model);
    let mut ledger = Ledger::default();
    ledger.has_halves = true;
    for (round, (call, error)) in FAILURES.iter().enumerate() {
        for when in ["3", "2+"] {
            let what = format!("error={error}:when={when}");
            let mut count = 0;
            let root = mount.path().to_owned();
            write_during(&root, (&model, round as u64), &mut ledger, Duration::ZERO, || {
                let injection = Injection::into(&mount, call, &what);
                let begun = Instant::now();
                std::thread::sleep(LIFE);
                while injection.count() == 0 && begun.elapsed() < LIFE_UNMET_MAX {
                    std::thread::sleep(LIFE / 10);
                }
                count = injection.end();
            });
            // Reading goes on, whatever failed.
            assert!(mount.path().join("files").is_dir());
            mount.crash();
            ledger.check(&model, &root, &format!("{call}: {what}"));
            ledger.retire(&root, is_written_once);
            assert_eq!(mount.status("state"), "ok");
            println!("{call}: {what}: {count} times");
            injected.push((call, count));
        }
    }
    // Which calls are made depends on what the programs come to; most must have failed.
    let met = injected.iter().filter(|(_, count)| *count > 0).count();
    println!("{} acknowledged, {met} of {} failures met", ledger.acknowledged, injected.len());
    assert!(met * 2 > injected.len(), "{injected:?}");
    assert!(mount.unmount().success());
    assert_sound(mount.store());
}

/// After a failed fsync the store takes no change, says why, and serves what it has.
#[test]
fn a_failed_fsync_makes_the_mount_read_only() {
    crate::require!(fuse, strace);
    // The kernel takes ENOSYS from a daemon for one that need not sync: success, and no question again.
    for error in ["EIO", "ENOSYS"] {
        let mut mount = Mount::with_options(Mode::Served, &["--commit-interval", "3600"]);
        let kept = mount.files("kept");
        crate::common::sys::write_and_close(&kept, b"durable").unwrap();
        crate::common::sys::sync_directory(mount.path()).unwrap();
        crate::common::sys::write_and_close(mount.files("lost"), b"not durable").unwrap();
        let injection = Injection::into(&mount, "fsync", &format!("error={error}:when=1"));
        let outcome = crate::common::sys::sync_directory(mount.path());
        assert!(injection.end() > 0);
        crate::common::sys::assert_errno(outcome, libc::EIO);
        // The kernel would say yes now; the mount does not believe it.
        let again = crate::common::sys::sync_directory(mount.path());
        crate::common::sys::assert_errno(again, libc::EROFS);
        let refused = crate::common::sys::open(mount.files("new"), libc::O_WRONLY | libc::O_CREAT);
        crate::common::sys::assert_errno(refused, libc::EROFS);
        assert_eq!(mount.status("state"), "read-only after a disk error");
        let errors = mount.errors();
        assert!(errors.iter().any(|line| line.contains("read-only")), "{errors:?}");
        assert_eq!(std::fs::read(&kept).unwrap(), b"durable");
        mount.crash();
        assert_eq!(mount.status("state"), "ok");
        assert_eq!(std::fs::read(&kept).unwrap(), b"durable");
    }
}

/// The kernel hands on a write in the middle of a page up to the end of that page first. If only what comes
/// behind it fails, the program is told how much was written, and that is what is there.
#[test]
fn a_write_that_fails_in_part_leaves_what_it_told() {
    crate::require!(fuse, strace);
    let mut mount = Mount::with_options(Mode::Served, &["--commit-interval", "3600"]);
    let path = mount.files("file");
    let bytes = crate::common::fill(1, 16 << 20);
    let file = crate::common::sys::open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC);
    let file = file.unwrap();
    assert_eq!(crate::common::sys::write(&file, &bytes[..10_000]).unwrap(), 10_000);
    let injection = Injection::into(&mount, "pwrite64", "error=ENOSPC:when=2+");
    let written = crate::common::sys::write(&file, &bytes[10_000..]).unwrap();
    assert!(injection.end() > 0);
    // strace counts the calls of each thread of the daemon; a request is 1 MiB at most.
    assert!(written >= 12_288 - 10_000 && 10_000 + written < bytes.len(), "{written}");
    let bytes = &bytes[..10_000 + written];
    crate::common::sys::close(file).unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    crate::common::sys::sync_directory(mount.path()).unwrap();
    mount.crash();
    assert!(std::fs::read(&path).unwrap() == bytes);
}

/// When a file's last writer is gone, the daemon looks how long it is. If it cannot, the next commit looks again.
#[test]
fn a_file_that_cannot_be_looked_at_is_not_forgotten() {
    crate::require!(fuse, strace);
    let mut mount = Mount::with_options(Mode::Served, &["--commit-interval", "3600"]);
    let (new, replaced) = (mount.files("new"), mount.files("replaced"));
    crate::common::sys::write_and_close(&replaced, b"old").unwrap();
    crate::common::sys::sync_directory(mount.path()).unwrap();
    let open_files = [&new, &replaced].map(|path| {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
        let file = crate::common::sys::open(path, flags).unwrap();
        crate::common::sys::write(&file, b"next").unwrap();
        file
    });
    let injection = Injection::into(&mount, "statx", "error=EIO:when=1+");
    drop(open_files);
    crate::common::eventually("both to be looked at", || (injection.count() >= 2).then_some(()));
    injection.end();
    crate::common::sys::sync_directory(mount.path()).unwrap();
    mount.crash();
    for path in [new, replaced] {
        assert_eq!(std::fs::read(&path).unwrap(), b"next", "{}", path.display());
    }
}

//! Disks that are slow or do not answer: nobody who uses a mount waits for them in the middle of an exchange.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::clients::Done;
use crate::common::disk::SmallDisk;
use crate::common::injection::Injection;
use crate::common::sys::{sync_directory, write_and_close};
use crate::common::{Mount, eventually};
use crate::{any_mode, exchanges, mounted, refusal, upgrade};

/// Whether a thread of the daemon waits for a disk.
fn has_thread_that_waits(mount: &Mount) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{}/task", mount.pid())).unwrap();
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.contains(") D ")
    })
}

/// execve(2) waits for every thread of the daemon, and nobody would serve the mount meanwhile.
#[test]
fn a_thread_that_waits_for_a_disk_keeps_its_daemon() {
    crate::require!(fuse, root, loop);
    let disk = SmallDisk::new();
    let place = disk.mountpoint.join("remote");
    std::fs::create_dir(&place).unwrap();
    let mount = mounted(any_mode(), &["--remote", place.to_str().unwrap()]);
    let frozen = disk.freeze();
    let mut since = None;
    let bytes = vec![7; 1 << 20];
    write_and_close(mount.files("moved"), &bytes).unwrap();
    sync_directory(mount.path()).unwrap();
    eventually("a thread to wait for the disk", || {
        // Longer than it waits for a disk that answers.
        let begin = *since.get_or_insert_with(Instant::now);
        since = has_thread_that_waits(&mount).then_some(begin);
        since.is_some_and(|begin| begin.elapsed() > Duration::from_secs(1)).then_some(())
    });
    let line = refusal(&mount, None);
    assert!(line.contains("a thread waits for a disk or a server"), "{line}");
    assert!(std::fs::read(mount.files("moved")).unwrap() == bytes);
    write_and_close(mount.files("used"), b"bytes").unwrap();
    assert_eq!(exchanges(&mount), 0);
    drop(frozen);
    upgrade(&mount);
}

/// Some ten syncs lie between the last answer of one daemon and the first one of the other.
#[test]
fn a_slow_disk_keeps_its_daemon() {
    crate::require!(fuse, strace);
    let mut mount = mounted(any_mode(), &[]);
    mount.may_be_slow("its disk is slow");
    write_and_close(mount.files("read"), b"bytes").unwrap();
    let injection = Injection::into(&mount, "fsync,fdatasync", "delay_enter=300000");
    let over = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut done = Done::default();
            while !over.load(Ordering::Relaxed) {
                let read = done.timed(|| std::fs::read(mount.files("read")));
                assert_eq!(read.unwrap(), b"bytes");
                std::thread::sleep(Duration::from_millis(5));
            }
            done
        });
        let line = refusal(&mount, None);
        over.store(true, Ordering::Relaxed);
        assert!(
            line.contains("a sync of the store's disk takes") || line.contains("a commit takes"),
            "{line}"
        );
        reading.join().unwrap()
    });
    assert!(done.longest < Duration::from_secs(1), "{:?}", done.longest);
    assert_eq!(exchanges(&mount), 0);
    injection.end();
    upgrade(&mount);
}

//! Something else lies in the place of a file of the store, and a daemon hangs for some other reason.

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode as Permissions;
use nix::unistd::{Pid, mkfifo};

use crate::common::forks::output;
use crate::common::sys::{assert_errno, sync_directory, write_and_close};
use crate::common::{Mode, Mount, fill};

in_both_modes!(a_fifo_in_the_place_of_a_file_holds_nobody_up, what_is_no_file_is_damage);

const LENGTH: usize = 300_000;

fn a_fifo_in_the_place_of_a_file_holds_nobody_up(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--pack", "0"]);
    write_and_close(mount.files("lost"), &fill(1, LENGTH)).unwrap();
    write_and_close(mount.files("kept"), b"bytes").unwrap();
    assert!(mount.unmount().success());
    let is_lost = |path: &&std::path::PathBuf| path.metadata().unwrap().len() == LENGTH as u64;
    let objects = mount.objects();
    let object = objects.iter().find(is_lost).unwrap();
    std::fs::remove_file(object).unwrap();
    mkfifo(object, Permissions::S_IRWXU).unwrap();
    mount.mount();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_errno(std::fs::read(mount.files("lost")), libc::EIO);
                assert_eq!(std::fs::read(mount.files("kept")).unwrap(), b"bytes");
            });
        }
    });
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    std::fs::remove_file(mount.files("lost")).unwrap();
    sync_directory(mount.path()).unwrap();
}

/// No file is damage of the one that was there: another copy takes its place, and where there is none it counts.
fn what_is_no_file_is_damage(mode: Mode) {
    let remote = tempfile::tempdir().unwrap();
    let place = remote.path().to_str().unwrap();
    for (options, is_lost) in
        [(&["--pack", "0"][..], true), (&["--pack", "0", "--remote", place], false)]
    {
        let mut mount = Mount::with_options(mode, options);
        let names = ["directory", "link", "socket"];
        for (length, name) in (LENGTH..).zip(names) {
            write_and_close(mount.files(name), &fill(1, length)).unwrap();
        }
        if !is_lost {
            let mut sync = Command::new(env!("CARGO_BIN_EXE_kvfs"));
            assert!(output(sync.args(["sync", "--remote"]).arg(mount.path())).status.success());
        }
        assert!(mount.unmount().success());
        for path in mount.objects() {
            let length = usize::try_from(path.metadata().unwrap().len()).unwrap();
            std::fs::remove_file(&path).unwrap();
            match length.checked_sub(LENGTH) {
                Some(0) => std::fs::create_dir(&path).unwrap(),
                Some(1) => std::os::unix::fs::symlink("/etc/hostname", &path).unwrap(),
                _ => drop(std::os::unix::net::UnixListener::bind(&path).unwrap()),
            }
        }
        mount.mount();
        for (length, name) in (LENGTH..).zip(names) {
            let found = std::fs::read(mount.files(name));
            if is_lost {
                assert_errno(found, libc::EIO);
            } else {
                assert!(found.unwrap() == fill(1, length), "{name}");
            }
        }
        let damaged = if is_lost { names.len() as u64 } else { 0 };
        assert_eq!(mount.status_number("damaged_files"), damaged);
        for name in names {
            std::fs::remove_file(mount.files(name)).unwrap();
        }
        sync_directory(mount.path()).unwrap();
        assert_eq!(mount.status("state"), "ok");
    }
}

#[test]
fn a_daemon_that_hangs_is_ended_by_force() {
    crate::require!(fuse, root);
    let mut mount = Mount::new(Mode::Served);
    write_and_close(mount.files("kept"), b"bytes").unwrap();
    sync_directory(mount.path()).unwrap();
    let daemon = Pid::from_raw(i32::try_from(mount.pid()).unwrap());
    kill(daemon, Signal::SIGSTOP).unwrap();
    let mut umount = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let told = output(umount.args(["umount", "--force"]).arg(mount.path()));
    let line = String::from_utf8_lossy(&told.stderr).into_owned();
    if !told.status.success() {
        let _ = kill(daemon, Signal::SIGKILL);
    }
    assert!(told.status.success(), "{line}");
    assert!(line.contains("cut off without a flush, and its daemon, which hung, ended"), "{line}");
    mount.wait_until_it_ends();
    mount.mount();
    assert_eq!(std::fs::read(mount.files("kept")).unwrap(), b"bytes");
}

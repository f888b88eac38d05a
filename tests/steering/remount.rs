//! `mount -o remount,...`, as mount(8) calls the helper, and SIGHUP.

use std::path::Path;
use std::process::{Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::forks::output;
use crate::common::sys::rename;
use crate::common::{Mode, Mount, eventually};
use crate::{complaint, setting, shown};

in_both_modes!(
    a_remount_changes_what_can_change,
    what_mount_says_of_every_mount_does_not_count,
    a_signal_opens_the_log_anew,
);

/// As `mount.fuse.kvfs` is called.
fn helper(mount: &Mount, options: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    output(command.arg(mount.store()).arg(mount.path()).args(["-o", options]))
}

fn a_remount_changes_what_can_change(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    // What the kernel tells of the mount comes along, as do flags of fstab.
    let known = "rw,nosuid,nodev,relatime,remount,user_id=0,group_id=0,default_permissions";
    let ended = helper(&mount, &format!("{known},noauto,ram=64M,ram=8M"));
    assert!(ended.status.success(), "{}", complaint(&ended));
    assert_eq!(setting(&mount, "ram"), ("8M".to_owned(), "set live".to_owned()));
    let ended = helper(&mount, &format!(r"{known},log_level=info\054kvfs=debug"));
    assert!(ended.status.success(), "{}", complaint(&ended));
    assert_eq!(setting(&mount, "log_level").0, "info,kvfs=debug");
    let before = shown(&mount);
    let check = |options: &str, expected: &str| {
        let ended = helper(&mount, options);
        assert!(!ended.status.success(), "{options}");
        assert!(complaint(&ended).contains(expected), "{}", complaint(&ended));
        assert_eq!(shown(&mount), before);
    };
    check("remount,ro", "read_only cannot change while the mount is used");
    check("remount,noexec,ram=16M", "options cannot change while the mount is used");
    check("remount,rma=16M", "unknown setting \"rma=16M\"");
    check("remount,ram=lots", "is no size");
    check("remount,ram=16M,threads=63", "threads cannot change");
    // A try changes nothing.
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let ended =
        output(command.arg(mount.store()).arg(mount.path()).args(["-f", "-o", "remount,ram=16M"]));
    assert!(ended.status.success());
    assert_eq!(shown(&mount), before);
}

fn what_mount_says_of_every_mount_does_not_count(mode: Mode) {
    let options = ["--read-only", "-o", "noatime,noexec"];
    let mut first = Mount::new(mode);
    assert!(first.unmount().success());
    let mount = Mount::of_store_with(mode, &options, first.store());
    // The kernel has an order of its own.
    let ended = helper(&mount, "rw,noexec,noatime,remount,verify=always");
    assert!(ended.status.success(), "{}", complaint(&ended));
    assert_eq!(setting(&mount, "verify"), ("always".to_owned(), "set live".to_owned()));
    let ended = helper(&mount, "ro,noatime,noexec,remount,verify=never");
    assert!(ended.status.success(), "{}", complaint(&ended));
    assert_eq!(setting(&mount, "verify").0, "never");
    assert_eq!(setting(&mount, "read_only"), ("yes".to_owned(), "option".to_owned()));
    let check = |options: &str, expected: &str| {
        let ended = helper(&mount, options);
        assert!(complaint(&ended).contains(expected), "{options}: {}", complaint(&ended));
    };
    check("rw,noatime,remount", "options cannot change while the mount is used");
    check("rw,read_only=no,remount", "read_only cannot change while the mount is used");
}

fn a_signal_opens_the_log_anew(mode: Mode) {
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("kvfs.log");
    let mount = Mount::with_options(mode, &["--log", path.to_str().unwrap()]);
    let has = |path: &Path, what: &str| {
        std::fs::read_to_string(path).is_ok_and(|text| text.contains(what))
    };
    // It answers a moment before it says so.
    eventually("the mount to say that it is ready", || has(&path, "is ready").then_some(()));
    let rotated = path.with_extension("1");
    rename(&path, &rotated).unwrap();
    let pid = Pid::from_raw(i32::try_from(mount.pid()).unwrap());
    kill(pid, Signal::SIGHUP).unwrap();
    eventually("the new log", || has(&path, "the log goes on here").then_some(()));
    assert!(!has(&rotated, "the log goes on here"));
    crate::set(&mount, &["verify=always"]);
    assert!(has(&path, "verify is always from now on, it was first"));
    // Where there is no such directory any more, the log goes on where it was.
    rename(log.path(), log.path().with_extension("moved")).unwrap();
    std::fs::write(log.path(), "in the way").unwrap();
    kill(pid, Signal::SIGHUP).unwrap();
    let moved = log.path().with_extension("moved");
    eventually("the old log", || {
        has(&moved.join("kvfs.log"), "the log stays where it was").then_some(())
    });
    std::fs::remove_file(log.path()).unwrap();
    rename(moved, log.path()).unwrap();
}

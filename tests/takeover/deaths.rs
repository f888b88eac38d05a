//! A daemon of a mount that is kept is killed: another one goes on, and whoever relied on what was lost hears so.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, UnixCredentials, recvmsg, setsockopt, sockopt,
};
use nix::unistd::Pid;

use crate::common::model::Model;
use crate::common::sys::{
    assert_errno, close, errno, map, open, rename, sync_directory, write, write_and_close,
};
use crate::common::{Mode, Mount, eventually, forks};
use crate::steps::check_store;
use crate::{any_mode, mounted, upgrade};

/// A mount that is kept. Nothing is committed before somebody asks for it.
pub(crate) fn kept(mode: Mode, options: &[&str]) -> Mount {
    let mount = mounted(mode, &[&["--keep-mounted", "--commit-interval", "60"], options].concat());
    wait_until_kept(&mount);
    mount
}

/// A mount answers before its keeper knows how to go on.
pub(crate) fn wait_until_kept(mount: &Mount) {
    eventually("the mount to be kept", || {
        mount.try_status("kept_mounted").filter(|word| word == "yes")
    });
}

pub(crate) fn daemon(mount: &Mount) -> Pid {
    Pid::from_raw(i32::try_from(mount.status_number("pid")).unwrap())
}

fn keeper(mount: &Mount) -> Pid {
    Pid::from_raw(i32::try_from(mount.pid()).unwrap())
}

/// Kills the daemon, and waits for another one.
pub(crate) fn die(mount: &Mount) {
    let before = daemon(mount);
    kill(before, Signal::SIGKILL).unwrap();
    // A status that was opened before cannot be read afterwards.
    let before = before.to_string();
    eventually("the next one to answer", || mount.try_status("pid").filter(|pid| *pid != before));
}

fn sync(mount: &Mount) -> Result<(), String> {
    let ended =
        forks::output(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("sync").arg(mount.path()));
    let told = String::from_utf8(ended.stderr).unwrap();
    if ended.status.success() { Ok(()) } else { Err(told) }
}

fn read(mut file: &File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map(|_| bytes)
}

/// Bytes that a file in a pack has, and one of its own.
fn small_and_large() -> [(&'static str, Vec<u8>); 2] {
    [("small", b"small".to_vec()), ("large", (0..200_000_u32).flat_map(u32::to_le_bytes).collect())]
}

fn what_is_open_for_reading_goes_on(mode: Mode) {
    let mut mount = kept(mode, &[]);
    let files = small_and_large().map(|(name, bytes)| (mount.files(name), bytes));
    for (path, bytes) in &files {
        write_and_close(path, bytes).unwrap();
    }
    sync(&mount).unwrap();
    let opened = files.each_ref().map(|(path, _)| File::open(path).unwrap());
    let mapped = map(&opened[1]);
    let standing = open(mount.files(""), libc::O_PATH | libc::O_DIRECTORY).unwrap();
    for round in 1..=3 {
        die(&mount);
        assert_eq!(mount.status_number("daemon_deaths"), round);
        for ((path, bytes), file) in files.iter().zip(&opened) {
            let mut beginning = [0; 5];
            file.read_exact_at(&mut beginning, 0).unwrap();
            assert_eq!(beginning, bytes[..5]);
            assert!(std::fs::read(path).unwrap() == *bytes, "opened anew beside it");
        }
        assert!(mapped[..] == files[1].1[..]);
        let through = format!("/proc/self/fd/{}/small", std::os::fd::AsRawFd::as_raw_fd(&standing));
        assert_eq!(std::fs::read(through).unwrap(), files[0].1);
        assert_eq!(sync(&mount), Ok(()), "nothing was lost");
    }
    for ((_, bytes), file) in files.iter().zip(opened) {
        assert!(read(&file).unwrap() == *bytes);
        close(file).unwrap();
    }
    drop((mapped, standing));
    assert!(mount.unmount().success());
    check_store(&mount);
}

#[test]
fn what_is_open_for_reading_goes_on_where_the_kernel_reads() {
    crate::require!(fuse, root);
    what_is_open_for_reading_goes_on(Mode::Passthrough);
}

#[test]
fn what_is_open_for_reading_goes_on_where_the_daemon_reads() {
    crate::require!(fuse);
    what_is_open_for_reading_goes_on(Mode::Served);
}

fn who_relied_on_what_was_lost_hears_so(mode: Mode) {
    let mut mount = kept(mode, &[]);
    let path = |name: &str| mount.files(name);
    std::fs::create_dir(path("kept")).unwrap();
    write_and_close(path("changed"), &vec![1; 100_000]).unwrap();
    sync(&mount).unwrap();
    let changing = open(path("changed"), libc::O_RDWR).unwrap();
    // All of this is lost, but for the bytes of what changes in place.
    write_and_close(path("lost"), b"lost").unwrap();
    write_and_close(path("kept/lost"), b"lost").unwrap();
    std::fs::create_dir(path("lost-directory")).unwrap();
    let written = File::create(path("written")).unwrap();
    write(&written, b"before").unwrap();
    write(&changing, b"before").unwrap();
    let reading = File::open(path("lost")).unwrap();
    assert_errno(std::fs::metadata(path("absent")), libc::ENOENT);
    die(&mount);
    for name in ["lost", "kept/lost", "lost-directory", "written", "absent"] {
        assert_errno(std::fs::metadata(path(name)), libc::ENOENT);
    }
    let listed = |name: &str| std::fs::read_dir(path(name)).unwrap().count();
    assert_eq!((listed(""), listed("kept")), (2, 0));
    for file in [&written, &changing] {
        assert_errno(file.sync_all(), libc::EIO);
        assert_errno(file.sync_all(), libc::EIO);
    }
    assert_errno(close(written), libc::EIO);
    assert_errno(close(changing), libc::EIO);
    let read = read(&reading);
    // What the kernel has open it goes on to read.
    assert!([libc::EIO, libc::ESTALE].contains(&errno(&read)) || read.unwrap() == b"lost");
    close(reading).unwrap();
    // Each hears it once.
    assert_errno(sync_directory(path("kept")), libc::EIO);
    sync_directory(path("kept")).unwrap();
    assert_errno(sync_directory(path("")), libc::EIO);
    let told = sync(&mount).unwrap_err();
    assert!(told.contains("a daemon of this mount has died"), "{told}");
    sync(&mount).unwrap();
    assert!(mount.errors().iter().any(|line| line.contains("has died")), "{:?}", mount.errors());
    // What is made now is as good as ever.
    write_and_close(path("lost"), b"again").unwrap();
    std::fs::create_dir(path("lost-directory")).unwrap();
    sync(&mount).unwrap();
    die(&mount);
    assert_eq!(std::fs::read(path("lost")).unwrap(), b"again");
    assert_eq!(std::fs::read(path("changed")).unwrap()[100..], vec![1; 99_900]);
    sync(&mount).unwrap();
    assert!(mount.unmount().success());
    check_store(&mount);
}

#[test]
fn who_relied_on_what_was_lost_hears_so_where_the_kernel_writes() {
    crate::require!(fuse, root);
    who_relied_on_what_was_lost_hears_so(Mode::Passthrough);
}

#[test]
fn who_relied_on_what_was_lost_hears_so_where_the_daemon_writes() {
    crate::require!(fuse);
    who_relied_on_what_was_lost_hears_so(Mode::Served);
}

#[test]
fn what_was_lost_is_told_also_after_the_next_daemon_has_died_or_was_exchanged() {
    crate::require!(fuse);
    let mount = kept(any_mode(), &[]);
    for name in ["one", "other", "third"] {
        std::fs::create_dir(mount.files(name)).unwrap();
    }
    sync(&mount).unwrap();
    for name in ["one", "other", "third"] {
        write_and_close(mount.files(name).join("lost"), b"lost").unwrap();
    }
    die(&mount);
    assert_errno(sync_directory(mount.files("one")), libc::EIO);
    die(&mount);
    sync_directory(mount.files("one")).unwrap();
    assert_errno(sync_directory(mount.files("other")), libc::EIO);
    upgrade(&mount);
    sync_directory(mount.files("other")).unwrap();
    assert_errno(sync_directory(mount.files("third")), libc::EIO);
    assert!(sync(&mount).is_err(), "this was not told yet");
    sync(&mount).unwrap();
}

/// A removed name is back when its removal was lost, and one that took its place is gone.
#[test]
fn names_are_those_of_the_last_commit() {
    crate::require!(fuse);
    let mount = kept(any_mode(), &[]);
    let path = |name: &str| mount.files(name);
    for name in ["removed", "renamed", "replaced"] {
        write_and_close(path(name), name.as_bytes()).unwrap();
    }
    sync(&mount).unwrap();
    std::fs::remove_file(path("removed")).unwrap();
    rename(path("renamed"), path("new name")).unwrap();
    write_and_close(path("tmp"), b"another").unwrap();
    rename(path("tmp"), path("replaced")).unwrap();
    std::fs::hard_link(path("new name"), path("linked")).unwrap();
    std::fs::set_permissions(path("new name"), std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .unwrap();
    // The kernel knows all of it.
    for name in ["removed", "renamed", "tmp"] {
        assert_errno(std::fs::metadata(path(name)), libc::ENOENT);
    }
    let inode =
        |name: &str| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path(name)).unwrap());
    let lost = inode("replaced");
    die(&mount);
    for name in ["removed", "renamed", "replaced"] {
        assert_eq!(std::fs::read(path(name)).unwrap(), name.as_bytes());
    }
    for name in ["new name", "tmp", "linked"] {
        assert_errno(std::fs::metadata(path(name)), libc::ENOENT);
    }
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(path("renamed")).unwrap());
    assert_eq!(mode & 0o777, 0o644);
    write_and_close(path("made since"), b"x").unwrap();
    assert!(inode("made since") > lost, "no number comes again");
}

#[test]
fn pages_in_memory_are_those_of_the_disk_afterwards() {
    crate::require!(fuse, root);
    let mut mount = kept(Mode::Passthrough, &["--ram", "16M"]);
    let model = Model::small();
    model.install(&mount);
    let place = |number: u64| model.page_path(&mount, "chat", 0, number * 32);
    let page = |number: u64| model.page(0, number * 32, number);
    let make = |number: u64| write_and_close(place(number), &page(number)).unwrap();
    std::fs::create_dir_all(place(0).parent().unwrap()).unwrap();
    (0..4).for_each(make);
    sync(&mount).unwrap();
    let opened = File::open(place(1)).unwrap();
    let mapped = map(&opened);
    make(4);
    die(&mount);
    for number in 0..4 {
        assert!(std::fs::read(place(number)).unwrap() == page(number), "{number}");
    }
    assert!(mapped[..] == page(1)[..] && read(&opened).unwrap() == page(1));
    assert_errno(std::fs::metadata(place(4)), libc::ENOENT);
    make(4);
    assert!(std::fs::read(place(4)).unwrap() == page(4));
    drop((opened, mapped));
    assert!(mount.unmount().success());
    check_store(&mount);
}

#[test]
fn it_goes_on_with_the_settings_of_now_and_the_program_of_now() {
    crate::require!(fuse);
    let mount = kept(any_mode(), &[]);
    let set = |setting: &str| {
        let mut set = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        let set = forks::output(set.args(["config", "set", setting]).arg(mount.path()));
        assert!(set.status.success());
    };
    let has = |line: &str| {
        let config = std::fs::read_to_string(mount.join(".kvfs/config")).unwrap();
        assert!(config.contains(line), "{config}");
    };
    set("verify=always");
    // The keeper hears of it in the background.
    std::thread::sleep(Duration::from_millis(300));
    die(&mount);
    has("verify = \"always\"");
    upgrade(&mount);
    has("verify = \"always\"");
    die(&mount);
    set("on_corrupt=miss");
    upgrade(&mount);
    die(&mount);
    has("verify = \"always\"");
    has("on_corrupt = \"miss\"");
}

#[test]
fn the_mount_ends_with_a_daemon_that_dies_again_and_again() {
    crate::require!(fuse);
    let mut mount = kept(any_mode(), &[]);
    write_and_close(mount.files("kept"), b"kept").unwrap();
    sync(&mount).unwrap();
    (0..3).for_each(|_| die(&mount));
    kill(daemon(&mount), Signal::SIGKILL).unwrap();
    assert_eq!(mount.wait_until_it_ends().code(), Some(128 + libc::SIGKILL));
    assert_errno(std::fs::metadata(mount.files("kept")), libc::ENOTCONN);
    assert!(mount.log().contains("the mount has ended"), "{}", mount.log());
    mount.mount();
    assert_eq!(std::fs::read(mount.files("kept")).unwrap(), b"kept");
    assert_eq!(mount.try_status("daemon_deaths"), None);
}

#[test]
fn it_can_be_ended_through_either_process_and_mounted_at_once() {
    crate::require!(fuse);
    let mut mount = kept(any_mode(), &[]);
    for round in 0..3 {
        write_and_close(mount.files(round.to_string()), b"kept").unwrap();
        match round {
            0 => kill(keeper(&mount), Signal::SIGTERM).unwrap(),
            1 => kill(daemon(&mount), Signal::SIGTERM).unwrap(),
            _ => {
                die(&mount);
                kill(keeper(&mount), Signal::SIGINT).unwrap();
            }
        }
        assert!(mount.wait_until_it_ends().success());
        check_store(&mount);
        mount.mount();
    }
    assert!(mount.files("0").exists() && mount.files("1").exists());
    // Both hear of it: that is one signal, and who uses the mount has his time.
    let used = File::create(mount.files("used")).unwrap();
    for pid in [keeper(&mount), daemon(&mount)] {
        kill(pid, Signal::SIGTERM).unwrap();
    }
    std::thread::sleep(Duration::from_secs(1));
    assert!(!mount.log().contains("were cut off"), "{}", mount.log());
    close(used).unwrap();
    assert!(mount.wait_until_it_ends().success());
    check_store(&mount);
}

#[test]
fn without_its_keeper_the_daemon_goes_on() {
    crate::require!(fuse);
    let mut mount = kept(any_mode(), &[]);
    let pid = daemon(&mount);
    kill(keeper(&mount), Signal::SIGKILL).unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&mount.wait_until_it_ends()), Some(9));
    write_and_close(mount.files("kept"), b"kept").unwrap();
    sync(&mount).unwrap();
    assert_eq!(daemon(&mount), pid);
    let unmounted =
        Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("umount").arg(mount.path()).status();
    assert!(unmounted.unwrap().success());
    check_store(&mount);
}

fn refused(directory: &Path, options: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["mount", "--keep-mounted"]).args(options);
    let ended = forks::output(command.arg(directory.join("store")).arg(directory.join("mnt")));
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    String::from_utf8(ended.stderr).unwrap()
}

#[test]
fn what_does_not_go_with_it_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("mnt")).unwrap();
    let line = refused(directory.path(), &["--read-only"]);
    assert!(line.contains("keep_mounted does not go with read_only"), "{line}");
    let remote = directory.path().join("remote").display().to_string();
    let options = ["--ssd-writes", "1G/day", "--ram", "1M", "--remote", &remote];
    let line = refused(directory.path(), &options);
    assert!(line.contains("keep_mounted does not go with ssd_writes"), "{line}");
}

/// As a user mounts: the command returns, and the daemon's number is told.
#[test]
fn a_daemon_in_the_background_is_kept_as_well() {
    crate::require!(fuse, root);
    let directory = crate::common::mount::scratch_directory();
    let at = |name: &str| -> PathBuf { directory.path().join(name) };
    std::fs::create_dir(at("mnt")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["mount", "--json", "--keep-mounted", "--log"]).arg(at("log"));
    let mounted = forks::output(command.arg(at("store")).arg(at("mnt")));
    assert!(mounted.status.success(), "{mounted:?}");
    let told: serde_json::Value = serde_json::from_slice(&mounted.stdout).unwrap();
    let pid = || {
        let status = std::fs::read_to_string(at("mnt/.kvfs/status")).ok()?;
        let pid = status.lines().find_map(|line| line.strip_prefix("pid: "))?;
        pid.parse::<i64>().ok()
    };
    let first = pid().unwrap();
    assert_eq!(told["pid"], first);
    let begin = Instant::now();
    kill(Pid::from_raw(i32::try_from(first).unwrap()), Signal::SIGABRT).unwrap();
    eventually("the next one to answer", || pid().filter(|pid| *pid != first));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    let umount = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        forks::output(command.arg("umount").arg(at("mnt"))).status.success()
    };
    assert!(umount());
    let mut again = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let again =
        forks::output(again.args(["mount", "--log"]).arg(at("log")).args([at("store"), at("mnt")]));
    assert!(again.status.success(), "the store is free at once: {again:?}");
    assert!(umount());
    eventually("the log", || {
        std::fs::read_to_string(at("log")).unwrap().contains("ended by SIGABRT").then_some(())
    });
}

/// systemd hears only from the process that it has started.
#[test]
fn the_manager_is_told_by_the_process_that_it_knows() {
    crate::require!(fuse);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    setsockopt(&socket, sockopt::PassCred, &true).unwrap();
    let told = || {
        let (mut bytes, mut room) = ([0; 512], nix::cmsg_space!(UnixCredentials));
        let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
        let (number, flags) = (std::os::fd::AsRawFd::as_raw_fd(&socket), MsgFlags::empty());
        let received = recvmsg::<()>(number, &mut parts, Some(&mut room), flags).unwrap();
        let length = received.bytes;
        let told_by = received.cmsgs().unwrap().find_map(|message| match message {
            ControlMessageOwned::ScmCredentials(told_by) => Some(told_by.pid()),
            _ => None,
        });
        (told_by, String::from_utf8_lossy(&bytes[..length]).into_owned())
    };
    let environment = vec![("NOTIFY_SOCKET".to_owned(), path.display().to_string())];
    let mount = Mount::with_environment(any_mode(), &["--keep-mounted"], environment);
    for _ in 0..2 {
        let (told_by, text) = told();
        assert_eq!(told_by, Some(keeper(&mount).as_raw()));
        assert!(text.starts_with("READY=1\n"), "{text}");
        die(&mount);
    }
}

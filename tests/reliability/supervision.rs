//! A daemon that dies is replaced without anybody's help (`mount-scripts/supervise.sh`), and its
//! clients hear of its end.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::injection::Injection;
use crate::common::mount::scratch_directory;
use crate::common::sys::{assert_errno, errno, open, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Mount, eventually, forks};

/// From the daemon's end until the mount answers again.
const BACK_WITHIN: Duration = Duration::from_secs(2);
const DEATHS: u32 = 5;

fn script() -> Command {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("mount-scripts/supervise.sh");
    let mut command = Command::new(path);
    command.env("KVFS", env!("CARGO_BIN_EXE_kvfs"));
    command
}

fn daemon(mountpoint: &Path) -> Option<i32> {
    let status = std::fs::read_to_string(mountpoint.join(".kvfs/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("pid: "))?.parse().ok()
}

fn kill(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

fn end(mut supervisor: Child) {
    kill(i32::try_from(supervisor.id()).unwrap(), nix::sys::signal::Signal::SIGTERM);
    let status = eventually("the supervisor to end", || supervisor.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

#[test]
fn a_dead_daemon_is_replaced() {
    crate::require!(fuse, root);
    let directory = scratch_directory();
    let (store, mountpoint) = (directory.path().join("store"), directory.path().join("mnt"));
    std::fs::create_dir(&mountpoint).unwrap();
    let mut command = script();
    command.args(["--commit-interval", "0.05"]).arg(&store).arg(&mountpoint);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let supervisor = forks::spawn(&mut command).unwrap();
    let mut pid = eventually("the mount", || daemon(&mountpoint));
    let kept = mountpoint.join("files/kept");
    write_and_close(&kept, b"durable").unwrap();
    sync_directory(&mountpoint).unwrap();
    let mut longest = Duration::ZERO;
    for death in 0..DEATHS {
        let held = open(&kept, libc::O_RDONLY).unwrap();
        write_and_close(mountpoint.join(format!("files/.unsynced-{death}")), b"lost").unwrap();
        let start = Instant::now();
        kill(pid, nix::sys::signal::Signal::SIGKILL);
        // Until then: an error that says so, and nothing that hangs.
        let meanwhile = open(&kept, libc::O_RDONLY);
        let expected = [0, libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED, libc::ENOENT];
        assert!(expected.contains(&errno(&meanwhile)), "{meanwhile:?}");
        drop(meanwhile);
        let next = || daemon(&mountpoint).filter(|next| *next != pid);
        pid = eventually("another daemon", next);
        longest = longest.max(start.elapsed());
        assert_eq!(std::fs::read(&kept).unwrap(), b"durable");
        drop(held);
    }
    println!("{DEATHS} daemons were replaced, each within {longest:?}");
    assert!(longest < BACK_WITHIN, "{longest:?}");
    // What was being written is gone, what was durable is not.
    assert_eq!(std::fs::read_dir(store.join("staging")).unwrap().count(), 0);
    end(supervisor);
    assert!(daemon(&mountpoint).is_none());
    assert_errno(std::fs::metadata(&kept), libc::ENOENT);
    crate::kills::assert_sound(&store);
}

/// Whoever unmounts means it.
#[test]
fn an_unmounted_store_stays_unmounted() {
    crate::require!(fuse, root);
    let directory = scratch_directory();
    let (store, mountpoint) = (directory.path().join("store"), directory.path().join("mnt"));
    std::fs::create_dir(&mountpoint).unwrap();
    let mut command = script();
    command.arg(&store).arg(&mountpoint).stdin(Stdio::null()).stderr(Stdio::null());
    let mut supervisor = forks::spawn(&mut command).unwrap();
    eventually("the mount", || daemon(&mountpoint));
    let kvfs = env!("CARGO_BIN_EXE_kvfs");
    forks::succeed(Command::new(kvfs).arg("umount").arg(&mountpoint));
    let status = eventually("the supervisor to end", || supervisor.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

#[test]
fn a_mount_that_cannot_be_made_is_not_tried_forever() {
    crate::require!(fuse, root);
    let directory = scratch_directory();
    let not_a_store = directory.path().join("file");
    std::fs::write(&not_a_store, "x").unwrap();
    let mut command = script();
    let ended = forks::output(command.arg(&not_a_store).arg(directory.path().join("mnt")));
    assert!(!ended.status.success());
}

/// While a client that lists a directory waits for the daemon it has the directory locked. A daemon that waited for
/// that lock, to tell the kernel of a removal there, would not end when it is killed, and its connection would not either.
#[test]
fn a_daemon_that_removes_from_a_locked_directory_can_be_killed() {
    crate::require!(fuse, root, strace);
    // With rings another thread would answer.
    let options = ["--commit-interval", "0.05", "--no-io-uring"];
    let mut mount = Mount::with_options(Mode::Passthrough, &options);
    let directory = mount.files("d");
    std::fs::create_dir(&directory).unwrap();
    // On a busy machine the first ones go before strace is attached.
    for seconds in ["2", "4", "8", "16", "32"] {
        let path = directory.join(seconds);
        write_and_close(&path, b"x").unwrap();
        setxattr(&path, "user.kvfs.ttl", seconds.as_bytes()).unwrap();
    }
    write_and_close(mount.files("kept"), b"durable").unwrap();
    sync_directory(mount.path()).unwrap();
    let listing = std::fs::read_dir(&directory).unwrap();
    // Requests come to nobody's notice for longer than the test takes.
    let injection = Injection::into(&mount, "read,readv", "delay_exit=120000000:when=1");
    let told = std::thread::scope(|scope| {
        let client = scope.spawn(|| listing.collect::<Result<Vec<_>, _>>());
        // What lives for four seconds goes meanwhile, and the removal is committed.
        std::thread::sleep(Duration::from_secs(7));
        kill(i32::try_from(mount.pid()).unwrap(), nix::sys::signal::Signal::SIGKILL);
        injection.kill();
        // Fails if the daemon does not end.
        mount.kill();
        client.join().unwrap()
    });
    assert!(matches!(errno(&told), libc::ENOTCONN | libc::ECONNABORTED), "{told:?}");
    mount.mount();
    assert_eq!(std::fs::read(mount.files("kept")).unwrap(), b"durable");
    assert!(!directory.join("4").exists(), "nothing was removed while the directory was locked");
}

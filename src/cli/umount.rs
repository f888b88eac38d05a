//! `kvfs umount`: when it returns 0, the mount is gone and everything in it is durable on the disk. What
//! the remote does not have yet, it says.

use std::path::Path;
use std::time::{Duration, Instant};

use kvfs_os::mountinfo::{self, Mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::arguments::UmountArguments;
use super::busy;
use super::output::{Failure, Outcome, Report, note};
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask, daemon};
use super::process::{Process, is_keeper, parent};
use super::unmount::{How, UnmountError, unmount};
use super::{connection, stale, sync};

/// Time for the flush before unmounting: 128 GiB at 200 MB/s.
const FLUSH_DEADLINE: Duration = Duration::from_secs(11 * 60);
/// Time for the daemon to end afterwards: there is little left to write.
const EXIT_DEADLINE: Duration = Duration::from_secs(60);
/// After so much of it somebody may keep the daemon: that is looked into.
const SOON: Duration = Duration::from_secs(1);
/// The same after detaching, which waits for nobody.
const DETACHED_EXIT_DEADLINE: Duration = Duration::from_secs(1);

/// Time for a daemon that was cut off: it may still be writing what it has.
const CUT_OFF_EXIT_DEADLINE: Duration = Duration::from_secs(30);
/// The same for one that was killed.
const KILLED_EXIT_DEADLINE: Duration = Duration::from_secs(10);

/// Who uses a mount and cannot be seen is waited for so long: a program that has just ended, most likely.
const UNSEEN_USER_WAIT: Duration = Duration::from_secs(2);
/// How often the lock of a store is looked at, and whether a mount is used.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Unmounts.
pub(crate) fn run(arguments: &UmountArguments) -> Outcome {
    let (mount, mounts) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
    end(&mount, &mounts, arguments)?;
    let named = |path: &Path| path.display().to_string();
    let value = json!({ "store": named(&mount.source), "mountpoint": named(&mount.mountpoint) });
    Ok(Report::answer(arguments.json, &value, String::new()))
}

fn end(mount: &Mount, mounts: &[Mount], arguments: &UmountArguments) -> Result<(), Failure> {
    let answer = ask(&mount.mountpoint, Question::Status, ANSWER_DEADLINE)
        .map_err(|error| failed(mount, &format!("cannot be asked: {error}")))?;
    match answer {
        Answer::Alive(status) => alive(mount, mounts, &status, arguments),
        Answer::Dead => {
            take_away(mount, How::Detach)?;
            let place = mount.mountpoint.display();
            note(&format!("kvfs: the daemon of {place} was already gone: unmounted"));
            Ok(())
        }
        Answer::Stuck if arguments.force => cut_off(mount),
        Answer::Stuck => Err(failed(
            mount,
            &format!(
                "does not answer within {} seconds: wait, or cut it off with --force and lose \
                 what is not yet durable",
                ANSWER_DEADLINE.as_secs()
            ),
        )),
        // Somebody else's mount: only the kernel can say whether it may be taken away.
        Answer::Refused(_) => {
            take_away(mount, how(arguments))?;
            wait_for_store(mount, arguments.lazy)
        }
    }
}

/// Takes a mount away that does not answer. Its daemon ends by itself then, once it has written what it has, unless one of its
/// threads hangs: then it is killed, or the store could not be mounted again.
fn cut_off(mount: &Mount) -> Result<(), Failure> {
    let daemon = connection::server(&mount.device);
    take_away(mount, How::Abort)?;
    let place = mount.mountpoint.display();
    let cut_off = "did not answer: cut off without a flush";
    let before = daemon.as_ref().and_then(Process::work);
    let Some(daemon) = daemon.filter(|daemon| !daemon.wait_for_exit(CUT_OFF_EXIT_DEADLINE)) else {
        note(&format!("kvfs: {place} {cut_off}"));
        return Ok(());
    };
    let pid = daemon.pid();
    if before.zip(daemon.work()).is_some_and(|(before, now)| before.is_less_than(now)) {
        note(&format!("kvfs: {place} {cut_off}; its daemon (pid {pid}) still writes what it has"));
        return Ok(());
    }
    // A keeper is told that this is meant.
    if let Some(keeper) = parent(pid).filter(|parent| is_keeper(*parent)) {
        let _ = kill(Pid::from_raw(keeper), Signal::SIGTERM);
    }
    let killed = kill(Pid::from_raw(pid), Signal::SIGKILL);
    let end = Instant::now() + KILLED_EXIT_DEADLINE;
    while daemon.has_threads() && Instant::now() < end {
        std::thread::sleep(POLL_INTERVAL);
    }
    if !daemon.has_threads() {
        note(&format!("kvfs: {place} {cut_off}, and its daemon, which hung, ended"));
        return Ok(());
    }
    let store = mount.source.display();
    Err(failed(
        mount,
        &match killed {
            Err(error) => {
                format!("is cut off, but its daemon (pid {pid}) hangs and cannot be ended: {error}")
            }
            Ok(()) => format!(
                "is cut off, but its daemon (pid {pid}) cannot be ended: it waits for a disk or a server, and keeps its \
             store {store} until that answers"
            ),
        },
    ))
}

fn how(arguments: &UmountArguments) -> How {
    match arguments {
        UmountArguments { force: true, .. } => How::Abort,
        UmountArguments { lazy: true, .. } => How::Detach,
        _ => How::Unused,
    }
}

fn alive(
    mount: &Mount, mounts: &[Mount], status: &str, arguments: &UmountArguments,
) -> Result<(), Failure> {
    let (pid, _) = daemon(status);
    let process = pid.and_then(Process::find);
    flush(mount, arguments.force)?;
    let notes = lacking_in_remote(mount);
    take_away(mount, how(arguments))?;
    for what in notes {
        let place = mount.mountpoint.display();
        note(&format!("kvfs: {place}: on this machine's disk only, {what}"));
    }
    // A bind mount of the same session: its daemon goes on serving the others.
    let shared = mounts.iter().filter(|other| other.device == mount.device).count() > 1;
    let Some(process) = process.filter(|_| !shared) else {
        return Ok(());
    };
    let pid = process.pid();
    if arguments.lazy && !arguments.force {
        if !process.wait_for_exit(DETACHED_EXIT_DEADLINE) {
            note(&format!("kvfs: the daemon (pid {pid}) goes on until the last user ends"));
        }
    } else if !process.wait_for_exit(SOON) {
        if let Some(other) = mountinfo::other_namespace_with(&mount.device) {
            let line = format!(
                "is unmounted here, but another mount namespace has it still (process {other}): \
                 the daemon (pid {pid}) goes on until that one ends"
            );
            return Err(failed(mount, &line));
        }
        if process.wait_for_exit(EXIT_DEADLINE) {
            return Ok(());
        }
        let line = format!(
            "is unmounted, but its daemon (pid {pid}) is still working after {} seconds: do not \
             switch off before it has ended",
            EXIT_DEADLINE.as_secs()
        );
        return Err(failed(mount, &line));
    }
    Ok(())
}

/// The daemon could not be asked who it is, but it holds the lock of its store to its end.
fn wait_for_store(mount: &Mount, lazy: bool) -> Result<(), Failure> {
    let end = Instant::now() + EXIT_DEADLINE;
    while !lazy && stale::is_locked(&mount.source) {
        if Instant::now() >= end {
            let store = mount.source.display();
            return Err(failed(mount, &format!("is unmounted, but {store} is still in use")));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// What the remote of a mount does not have, which has just been flushed to the disk.
fn lacking_in_remote(mount: &Mount) -> Vec<String> {
    let Ok(Answer::Alive(status)) = ask(&mount.mountpoint, Question::Status, ANSWER_DEADLINE)
    else {
        return Vec::new();
    };
    let lacking = sync::lacking(&status).map(|what| format!("not yet in the remote: {what}"));
    let given_up = sync::given_up(&status).map(|what| format!("never in the remote: {what}"));
    lacking.into_iter().chain(given_up).collect()
}

/// The flush comes first, while an error can still be told and the mount is still there.
fn flush(mount: &Mount, force: bool) -> Result<(), Failure> {
    let answer = ask(&mount.mountpoint, Question::Sync, FLUSH_DEADLINE)
        .map_err(|error| failed(mount, &format!("cannot be flushed: {error}")))?;
    let line = match answer {
        // A daemon that died between the two questions has nothing left to flush.
        Answer::Alive(_) | Answer::Dead => return Ok(()),
        Answer::Refused(error) => match sync::of_a_death(&mount.mountpoint, &error) {
            Some(told) => told.to_owned(),
            None => format!("cannot be flushed: {error}"),
        },
        Answer::Stuck => {
            format!("is not flushed after {} minutes", FLUSH_DEADLINE.as_secs() / 60)
        }
    };
    if force {
        note(&format!("kvfs: {} {line}: unmounted all the same", mount.mountpoint.display()));
        return Ok(());
    }
    Err(failed(mount, &format!("{line}; still mounted: try again, or --force")))
}

fn take_away(mount: &Mount, how: How) -> Result<(), Failure> {
    let end = Instant::now() + UNSEEN_USER_WAIT;
    let mut outcome = unmount(&mount.mountpoint, how);
    while matches!(outcome, Err(UnmountError::Busy))
        && !busy::is_used(&mount.mountpoint)
        && Instant::now() < end
    {
        std::thread::sleep(POLL_INTERVAL);
        outcome = unmount(&mount.mountpoint, how);
    }
    match outcome {
        Ok(()) => Ok(()),
        Err(UnmountError::Busy) => {
            let users = busy::describe(&mount.mountpoint);
            Err(failed(mount, &format!("is {users}: end them, or use --lazy")))
        }
        Err(UnmountError::NotMounted) => Err(failed(mount, "was unmounted by somebody else")),
        Err(UnmountError::NotPermitted) => {
            let line = "was mounted by another user: only that user or root may unmount it";
            Err(failed(mount, line))
        }
        Err(UnmountError::Other(line)) => {
            Err(failed(mount, &format!("is not cleanly unmounted: {line}")))
        }
    }
}

fn failed(mount: &Mount, line: &str) -> Failure {
    let place: &Path = &mount.mountpoint;
    Failure::Failed(format!("{} {line}", place.display()))
}

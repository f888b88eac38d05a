//! What to do about a kvfs that is already mounted where the new one is to be.
//!
//! A mount whose daemon died is cleared, but only if that is certain: it is ours by its type, it
//! answers ENOTCONN, and nobody holds the lock of its store. A daemon that was cut off may still
//! be flushing, and one that does not answer is not dead, unless it was killed: while the kernel
//! waits in one of its threads for a directory, whose holder waits for the daemon, it cannot end and
//! its connection does not either. Such a mount is cut off.

use std::path::Path;
use std::time::{Duration, Instant};

use kvfs_os::mountinfo::{self, Mount};

use super::output::{Failure, note};
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask, daemon};
use super::process::Process;
use super::unmount::{How, UnmountError, unmount};
use super::{connection, locks};
use crate::store::format::{is_locked_for_writing, lock_file};

/// A mountpoint may carry several dead mounts; this many are cleared before giving up.
const LAYERS_MAX: usize = 16;

/// Time for a daemon without a mount to flush and end.
const RELEASE_DEADLINE: Duration = Duration::from_secs(10);
/// How often its lock is looked at.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Makes sure that no kvfs is mounted at `mountpoint`, clearing what is stale.
pub(crate) fn clear(mountpoint: &Path) -> Result<(), Failure> {
    for _ in 0..LAYERS_MAX {
        let mounts = mountinfo::read()
            .map_err(|error| Failure::failed(format!("/proc/self/mountinfo: {error}")))?;
        match mountinfo::top_at(&mounts, mountpoint).filter(|mount| mount.is_kvfs()) {
            None => return Ok(()),
            Some(mount) => clear_one(mount).map_err(Failure::Failed)?,
        }
    }
    Err(Failure::failed(format!("{}: too many stale mounts", mountpoint.display())))
}

fn clear_one(mount: &Mount) -> Result<(), String> {
    let place = mount.mountpoint.display();
    if was_killed(&mount.source) {
        return clear_dead(mount, How::Abort);
    }
    let answer = ask(&mount.mountpoint, Question::Status, ANSWER_DEADLINE);
    match answer.map_err(|error| format!("{place} cannot be asked: {error}"))? {
        Answer::Alive(status) => {
            let (pid, store) = daemon(&status);
            let pid = pid.map_or("?".to_owned(), |pid| pid.to_string());
            Err(format!(
                "{place} already has the store {} mounted (pid {pid}): kvfs umount {place} first",
                store.display()
            ))
        }
        Answer::Dead => clear_dead(mount, How::Detach),
        Answer::Stuck => Err(format!(
            "{place} already has a kvfs that does not answer within {} seconds; it may still be \
             working: wait, or cut it off with kvfs umount --force {place}",
            ANSWER_DEADLINE.as_secs()
        )),
        Answer::Refused(error) => Err(format!(
            "{place} already has a kvfs, which refuses to be asked ({error}): another user's?"
        )),
    }
}

fn clear_dead(mount: &Mount, how: How) -> Result<(), String> {
    let place = mount.mountpoint.display();
    if how == How::Detach && !is_released(&mount.source) {
        return Err(format!(
            "{place} has a kvfs that was cut off, and its store {} is still in use: wait until \
             its daemon has ended",
            mount.source.display()
        ));
    }
    match unmount(&mount.mountpoint, how) {
        Ok(()) | Err(UnmountError::NotMounted) => {
            note(&format!("kvfs: {place} had a mount whose daemon is gone: unmounted"));
            Ok(())
        }
        Err(UnmountError::Busy) => Err(format!("{place} has a stale mount that is in use")),
        Err(UnmountError::NotPermitted) => Err(format!(
            "{} was mounted by another user: only that user or root may unmount it",
            mount.mountpoint.display()
        )),
        Err(UnmountError::Other(line)) => {
            Err(format!("{place} has a stale mount that cannot be unmounted: {line}"))
        }
    }
}

/// Makes sure that a daemon whose mount is gone has let go of its store: it still flushes after
/// `fusermount3 -u`, or after umount(8) where this program is not installed as its helper.
pub(crate) fn wait_for_flush(store: &Path) -> Result<(), Failure> {
    let mounts = mountinfo::read().unwrap_or_default();
    let has_its_name = |mount: &&Mount| mount.source == store;
    let mut of_kvfs = mounts.iter().filter(|mount| mount.is_kvfs());
    let mounted = of_kvfs.clone().find(has_its_name);
    // Under another name: it was moved since, or a bind mount leads to it, too.
    let holder = locks::holder(&lock_file(store)).ok().flatten();
    let is_of_holder =
        |mount: &&Mount| holder.is_some_and(|pid| connection::is_served_by(&mount.device, pid));
    match mounted.or_else(|| of_kvfs.find(is_of_holder)) {
        // On read-only media nobody keeps it from others.
        Some(mount) if is_locked(store) => Err(Failure::failed(format!(
            "the store {} is already mounted at {}: unmount it first",
            store.display(),
            mount.mountpoint.display()
        ))),
        _ if is_released(store) => Ok(()),
        _ => Err(Failure::failed(format!(
            "the store {} is in use by another kvfs that has no mount here: wait until it has \
             ended",
            store.display()
        ))),
    }
}

/// Whether the daemon that holds a store has ended but for a thread that cannot.
fn was_killed(store: &Path) -> bool {
    let holder = locks::holder(&lock_file(store)).ok().flatten();
    holder.is_some_and(|pid| Process::find(pid).is_none())
}

/// Waits for a lock that a daemon without a mount gives back as soon as it has flushed.
fn is_released(store: &Path) -> bool {
    let end = Instant::now() + RELEASE_DEADLINE;
    while is_locked(store) {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(RELEASE_POLL_INTERVAL);
    }
    true
}

/// Whether a daemon still holds the store. A store that is no longer there has none.
pub(crate) fn is_locked(store: &Path) -> bool {
    is_locked_for_writing(store)
}

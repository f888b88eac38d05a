//! Ctrl-C ends a run and leaves nothing behind: no mount, no daemon, no gigabytes of pages.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

use super::daemon;
use super::workplace;

/// What is there now: daemons with their mountpoints, and workplaces.
#[derive(Debug)]
struct Running {
    daemons: Vec<(Pid, PathBuf)>,
    workplaces: Vec<PathBuf>,
}

static RUNNING: Mutex<Running> =
    Mutex::new(Running { daemons: Vec::new(), workplaces: Vec::new() });

fn running() -> MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A daemon runs.
pub(super) fn daemon_starts(pid: u32, mountpoint: &Path) {
    running().daemons.push((to_pid(pid), mountpoint.to_path_buf()));
}

/// It is about to be waited for, after which its number may be somebody else's.
pub(super) fn daemon_ends(pid: u32) {
    running().daemons.retain(|(other, _)| *other != to_pid(pid));
}

/// A workplace is made.
pub(super) fn workplace_begins(path: &Path) {
    running().workplaces.push(path.to_path_buf());
}

/// It is gone.
pub(super) fn workplace_ends(path: &Path) {
    running().workplaces.retain(|other| other != path);
}

fn to_pid(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX))
}

/// Starts the thread that waits for SIGINT and SIGTERM. To be called before any other is started,
/// since they inherit that the signals are held back.
pub(super) fn watch() -> Result<(), String> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
    signals.thread_block().map_err(|error| format!("signals: {error}"))?;
    let wait = move || {
        if let Ok(signal) = signals.wait() {
            clear();
            std::process::exit(128 + signal as i32);
        }
    };
    let thread = std::thread::Builder::new().name("kvfs-signals".to_owned());
    thread.spawn(wait).map(drop).map_err(|error| format!("a thread: {error}"))
}

fn clear() {
    // Held to the end, so that nothing is begun anew.
    let running = running();
    for (pid, mountpoint) in &running.daemons {
        let _ = kill(*pid, Signal::SIGKILL);
        let _ = daemon::unmount(mountpoint, true);
    }
    for path in &running.workplaces {
        let _ = umount2(&workplace::tmpfs(path), MntFlags::MNT_DETACH);
        workplace::remove(path);
    }
}

//! Ctrl-C ends a run and leaves nothing behind: no mount, no daemon, no gigabytes of pages.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::daemon;
use super::workplace;

/// What is there now.
#[derive(Debug)]
struct Running {
    daemons: Vec<Pid>,
    /// In each of them there may be a mount, of a daemon that has ended, too.
    workplaces: Vec<PathBuf>,
}

static RUNNING: Mutex<Running> =
    Mutex::new(Running { daemons: Vec::new(), workplaces: Vec::new() });

fn running() -> MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a daemon.
pub(super) fn start_daemon(command: &mut Command) -> io::Result<Child> {
    let mut running = running();
    let child = command.spawn()?;
    running.daemons.push(to_pid(child.id()));
    Ok(child)
}

/// It is about to be waited for, after which its number may be somebody else's.
pub(super) fn daemon_ends(pid: u32) {
    running().daemons.retain(|other| *other != to_pid(pid));
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

/// Starts the thread that waits for SIGINT, SIGTERM and SIGHUP. To be called before any other is started,
/// since they inherit that the signals are held back.
pub(super) fn watch() -> Result<(), String> {
    let signals: SigSet = super::super::interrupt::ENDING.into_iter().collect();
    signals.thread_block().map_err(|error| format!("signals: {error}"))?;
    let wait = move || {
        if let Ok(signal) = signals.wait() {
            // Held to the end: nothing is begun anew, and whoever finds the daemon gone and wants to
            // fail with that stops here, where it says that it ended.
            let running = running();
            clear(&running);
            std::process::exit(128 + signal as i32);
        }
    };
    let thread = thread::Builder::new().name("kvfs-signals".to_owned());
    thread.spawn(wait).map(drop).map_err(|error| format!("a thread: {error}"))
}

/// A killed process ends within milliseconds, unless the kernel is stuck in one of its threads.
const END_WAIT_MAX: Duration = Duration::from_secs(5);

fn wait_for(pid: Pid) {
    let end = Instant::now() + END_WAIT_MAX;
    let still_runs = || waitpid(pid, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive);
    while still_runs() && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
}

fn clear(running: &Running) {
    for pid in &running.daemons {
        let _ = kill(*pid, Signal::SIGKILL);
    }
    for path in &running.workplaces {
        let mountpoint = workplace::mount(path);
        let _ = daemon::unmount(&mountpoint, true);
        // Only now does it end for certain, and may have mounted meanwhile.
        running.daemons.iter().for_each(|pid| wait_for(*pid));
        let _ = daemon::unmount(&mountpoint, true);
        let _ = umount2(&workplace::tmpfs(path), MntFlags::MNT_DETACH);
        workplace::remove(path);
    }
}

//! Ending a mount by a signal.
//!
//! SIGTERM and SIGINT unmount: the kernel then ends the session, and `serve` flushes and
//! returns. As long as programs use the mount it stays, for a bounded time, because a service
//! manager kills a daemon that does not end, and a killed daemon flushes nothing. After that the
//! programs are cut off.
//!
//! SIGHUP opens the log file anew. A mount in the foreground whose log is no file ends then: its terminal is gone.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::fuse::{Ending, MountOptions};
use kvfs_os::mountinfo;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::output::EXIT_FAILED;
use super::unmount::{How, UnmountError, unmount};
use super::{busy, logging};

/// Time for programs to let go of the mount; systemd kills after 90 seconds.
const GRACE: Duration = Duration::from_secs(10);
/// Signals that come so soon after another are the same: a keeper has it as well, and passes it on.
const SAME_WITHIN: Duration = Duration::from_millis(500);
/// How often unmounting is tried meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Signals that are held back for the thread that waits for them.
#[derive(Debug)]
pub(crate) struct StopSignals {
    signals: SignalFd,
}

/// The thread that waits for signals.
#[derive(Debug)]
pub(crate) struct Watch {
    thread: JoinHandle<()>,
    served: OwnedFd,
}

/// What the thread needs to know.
struct Watched {
    signals: SignalFd,
    /// Readable (closed) once `serve` has returned.
    served: OwnedFd,
    store: PathBuf,
    mountpoint: PathBuf,
    ready: Arc<AtomicBool>,
    ending: Arc<Ending>,
    /// When the last signal came that was to end the mount.
    last: Cell<Option<Instant>>,
    /// A keeper passes signals on.
    is_kept: bool,
}

/// What ended the waiting.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    Signal,
    Served,
    Timeout,
    /// The log was opened anew, or a signal came twice: neither ends anything.
    Nothing,
}

fn is_hangup(signal: &nix::sys::signalfd::siginfo) -> bool {
    u32::try_from(libc::SIGHUP) == Ok(signal.ssi_signo)
}

impl StopSignals {
    /// Holds the signals back, in this thread and those it starts: call it before any other
    /// thread runs.
    pub(crate) fn hold() -> io::Result<StopSignals> {
        let mut held = SigSet::empty();
        held.add(Signal::SIGTERM);
        held.add(Signal::SIGINT);
        held.add(Signal::SIGHUP);
        let waited_for = held;
        // Nobody waits for these: an operator who tries them does not end the daemon.
        held.add(Signal::SIGUSR1);
        held.add(Signal::SIGUSR2);
        held.thread_block()?;
        let signals = SignalFd::with_flags(&waited_for, SfdFlags::SFD_CLOEXEC)?;
        Ok(StopSignals { signals })
    }

    /// Starts the thread. `ready` says whether the mount has been announced.
    pub(crate) fn watch(
        self, options: &MountOptions, ready: Arc<AtomicBool>, is_kept: bool,
    ) -> io::Result<Watch> {
        let (read_end, write_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let watched = Watched {
            signals: self.signals,
            served: read_end,
            store: options.store.clone(),
            mountpoint: options.mountpoint.clone(),
            ready,
            ending: Arc::clone(&options.ending),
            last: Cell::new(None),
            is_kept,
        };
        let thread = std::thread::Builder::new()
            .name("kvfs-signals".to_owned())
            .spawn(move || watched.run())?;
        Ok(Watch { thread, served: write_end })
    }
}

impl Watch {
    /// Ends the thread; `serve` has returned.
    pub(crate) fn finish(self) {
        drop(self.served);
        if self.thread.join().is_err() {
            log::error!("the signal thread panicked");
        }
    }
}

impl Watched {
    fn run(&self) {
        loop {
            match self.wait(None) {
                Event::Signal => {
                    log::info!("stopping: unmounting {}", self.mountpoint.display());
                    if !self.stop() {
                        *self.ending.hold() = false;
                    }
                }
                Event::Nothing => {}
                Event::Served | Event::Timeout => return,
            }
        }
    }

    /// Whether the mount has ended.
    fn stop(&self) -> bool {
        if !self.is_ours() {
            if !self.ready.load(Ordering::Acquire) {
                log::info!("stopped before the mount was ready");
                // Nothing was promised yet: a crash-safe store needs no farewell.
                std::process::exit(i32::from(EXIT_FAILED));
            }
            log::info!("already unmounted");
            return true;
        }
        let deadline = Instant::now() + GRACE;
        let mut told = false;
        let mut insist = false;
        loop {
            let how = if insist || Instant::now() >= deadline { How::Abort } else { How::Unused };
            match unmount(&self.mountpoint, how) {
                Ok(()) if how == How::Abort => {
                    log::warn!("programs that still used the mount were cut off");
                    return true;
                }
                Ok(()) | Err(UnmountError::NotMounted) => return true,
                Err(UnmountError::Busy) if how == How::Unused => {}
                Err(UnmountError::NotPermitted) => {
                    log::error!("not unmounted: it was mounted by another user");
                    return false;
                }
                Err(UnmountError::Other(line)) => {
                    log::error!("not cleanly unmounted: {line}");
                    return false;
                }
                Err(UnmountError::Busy) => {
                    log::error!("still {}", busy::describe(&self.mountpoint));
                    return false;
                }
            }
            if !told {
                told = true;
                let seconds = GRACE.as_secs();
                log::warn!("{}; cut off in {seconds} seconds", busy::describe(&self.mountpoint));
            }
            match self.wait(Some(RETRY_INTERVAL)) {
                Event::Signal => insist = true,
                Event::Served => return true,
                Event::Timeout | Event::Nothing => {}
            }
        }
    }

    /// Whether what is mounted there is still this mount.
    fn is_ours(&self) -> bool {
        let mounts = mountinfo::read().unwrap_or_default();
        mountinfo::top_at(&mounts, &self.mountpoint)
            .is_some_and(|mount| mount.is_kvfs() && mount.source == self.store)
    }

    fn wait(&self, timeout: Option<Duration>) -> Event {
        let timeout = timeout.map_or(PollTimeout::NONE, |timeout| {
            PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX)
        });
        let mut descriptors = [
            PollFd::new(self.served.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut descriptors, timeout) {
            Ok(0) | Err(Errno::EINTR) => return Event::Timeout,
            Ok(_) => {}
            Err(error) => {
                log::error!("signals can no longer be waited for: {error}");
                return Event::Served;
            }
        }
        if descriptors[0].any().unwrap_or(true) {
            return Event::Served;
        }
        let mut is_ending = self.ending.hold();
        match self.signals.read_signal() {
            Ok(Some(signal)) if is_hangup(&signal) && logging::is_file() => {
                logging::reopen();
                Event::Nothing
            }
            Ok(_) => {
                let last = self.last.replace(Some(Instant::now()));
                if self.is_kept && last.is_some_and(|last| last.elapsed() < SAME_WITHIN) {
                    return Event::Nothing;
                }
                *is_ending = true;
                Event::Signal
            }
            Err(error) => {
                log::error!("signals can no longer be read: {error}");
                Event::Served
            }
        }
    }
}

//! The keeper's half: it waits for the daemon's end, and starts another one where that was no end of its own.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid};

use super::{ARM, END, Kept, Place, READY};
use crate::exchange::candidate::{take_over, variables};
use kvfs_os::Message;

/// Daemons in a row that die before they are [`OLD`] and are replaced: what kills them may be a request that the kernel sends
/// again and again.
const YOUNG_DEATHS_MAX: u32 = 3;
const OLD: Duration = Duration::from_secs(10);
/// A daemon that dies so soon after it was asked to end has ended.
const ENDS_WITHIN: Duration = Duration::from_secs(30);
/// What a process exits with whose program could not be run.
const NOT_RUN: i32 = 127;

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Side {
    /// The one that keeps the mount.
    Keeper(Keeping),
    /// The one that serves it.
    Daemon(Kept),
}

/// A mount that is kept.
#[derive(Debug)]
pub struct Keeping {
    daemon: Pid,
    /// Until the daemon has closed it.
    connection: Option<OwnedFd>,
    signals: SignalFd,
    /// What the daemon has said last.
    armed: Option<Vec<OwnedFd>>,
    /// When the daemon began.
    begun: Instant,
    /// It answers.
    has_served: bool,
    young_deaths: u32,
    asked_to_end: Option<Instant>,
    /// The store and the mountpoint, for whoever looks at the list of processes.
    told: [CString; 2],
}

/// What a signal was that the keeper got.
enum Heard {
    /// A child may have ended.
    Child,
    /// The daemon is to have it.
    Forward(Signal),
    Nothing,
}

/// Splits this process, which must have one thread, into a keeper and the daemon that it keeps.
///
/// # Errors
/// Those of the system calls.
pub fn split(store: &Path, mountpoint: &Path) -> io::Result<Side> {
    let told = [store, mountpoint].map(|path| CString::new(path.as_os_str().as_bytes()));
    let [Ok(store), Ok(mountpoint)] = told else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let (here, there) = kvfs_os::connection()?;
    // Before there is a child whose end could be missed.
    let held = held();
    let before = held.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    Ok(match kvfs_os::fork()? {
        ForkResult::Parent { child } => {
            drop(there);
            let signals = SignalFd::with_flags(&held, SfdFlags::SFD_CLOEXEC)?;
            let told = [store, mountpoint];
            Side::Keeper(Keeping {
                daemon: child,
                connection: Some(here),
                signals,
                armed: None,
                begun: Instant::now(),
                has_served: false,
                young_deaths: 0,
                asked_to_end: None,
                told,
            })
        }
        ForkResult::Child => {
            before.thread_set_mask()?;
            Side::Daemon(Kept::new(there))
        }
    })
}

/// Signals that a keeper takes one by one.
fn held() -> SigSet {
    let all = [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGCHLD,
    ];
    all.into_iter().collect()
}

impl Keeping {
    /// Keeps the mount until its daemon ends by itself, or cannot be replaced; what this process is to exit with. `ready`
    /// is called when the mount answers, `reopen` when the log is to be opened anew.
    pub fn run(mut self, mut ready: impl FnMut(), reopen: impl Fn()) -> i32 {
        loop {
            if !self.wait() {
                self.hear(&mut ready);
                continue;
            }
            match self.read_signal() {
                Heard::Child => {
                    if let Some(code) = self.look_for_end() {
                        return code;
                    }
                }
                Heard::Forward(signal) => {
                    if signal == Signal::SIGHUP {
                        reopen();
                    } else {
                        self.asked_to_end = Some(Instant::now());
                    }
                    // One that has ended is looked for next.
                    let _ = kill(self.daemon, signal);
                }
                Heard::Nothing => {}
            }
        }
    }

    /// Waits for something; whether it is a signal. What the daemon says comes first: it said so before it ended.
    fn wait(&self) -> bool {
        let ends = self.connection.iter().map(AsFd::as_fd).chain([self.signals.as_fd()]);
        let mut watched: Vec<PollFd<'_>> =
            ends.map(|end| PollFd::new(end, PollFlags::POLLIN)).collect();
        match poll(&mut watched, PollTimeout::NONE) {
            Ok(_) => self.connection.is_none() || watched[0].any() == Some(false),
            // A signal that could not be read is none.
            Err(_) => true,
        }
    }

    /// Takes what the daemon says.
    fn hear(&mut self, ready: &mut impl FnMut()) {
        let Some(connection) = &self.connection else { return };
        match kvfs_os::receive(connection) {
            Ok(Some(Message { kind: ARM, descriptors })) if descriptors.len() == Place::COUNT => {
                self.armed = Some(descriptors);
            }
            Ok(Some(Message { kind: READY, .. })) => {
                self.has_served = true;
                ready();
            }
            Ok(Some(Message { kind: END, .. })) => {
                self.armed = None;
                let _ = kvfs_os::send(connection, END, &[]);
            }
            Ok(Some(_)) => {}
            // Its end is told by a signal.
            Ok(None) | Err(_) => self.connection = None,
        }
    }

    fn read_signal(&self) -> Heard {
        let Ok(Some(signal)) = self.signals.read_signal() else { return Heard::Nothing };
        // A terminal tells all of its processes.
        let is_of_terminal = signal.ssi_code == libc::SI_KERNEL;
        match Signal::try_from(i32::try_from(signal.ssi_signo).unwrap_or_default()) {
            Ok(Signal::SIGCHLD) => Heard::Child,
            Ok(signal @ (Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP)) if !is_of_terminal => {
                Heard::Forward(signal)
            }
            _ => Heard::Nothing,
        }
    }

    /// What to exit with, if that is due.
    fn look_for_end(&mut self) -> Option<i32> {
        loop {
            // Other children are those of a program that became this one.
            let signal = match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == self.daemon => return Some(code),
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == self.daemon => signal,
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return None,
                _ => continue,
            };
            let exit = 128 + signal as i32;
            match self.replace(signal) {
                Ok(true) => {}
                Ok(false) => return Some(exit),
                Err(error) => {
                    log::error!("no other daemon can be started: {error}: the mount has ended");
                    return Some(exit);
                }
            }
        }
    }

    /// Starts another daemon; whether there is one.
    fn replace(&mut self, signal: Signal) -> io::Result<bool> {
        let now = Instant::now();
        let has_ended = self.asked_to_end.is_some_and(|since| now - since < ENDS_WITHIN);
        let Some(armed) = self.armed.as_ref().filter(|_| !has_ended) else {
            log::error!("the daemon was ended by {signal}");
            return Ok(false);
        };
        // One that never answers may not do so however often it is tried.
        let is_young = !self.has_served || now - self.begun < OLD;
        if is_young && self.young_deaths >= YOUNG_DEATHS_MAX {
            log::error!(
                "the daemon was ended by {signal}, as {YOUNG_DEATHS_MAX} before it, each within {} seconds or before it answered: the mount has ended",
                OLD.as_secs()
            );
            return Ok(false);
        }
        self.young_deaths = if is_young { self.young_deaths + 1 } else { 0 };
        (self.begun, self.has_served) = (now, false);
        log::error!("the daemon was ended by {signal}: another one goes on with the mount");
        let (here, there) = kvfs_os::connection()?;
        match kvfs_os::fork()? {
            ForkResult::Parent { child } => (self.daemon, self.connection) = (child, Some(here)),
            ForkResult::Child => {
                let error = become_daemon(armed, &there, &self.told);
                log::error!("the program of the daemon cannot be run: {error}");
                std::process::exit(NOT_RUN);
            }
        }
        Ok(true)
    }
}

/// Gives this process to the program of the daemon. Comes back only to say why not.
fn become_daemon(armed: &[OwnedFd], connection: &OwnedFd, told: &[CString; 2]) -> io::Error {
    let place = |(descriptor, number)| kvfs_os::inherited_as(descriptor, number);
    let numbers = Place::Left.number()..;
    let placed: io::Result<Vec<OwnedFd>> =
        armed.iter().chain([connection]).zip(numbers).map(place).collect();
    let placed = match placed {
        Ok(placed) => placed,
        Err(error) => return error,
    };
    debug_assert_eq!(placed.last().map(AsRawFd::as_raw_fd), Some(Place::CONNECTION));
    // The others stay held for the daemon, which takes them as it comes to it.
    if let Err(error) = SigSet::from(Signal::SIGCHLD).thread_unblock() {
        return error.into();
    }
    let number = CString::new(Place::Left.number().to_string()).unwrap_or_default();
    take_over(&armed[Place::Program as usize], &number, &variables(), told)
}

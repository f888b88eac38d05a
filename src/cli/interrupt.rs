//! Waiting in a command that goes on until somebody ends it: a signal ends the wait, not the program, so
//! that what is on the screen is left in order. Or it does something before it ends the program.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread::Builder;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// What ends a command.
pub(super) const ENDING: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The time is over.
    Waited,
    /// Somebody wants the command to end, or nobody reads any more what it prints.
    Stopped,
}

/// Does something before a signal ends the program, which it then does as if nobody had looked. What the program
/// begins to do later, in whichever thread, goes on until then.
pub(super) fn before_end(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut ending = SigSet::empty();
    for signal in ENDING {
        // As under nohup: it ends nothing.
        if !is_ignored(signal)? {
            ending.add(signal);
        }
    }
    ending.thread_block()?;
    let waiting = Builder::new().name("kvfs-end".to_owned()).spawn(move || {
        let Ok(signal) = ending.wait() else { return };
        work();
        let mut only = SigSet::empty();
        only.add(signal);
        let _ = only.thread_unblock();
        let _ = raise(signal);
    });
    waiting.map(drop).or_else(|error| {
        ending.thread_unblock()?;
        Err(error)
    })
}

fn is_ignored(signal: Signal) -> io::Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    Ok(ignored.is_some_and(|mask| mask >> (signal as u32 - 1) & 1 == 1))
}

/// Signals that end a command, held back from their usual effect.
#[derive(Debug)]
pub(super) struct Interrupts {
    signals: SignalFd,
}

impl Interrupts {
    /// Holds them back in this thread, and in those that it begins later.
    pub(super) fn hold() -> Result<Interrupts, Errno> {
        Interrupts::hold_all(&ENDING)
    }

    /// The same, and the signal that tells of a terminal's new size.
    pub(super) fn hold_with_resizes() -> Result<Interrupts, Errno> {
        let [interrupt, terminate, hang_up] = ENDING;
        Interrupts::hold_all(&[interrupt, terminate, hang_up, Signal::SIGWINCH])
    }

    fn hold_all(signals: &[Signal]) -> Result<Interrupts, Errno> {
        let mut held = SigSet::empty();
        for signal in signals {
            held.add(*signal);
        }
        held.thread_block()?;
        let signals = SignalFd::with_flags(&held, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Interrupts { signals })
    }

    /// Where they come.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// Whether one of those that came since the last call ends the command.
    pub(super) fn have_ended(&self) -> Result<bool, Errno> {
        let mut have_ended = false;
        while let Some(signal) = self.signals.read_signal()? {
            let number = i32::try_from(signal.ssi_signo).unwrap_or_default();
            have_ended |= ENDING.into_iter().any(|ending| ending as i32 == number);
        }
        Ok(have_ended)
    }

    /// Waits for so long, or until somebody wants an end.
    pub(super) fn wait(&self, time: Duration, output: &impl AsFd) -> Result<Ended, Errno> {
        // That nobody reads the output is told whatever is asked for.
        let mut descriptors = [
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(output.as_fd(), PollFlags::empty()),
        ];
        let time = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
        match poll(&mut descriptors, time) {
            Ok(0) | Err(Errno::EINTR) => Ok(Ended::Waited),
            Ok(_) => Ok(Ended::Stopped),
            Err(errno) => Err(errno),
        }
    }
}

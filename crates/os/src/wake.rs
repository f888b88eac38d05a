//! Ending a system call that a thread waits in.

use std::io;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{Pid, gettid};

/// Not what anybody sends for another reason: its default is to do nothing.
const WAKING: Signal = Signal::SIGURG;

/// A thread whose system calls can be ended, with EINTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wakeable(Pid);

extern "C" fn do_nothing(_: libc::c_int) {}

impl Wakeable {
    /// The calling thread, from now on.
    ///
    /// # Errors
    /// The kernel takes no handler.
    pub fn this_thread() -> io::Result<Wakeable> {
        let action =
            SigAction::new(SigHandler::Handler(do_nothing), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, which every thread may do at any time.
        unsafe { sigaction(WAKING, &action) }?;
        let mut waking = SigSet::empty();
        waking.add(WAKING);
        waking.thread_unblock()?;
        Ok(Wakeable(gettid()))
    }

    /// Ends the call that it waits in, if it does. It may be about to begin one: who wants to be sure wakes it again.
    pub fn wake(self) {
        let (process, signal) = (std::process::id(), WAKING as libc::c_long);
        // SAFETY: three numbers. A thread that is gone is no error here, and none of another process is meant.
        unsafe { libc::syscall(libc::SYS_tgkill, process, self.0.as_raw(), signal) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_thread_that_waits_is_woken() {
        let (read_end, _write_end) = nix::unistd::pipe().unwrap();
        let (told, heard) = std::sync::mpsc::channel();
        let waiting = std::thread::Builder::new().spawn(move || {
            told.send(Wakeable::this_thread().unwrap()).unwrap();
            nix::unistd::read(&read_end, &mut [0; 8])
        });
        let (waiting, thread) = (waiting.unwrap(), heard.recv().unwrap());
        while !waiting.is_finished() {
            thread.wake();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(waiting.join().unwrap(), Err(nix::errno::Errno::EINTR));
        thread.wake();
    }
}

//! A question that may end the process which answers it: a forked child does.
//!
//! The child allocates, which glibc allows after a fork whatever other threads were doing. A lock of
//! the engine that another thread held would keep it waiting for ever, so it has a limited time.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, pipe2};

/// Far more than any answer takes; an engine that starts waits no longer.
const LIMIT: Duration = Duration::from_secs(2);

/// What came of a question.
pub(super) enum Answer {
    Said(String),
    /// The child died of it, as this says.
    Died(String),
    /// Nobody could be asked in time.
    Nothing(String),
}

/// Answers in a child.
pub(super) fn ask(question: impl FnOnce() -> String) -> Answer {
    let Ok((from, to)) = pipe2(OFlag::O_CLOEXEC) else {
        return Answer::Nothing("no pipe for a child process".to_owned());
    };
    // SAFETY: the child runs `answer` alone, which the module's first lines are about.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            drop(from);
            answer(question, File::from(to))
        }
        Ok(ForkResult::Parent { child }) => {
            drop(to);
            listen(child, File::from(from))
        }
        Err(error) => Answer::Nothing(format!("no child process: {error}")),
    }
}

/// Quietly: neither a report of a crash nor a handler of the engine is for the child.
fn answer(question: impl FnOnce() -> String, mut to: File) -> ! {
    for caught in [
        Signal::SIGSEGV,
        Signal::SIGBUS,
        Signal::SIGILL,
        Signal::SIGFPE,
        Signal::SIGABRT,
        Signal::SIGTRAP,
    ] {
        // SAFETY: the default is no function.
        let _ = unsafe { signal(caught, SigHandler::SigDfl) };
    }
    let _ = nix::sys::prctl::set_dumpable(false);
    if let Ok(nowhere) = File::options().write(true).open("/dev/null") {
        let _ = nix::unistd::dup2_stdout(&nowhere);
        let _ = nix::unistd::dup2_stderr(&nowhere);
    }
    let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(question));
    let _ = to.write_all(said.unwrap_or_default().as_bytes());
    // SAFETY: nothing of the engine's may run at the end of a copy of it.
    unsafe { libc::_exit(0) }
}

fn listen(child: Pid, mut from: File) -> Answer {
    let is_there = is_answered(&from, Instant::now() + LIMIT);
    if !is_there {
        let _ = kill(child, Signal::SIGKILL);
    }
    let mut said = String::new();
    let _ = from.read_to_string(&mut said);
    // An engine that reaps its children itself, or has none reaped, leaves no status.
    let status = loop {
        match waitpid(child, None) {
            Err(Errno::EINTR) => {}
            status => break status,
        }
    };
    match status {
        _ if !said.is_empty() => Answer::Said(said),
        _ if !is_there => Answer::Nothing(format!("no answer within {} s", LIMIT.as_secs())),
        Ok(WaitStatus::Signaled(_, signal, _)) => Answer::Died(signal.to_string()),
        status => Answer::Died(format!("{status:?}")),
    }
}

/// Waits until the child has written, or is gone.
fn is_answered(from: &File, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout) {
            Err(Errno::EINTR) => {}
            Ok(count) => return count > 0,
            Err(_) => return false,
        }
    }
}

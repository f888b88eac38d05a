//! Becoming a daemon without hiding what goes wrong.
//!
//! The process forks before it has threads. The child tells the parent through a pipe either
//! "ready" or, in one line, why not; a child that dies silently closes the pipe. The parent
//! returns only then, so `kvfs mount` and mount(8) report the real error.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::OFlag;
use nix::unistd::{ForkResult, Pid};

use crate::sys;

/// The message that means success; an error line starts with something else.
const READY: &[u8] = b"\0ready";
/// An error line is far shorter.
const MESSAGE_BYTES_MAX: u64 = 8 << 10;

/// Which of the two processes this is.
#[derive(Debug)]
pub(crate) enum Side {
    /// The one that was called.
    Parent(Child),
    /// The one that stays.
    Daemon(Reporter),
}

/// The daemon, seen by the parent.
#[derive(Debug)]
pub(crate) struct Child {
    /// Its process.
    pub pid: Pid,
    pipe: File,
}

/// Tells the parent, once.
#[derive(Debug, Clone)]
pub(crate) struct Reporter(Arc<Mutex<Option<File>>>);

/// Splits into parent and daemon. Fails if the process has more than one thread.
pub(crate) fn split() -> io::Result<Side> {
    let (read_end, write_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    Ok(match sys::fork()? {
        ForkResult::Parent { child } => {
            Side::Parent(Child { pid: child, pipe: File::from(read_end) })
        }
        ForkResult::Child => {
            let pipe = File::from(write_end);
            Side::Daemon(Reporter(Arc::new(Mutex::new(Some(pipe)))))
        }
    })
}

impl Child {
    /// Waits for the daemon's word; the error is its line.
    pub(crate) fn wait_until_ready(self) -> Result<(), Option<String>> {
        let mut message = Vec::new();
        // What was read before an error is all there is.
        let _ = self.pipe.take(MESSAGE_BYTES_MAX).read_to_end(&mut message);
        match message.as_slice() {
            READY => Ok(()),
            [] => Err(None),
            line => Err(Some(String::from_utf8_lossy(line).into_owned())),
        }
    }
}

impl Reporter {
    /// Says that the mount is ready. False if the parent is gone: whoever asked for the mount
    /// has given up on it.
    pub(crate) fn ready(&self) -> bool {
        self.say(READY)
    }

    /// Leaves it to another process that has the same caller.
    pub(crate) fn leave(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Says why there is no mount; after [`ready`](Self::ready) nobody listens any more.
    pub(crate) fn failed(&self, line: &str) {
        self.say(line.as_bytes());
    }

    /// Closes what the caller had open beyond the standard streams: a daemon that kept it would
    /// hold up whoever waits for the end of a pipe, or keep its own mount busy.
    fn close_others(&self) -> io::Result<()> {
        let pipe = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = pipe.as_ref().map(AsRawFd::as_raw_fd);
        let open: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        for descriptor in open.into_iter().filter(|number| *number > 2 && Some(*number) != kept) {
            // The listing's own descriptor is closed already.
            let _ = nix::unistd::close(descriptor);
        }
        Ok(())
    }

    fn say(&self, message: &[u8]) -> bool {
        let pipe = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        pipe.is_some_and(|mut pipe| pipe.write_all(message).is_ok())
    }
}

/// Lets go of the terminal, the working directory and the caller's files; standard error becomes
/// the log.
pub(crate) fn detach(log: File, reporter: &Reporter) -> io::Result<()> {
    nix::unistd::setsid()?;
    std::env::set_current_dir(Path::new("/"))?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    nix::unistd::dup2_stdout(&null)?;
    nix::unistd::dup2_stderr(&log)?;
    drop((log, null));
    reporter.close_others()
}

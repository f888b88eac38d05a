//! What goes wrong, as exceptions: each is an `OSError` with the errno and the reason.
//!
//! A [`Failure`] is made where the interpreter is not held, and becomes an exception where it is.

use std::fmt;
use std::io;
use std::path::Path;

use kvfs_os::{is_daemon_gone, mountinfo};
use kvfs_page::PageError;
use kvfs_runtime::attention::AttentionError;
use kvfs_runtime::reader::ReadError;
use kvfs_runtime::sequence::SequenceError;
use pyo3::PyErr;

/// The exceptions, in a module of their own because the macro makes them public.
#[allow(missing_docs, unreachable_pub, reason = "what the macro makes has its text for Python")]
pub(crate) mod exceptions {
    use pyo3::create_exception;
    use pyo3::exceptions::PyOSError;

    create_exception!(kvfs, Error, PyOSError, "What the mount, the kernel or kvfs refuses.");
    create_exception!(kvfs, InvalidArgument, Error, "Arguments that do not fit: correct the call.");
    create_exception!(
        kvfs,
        Missing,
        Error,
        "What was asked for is not there: compute it again, or name another one."
    );
    create_exception!(
        kvfs,
        Changed,
        Error,
        "Files are others than when they were listed, or the process was forked: open it again."
    );
    create_exception!(kvfs, Refused, Error, "Bytes that the manifest or the mount does not allow.");
    create_exception!(
        kvfs,
        Busy,
        Error,
        "Another writer has it: wait for that one, or fork the sequence."
    );
    create_exception!(
        kvfs,
        Disconnected,
        Error,
        "The mount is gone: mount it again, then open anew."
    );
}

/// Which exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Other,
    Argument,
    Missing,
    Changed,
    Refused,
    Busy,
    Disconnected,
}

/// An exception to be.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    errno: i32,
    text: String,
}

impl Failure {
    /// Correct the call.
    pub(crate) fn argument(why: impl Into<String>) -> Self {
        Self { kind: Kind::Argument, errno: libc::EINVAL, text: why.into() }
    }

    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Self { kind: Kind::Missing, errno: libc::ENOENT, text: what.into() }
    }

    pub(crate) fn changed(why: impl Into<String>) -> Self {
        Self { kind: Kind::Changed, errno: libc::ESTALE, text: why.into() }
    }

    pub(crate) fn refused(why: impl Into<String>) -> Self {
        Self { kind: Kind::Refused, errno: libc::EINVAL, text: why.into() }
    }

    pub(crate) fn busy(why: impl Into<String>) -> Self {
        Self { kind: Kind::Busy, errno: libc::EBUSY, text: why.into() }
    }

    /// The error of a system call about a file.
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let place = path.display();
            if is_daemon_gone(errno) {
                return Self::disconnected(path);
            }
            let (kind, why) = match errno {
                libc::ENOENT => (Kind::Missing, None),
                libc::EINVAL => (Kind::Refused, reason_of_mount(path)),
                _ => (Kind::Other, None),
            };
            let text =
                why.map_or_else(|| format!("{place}: {error}"), |why| format!("{place}: {why}"));
            Self { kind, errno, text }
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    fn disconnected(path: &Path) -> Self {
        let text = format!(
            "{}: the mount is gone: mount the store again, then open the model anew",
            path.display()
        );
        Self { kind: Kind::Disconnected, errno: libc::ENOTCONN, text }
    }
}

/// Why the mount refused a file: the last of its lines that names it.
fn reason_of_mount(path: &Path) -> Option<String> {
    let (mount, resolved) = mountinfo::kvfs_above(path).ok()?;
    let below = resolved.strip_prefix(&mount.mountpoint).ok()?.to_str()?.to_owned();
    let lines = std::fs::read_to_string(mount.mountpoint.join(".kvfs/errors")).ok()?;
    let line = lines.lines().rev().find(|line| line.contains(&below))?;
    // Without its time.
    Some(line.split_once(' ').map_or(line, |(_, text)| text).to_owned())
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let text = error.to_string();
        match error {
            ReadError::Io { path, error } => Self::io(&path)(error),
            ReadError::Disconnected(path) => Self::disconnected(&path),
            ReadError::Missing { .. } => Self { errno: libc::ENODATA, ..Self::missing(text) },
            ReadError::Manifest { .. } => Self::missing(text),
            ReadError::Changed(_) => Self::changed(text),
            ReadError::Refused { .. } => Self::refused(text),
            ReadError::Arguments(_) => Self::argument(text),
            ReadError::Attention(error) => error.into(),
        }
    }
}

impl From<SequenceError> for Failure {
    fn from(error: SequenceError) -> Self {
        let text = error.to_string();
        match error {
            SequenceError::Io { path, error } => Self::io(&path)(error),
            SequenceError::Read(error) => error.into(),
            SequenceError::NoSuchSequence(_) => Self::missing(text),
            SequenceError::Changed { .. } => Self::changed(text),
            SequenceError::Exists(_) => Self { kind: Kind::Busy, errno: libc::EEXIST, text },
            SequenceError::State(_) | SequenceError::Manifest(_) => Self::refused(text),
            SequenceError::Name(_)
            | SequenceError::NoSnapshot { .. }
            | SequenceError::NoWindow { .. }
            | SequenceError::Positions(_) => Self::argument(text),
        }
    }
}

impl From<AttentionError> for Failure {
    fn from(error: AttentionError) -> Self {
        Self::argument(error.to_string())
    }
}

impl From<PageError> for Failure {
    fn from(error: PageError) -> Self {
        Self::refused(error.to_string())
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        let Failure { kind, errno, text } = failure;
        let arguments = (errno, text);
        match kind {
            Kind::Other => exceptions::Error::new_err(arguments),
            Kind::Argument => exceptions::InvalidArgument::new_err(arguments),
            Kind::Missing => exceptions::Missing::new_err(arguments),
            Kind::Changed => exceptions::Changed::new_err(arguments),
            Kind::Refused => exceptions::Refused::new_err(arguments),
            Kind::Busy => exceptions::Busy::new_err(arguments),
            Kind::Disconnected => exceptions::Disconnected::new_err(arguments),
        }
    }
}

//! What can go wrong with a remote, one variant per decision of the caller.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;

/// Result of an operation on a remote.
pub type Result<T> = std::result::Result<T, RemoteError>;

/// Why an operation on a remote failed. The text says what was tried, where, and the cause.
#[derive(Clone, Debug)]
pub enum RemoteError {
    /// The object is not there: another copy, or an error to the reader.
    Missing(String),
    /// The remote did not answer, or answered that it cannot now: try again later.
    Unreachable(String),
    /// No byte moved for the time allowed; whether the operation takes place is unknown.
    Timeout(String),
    /// Bytes came, but too slowly (see `pace`): try again later. The remote answers, so it is not down.
    Slow(String),
    /// No space or quota: stop demoting.
    Full(String),
    /// Credentials or permissions: somebody must change them.
    Denied(String),
    /// The bytes are not what was stored: another copy; the damaged one may be replaced.
    Corrupt(String),
    /// What is in this place is no remote, another one, or of another version: refuse it.
    Foreign(String),
    /// The remote is sealed and the key is missing or another one, or it is not sealed and there is
    /// a key: refuse to use it.
    Key(String),
    /// The request itself is wrong or not supported: trying again does not help.
    Other(String),
    /// The caller's own source or sink failed, not the remote.
    Local(Arc<io::Error>),
}

impl RemoteError {
    /// Of the caller's source or sink.
    pub fn local(error: io::Error) -> RemoteError {
        RemoteError::Local(Arc::new(error))
    }

    /// From a system call on a shared directory. `what` says the operation and the name.
    pub fn from_errno(what: &str, place: &str, error: &io::Error) -> RemoteError {
        let text = format!("remote {place}: {what}: {error}");
        match error.raw_os_error() {
            Some(libc::ENOENT) => RemoteError::Missing(text),
            Some(libc::ENOSPC | libc::EDQUOT) => RemoteError::Full(text),
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => RemoteError::Denied(text),
            Some(libc::ETIMEDOUT) => RemoteError::Timeout(text),
            // A link, or a socket, where an object should be.
            Some(libc::ELOOP | libc::ENXIO) => RemoteError::Corrupt(text),
            Some(code) if AWAY.contains(&code) => RemoteError::Unreachable(text),
            _ => RemoteError::Other(text),
        }
    }

    /// What was tried, where, and the cause, without advice.
    pub(super) fn text(&self) -> Cow<'_, str> {
        match self {
            RemoteError::Missing(text)
            | RemoteError::Unreachable(text)
            | RemoteError::Timeout(text)
            | RemoteError::Slow(text)
            | RemoteError::Full(text)
            | RemoteError::Denied(text)
            | RemoteError::Corrupt(text)
            | RemoteError::Foreign(text)
            | RemoteError::Key(text)
            | RemoteError::Other(text) => text.into(),
            RemoteError::Local(error) => format!("on this machine: {error}").into(),
        }
    }

    /// The same for whoever asked once: nobody tries again in their place.
    pub fn told_once(&self) -> String {
        let text = self.text();
        match self {
            RemoteError::Unreachable(_) => {
                format!("{text} (see that it is there and answers, and run this again)")
            }
            RemoteError::Timeout(_) | RemoteError::Slow(_) => {
                format!("{text} (check the network and the server, and run this again)")
            }
            _ => self.to_string(),
        }
    }

    /// Whether the remote itself failed, rather than said no.
    pub fn is_outage(&self) -> bool {
        use RemoteError::{Slow, Timeout, Unreachable};
        matches!(self, Unreachable(_) | Timeout(_) | Slow(_))
    }

    /// The word for it in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            RemoteError::Missing(_) => "missing",
            RemoteError::Unreachable(_) => "unreachable",
            RemoteError::Timeout(_) => "timeout",
            RemoteError::Slow(_) => "slow",
            RemoteError::Full(_) => "full",
            RemoteError::Denied(_) => "denied",
            RemoteError::Corrupt(_) => "corrupt",
            RemoteError::Foreign(_) => "foreign",
            RemoteError::Key(_) => "key",
            RemoteError::Other(_) => "other",
            RemoteError::Local(_) => "local",
        }
    }
}

/// What a network filesystem answers while its server is away. ESTALE: the server has forgotten
/// the file handle; EIO: a soft mount gave up; ENOTCONN: a user-space client died.
const AWAY: [i32; 15] = [
    libc::ESTALE,
    libc::EIO,
    libc::EREMOTEIO,
    libc::ENOTCONN,
    libc::ECONNREFUSED,
    libc::ECONNRESET,
    libc::ECONNABORTED,
    libc::EHOSTDOWN,
    libc::EHOSTUNREACH,
    libc::ENETDOWN,
    libc::ENETUNREACH,
    libc::ESHUTDOWN,
    libc::EAGAIN,
    libc::ENODEV,
    libc::ENXIO,
];

impl fmt::Display for RemoteError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text())?;
        let advice = match self {
            RemoteError::Missing(_) => "the object was deleted or never stored",
            RemoteError::Unreachable(_) => {
                "local files are unaffected, it is tried again by itself"
            }
            RemoteError::Timeout(_) | RemoteError::Slow(_) => {
                "check the network and the server, it is tried again by itself"
            }
            RemoteError::Full(_) => "make room there, or collect garbage with kvfs gc",
            RemoteError::Denied(_) => "check the directory's permissions or the AWS_* credentials",
            RemoteError::Corrupt(_) => "this copy is not used",
            RemoteError::Foreign(_) => "name an empty place or the right remote",
            RemoteError::Key(_) | RemoteError::Other(_) | RemoteError::Local(_) => return Ok(()),
        };
        write!(formatter, " ({advice})")
    }
}

impl std::error::Error for RemoteError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RemoteError::Local(error) => Some(error.as_ref()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asked_once_is_not_told_that_it_is_tried_again() {
        for error in [RemoteError::Unreachable("it".into()), RemoteError::Timeout("it".into())] {
            assert!(error.to_string().contains("tried again by itself"));
            let told = error.told_once();
            assert!(told.starts_with("it (") && told.ends_with("and run this again)"), "{told}");
        }
        let full = RemoteError::Full("it".into());
        assert_eq!(full.told_once(), full.to_string());
    }

    #[test]
    fn each_errno_leads_to_its_decision() {
        fn check(errno: i32, expected: &str) {
            let error = io::Error::from_raw_os_error(errno);
            let error = RemoteError::from_errno("get blobs/x", "/mnt/share", &error);
            assert_eq!(error.label(), expected, "{errno}");
            let text = error.to_string();
            assert!(text.starts_with("remote /mnt/share: get blobs/x: "), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
        check(libc::ENOENT, "missing");
        check(libc::ENOSPC, "full");
        check(libc::EDQUOT, "full");
        check(libc::EROFS, "denied");
        check(libc::EACCES, "denied");
        check(libc::ESTALE, "unreachable");
        check(libc::EIO, "unreachable");
        check(libc::ETIMEDOUT, "timeout");
        check(libc::EINVAL, "other");
    }
}

//! What a reader of a sequence can run into.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::attention::AttentionError;
use crate::page::{Layer, PageError, TokenStart};
use crate::sys;

/// One variant for each decision of the caller.
#[derive(Debug)]
pub enum ReadError {
    /// There is no sequence of a model here: the manifest is missing or refused.
    Manifest {
        /// Of `manifest.json`.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Tokens in the middle of what was asked for have no page: compute them again.
    Missing {
        /// The layer.
        layer: Layer,
        /// The first token that is missing.
        start: TokenStart,
    },
    /// A file is another one than when the sequence was listed:
    /// [`refresh`](super::Sequence::refresh), and begin the scan again.
    Changed(PathBuf),
    /// A page that the manifest does not allow. A mount shows none, so this is no mount, or the
    /// manifest of another model.
    Refused {
        /// The page.
        path: PathBuf,
        /// What is wrong with it.
        error: PageError,
    },
    /// The mount is gone (ENOTCONN, or ECONNABORTED and ECANCELED for what was under way): mount it again and open the sequence anew. Pages that are
    /// already loaded stay valid.
    Disconnected(PathBuf),
    /// Anything else that the kernel answers, such as a disk error or a remote tier's deadline.
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// Arguments that do not fit the sequence: correct the call.
    Arguments(String),
    /// Attention refused the pages or the arguments.
    Attention(AttentionError),
}

impl ReadError {
    /// The error of a system call.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| {
            if error.raw_os_error().is_some_and(sys::is_daemon_gone) {
                Self::Disconnected(path.to_owned())
            } else {
                Self::Io { path: path.to_owned(), error }
            }
        }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manifest { path, why } => write!(f, "{}: {why}", path.display()),
            Self::Missing { layer, start } => {
                write!(f, "layer {layer}: the page with token {start} is missing: compute it again")
            }
            Self::Changed(path) => {
                let path = path.display();
                write!(f, "{path}: changed since the sequence was listed: refresh it")
            }
            Self::Refused { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Disconnected(path) => write!(f, "{}: the mount is gone", path.display()),
            Self::Io { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Arguments(why) => write!(f, "sequence: {why}"),
            Self::Attention(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ReadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused { error, .. } => Some(error),
            Self::Io { error, .. } => Some(error),
            Self::Attention(error) => Some(error),
            _ => None,
        }
    }
}

impl From<AttentionError> for ReadError {
    fn from(error: AttentionError) -> Self {
        Self::Attention(error)
    }
}

//! What an operation on a sequence can run into.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::page::{Layer, PageError};
use crate::reader::ReadError;

/// One variant for each decision of the caller. The sequence is as it was before the operation,
/// unless a variant says otherwise.
#[derive(Debug)]
pub enum SequenceError {
    /// This is no name of a sequence: choose another one.
    Name(String),
    /// There is no such directory.
    NoSuchSequence(PathBuf),
    /// The sequence has tokens, and copying adds nothing to those: clear it, or choose another name.
    Exists(String),
    /// A recurrent layer has no snapshot after this many tokens: take one before tokens are
    /// added that may have to go again.
    NoSnapshot {
        /// The layer.
        layer: Layer,
        /// Tokens that would stay.
        tokens: u64,
    },
    /// Layers with a window have forgotten what the new end looks at.
    NoWindow {
        /// The first of them.
        layer: Layer,
        /// Rows that are gone, from the first to behind the last.
        rows: Range<u64>,
        /// Tokens that would stay.
        tokens: u64,
        /// The fewest, beside none, that can stay.
        least: u64,
    },
    /// Others changed the sequence each time that it was read: nothing was done. Wait for them, or let them hold the lock.
    Changed {
        /// Its name.
        name: String,
        /// How often it was read.
        attempts: u32,
        /// What happened the last time.
        what: String,
    },
    /// No token can stand where the operation would move some.
    Positions(PageError),
    /// A manifest cannot say so.
    Manifest(PageError),
    /// A stream that is no state of a sequence of this model.
    State(String),
    /// The sequence cannot be read.
    Read(ReadError),
    /// Anything else that the kernel answers. What an operation has begun is complete or not
    /// there; files that nobody needs any more may be left.
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
}

impl SequenceError {
    /// The error of a system call.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| Self::Io { path: path.to_owned(), error }
    }
}

impl fmt::Display for SequenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(
                f,
                "{name:?} is no name of a sequence: not empty, without /, not beginning with a dot, \
                 not ending in .tmp or ~"
            ),
            Self::NoSuchSequence(path) => write!(f, "{}: no such sequence", path.display()),
            Self::Exists(name) => {
                write!(f, "sequence {name} has tokens: clear it first, or choose another name")
            }
            Self::NoSnapshot { layer, tokens } => write!(
                f,
                "layer {layer} is recurrent and has no snapshot after {tokens} tokens: \
                 it can only go back to where one was taken"
            ),
            Self::NoWindow { layer, rows, tokens, least } => write!(
                f,
                "layer {layer} has a window, and its rows {} to {} are gone, which an end after {tokens} \
                 tokens looks at: it can end after {least} tokens or more, or be cleared",
                rows.start,
                rows.end - 1
            ),
            Self::Changed { name, attempts: 1, what } => {
                write!(f, "sequence {name} changed while it was read: {what}")
            }
            Self::Changed { name, attempts, what } => {
                write!(
                    f,
                    "sequence {name} changed each of {attempts} times that it was read: {what}"
                )
            }
            Self::Positions(error) | Self::Manifest(error) => error.fmt(f),
            Self::State(why) => write!(f, "state of a sequence: {why}"),
            Self::Read(error) => error.fmt(f),
            Self::Io { path, error } => write!(f, "{}: {error}", path.display()),
        }
    }
}

impl std::error::Error for SequenceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Positions(error) | Self::Manifest(error) => Some(error),
            Self::Read(error) => Some(error),
            Self::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl From<ReadError> for SequenceError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

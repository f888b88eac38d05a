//! Why a copy could not be encoded or decoded.

use std::fmt;
use std::io;

/// Why a copy could not be encoded or decoded. One variant per decision of a caller; whatever the
/// sink received is worthless then.
#[derive(Debug)]
pub enum EncodingError {
    /// Reading failed; nothing is known about the bytes. Try again, or another copy.
    Source(io::Error),
    /// Writing failed: the destination is full or broken, the source may be fine.
    Sink(io::Error),
    /// The object to encode is not as long as its record says: it was changed meanwhile.
    Length {
        /// Bytes on record.
        expected: u64,
        /// Bytes that were there; one more than expected if there were any more.
        found: u64,
    },
    /// The blob is damaged or another one: quarantine it, take another copy.
    Corrupt {
        /// Byte of the blob at which it was noticed.
        at: u64,
        /// What is wrong there.
        what: String,
    },
    /// A newer kvfs wrote the blob: upgrade instead of dropping it.
    Unsupported(String),
}

impl EncodingError {
    pub(super) fn corrupt(at: u64, what: impl Into<String>) -> EncodingError {
        EncodingError::Corrupt { at, what: what.into() }
    }
}

impl fmt::Display for EncodingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(error) => write!(f, "copy cannot be read: {error}"),
            Self::Sink(error) => write!(f, "copy cannot be written: {error}"),
            Self::Length { expected, found } if found > expected => {
                write!(f, "object is longer than the {expected} bytes on record")
            }
            Self::Length { expected, found } => {
                write!(f, "object ends after {found} of the {expected} bytes on record")
            }
            Self::Corrupt { at, what } => write!(f, "copy is damaged at byte {at}: {what}"),
            Self::Unsupported(what) => write!(f, "copy needs a newer kvfs: {what}"),
        }
    }
}

impl std::error::Error for EncodingError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Source(error) | Self::Sink(error) => Some(error),
            Self::Length { .. } | Self::Corrupt { .. } | Self::Unsupported(_) => None,
        }
    }
}

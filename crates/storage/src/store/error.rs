//! Why a store cannot be used.

use std::io;
use std::path::PathBuf;

/// Why a store cannot be used, by what the user has to do.
#[derive(Debug)]
pub enum StoreError {
    /// The directory is not a store.
    NotAStore(PathBuf),
    /// Another daemon has it.
    Locked(PathBuf),
    /// It was written by another version.
    Version(String),
    /// Its metadata contradicts itself or cannot be decoded.
    Corrupt(String),
    /// A directory is missing, and records tell of files in it, or something else is in the place of a part.
    Incomplete(String),
    /// There are objects, but no metadata.
    MetadataMissing(PathBuf),
    /// The metadata was to be made anew, but can be read.
    MetadataSound(PathBuf),
    /// Nothing can be written where it lies.
    ReadOnlyMedia(PathBuf),
    /// The numbers for inodes and objects are used up.
    Full,
    /// The database failed.
    Database(Box<redb::Error>),
    /// The disk failed.
    Io(io::Error),
}

impl StoreError {
    /// Whether this is the refusal with which the database answers everything after its first failure.
    pub fn is_after_a_failure(&self) -> bool {
        matches!(self, StoreError::Database(error) if matches!(**error, redb::Error::PreviousIo))
    }
}

impl std::fmt::Display for StoreError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StoreError::NotAStore(path) => write!(
                formatter,
                "{} is not a kvfs store and not empty: name a store or an empty directory",
                path.display()
            ),
            StoreError::Locked(path) => write!(
                formatter,
                "the store {} is in use by another kvfs: unmount it first",
                path.display()
            ),
            StoreError::Version(text) | StoreError::Incomplete(text) => formatter.write_str(text),
            StoreError::Corrupt(what) => {
                write!(formatter, "the store's metadata is damaged ({what}): run kvfs fsck")
            }
            StoreError::MetadataMissing(path) => write!(
                formatter,
                "the store {} has objects but no meta.redb: restore it from a backup, or make it anew \
                 with kvfs fsck --rebuild",
                path.display()
            ),
            StoreError::MetadataSound(path) => write!(
                formatter,
                "{} can be read, so kvfs fsck --repair is what to run: --rebuild would forget names, \
                 attributes and links (move the file away to insist)",
                path.join("meta.redb").display()
            ),
            StoreError::ReadOnlyMedia(path) => write!(
                formatter,
                "the store {} is on a read-only filesystem: mount it with --read-only, check it with \
                 kvfs fsck and nothing else, or copy it to where it can be written",
                path.display()
            ),
            StoreError::Full => formatter.write_str("the store has used up its numbers"),
            StoreError::Database(error) => write!(formatter, "meta.redb: {error}"),
            StoreError::Io(error) => write!(formatter, "{error}"),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StoreError::Database(error) => Some(error),
            StoreError::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> StoreError {
        StoreError::Io(error)
    }
}

macro_rules! from_redb {
    ($($error:ty),*) => {$(
        impl From<$error> for StoreError {
            fn from(error: $error) -> StoreError {
                match redb::Error::from(error) {
                    redb::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
                        StoreError::Corrupt(error.to_string())
                    }
                    redb::Error::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        StoreError::Corrupt("meta.redb was cut short".to_owned())
                    }
                    redb::Error::Io(error) => StoreError::Io(error),
                    redb::Error::Corrupted(what) => StoreError::Corrupt(what),
                    error => StoreError::Database(Box::new(error)),
                }
            }
        }
    )*};
}
from_redb!(
    redb::DatabaseError,
    redb::TransactionError,
    redb::TableError,
    redb::StorageError,
    redb::CommitError
);

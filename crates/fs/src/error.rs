//! What can go wrong in an operation, one variant per decision of the caller, and the one table
//! that maps them to errno.

use std::io;

use kvfs_storage::store::StoreError;
use kvfs_storage::tier::remote::RemoteError;

/// An operation's failure.
#[derive(Debug)]
pub enum FsError {
    /// No such name or inode.
    NotFound,
    /// The name is taken.
    Exists,
    /// A directory was needed.
    NotDirectory,
    /// Anything but a directory was needed.
    IsDirectory,
    /// The directory still has names.
    NotEmpty,
    /// The name is longer than 255 bytes.
    NameTooLong,
    /// The file has as many links as it may have.
    TooManyLinks,
    /// Sealed files never change; reserved names cannot be made; rows are only appended.
    NotPermitted,
    /// The caller may not follow the path.
    NoAccess,
    /// A page or manifest was refused; the reason is in `.kvfs/errors`.
    Refused,
    /// The arguments make no sense.
    Invalid,
    /// A directory of pages cannot move where its pages would mean something else; copy instead.
    CrossDevice,
    /// The append would cross the end of the page.
    CrossesPage,
    /// The inode was replaced; look the name up again.
    Stale,
    /// The stored bytes are not what was sealed.
    Corrupt,
    /// The file has no such attribute.
    NoAttribute,
    /// The buffer is too small for the attribute.
    AttributeRange,
    /// The attribute is larger than 64 KiB.
    AttributeTooLarge,
    /// Not offered on this kind of file.
    Unsupported,
    /// The file is being sealed, or a program runs from it.
    Busy,
    /// Somebody has the file open or mapped: try again after the last close.
    InUse,
    /// The tier has no room for the file.
    NoRoom,
    /// The file is larger than what moves between tiers.
    TooLarge,
    /// Too much waits already.
    TryAgain,
    /// As many files are open as the daemon may have open for its clients.
    TooManyOpen,
    /// The handle is not open, or not for this.
    BadHandle,
    /// A daemon of this mount has died since the file was opened, or since it was made durable last: what was written may
    /// be gone.
    Lost,
    /// The store stopped taking changes after a disk error.
    ReadOnly,
    /// The offset is past the end (`SEEK_HOLE`).
    NoSuchOffset,
    /// The disk cannot read the bytes of a file, which may be what was written, and no other copy could be had.
    Unreadable(io::Error),
    /// The disk failed.
    Io(io::Error),
    /// The remote did not give what only it has.
    Remote(RemoteError),
    /// The metadata failed.
    Store(StoreError),
}

impl FsError {
    /// The errno that the caller of the system call sees.
    pub fn errno(&self) -> i32 {
        match self {
            FsError::NotFound => libc::ENOENT,
            FsError::Exists => libc::EEXIST,
            FsError::NotDirectory => libc::ENOTDIR,
            FsError::IsDirectory => libc::EISDIR,
            FsError::NotEmpty => libc::ENOTEMPTY,
            FsError::NameTooLong => libc::ENAMETOOLONG,
            FsError::TooManyLinks => libc::EMLINK,
            FsError::NotPermitted => libc::EPERM,
            FsError::NoAccess => libc::EACCES,
            FsError::Refused | FsError::Invalid => libc::EINVAL,
            FsError::CrossDevice => libc::EXDEV,
            FsError::CrossesPage | FsError::TooLarge => libc::EFBIG,
            FsError::Stale => libc::ESTALE,
            FsError::NoAttribute => libc::ENODATA,
            FsError::AttributeRange => libc::ERANGE,
            FsError::AttributeTooLarge => libc::E2BIG,
            FsError::Unsupported => libc::EOPNOTSUPP,
            FsError::Busy => libc::ETXTBSY,
            FsError::InUse => libc::EBUSY,
            FsError::NoRoom => libc::ENOSPC,
            FsError::TryAgain => libc::EAGAIN,
            FsError::TooManyOpen => libc::ENFILE,
            FsError::BadHandle => libc::EBADF,
            FsError::ReadOnly => libc::EROFS,
            FsError::NoSuchOffset => libc::ENXIO,
            FsError::Io(error) | FsError::Store(StoreError::Io(error)) => errno_of_disk(error),
            FsError::Remote(RemoteError::Local(error)) => errno_of_disk(error),
            FsError::Remote(RemoteError::Timeout(_) | RemoteError::Slow(_)) => libc::ETIMEDOUT,
            FsError::Corrupt
            | FsError::Lost
            | FsError::Unreadable(_)
            | FsError::Remote(_)
            | FsError::Store(_) => libc::EIO,
        }
    }

    /// The same where a name has led to something a moment ago: then what is gone is stale, and who asks by a path has
    /// the kernel look it up again.
    pub(crate) fn after_lookup(self) -> FsError {
        match self {
            FsError::NotFound => FsError::Stale,
            other => other,
        }
    }

    /// Whether the daemon's log should have it: the caller did nothing wrong.
    pub fn is_internal(&self) -> bool {
        matches!(
            self,
            FsError::Corrupt
                | FsError::Unreadable(_)
                | FsError::Io(_)
                | FsError::Store(_)
                | FsError::Remote(_)
        )
    }
}

/// What the caller hears of an error below. ENOSYS is no answer: the kernel takes it for a daemon that does not do
/// such a thing, tells the caller of an fsync that it succeeded, and never asks again.
fn errno_of_disk(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        // The daemon has them, not whoever asked.
        Some(libc::EMFILE) => libc::ENFILE,
        // Somebody has put a link in the place of a part of the store.
        Some(libc::ENOSYS | libc::ELOOP) | None => libc::EIO,
        Some(code) => code,
    }
}

impl std::fmt::Display for FsError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FsError::Io(error) | FsError::Unreadable(error) => write!(formatter, "{error}"),
            FsError::Store(error) => write!(formatter, "{error}"),
            FsError::Remote(error) => write!(formatter, "{error}"),
            other => write!(formatter, "{}", io::Error::from_raw_os_error(other.errno())),
        }
    }
}

impl std::error::Error for FsError {}

impl From<io::Error> for FsError {
    fn from(error: io::Error) -> FsError {
        FsError::Io(error)
    }
}

impl From<StoreError> for FsError {
    fn from(error: StoreError) -> FsError {
        FsError::Store(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_disk(code: i32) -> io::Error {
        io::Error::from_raw_os_error(code)
    }

    #[test]
    fn callers_hear_what_the_disk_said_but_never_that_nothing_can_be_done() {
        fn check(error: &FsError, expected: i32) {
            assert_eq!(error.errno(), expected, "{error:?}");
        }
        check(&FsError::Io(of_disk(libc::ENOSPC)), libc::ENOSPC);
        check(&FsError::Store(StoreError::Io(of_disk(libc::EDQUOT))), libc::EDQUOT);
        check(&FsError::Remote(RemoteError::Local(of_disk(libc::EROFS).into())), libc::EROFS);
        // The kernel would never ask again.
        check(&FsError::Io(of_disk(libc::ENOSYS)), libc::EIO);
        check(&FsError::Io(io::Error::other("no number")), libc::EIO);
        check(&FsError::Remote(RemoteError::Timeout("slow".into())), libc::ETIMEDOUT);
        check(&FsError::Corrupt, libc::EIO);
        check(&FsError::Refused, libc::EINVAL);
    }

    #[test]
    fn what_is_gone_after_a_lookup_is_stale() {
        assert!(matches!(FsError::NotFound.after_lookup(), FsError::Stale));
        assert!(matches!(FsError::Exists.after_lookup(), FsError::Exists));
    }

    #[test]
    fn the_log_has_what_callers_did_not_cause() {
        let internal = [
            FsError::Corrupt,
            FsError::Io(of_disk(libc::EIO)),
            FsError::Store(StoreError::Io(of_disk(libc::EIO))),
            FsError::Remote(RemoteError::Timeout("slow".into())),
        ];
        assert!(internal.iter().all(FsError::is_internal));
        assert!(![FsError::NotFound, FsError::Refused].iter().any(FsError::is_internal));
    }

    #[test]
    fn people_read_what_is_known() {
        let timeout = RemoteError::Timeout("nobody answered".into());
        for (error, text) in [
            (FsError::Io(io::Error::other("it broke")), "it broke"),
            (FsError::Remote(RemoteError::Timeout("nobody answered".into())), &timeout.to_string()),
            (FsError::NotEmpty, &of_disk(libc::ENOTEMPTY).to_string()),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }
}

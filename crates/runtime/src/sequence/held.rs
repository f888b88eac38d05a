//! A directory that is held open: what is done in it is done in this one, whatever has its name by now, and through no
//! link that somebody puts there meanwhile.

use std::ffi::OsStr;
use std::fs::{DirBuilder, DirEntry, File, Metadata, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, RenameFlags, renameat2};
use nix::unistd::{AccessFlags, eaccess};

use super::{SequenceError, files};
use crate::reader::ReadError;
use crate::sys;

/// Where the kernel shows what this program has open.
pub(super) const OPEN_FILES: &str = "/proc/self/fd";

/// The path of a file that is open.
pub(super) fn open_file(file: &File) -> PathBuf {
    Path::new(OPEN_FILES).join(file.as_raw_fd().to_string())
}

#[derive(Debug)]
pub(super) struct Held {
    directory: File,
    /// The path that people know.
    known: PathBuf,
}

impl Held {
    /// Opens a directory that is no symbolic link.
    pub(super) fn open(path: &Path) -> Result<Self, SequenceError> {
        let directory = sys::open_directory_no_follow(path).map_err(SequenceError::io(path))?;
        Ok(Self { directory, known: path.to_owned() })
    }

    /// The same without reading its names, which whoever may enter it need not be allowed.
    pub(super) fn enter(path: &Path) -> Result<Self, SequenceError> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let directory = sys::open_no_follow(path, flags).map_err(SequenceError::io(path))?;
        Ok(Self { directory, known: path.to_owned() })
    }

    /// Opens one that is in this one, if it is there.
    pub(super) fn open_inside(
        &self, name: impl AsRef<OsStr>,
    ) -> Result<Option<Self>, SequenceError> {
        let known = self.known_path(&name);
        match sys::open_directory_no_follow(&self.path_of(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(SequenceError::io(&known)(error)),
            Ok(directory) => Ok(Some(Self { directory, known })),
        }
    }

    /// What has a name in it, if that is no symbolic link.
    pub(super) fn find(&self, name: impl AsRef<OsStr>) -> Result<Option<Metadata>, SequenceError> {
        match sys::metadata_no_follow(&self.path_of(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found.map(Some).map_err(SequenceError::io(&self.known_path(&name))),
        }
    }

    /// What is in it.
    pub(super) fn entries(&self) -> Result<Vec<DirEntry>, SequenceError> {
        self.within(files::entries)
    }

    /// Makes a directory in it with these permissions at most, and does not look what it is by now.
    pub(super) fn make_inside(
        &self, name: impl AsRef<OsStr>, mode: u32,
    ) -> Result<(), SequenceError> {
        let outcome = DirBuilder::new().mode(mode).create(self.path_of(&name));
        outcome.map_err(SequenceError::io(&self.known_path(&name)))
    }

    /// Gives what is in it another name in it.
    pub(super) fn rename(
        &self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>,
    ) -> Result<(), SequenceError> {
        self.rename_with(RenameFlags::empty(), from.as_ref(), to.as_ref())
    }

    /// Two directories that are in it change names.
    pub(super) fn exchange(
        &self, one: impl AsRef<OsStr>, other: impl AsRef<OsStr>,
    ) -> Result<(), SequenceError> {
        self.rename_with(RenameFlags::RENAME_EXCHANGE, one.as_ref(), other.as_ref())
    }

    fn rename_with(
        &self, flags: RenameFlags, from: &OsStr, to: &OsStr,
    ) -> Result<(), SequenceError> {
        renameat2(&self.directory, from, &self.directory, to, flags)
            .map_err(|errno| SequenceError::io(&self.known_path(to))(errno.into()))
    }

    /// Removes a directory that is in it with all that is in that, if it is there.
    pub(super) fn remove_tree(&self, name: impl AsRef<OsStr>) -> Result<(), SequenceError> {
        self.within(|path| files::remove_tree(&path.join(name.as_ref())))
    }

    /// Makes what is in it survive a crash.
    pub(super) fn sync(&self) -> Result<(), SequenceError> {
        self.directory.sync_all().map_err(SequenceError::io(&self.known))
    }

    pub(super) fn file(&self) -> &File {
        &self.directory
    }

    pub(super) fn metadata(&self) -> Result<Metadata, SequenceError> {
        self.directory.metadata().map_err(SequenceError::io(&self.known))
    }

    /// Device and inode.
    pub(super) fn identity(&self) -> Result<(u64, u64), SequenceError> {
        self.metadata().map(|found| (found.dev(), found.ino()))
    }

    /// Takes the rights of all but its owner; whether that was possible.
    pub(super) fn close_to_others(&self) -> Result<bool, SequenceError> {
        let before = self.metadata()?.mode();
        let closed = Permissions::from_mode(before & 0o7700);
        match self.directory.set_permissions(closed) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(false),
            outcome => {
                outcome.map_err(SequenceError::io(&self.known))?;
                Ok(self.metadata()?.mode() != before)
            }
        }
    }

    /// Fails unless this program may make and remove names in it.
    pub(super) fn check_may_change(&self) -> Result<(), SequenceError> {
        eaccess(&self.path(), AccessFlags::W_OK | AccessFlags::X_OK)
            .map_err(|errno| SequenceError::io(&self.known)(errno.into()))
    }

    /// The path that people know.
    pub(super) fn known(&self) -> &Path {
        &self.known
    }

    /// The path of something in it that people know.
    pub(super) fn known_path(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.known.join(name.as_ref())
    }

    /// A path that leads to something in it.
    fn path_of(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.path().join(name.as_ref())
    }

    /// A path that leads into it.
    pub(super) fn path(&self) -> PathBuf {
        // The dot makes it a directory, also for calls that follow no link.
        self.place().join(".")
    }

    fn place(&self) -> PathBuf {
        open_file(&self.directory)
    }

    /// Does something with that path; errors have the one that people know.
    pub(super) fn within<T>(
        &self, work: impl FnOnce(&Path) -> Result<T, SequenceError>,
    ) -> Result<T, SequenceError> {
        let place = self.place();
        work(&self.path()).map_err(|error| {
            renamed(error, |path| match path.strip_prefix(&place) {
                Ok(inside) => joined(&self.known, inside),
                Err(_) => path,
            })
        })
    }
}

/// An error with the path that people know of what was found in the directory of a sequence, which was held open.
pub(super) fn named(error: SequenceError, sequence: &Path) -> SequenceError {
    renamed(error, |path| match path.strip_prefix(OPEN_FILES) {
        Ok(inside) => joined(sequence, &inside.components().skip(1).collect::<PathBuf>()),
        Err(_) => path,
    })
}

/// Without a slash at the end where nothing follows.
fn joined(directory: &Path, inside: &Path) -> PathBuf {
    let mut path = directory.to_owned();
    path.extend(inside.components());
    path
}

fn renamed(error: SequenceError, known: impl FnOnce(PathBuf) -> PathBuf) -> SequenceError {
    match error {
        SequenceError::Io { path, error } => SequenceError::Io { path: known(path), error },
        SequenceError::Read(ReadError::Io { path, error }) => {
            SequenceError::Read(ReadError::Io { path: known(path), error })
        }
        SequenceError::Read(ReadError::Refused { path, error }) => {
            SequenceError::Read(ReadError::Refused { path: known(path), error })
        }
        SequenceError::Read(ReadError::Manifest { path, why }) => {
            SequenceError::Read(ReadError::Manifest { path: known(path), why })
        }
        SequenceError::Read(ReadError::Changed(path)) => {
            SequenceError::Read(ReadError::Changed(known(path)))
        }
        SequenceError::Read(ReadError::Disconnected(path)) => {
            SequenceError::Read(ReadError::Disconnected(known(path)))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_comes_later_leads_nowhere() {
        let place = tempfile::tempdir().unwrap();
        let [his, private] = ["his", "private"].map(|name| place.path().join(name));
        for directory in [&his, &private] {
            std::fs::create_dir(directory).unwrap();
        }
        let held = Held::open(&his).unwrap();
        std::fs::create_dir(his.join("000")).unwrap();
        let layer = held.open_inside("000").unwrap().unwrap();
        std::fs::remove_dir(his.join("000")).unwrap();
        std::os::unix::fs::symlink(&private, his.join("000")).unwrap();
        // The directory that was opened is gone, and the other one is not taken for it.
        let made = layer.within(|path| {
            std::fs::write(path.join("page"), "").map_err(SequenceError::io(&path.join("page")))
        });
        let line = made.unwrap_err().to_string();
        assert!(
            line.starts_with(&format!("{}: No such", his.join("000/page").display())),
            "{line}"
        );
        assert_eq!(private.read_dir().unwrap().count(), 0);
        let again = held.open_inside("000").unwrap_err().to_string();
        assert!(again.contains("his/000: is a symbolic link: "), "{again}");
    }

    #[test]
    fn errors_name_files_as_people_know_them() {
        let sequence = Path::new("/mnt/models/m/sequences/chat");
        for (found, told) in [
            ("/proc/self/fd/17/000/0000000.tail", "/mnt/models/m/sequences/chat/000/0000000.tail"),
            ("/proc/self/fd/17/.", "/mnt/models/m/sequences/chat"),
            ("/mnt/models/m/manifest.json", "/mnt/models/m/manifest.json"),
        ] {
            let error = || io::Error::from_raw_os_error(libc::EIO);
            let errors = [
                SequenceError::Io { path: found.into(), error: error() },
                SequenceError::Read(ReadError::Io { path: found.into(), error: error() }),
                SequenceError::Read(ReadError::Disconnected(found.into())),
            ];
            for error in errors {
                let text = named(error, sequence).to_string();
                assert!(text.starts_with(&format!("{told}: ")), "{text}");
            }
        }
    }
}

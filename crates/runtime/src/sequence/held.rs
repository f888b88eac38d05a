//! A directory that is held open: what is done in it is done in this one, whatever has its name by now, and through no
//! link that somebody puts there meanwhile.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::SequenceError;
use crate::reader::ReadError;
use crate::sys;

/// Where the kernel shows what this program has open.
pub(super) const OPEN_FILES: &str = "/proc/self/fd";

#[derive(Debug)]
pub(super) struct Held {
    directory: File,
    /// The path that people know.
    known: PathBuf,
}

impl Held {
    /// Opens a directory that is no symbolic link.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let directory = sys::open_directory_no_follow(path)?;
        Ok(Self { directory, known: path.to_owned() })
    }

    /// Opens one that is in this one, if it is there.
    pub(super) fn open_inside(&self, name: &str) -> Result<Option<Self>, SequenceError> {
        let known = self.known.join(name);
        match sys::open_directory_no_follow(&self.path().join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(SequenceError::io(&known)(error)),
            Ok(directory) => Ok(Some(Self { directory, known })),
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.directory
    }

    pub(super) fn metadata(&self) -> io::Result<Metadata> {
        self.directory.metadata()
    }

    /// A path that leads into it.
    pub(super) fn path(&self) -> PathBuf {
        // The dot makes it a directory, also for calls that follow no link.
        self.place().join(".")
    }

    fn place(&self) -> PathBuf {
        Path::new(OPEN_FILES).join(self.directory.as_raw_fd().to_string())
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

//! Files that commands make for other programs: they appear whole, under their name, or not at all.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::linkat;
use tempfile::{Builder, NamedTempFile};

use super::history::shown;
use super::interrupt;
use super::output::{Failure, Outcome};

/// A file without its name yet. Dropped, it goes.
#[derive(Debug)]
pub(super) struct NewFile {
    written: Written,
    name: PathBuf,
    /// Whether what has the name is replaced.
    replaces: bool,
}

/// Where the bytes are meanwhile.
#[derive(Debug)]
enum Written {
    /// In a file that has no name in its directory, of which nothing is left however the program ends.
    Nameless(File),
    /// In one beside, where the filesystem has no such files. A signal that can be held takes it away.
    Beside(NamedTempFile),
}

impl Written {
    fn begin(directory: &Path) -> io::Result<Written> {
        let nameless = OpenOptions::new()
            .write(true)
            .mode(0o666)
            .custom_flags(libc::O_TMPFILE)
            .open(directory);
        match nameless {
            // Without /proc it could get no name.
            Ok(file) if by_descriptor(&file).exists() => Ok(Written::Nameless(file)),
            _ => Written::beside(directory),
        }
    }

    /// On a mount such a name is staging.
    fn beside(directory: &Path) -> io::Result<Written> {
        // A signal that comes while the file is made waits for its name.
        let mut unfinished = unfinished();
        let file = staging().tempfile_in(directory).map_err(without_name)?;
        unfinished.push(file.path().to_owned());
        Ok(Written::Beside(file))
    }

    /// Gives it its name.
    fn publish(self, name: &Path, replaces: bool) -> io::Result<()> {
        let beside = match (self, replaces) {
            (Written::Nameless(file), false) => return link(&file, name),
            // A link takes no other's place, a rename does.
            (Written::Nameless(file), true) => {
                let linked = staging().make_in(directory_of(name), |path| link(&file, path));
                linked?.into_temp_path()
            }
            (Written::Beside(file), _) => file.into_temp_path(),
        };
        let published =
            if replaces { beside.persist(name) } else { beside.persist_noclobber(name) };
        published.map_err(|error| error.error)
    }
}

/// The error alone, without the name of a file that nobody asked for.
fn without_name(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(std::error::Error::source);
    let code = inner.and_then(|inner| inner.downcast_ref::<io::Error>()?.raw_os_error());
    code.map_or(error, io::Error::from_raw_os_error)
}

fn staging() -> Builder<'static, 'static> {
    let mut names = Builder::new();
    names.prefix(".kvfs-").suffix(".tmp").permissions(Permissions::from_mode(0o666));
    names
}

fn by_descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn link(file: &File, name: &Path) -> io::Result<()> {
    let (from, follow) = (by_descriptor(file), AtFlags::AT_SYMLINK_FOLLOW);
    Ok(linkat(AT_FDCWD, &from, AT_FDCWD, name, follow)?)
}

/// Names of files in the making.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a command that makes files, of which a signal leaves nothing. It must have no threads yet: the signal would
/// come to one of them.
pub(super) fn whole_or_nothing(command: impl FnOnce() -> Outcome) -> Outcome {
    let remove = || unfinished().iter().for_each(|path| drop(fs::remove_file(path)));
    interrupt::before_end(remove).map_err(Failure::failed)?;
    command()
}

/// Begins a file that somebody asked for, who must say so where it is to replace one.
pub(super) fn begin(name: &Path, replaces: bool) -> Result<NewFile, Failure> {
    // What is no regular file is not replaced either, so nobody is told to force it.
    let is_regular = name.metadata().map_or(true, |there| there.is_file());
    let new =
        if replaces || !is_regular { NewFile::replacing(name) } else { NewFile::absent(name) };
    new.map_err(|error| explain(name, &error))
}

/// Why such a file could not be made.
pub(super) fn explain(name: &Path, error: &io::Error) -> Failure {
    explain_taken(name, error, "--force replaces it")
}

/// The same, and what to do where something has the name.
pub(super) fn explain_taken(name: &Path, error: &io::Error, remedy: &str) -> Failure {
    let name = shown(name);
    Failure::Failed(match error.kind() {
        io::ErrorKind::AlreadyExists if error.get_ref().is_none() => {
            format!("{name} is there: {remedy}")
        }
        _ => format!("{name}: {error}"),
    })
}

impl NewFile {
    /// Fails if something has the name.
    pub(super) fn absent(name: &Path) -> io::Result<NewFile> {
        if name.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        NewFile::beside(name.to_owned(), false)
    }

    /// Replaces a regular file that has the name, with its permissions; through a symbolic link the one that it leads
    /// to. A device or a pipe is not replaced: whoever names one does not want it gone.
    pub(super) fn replacing(name: &Path) -> io::Result<NewFile> {
        let old = match fs::metadata(name) {
            Ok(old) => old,
            Err(_) if name.is_symlink() => {
                let why = "is a symbolic link that leads nowhere: name another one";
                return Err(io::Error::new(io::ErrorKind::NotFound, why));
            }
            Err(_) => return NewFile::absent(name),
        };
        if !old.is_file() {
            let why = "is there and is no regular file: name another one";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let new = NewFile::beside(name.canonicalize()?, true)?;
        // Only root may, and only for root it makes a difference.
        let _ = fchown(new.file(), Some(old.uid()), Some(old.gid()));
        new.file().set_permissions(Permissions::from_mode(old.permissions().mode() & 0o777))?;
        Ok(new)
    }

    fn beside(name: PathBuf, replaces: bool) -> io::Result<NewFile> {
        let directory = directory_of(&name);
        if !directory.is_dir() {
            let why = format!("{} is no directory", directory.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        Ok(NewFile { written: Written::begin(directory)?, name, replaces })
    }

    pub(super) fn file(&self) -> &File {
        match &self.written {
            Written::Nameless(file) => file,
            Written::Beside(file) => file.as_file(),
        }
    }

    /// Makes it durable and gives it its name.
    pub(super) fn publish(self) -> io::Result<()> {
        self.file().sync_all()?;
        self.written.publish(&self.name, self.replaces)?;
        File::open(directory_of(&self.name))?.sync_all()
    }
}

/// The directory in which a file has its name.
pub(super) fn directory_of(name: &Path) -> &Path {
    match name.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn make(new: io::Result<NewFile>, bytes: &[u8]) -> io::Result<()> {
        let new = new?;
        new.file().write_all(bytes)?;
        new.publish()
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        drop(NewFile::absent(&path).unwrap());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        make(NewFile::absent(&path), b"old").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let refused = make(NewFile::absent(&path), b"new").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        // Somebody else made it meanwhile.
        let second = directory.path().join("second");
        let begun = NewFile::absent(&second);
        fs::write(&second, b"another's").unwrap();
        make(begun, b"new").unwrap_err();
        assert_eq!(fs::read(&second).unwrap(), b"another's");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_in_the_making_has_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let begun = NewFile::absent(&path).unwrap();
        begun.file().write_all(b"some").unwrap();
        assert!(matches!(begun.written, Written::Nameless(_)), "{begun:?}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        begun.publish().unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        fs::write(directory.path().join("plain"), "").unwrap();
        let plain = fs::metadata(directory.path().join("plain")).unwrap().permissions();
        assert_eq!(mode, plain.mode() & 0o777);
        // Not every filesystem has such files.
        let beside = Written::beside(directory.path()).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3);
        beside.publish(&path, true).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_is_replaced_keeps_its_permissions_and_links() {
        let directory = tempfile::tempdir().unwrap();
        let [path, link] = ["file", "link"].map(|name| directory.path().join(name));
        fs::write(&path, b"private").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        make(NewFile::replacing(&link), b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(link.is_symlink());
        make(NewFile::replacing(&directory.path().join("third")), b"new").unwrap();
    }

    #[test]
    fn devices_and_pipes_stay() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [&pipe, directory.path()] {
            let refused = NewFile::replacing(path).unwrap_err().to_string();
            assert!(refused.contains("no regular file"), "{refused}");
        }
    }
}

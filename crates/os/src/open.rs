//! Opens that nothing planted in a directory can lead astray.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::Mode;

/// Opens a path beneath a directory without following a symbolic link, so that nothing planted
/// there leads out of it. `mode` is that of a file that is made.
pub fn open_beneath(root: impl AsFd, path: &Path, flags: OFlag, mode: Mode) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .mode(mode)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    Ok(File::from(nix::fcntl::openat2(root, path, how)?))
}

/// Opens for reading what has a name: not what a symbolic link leads to, and without waiting for the writer of a FIFO.
pub fn open_no_follow(path: &Path, flags: OFlag) -> io::Result<File> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let opened = File::options().read(true).custom_flags(flags.bits()).open(path);
    opened.map_err(|error| if path.is_symlink() { link() } else { error })
}

/// The same of a directory.
pub fn open_directory_no_follow(path: &Path) -> io::Result<File> {
    open_no_follow(path, OFlag::O_DIRECTORY)
}

/// The same of a regular file: nothing that has no end, or no bytes of its own.
pub fn open_regular_no_follow(path: &Path) -> io::Result<File> {
    let file = open_no_follow(path, OFlag::empty())?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "is no regular file"))
    }
}

/// The bytes of such a file, so many at most.
pub fn read_no_follow(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open_regular_no_follow(path)?;
    let length = file.metadata()?.len().min(bytes_max);
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(length).unwrap_or(usize::MAX))?;
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What has a name, if that is no symbolic link.
pub fn metadata_no_follow(path: &Path) -> io::Result<Metadata> {
    let found = path.symlink_metadata()?;
    if found.is_symlink() { Err(link()) } else { Ok(found) }
}

fn link() -> io::Error {
    let why = "is a symbolic link: none is followed here, since others may have put it there";
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

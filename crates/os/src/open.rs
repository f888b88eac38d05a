//! Opens that nothing planted in a directory can lead astray.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
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

//! Steps on directories that are there as a whole or not at all.

use std::fs::{self, DirEntry, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown, lchown};
use std::path::{Path, PathBuf};

use super::SequenceError;
use super::held::{Held, open_file};
use super::source::Listed;
use crate::page::{Layer, names};
use crate::reader::page::Home;
use crate::sys;

/// What is in a directory; nothing if it is not there.
pub(super) fn entries(directory: &Path) -> Result<Vec<DirEntry>, SequenceError> {
    match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        outcome => outcome.and_then(Iterator::collect).map_err(SequenceError::io(directory)),
    }
}

/// Makes what is in a directory survive a crash.
pub(super) fn sync(path: &Path) -> Result<(), SequenceError> {
    let opened = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path);
    opened.and_then(|file| file.sync_all()).map_err(SequenceError::io(path))
}

/// Writes a new file, with the owner and permissions of the first of some that is there: whoever may not read these may
/// not read what is made of them, whatever the mask of the caller says.
pub(super) fn write_like(
    models: &[PathBuf], path: &Path, bytes: &[u8], durable: bool,
) -> Result<(), SequenceError> {
    let like = models.iter().find_map(|model| {
        let found = sys::metadata_no_follow(model).ok()?;
        Some((model, found))
    });
    let write = || -> io::Result<()> {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        if let Some((model, like)) = like {
            if like.is_file() {
                sys::copy_access_lists(model, &open_file(&file))?;
            }
            belong_like(&file, &like)?;
        }
        file.write_all(bytes)?;
        if durable { file.sync_all() } else { Ok(()) }
    };
    write().map_err(SequenceError::io(path))
}

/// Gives a new file the owner and permissions of another one, or of a directory what a file can have of them. Pages may
/// not be written, and a tail that is made of one is.
fn belong_like(file: &File, like: &Metadata) -> io::Result<()> {
    let mut mode = like.mode() & if like.is_dir() { 0o666 } else { 0o777 } | 0o200;
    let own = file.metadata()?;
    let is_alike = (own.uid(), own.gid()) == (like.uid(), like.gid());
    if !is_alike && let Err(error) = fchown(file, Some(like.uid()), Some(like.gid())) {
        if error.raw_os_error() != Some(libc::EPERM) {
            return Err(error);
        }
        // It stays with the caller, who could read the other one. His group need not be one that could.
        if own.gid() != like.gid() && fchown(file, None, Some(like.gid())).is_err() {
            mode &= !0o070;
        }
    }
    file.set_permissions(Permissions::from_mode(mode))
}

/// Puts a file into a directory, in the place of an older one and like one of `models`; without bytes, removes it. It
/// is durable then.
pub(super) fn publish(
    directory: &Path, name: &str, models: &[PathBuf], bytes: &[u8],
) -> Result<(), SequenceError> {
    let staged = stage(directory, name, models, bytes, true)?;
    put(directory, name, staged)
}

/// The first step of that: writes what is to have the name, if there are bytes.
pub(super) fn stage(
    directory: &Path, name: &str, models: &[PathBuf], bytes: &[u8], durable: bool,
) -> Result<Option<PathBuf>, SequenceError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let staging = directory.join(format!(".{name}.tmp"));
    let _ = fs::remove_file(&staging);
    match write_like(models, &staging, bytes, durable) {
        Ok(()) => Ok(Some(staging)),
        Err(error) => {
            let _ = fs::remove_file(&staging);
            Err(error)
        }
    }
}

/// What the `positions.json` of a sequence is like: the one that is there, or `tokens`, about which it is.
pub(super) fn models_of_positions(sequence: &Path) -> [PathBuf; 3] {
    [sequence.join(names::POSITIONS), sequence.join(names::TOKENS), sequence.to_owned()]
}

/// Instead of the second.
pub(super) fn discard(staged: Option<PathBuf>) {
    if let Some(staging) = staged {
        let _ = fs::remove_file(staging);
    }
}

/// The second step.
pub(super) fn put(
    directory: &Path, name: &str, staged: Option<PathBuf>,
) -> Result<(), SequenceError> {
    let path = directory.join(name);
    match staged {
        None => fs::remove_file(&path).map_err(SequenceError::io(&path))?,
        Some(staging) => rename(&staging, &path)?,
    }
    sync(directory)
}

/// Gives a file or directory its name.
#[expect(clippy::disallowed_methods, reason = "these are files of a mount, not of a store")]
pub(super) fn rename(from: &Path, to: &Path) -> Result<(), SequenceError> {
    fs::rename(from, to).map_err(SequenceError::io(to))
}

/// Whether two directories have the same names, and behind each the same file or one of the same bytes.
pub(super) fn are_shared(one: &Path, other: &Path) -> Result<bool, SequenceError> {
    // What an operation that was interrupted has left is no part of either.
    let named = |directory: &Path| -> Result<Vec<DirEntry>, SequenceError> {
        let is_named = |entry: &DirEntry| !names::is_staging(entry.file_name().as_bytes());
        Ok(entries(directory)?.into_iter().filter(is_named).collect())
    };
    let (ours, theirs) = (named(one)?, named(other)?);
    if ours.len() != theirs.len() {
        return Ok(false);
    }
    for entry in ours {
        let (path, twin) = (entry.path(), other.join(entry.file_name()));
        let found = fs::symlink_metadata(&path).map_err(SequenceError::io(&path))?;
        let Ok(twin_found) = fs::symlink_metadata(&twin) else { return Ok(false) };
        let is_same = if found.is_dir() {
            twin_found.is_dir() && are_shared(&path, &twin)?
        } else {
            (found.dev(), found.ino()) == (twin_found.dev(), twin_found.ino())
                || found.is_file()
                    && twin_found.is_file()
                    && found.len() == twin_found.len()
                    && read(&path)? == read(&twin)?
        };
        if !is_same {
            return Ok(false);
        }
    }
    Ok(true)
}

fn read(path: &Path) -> Result<Vec<u8>, SequenceError> {
    sys::read_no_follow(path, u64::MAX).map_err(SequenceError::io(path))
}

/// Removes files of layers, one layer after the other, so that it takes no more descriptors than for one; they are gone after
/// a crash, too. One that somebody else has removed is no error.
pub(super) fn remove_all(
    listed: &Listed<'_>, gone: &[(Layer, Vec<String>)], home: Home,
) -> Result<(), SequenceError> {
    let remove = |path: PathBuf| match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.map_err(SequenceError::io(&path)),
    };
    let mut unsynced = None;
    for (layer, names) in gone {
        let Some(directory) = listed.layer(*layer)? else { continue };
        directory.within(|path| names.iter().try_for_each(|name| remove(path.join(name))))?;
        if home == Home::Directory {
            directory.within(sync)?;
        } else {
            // In a mount one sync is enough.
            unsynced = Some(directory);
        }
    }
    unsynced.map_or(Ok(()), |directory| directory.within(sync))
}

/// Removes a directory with all that is in it, or what else has its name, if it is there.
pub(super) fn remove_tree(directory: &Path) -> Result<(), SequenceError> {
    let removed = match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => fs::remove_file(directory),
        // An empty one need not be looked into.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            fs::remove_dir(directory).map_err(|_| error)
        }
        outcome => outcome,
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.map_err(SequenceError::io(directory)),
    }
}

/// Makes a directory with the owner, permissions and attributes of another one. In what is being filled, that is: an owner
/// could put something else there otherwise.
pub(super) fn make_like(model: &Path, directory: &Path) -> Result<Held, SequenceError> {
    let failed = SequenceError::io(directory);
    let like = Held::open(model)?;
    let found = like.metadata()?;
    fs::create_dir(directory).map_err(&failed)?;
    let made = Held::open(directory)?;
    let own = made.metadata()?;
    if (own.uid(), own.gid()) != (found.uid(), found.gid()) {
        fchown(made.file(), Some(found.uid()), Some(found.gid())).map_err(&failed)?;
    }
    made.file().set_permissions(found.permissions()).map_err(&failed)?;
    sys::copy_extended_attributes(&like.path(), &made.path()).map_err(&failed)?;
    Ok(made)
}

/// Gives what is below a directory, and has no other name, the owner and group of something.
pub(super) fn give_away(directory: &Path, like: &Metadata) -> Result<(), SequenceError> {
    for entry in entries(directory)? {
        let path = entry.path();
        let found = fs::symlink_metadata(&path).map_err(SequenceError::io(&path))?;
        if found.is_dir() {
            give_away(&path, like)?;
        } else if found.nlink() > 1 {
            continue;
        }
        lchown(&path, Some(like.uid()), Some(like.gid())).map_err(SequenceError::io(&path))?;
    }
    Ok(())
}

/// Gives all files below a directory another name below a new one.
fn link_tree(from: &Path, to: &Path) -> Result<(), SequenceError> {
    Held::open(from)?.within(|from| {
        make_like(from, to)?
            .within(|to| entries(from)?.iter().try_for_each(|entry| link(entry, to)))
    })
}

/// Gives what is in a directory another name in a new one.
pub(super) fn link(entry: &DirEntry, to: &Path) -> Result<(), SequenceError> {
    let (from, to) = (entry.path(), to.join(entry.file_name()));
    let kind = entry.file_type().map_err(SequenceError::io(&from))?;
    if kind.is_dir() {
        return link_tree(&from, &to);
    }
    fs::hard_link(&from, &to).map_err(SequenceError::io(&from))
}

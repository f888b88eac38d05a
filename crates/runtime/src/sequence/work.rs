//! The directory that an operation fills. Nobody else gets into it before it is complete: whoever may write in
//! `sequences/` could put links into one that is his, and have the operation write through them.
//!
//! On a filesystem that knows no permissions, everybody gets into it who gets into anything there.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, Permissions, create_dir, remove_dir, remove_file};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use nix::unistd::geteuid;

use super::held::Held;
use super::{SequenceError, files};
use crate::page::names;
use crate::sys;

/// Permissions of a directory that only its owner gets into, and those of all others.
const CLOSED: u32 = 0o700;
const OTHERS: u32 = 0o077;

/// What is made for a moment, to see what becomes of it.
const PROBE: &str = ".probe.tmp";

/// Rests of other users that are kept beside each other, for one name.
const RESTS_MAX: u32 = 9;

/// What is being filled, beside what it will take the place of.
#[derive(Debug)]
pub(super) struct Work<'a> {
    above: &'a Held,
    name: OsString,
    directory: Held,
    /// What it is to be like when it has its name; else as it was made.
    like: Option<&'a Held>,
    /// Whether the filesystem knows permissions.
    is_closed: bool,
}

/// What is filled, and open to whoever it is for.
#[derive(Debug)]
pub(super) struct Made<'a>(Work<'a>);

impl<'a> Work<'a> {
    /// Makes a directory in another one, to be called `name`.
    pub(super) fn make(
        above: &'a Held, name: impl AsRef<OsStr>, like: Option<&'a Held>,
    ) -> Result<Self, SequenceError> {
        // From the beginning on, also where the directory above hands rights down.
        above.make_inside(work_name(&name), CLOSED)?;
        Self::open(above, name, like)
    }

    /// Opens what was made a moment ago, if that is it: others may have put something else in its place.
    fn open(
        above: &'a Held, name: impl AsRef<OsStr>, like: Option<&'a Held>,
    ) -> Result<Self, SequenceError> {
        let name = work_name(name);
        let known = above.known_path(&name);
        let Some(directory) = above.open_inside(&name)? else { return Err(exchanged(&known)) };
        let is_closed = directory.metadata()?.mode() & OTHERS == 0;
        if !directory.entries()?.is_empty()
            || !directory.within(|path| has_own_owner(&directory, path))?
            // It was not made here, or there are no permissions that could be taken.
            || !is_closed && directory.close_to_others()?
        {
            return Err(exchanged(&known));
        }
        let work = Self { above, name, directory, like, is_closed };
        work.take_group().map_err(SequenceError::io(&known))?;
        Ok(work)
    }

    /// What is made in it gets the group, as in what it takes the place of. The group itself has no right yet.
    fn take_group(&self) -> io::Result<()> {
        let own = self.directory.file().metadata()?;
        let mut mode = own.mode();
        if let Some(like) = self.like {
            let like = like.file().metadata()?;
            mode = like.mode();
            if like.gid() != own.gid() {
                fchown(self.directory.file(), None, Some(like.gid()))?;
            }
        }
        let mode = mode & libc::S_ISGID | CLOSED;
        // The mask of the program may have taken rights of its own.
        if self.is_closed && own.mode() & 0o7777 != mode {
            self.directory.file().set_permissions(Permissions::from_mode(mode))?;
        }
        Ok(())
    }

    /// Fills it.
    pub(super) fn fill(
        self, fill: impl FnOnce(&Path) -> Result<(), SequenceError>,
    ) -> Result<Self, SequenceError> {
        self.directory.within(fill)?;
        Ok(self)
    }

    /// Gives all that was made in it to the owner of what it takes the place of: nobody is to have files in his sequence that
    /// he cannot remove.
    pub(super) fn give_away(self) -> Result<Self, SequenceError> {
        let Some(like) = self.like else { return Ok(self) };
        let (like, own) = (like.metadata()?, self.directory.metadata()?);
        if like.uid() != own.uid() {
            self.directory.within(|path| files::give_away(path, &like))?;
        }
        Ok(self)
    }

    /// Gives it the owner, the attributes and the permissions that it is to have. From now on others may get into it.
    pub(super) fn open_up(self, is_durable: bool) -> Result<Made<'a>, SequenceError> {
        let failed = |error| SequenceError::io(self.directory.known())(error);
        self.check()?;
        let permissions = match self.like {
            None => self.usual_permissions().map_err(failed)?,
            Some(like) => {
                let (found, own) = (like.metadata()?, self.directory.metadata()?);
                if own.uid() != found.uid() {
                    fchown(self.directory.file(), Some(found.uid()), None).map_err(failed)?;
                }
                sys::copy_extended_attributes(&like.path(), &self.directory.path())
                    .map_err(failed)?;
                found.permissions()
            }
        };
        match self.directory.file().set_permissions(permissions) {
            Err(error) if !self.is_closed && error.raw_os_error() == Some(libc::EPERM) => {}
            outcome => outcome.map_err(failed)?,
        }
        if is_durable {
            self.directory.sync()?;
        }
        Ok(Made(self))
    }

    /// Those of a directory that is made there, which the mask of the program or the directory above says.
    fn usual_permissions(&self) -> io::Result<Permissions> {
        let probe = self.directory.path().join(PROBE);
        create_dir(&probe)?;
        let found = probe.symlink_metadata();
        remove_dir(&probe)?;
        Ok(found?.permissions())
    }

    /// Whether this is it.
    fn is(&self, found: &Metadata) -> bool {
        let own = self.directory.identity();
        own.is_ok_and(|own| own == (found.dev(), found.ino()))
    }

    /// Fails unless it still has the name that it was made with.
    fn check(&self) -> Result<(), SequenceError> {
        let found = self.above.find(&self.name)?;
        if found.is_some_and(|found| self.is(&found)) {
            return Ok(());
        }
        Err(exchanged(&self.above.known_path(&self.name)))
    }
}

impl Made<'_> {
    /// Whether this is it.
    pub(super) fn is(&self, found: &Metadata) -> bool {
        self.0.is(found)
    }

    /// Gives it a name that nothing has.
    pub(super) fn take_name(&self, name: impl AsRef<OsStr>) -> Result<(), SequenceError> {
        self.0.check()?;
        self.0.above.rename(&self.0.name, name)
    }

    /// It and the directory that has a name change names.
    pub(super) fn exchange(&self, name: impl AsRef<OsStr>) -> Result<(), SequenceError> {
        self.0.check()?;
        self.0.above.exchange(&self.0.name, name)
    }

    /// The same once more: afterwards both are called as before.
    pub(super) fn exchange_back(&self, name: impl AsRef<OsStr>) -> Result<(), SequenceError> {
        self.0.above.exchange(&self.0.name, name)
    }
}

/// What an operation works on beside something of that name.
pub(super) fn work_name(name: impl AsRef<OsStr>) -> OsString {
    let mut work = name.as_ref().to_owned();
    work.push(names::WORK_SUFFIX);
    work
}

/// Removes what an interrupted operation has left beside something of that name. What that of another user has left, nobody
/// else may look into: it is moved out of the way, and goes with a later operation of whoever may.
pub(super) fn remove_rests(above: &Held, name: &str) -> Result<(), SequenceError> {
    let aside = |number| format!("{name}~{number}{}", names::WORK_SUFFIX);
    for number in 1..=RESTS_MAX {
        // Of somebody else still.
        let _ = above.remove_tree(aside(number));
    }
    let work = work_name(name);
    match above.remove_tree(&work) {
        Err(SequenceError::Io { path, error })
            if error.kind() == io::ErrorKind::PermissionDenied =>
        {
            let is_free = |number: &u32| matches!(above.find(aside(*number)), Ok(None));
            let free = (1..=RESTS_MAX).find(is_free);
            // What keeps it from being moved says less than why it stays.
            let moved = free.is_some_and(|number| above.rename(&work, aside(number)).is_ok());
            if moved { Ok(()) } else { Err(SequenceError::Io { path, error }) }
        }
        outcome => outcome,
    }
}

/// The same of all names; what nobody else may look into stays.
pub(super) fn remove_all_rests(above: &Held) -> Result<(), SequenceError> {
    for entry in above.entries()? {
        let name = entry.file_name();
        // A slot that is being saved waits for nobody, and nobody for it.
        let is_saved = name.as_bytes().ends_with(names::SAVING_SUFFIX.as_bytes());
        if name.as_bytes().ends_with(names::WORK_SUFFIX.as_bytes()) && !is_saved {
            match above.remove_tree(&name) {
                Err(SequenceError::Io { error, .. })
                    if error.kind() == io::ErrorKind::PermissionDenied => {}
                outcome => outcome?,
            }
        }
    }
    Ok(())
}

/// Whether an empty directory has the owner that this program's files get there.
fn has_own_owner(directory: &Held, path: &Path) -> Result<bool, SequenceError> {
    let owner = directory.metadata()?.uid();
    if owner == geteuid().as_raw() {
        return Ok(true);
    }
    // A server may make somebody else of root, or one of everybody.
    let probe = path.join(PROBE);
    let look = || -> io::Result<u32> {
        let made = File::create_new(&probe)?;
        remove_file(&probe)?;
        Ok(made.metadata()?.uid())
    };
    look().map(|uid| uid == owner).map_err(SequenceError::io(&probe))
}

fn exchanged(known: &Path) -> SequenceError {
    let why =
        "somebody put something else in the place of this directory, which the operation has made";
    SequenceError::io(known)(io::Error::other(why))
}

#[cfg(test)]
mod tests {
    use std::fs::{set_permissions, write};
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_what_was_made_a_moment_ago_is_opened() {
        let place = tempfile::tempdir().unwrap();
        let above = Held::open(place.path()).unwrap();
        let path = place.path().join("x~");
        let opened = || Work::open(&above, "x", None).map(drop);
        let told = |outcome: Result<(), SequenceError>| outcome.unwrap_err().to_string();
        let exchanged = format!("{}: somebody put something else", path.display());
        create_dir(&path).unwrap();
        for mode in [0o755, 0o770, 0o707] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert!(told(opened()).starts_with(&exchanged), "{mode:o}");
        }
        set_permissions(&path, Permissions::from_mode(CLOSED)).unwrap();
        opened().unwrap();
        write(path.join("000"), b"").unwrap();
        assert!(told(opened()).starts_with(&exchanged));
        remove_file(path.join("000")).unwrap();
        remove_dir(&path).unwrap();
        assert!(told(opened()).starts_with(&exchanged));
        symlink(place.path(), &path).unwrap();
        assert!(told(opened()).contains("x~: is a symbolic link"));
    }
}

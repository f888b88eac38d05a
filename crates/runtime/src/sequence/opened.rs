//! The directory `sequences/` as an operation has opened it: names mean what is in this one, whatever has its path by now.

use std::io;
use std::ops::Deref;
use std::thread;

use super::held::Held;
use super::source::{APPEND, Listed, attempt};
use super::work::{remove_all_rests, remove_rests};
use super::{SequenceError, Sequences, check_name, turn};

#[derive(Debug)]
pub(super) struct Opened<'a> {
    pub(super) all: &'a Sequences,
    pub(super) directory: Held,
}

/// The turn of one operation among those on the sequences of a model, until it is dropped: the directory is locked.
#[derive(Debug)]
pub(super) struct Turn<'a>(Opened<'a>);

impl Opened<'_> {
    /// Whether there is a sequence of that name.
    pub(super) fn has(&self, name: &str) -> Result<bool, SequenceError> {
        Ok(self.directory.find(name)?.is_some())
    }

    pub(super) fn list(&self, name: &str) -> Result<Listed<'_>, SequenceError> {
        check_name(name)?;
        let look = || Listed::look(&self.directory, name, &self.all.manifest);
        attempt(&self.all.path(name), look)
    }

    /// The same, but not in the middle of an append, unless that was interrupted.
    pub(super) fn list_settled(&self, name: &str) -> Result<Listed<'_>, SequenceError> {
        let listed = self.list(name)?;
        if !listed.is_whole(&self.all.manifest)? {
            thread::sleep(APPEND);
            listed.check_same(&self.all.manifest)?;
        }
        Ok(listed)
    }
}

impl<'a> Deref for Turn<'a> {
    type Target = Opened<'a>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Sequences {
    /// Enters the directory, for a look without a turn. A model may have none, and no sequences.
    pub(super) fn enter(&self) -> Result<Option<Opened<'_>>, SequenceError> {
        match Held::enter(&self.directory) {
            Err(SequenceError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                Ok(None)
            }
            outcome => Ok(Some(Opened { all: self, directory: outcome? })),
        }
    }

    /// Does something with a sequence as it is listed, without a turn.
    pub(super) fn with_listed<T>(
        &self, name: &str, look: impl FnOnce(Listed<'_>) -> Result<T, SequenceError>,
    ) -> Result<T, SequenceError> {
        check_name(name)?;
        let none = || SequenceError::NoSuchSequence(self.path(name));
        look(self.enter()?.ok_or_else(none)?.list(name)?)
    }

    /// Waits for other operations, and removes what an interrupted one left.
    pub(super) fn begin(&self, name: &str) -> Result<Turn<'_>, SequenceError> {
        let turn = self.begin_reading(name)?;
        remove_rests(&turn.directory, name)?;
        Ok(turn)
    }

    /// Waits for other operations.
    pub(super) fn begin_reading(&self, name: &str) -> Result<Turn<'_>, SequenceError> {
        check_name(name)?;
        let directory = turn::wait(&self.directory)?;
        Ok(Turn(Opened { all: self, directory }))
    }

    /// Removes what interrupted operations on any sequence left.
    pub(super) fn remove_rests(&self) -> Result<(), SequenceError> {
        if self.enter()?.is_none() {
            return Ok(());
        }
        remove_all_rests(&turn::wait(&self.directory)?)
    }
}

//! Other weights under the name of a model: an empty directory takes the place of what the old ones computed.
//!
//! The new directory is made beside the model's as `NAME~`, and changes names with it (`RENAME_EXCHANGE`). So a prefix of
//! the model is found with pages of the old revision or of the new one, never of both; programs that have old pages open
//! read them on, and their bytes go when the last of them is closed. What a crash leaves under that name goes with the
//! next change of the model's revision.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::held::Held;
use super::work::{Work, work_name};
use super::{SequenceError, files, turn};
use crate::page::limits::MANIFEST_BYTES_READ;
use crate::page::{Manifest, ManifestFields, names};
use crate::reader::listing;
use crate::sys;

/// Gives the model in directory `MOUNT/models/NAME` another revision of its weights, and no sequences. Its owner,
/// permissions and limits stay. Returns the new manifest, or nothing if the model has this revision; then it keeps
/// its sequences. It is durable then.
///
/// # Errors
/// [`SequenceError::Read`] if there is no manifest; [`SequenceError::Manifest`] if it cannot have such a revision;
/// [`SequenceError::Io`], after which the model has the old revision and its sequences, or the new one and none, and
/// `NAME~` may be left with some of the old. A model of another shape that has this name stays, and is an error.
pub fn begin_revision(model: &Path, revision: &str) -> Result<Option<Manifest>, SequenceError> {
    // A link to a model stays one.
    let model = fs::canonicalize(model).map_err(SequenceError::io(model))?;
    let (Some(models), Some(name)) = (model.parent(), model.file_name()) else {
        return Err(SequenceError::Name(model.display().to_string()));
    };
    let (models, like, _turn) = turns(models, &model, name)?;
    let work = work_name(name);
    let old = like.within(|path| Ok(listing::read_manifest(path)?))?;
    remove_left(&models, &work, &old)?;
    if old.fields().model_revision.as_deref() == Some(revision) {
        return Ok(None);
    }
    let mut fields = old.fields().clone();
    fields.model_revision = Some(revision.to_owned());
    let manifest = Manifest::new(fields).map_err(SequenceError::Manifest)?;
    let made = make(&like, (&models, name), &manifest);
    let outcome = made.and_then(|made| {
        // Whoever waits for the turn of the sequences finds none.
        made.open_up(true)?.exchange(name)?;
        models.sync()
    });
    outcome.and(models.remove_tree(&work))?;
    models.sync()?;
    Ok(Some(manifest))
}

/// The directory of all models, that of one, and that of its sequences, when it is the turn in the first and the last. That of
/// the sequences comes first: whoever keeps it for long is not to hold up changes of other models.
fn turns(models: &Path, model: &Path, name: &OsStr) -> Result<(Held, Held, Held), SequenceError> {
    loop {
        let sequences = turn::wait(&model.join(names::SEQUENCES))?;
        let all = turn::wait(models)?;
        let gone = || SequenceError::io(model)(io::Error::from_raw_os_error(libc::ENOENT));
        let like = all.open_inside(name)?.ok_or_else(gone)?;
        // Another revision may have come meanwhile.
        let now = like.find(names::SEQUENCES)?;
        let own = sequences.identity()?;
        if now.is_some_and(|now| (now.dev(), now.ino()) == own) {
            return Ok((all, like, sequences));
        }
    }
}

/// Removes what an interrupted change of the revision has left.
fn remove_left(models: &Held, left: &OsStr, manifest: &Manifest) -> Result<(), SequenceError> {
    let Some(directory) = models.open_inside(left)? else { return Ok(()) };
    let found = directory.within(|path| {
        let path = path.join(names::MANIFEST);
        match sys::read_no_follow(&path, MANIFEST_BYTES_READ) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            outcome => outcome.map(Some).map_err(SequenceError::io(&path)),
        }
    })?;
    let shape =
        |manifest: &Manifest| ManifestFields { model_revision: None, ..manifest.fields().clone() };
    // One that was interrupted before it had a manifest, or when that was removed, has nothing else.
    let has_nothing_else = || -> Result<bool, SequenceError> {
        let is_of_model =
            |name: &OsStr| name == names::SEQUENCES || names::is_staging(name.as_bytes());
        Ok(directory.entries()?.iter().all(|entry| is_of_model(&entry.file_name())))
    };
    let is_ours = match found {
        None => has_nothing_else()?,
        Some(json) => Manifest::parse(&json).is_ok_and(|found| shape(&found) == shape(manifest)),
    };
    if !is_ours {
        let taken = io::Error::from_raw_os_error(libc::EEXIST);
        return Err(SequenceError::io(&models.known_path(left))(taken));
    }
    models.remove_tree(left)
}

fn make<'a>(
    like: &'a Held, (models, name): (&'a Held, &OsStr), manifest: &Manifest,
) -> Result<Work<'a>, SequenceError> {
    Work::make(models, name, Some(like))?.fill(|to| {
        like.within(|like| {
            let owners = [like.join(names::MANIFEST), like.to_owned()];
            files::publish(to, names::MANIFEST, &owners, manifest.to_json().as_bytes())?;
            files::make_like(&like.join(names::SEQUENCES), &to.join(names::SEQUENCES))?;
            files::sync(to)
        })
    })
}

//! Other weights under the name of a model: an empty directory takes the place of what the old ones computed.
//!
//! The new directory is made beside the model's as `NAME~`, and changes names with it (`RENAME_EXCHANGE`). So a prefix of
//! the model is found with pages of the old revision or of the new one, never of both; programs that have old pages open
//! read them on, and their bytes go when the last of them is closed. What a crash leaves under that name goes with the
//! next change of the model's revision.

use std::fs;
use std::io;
use std::path::Path;

use super::files;
use super::turn::Turn;
use super::{SequenceError, Sequences};
use crate::page::limits::MAX_MANIFEST_BYTES;
use crate::page::{Manifest, ManifestFields, names};
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
    let _turn = Turn::wait(models)?;
    let mut work = name.to_owned();
    work.push(names::WORK_SUFFIX);
    let made = models.join(work);
    let old = Sequences::open(&model)?;
    remove_left(&made, old.manifest())?;
    if old.manifest().fields().model_revision.as_deref() == Some(revision) {
        return Ok(None);
    }
    let mut fields = old.manifest().fields().clone();
    fields.model_revision = Some(revision.to_owned());
    let manifest = Manifest::new(fields).map_err(SequenceError::Manifest)?;
    let made_whole = make(&model, &made, &manifest);
    let outcome = made_whole.and_then(|()| {
        // Nobody changes the sequences meanwhile; who waits finds none.
        let _turn = Turn::wait(&model.join(names::SEQUENCES))?;
        files::exchange(&made, &model)?;
        files::sync(models)
    });
    outcome.and(files::remove_tree(&made))?;
    files::sync(models)?;
    Ok(Some(manifest))
}

/// Removes what an interrupted change of the revision has left.
fn remove_left(left: &Path, manifest: &Manifest) -> Result<(), SequenceError> {
    let path = left.join(names::MANIFEST);
    let found = match sys::read_no_follow(&path, MAX_MANIFEST_BYTES as u64) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        outcome => Some(outcome.map_err(SequenceError::io(&path))?),
    };
    let shape =
        |manifest: &Manifest| ManifestFields { model_revision: None, ..manifest.fields().clone() };
    let is_ours = found.is_none_or(|json| {
        Manifest::parse(&json).is_ok_and(|found| shape(&found) == shape(manifest))
    });
    if !is_ours {
        let taken = io::Error::from_raw_os_error(libc::EEXIST);
        return Err(SequenceError::io(left)(taken));
    }
    files::remove_tree(left)
}

fn make(like: &Path, to: &Path, manifest: &Manifest) -> Result<(), SequenceError> {
    files::make_like(like, to)?.within(|to| {
        let models = [like.join(names::MANIFEST), like.to_owned()];
        files::publish(to, names::MANIFEST, &models, manifest.to_json().as_bytes())?;
        files::make_like(&like.join(names::SEQUENCES), &to.join(names::SEQUENCES))?;
        files::sync(to)
    })
}

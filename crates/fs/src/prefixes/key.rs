//! The key of a model's references: made when it is first asked for, kept with the model's directory.
//!
//! Who may read the directory may have it, as the pages themselves. It is never listed, so no copy of the
//! directory takes it along.

use std::fs::File;
use std::io::Read;

use kvfs_formats::slot::reference::Key;

use crate::FsError;
use crate::core::Core;
use kvfs_storage::store::record::{DirectoryClass, InodeId};

/// Stored, and set by the daemon alone.
pub(crate) const SLOT_KEY: &[u8] = b"user.kvfs.slot_key";

/// The key of a model.
pub(crate) fn key_bytes(core: &Core, model: InodeId) -> Result<Vec<u8>, FsError> {
    if !matches!(core.state().directory(model), Ok((_, DirectoryClass::Model))) {
        return Err(FsError::NoAttribute);
    }
    if let Some(known) = core.state().metadata.attribute(model, SLOT_KEY)? {
        return Ok(known);
    }
    let mut fresh = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut fresh)?;
    let mut state = core.state_to_change()?;
    // Somebody else may have been faster.
    if let Some(known) = state.metadata.attribute(model, SLOT_KEY)? {
        return Ok(known);
    }
    let life = state.metadata.life(model);
    state.metadata.put_attribute(life, model, SLOT_KEY, &fresh);
    Ok(fresh.to_vec())
}

pub(super) fn key_of(core: &Core, model: InodeId) -> Result<Key, FsError> {
    Key::new(&key_bytes(core, model)?).ok_or(FsError::Stale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted};

    #[test]
    fn a_model_keeps_its_key_and_nothing_else_has_one() {
        let unmounted = Unmounted::new();
        let model = unmounted.make_model(1);
        let other = unmounted.make_model_of(1, |fields| fields.model_id = "other".into());
        let (model, other, sequences) = (model.directory, other.directory, model.sequences);
        let key = |id| key_bytes(&unmounted.fs.core, id).unwrap();
        let known = key(model);
        assert_eq!((known.len(), key(model)), (32, known.clone()));
        assert_ne!(known, key(other), "each has its own");
        assert!(known.iter().any(|byte| *byte != 0));
        key_of(&unmounted.fs.core, model).unwrap();
        for id in [FILES, sequences] {
            assert!(matches!(key_bytes(&unmounted.fs.core, id), Err(FsError::NoAttribute)));
        }
        let unmounted = unmounted.again();
        assert_eq!(key_bytes(&unmounted.fs.core, model).unwrap(), known);
    }
}

//! What a name means where it stands, and the proof that bytes are that.

use std::sync::Arc;

use crate::FsError;
use crate::attributes::Place;
use crate::classify::{self, FileClass};
use crate::core::Core;
use crate::core::state::State;
use crate::insert::Verified;
use kvfs_page::{Manifest, PageError, names};
use kvfs_storage::ingest::model::{MANIFEST_BYTES_MAX, ManifestError, Model};
use kvfs_storage::ingest::seal::{self, SealError, SealedPlace};
use kvfs_storage::store::disk::{Access, read_all};
use kvfs_storage::store::record::{DEPTH_MAX, DirectoryClass, InodeId, Kind, ObjectId, Role};

impl Core {
    /// The model above a directory of its tree.
    pub(crate) fn model_of(
        &self, state: &mut State, directory: InodeId,
    ) -> Result<Arc<Model>, SealError> {
        let id = model_directory(state, directory)?;
        if let Some(model) = state.models.get(&id) {
            return Ok(Arc::clone(model));
        }
        let missing = || {
            SealError::Refused(PageError::Manifest(
                "the model has no manifest.json: create it before the pages (kvfs create)".into(),
            ))
        };
        let entry = state.entry(id, names::MANIFEST.as_bytes())?;
        let inode = state.inode(entry.ok_or_else(missing)?.inode)?;
        let object = inode.file().and_then(|file| file.object).ok_or_else(missing)?;
        let model = Arc::new(Model::load(&self.store, object).map_err(|error| match error {
            ManifestError::Io(error) => SealError::Io(error),
            ManifestError::Refused(error) => SealError::Refused(error),
        })?);
        state.models.insert(id, Arc::clone(&model));
        Ok(model)
    }

    /// The manifest above a directory, if it is being written in place.
    pub(crate) fn pending_manifest_above(&self, directory: InodeId) -> Option<Place> {
        let state = self.state();
        if state.pending.is_empty() {
            return None;
        }
        let parent = model_directory(&state, directory).ok()?;
        let place = Place { parent, name: names::MANIFEST.as_bytes().to_vec() };
        state.pending.contains_key(&place).then_some(place)
    }

    /// Checks the bytes of an object as what a name says they are.
    pub(crate) fn verify_as(&self, object: ObjectId, place: &Place) -> Result<Verified, SealError> {
        match self.class_of(place)? {
            (class @ (FileClass::Page(_) | FileClass::State(_)), layer) => {
                let stands = self.sealed_place(place.parent, layer, class)?;
                let sealed = seal::verify(&self.store, object, &stands)?;
                let role = Role::Page(sealed.record);
                let (length, checksum) = (sealed.length, sealed.checksum);
                let twin = self.find_twin(object, role, checksum)?;
                let same = self.find_same(object, place, (role, checksum))?;
                Ok(Verified { role, checksum, length, twin, same })
            }
            (FileClass::Manifest, _) => self.verify_manifest(object, place),
            _ => Err(FsError::Invalid.into()),
        }
    }

    /// Checks a manifest, also against the one that it would replace: it is written once.
    fn verify_manifest(&self, object: ObjectId, place: &Place) -> Result<Verified, SealError> {
        let (manifest, bytes) = self.read_manifest(object)?;
        let mut state = self.state();
        let existing = state.entry(place.parent, &place.name)?;
        if existing.is_some() {
            let model = self.model_of(&mut state, place.parent)?;
            let used = state.entry(place.parent, names::SEQUENCES.as_bytes())?;
            let mut has_sequences = false;
            if let Some(sequences) = used {
                let found = state.metadata.entries(sequences.inode, 0, |_, _, _| {
                    has_sequences = true;
                    false
                });
                found.map_err(FsError::from)?;
            }
            if has_sequences && !model.manifest.same_cache(&manifest) {
                return Err(SealError::Refused(PageError::Manifest(
                    "the model has sequences of another geometry or identity: a manifest is \
                     written once, make a new model directory"
                        .into(),
                )));
            }
        }
        let checksum = kvfs_page::content_checksum(&bytes).0;
        let length = bytes.len() as u64;
        drop(state);
        let same = self.find_same(object, place, (Role::Manifest, checksum))?;
        Ok(Verified { role: Role::Manifest, checksum, length, twin: None, same })
    }

    pub(crate) fn read_manifest(&self, object: ObjectId) -> Result<(Manifest, Vec<u8>), SealError> {
        let file = self.store.open_object(object, Access::Read).map_err(SealError::Io)?;
        let bytes = read_all(file.as_ref(), MANIFEST_BYTES_MAX)
            .map_err(|error| SealError::Refused(PageError::Manifest(error.to_string())))?;
        let manifest = Manifest::parse(&bytes).map_err(SealError::Refused)?;
        Ok((manifest, bytes))
    }

    /// Where a page or a state stands.
    pub(crate) fn sealed_place(
        &self, directory: InodeId, layer: u32, class: FileClass,
    ) -> Result<SealedPlace, SealError> {
        let model = self.model_of(&mut self.state(), directory)?;
        let stands = match class {
            FileClass::Page(start) => model.place(layer, start).map(SealedPlace::Page),
            FileClass::State(row) => {
                model.state_place(layer, row).map(|place| SealedPlace::State(Box::new(place)))
            }
            _ => return Err(FsError::Invalid.into()),
        };
        stands.map_err(SealError::Refused)
    }

    /// What a name means, and the layer of its directory.
    pub(crate) fn class_of(&self, place: &Place) -> Result<(FileClass, u32), FsError> {
        let mut state = self.state();
        let (_, directory) = state.directory(place.parent)?;
        let layer = if let DirectoryClass::Layer(layer) = directory { layer } else { 0 };
        Ok((self.class_in(&mut state, directory, place), layer))
    }

    /// What a name means in a directory of some class. Without a manifest nobody knows what a state would
    /// be, so there are none, as there are no pages.
    pub(crate) fn class_in(
        &self, state: &mut State, directory: DirectoryClass, place: &Place,
    ) -> FileClass {
        let class = classify::file(directory, &place.name);
        if !matches!(class, FileClass::State(_)) {
            return class;
        }
        let model = self.model_of(state, place.parent);
        class.in_model(model.map_or(true, |model| model.manifest.describes_states()))
    }
}

/// The model directory above (or at) a directory of its tree.
pub(crate) fn model_directory(state: &State, directory: InodeId) -> Result<InodeId, FsError> {
    let mut at = directory;
    for _ in 0..DEPTH_MAX {
        match state.inode(at)?.kind {
            Kind::Directory { class: DirectoryClass::Model, .. } => return Ok(at),
            Kind::Directory { parent, .. } if parent != at => at = parent,
            _ => break,
        }
    }
    Err(FsError::Invalid)
}

impl From<FsError> for SealError {
    fn from(error: FsError) -> SealError {
        SealError::Io(std::io::Error::from_raw_os_error(error.errno()))
    }
}

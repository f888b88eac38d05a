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
use kvfs_storage::ingest::seal::{self, SealError};
use kvfs_storage::store::disk::{Access, read_all};
use kvfs_storage::store::record::{
    DEPTH_MAX, DirectoryClass, InodeId, Kind, ObjectId, PageRecord, Role,
};

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
            (FileClass::Page(start), layer) => {
                let page = self.page_place(place.parent, layer, start)?;
                let verified = seal::verify_page(&self.store, object, &page)?;
                let tokens = verified.header.tokens;
                let role = page_role(&page, tokens, verified.digest.page.0);
                let length = page.geometry().file_bytes(tokens);
                let checksum = verified.digest.object.0;
                let twin = self.find_twin(object, role, checksum)?;
                Ok(Verified { role, checksum, length, twin })
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
        Ok(Verified { role: Role::Manifest, checksum, length, twin: None })
    }

    pub(crate) fn read_manifest(&self, object: ObjectId) -> Result<(Manifest, Vec<u8>), SealError> {
        let file = self.store.open_object(object, Access::Read).map_err(SealError::Io)?;
        let bytes = read_all(file.as_ref(), MANIFEST_BYTES_MAX)
            .map_err(|error| SealError::Refused(PageError::Manifest(error.to_string())))?;
        let manifest = Manifest::parse(&bytes).map_err(SealError::Refused)?;
        Ok((manifest, bytes))
    }

    /// Where a page stands.
    pub(crate) fn page_place(
        &self, directory: InodeId, layer: u32, start: u64,
    ) -> Result<kvfs_page::PagePlace, SealError> {
        let model = self.model_of(&mut self.state(), directory)?;
        model.place(layer, start).map_err(SealError::Refused)
    }

    /// What a name means, and the layer of its directory.
    pub(crate) fn class_of(&self, place: &Place) -> Result<(FileClass, u32), FsError> {
        let (_, directory) = self.state().directory(place.parent)?;
        let layer = if let DirectoryClass::Layer(layer) = directory { layer } else { 0 };
        Ok((classify::file(directory, &place.name), layer))
    }

    /// The layer of a directory; 0 where it is none.
    pub(crate) fn layer_of(&self, directory: InodeId) -> Result<u32, FsError> {
        let (_, class) = self.state().directory(directory)?;
        Ok(if let DirectoryClass::Layer(layer) = class { layer } else { 0 })
    }
}

/// The role of a sealed page.
pub(crate) fn page_role(page: &kvfs_page::PagePlace, tokens: u32, checksum: [u8; 16]) -> Role {
    let identity = page.identity(tokens);
    Role::Page(PageRecord {
        model: identity.model.0,
        layer: identity.layer.0,
        start: identity.start.0,
        tokens,
        dtype: identity.dtype,
        checksum,
    })
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

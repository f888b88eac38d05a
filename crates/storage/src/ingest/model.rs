//! A model's manifest, read from its object.

use crate::page::{
    Layer, Manifest, ModelIdentity, PageError, PagePlace, StatePlace, StateShape, TokenStart,
};
use crate::store::Store;
use crate::store::disk::{Access, read_all};
use crate::store::record::ObjectId;

/// A manifest is a page of text; the limit keeps a mistaken file from being read into memory.
pub const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// What the daemon keeps of a model in use.
#[derive(Debug)]
pub struct Model {
    /// The manifest.
    pub manifest: Manifest,
    /// Its identity, computed once.
    pub identity: ModelIdentity,
}

/// Why a manifest cannot be used.
#[derive(Debug)]
pub enum ManifestError {
    /// Its bytes cannot be read.
    Io(std::io::Error),
    /// It says something that cannot be.
    Refused(PageError),
}

impl Model {
    /// Reads and checks a manifest.
    pub fn load(store: &Store, object: ObjectId) -> Result<Model, ManifestError> {
        let file = store.open_object(object, Access::Read).map_err(ManifestError::Io)?;
        let bytes = read_all(file.as_ref(), MANIFEST_BYTES_MAX).map_err(ManifestError::Io)?;
        let manifest = Manifest::parse(&bytes).map_err(ManifestError::Refused)?;
        let identity = manifest.identity();
        Ok(Model { manifest, identity })
    }

    /// Where a page of this model stands, if there can be one.
    pub fn place(&self, layer: u32, start: u64) -> Result<PagePlace, PageError> {
        PagePlace::new(&self.manifest, Layer(layer), TokenStart(start))
    }

    /// Length of the longest page or state of a layer.
    pub fn file_bytes_max(&self, layer: u32) -> u64 {
        let geometry = self.manifest.layer_geometry(Layer(layer));
        let state = self.manifest.state_shape(Layer(layer));
        state.map_or(geometry.file_bytes(geometry.page_tokens()), StateShape::file_bytes)
    }

    /// Where the state of a layer after some row stands, if there can be one.
    pub fn state_place(&self, layer: u32, row: u64) -> Result<StatePlace, PageError> {
        StatePlace::new(&self.manifest, Layer(layer), TokenStart(row))
    }
}

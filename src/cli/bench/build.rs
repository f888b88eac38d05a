//! The store that is measured, filled through the library, and plain files of the same bytes.
//!
//! ```text
//! models/large/sequences/s/000    pages of 4 MiB
//! models/medium/sequences/s/000   pages of 1 MiB
//! models/small/sequences/listed   pages of 8 KiB in one directory
//! models/small/sequences/held     the same in layers of 1000
//! ```

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use super::measure::at;
use super::unsynced::Unsynced;
use super::workplace::Workplace;
use super::{Sizes, note};
use crate::fs::{Caller, FileSystem, FsError, Lookup, NewNode, Place};
use crate::observe::Observer;
use crate::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page,
};
use crate::store::Store;
use crate::store::record::InodeId;

/// Pages of one layer where many are held.
pub(super) const HELD_PER_LAYER: u64 = 1000;

/// A model whose pages have some size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Model {
    /// 8 KV heads x 128 in f16, 1024 tokens: 4 MiB.
    Large,
    /// The same with 256 tokens: 1 MiB.
    Medium,
    /// One head of 16 elements, 16 tokens: 8 KiB.
    Small,
}

impl Model {
    /// The manifest of its cache.
    pub(super) fn manifest_text(self) -> Result<String, String> {
        Ok(self.manifest()?.to_json())
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Model::Large => "large",
            Model::Medium => "medium",
            Model::Small => "small",
        }
    }

    fn manifest(self) -> Result<Manifest, String> {
        let (heads, dimension, page_tokens) = match self {
            Model::Large => (8, 128, 1024),
            Model::Medium => (8, 128, 256),
            Model::Small => (1, 16, 16),
        };
        let fields = ManifestFields {
            page_tokens,
            ..ManifestFields::new(self.name(), Dtype::F16, 200, heads, dimension)
        };
        Manifest::new(fields).map_err(|error| error.to_string())
    }
}

/// A layer's directory in the mount.
pub(super) fn layer_path(workplace: &Workplace, model: Model, sequence: &str) -> PathBuf {
    let model = workplace.mount().join("models").join(model.name());
    model.join("sequences").join(sequence).join("000")
}

/// A directory of plain files.
pub(super) fn native_path(workplace: &Workplace, model: Model, sequence: &str) -> PathBuf {
    workplace.native().join(format!("{}-{sequence}", model.name()))
}

/// Makes pages of one model.
pub(super) struct Pages {
    manifest: Manifest,
}

impl Pages {
    pub(super) fn new(model: Model) -> Result<Pages, String> {
        let manifest = model.manifest()?;
        Ok(Pages { manifest })
    }

    /// Name and bytes of the `index`-th page of a layer.
    pub(super) fn page(&self, layer: u32, index: u64) -> Result<(String, Vec<u8>), String> {
        let geometry = *self.manifest.geometry();
        let tokens = geometry.page_tokens();
        let start = TokenStart(index * u64::from(tokens));
        let bytes = PagePlace::new(&self.manifest, Layer(layer), start).and_then(|place| {
            let length = geometry.row_bytes() * u64::from(tokens);
            pack_page(&place, &noise(length, index), tokens)
        });
        let bytes = bytes.map_err(|error| error.to_string())?;
        Ok((names::format_page(start), bytes))
    }

    /// The first `count` pages of layer 0.
    pub(super) fn first(&self, count: u64) -> Result<Vec<(String, Vec<u8>)>, String> {
        (0..count).map(|index| self.page(0, index)).collect()
    }

    /// Where the `index`-th page of layer 0 belongs, and its tokens.
    pub(super) fn place(&self, index: u64) -> Result<(PagePlace, u32), String> {
        let tokens = self.manifest.geometry().page_tokens();
        let start = TokenStart(index * u64::from(tokens));
        let place = PagePlace::new(&self.manifest, Layer(0), start);
        Ok((place.map_err(|error| error.to_string())?, tokens))
    }
}

/// Bytes without structure, so that nothing below can compress or share them.
pub(super) fn noise(length: u64, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    let words = words.take(usize::try_from(length / 8).unwrap_or(0));
    words.flatten().collect()
}

/// Fills the store and the plain files, and flushes both.
pub(super) fn build(workplace: &Workplace, sizes: &Sizes) -> Result<(), String> {
    let mut builder = Builder::open(workplace)?;
    for (model, pages) in [(Model::Large, sizes.large_pages), (Model::Medium, sizes.medium_pages)] {
        let layer = builder.layer(model, "s", 0)?;
        builder.fill(&Pages::new(model)?, layer, pages, native_path(workplace, model, "s"))?;
    }
    let pages = Pages::new(Model::Small)?;
    let layer = builder.layer(Model::Small, "listed", 0)?;
    let native = native_path(workplace, Model::Small, "listed");
    builder.fill(&pages, layer, sizes.listed_pages, native)?;
    note("building a store of many pages");
    for number in 0..sizes.held_pages.div_ceil(HELD_PER_LAYER) {
        let number = u32::try_from(number).map_err(|error| error.to_string())?;
        let layer = builder.layer(Model::Small, "held", number)?;
        let left = sizes.held_pages - u64::from(number) * HELD_PER_LAYER;
        builder.fill(&pages, layer, left.min(HELD_PER_LAYER), None)?;
    }
    builder.file_system.commit_and_close().map_err(|error| error.to_string())?;
    nix::unistd::sync();
    Ok(())
}

struct Builder {
    file_system: FileSystem,
}

const CALLER: Caller = Caller { uid: 0, gid: 0 };

impl Builder {
    fn open(workplace: &Workplace) -> Result<Builder, String> {
        let failed = |error: crate::store::StoreError| error.to_string();
        let mut store = Store::open_or_create(&workplace.store()).map_err(failed)?;
        store.disk = Arc::new(Unsynced(store.disk));
        // Nobody is to be told of names: a full queue is fine.
        let (sender, _) = crossbeam_channel::bounded(1);
        let observer = Arc::new(Observer::new());
        let (file_system, _) = FileSystem::open(store, observer, sender).map_err(failed)?;
        Ok(Builder { file_system })
    }

    /// A layer's number and directory, made with everything above it.
    fn layer(&self, model: Model, sequence: &str, layer: u32) -> Result<(u32, InodeId), String> {
        let failed = |error: FsError| error.to_string();
        let models = self.directory(InodeId::ROOT, "models").map_err(failed)?;
        let directory = self.directory(models, model.name()).map_err(failed)?;
        let manifest = names::MANIFEST;
        let lookup = self.file_system.lookup(directory, manifest.as_bytes());
        if matches!(lookup.map_err(failed)?, Lookup::Absent { .. }) {
            let text = model.manifest()?.to_json();
            self.publish(directory, manifest, text.as_bytes()).map_err(failed)?;
        }
        let mut at = directory;
        for name in [names::SEQUENCES, sequence, &names::format_layer(Layer(layer))] {
            at = self.directory(at, name).map_err(failed)?;
        }
        Ok((layer, at))
    }

    fn directory(&self, parent: InodeId, name: &str) -> Result<InodeId, FsError> {
        if let Lookup::Found(found) = self.file_system.lookup(parent, name.as_bytes())? {
            return Ok(found.attributes.inode);
        }
        let place = Place { parent, name: name.as_bytes().to_vec() };
        let made = self.file_system.make(&place, &NewNode::Directory, 0o755, CALLER)?;
        Ok(made.attributes.inode)
    }

    /// Writes under a temporary name and renames, as an engine does.
    fn publish(&self, parent: InodeId, name: &str, bytes: &[u8]) -> Result<(), FsError> {
        let place = |name: &str| Place { parent, name: name.as_bytes().to_vec() };
        let temporary = place(".tmp");
        let created = self.file_system.create(&temporary, 0o644, CALLER, true)?;
        let handle = created.opened.handle;
        drop(created.opened);
        self.file_system.write(handle, 0, bytes, false)?;
        self.file_system.flush(handle)?;
        self.file_system.release(handle)?;
        self.file_system.rename(&temporary, &place(name), 0)?;
        self.file_system.forget(created.found.attributes.inode, 1);
        Ok(())
    }

    fn fill(
        &mut self, pages: &Pages, (layer, directory): (u32, InodeId), count: u64,
        native: impl Into<Option<PathBuf>>,
    ) -> Result<(), String> {
        let native = native.into();
        if let Some(path) = &native {
            fs::create_dir(path).map_err(at(path))?;
        }
        for index in 0..count {
            let (name, bytes) = pages.page(layer, index)?;
            self.publish(directory, &name, &bytes).map_err(|error| format!("{name}: {error}"))?;
            if let Some(path) = native.as_ref().map(|path| path.join(&name)) {
                fs::write(&path, &bytes).map_err(at(&path))?;
            }
        }
        Ok(())
    }
}

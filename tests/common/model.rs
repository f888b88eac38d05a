//! Models with pages of known content.

use std::path::PathBuf;

use kvfs::page::{
    Dtype, Layer, LayerKind, Manifest, ManifestFields, PageHasher, PagePlace, SideRows, TokenStart,
    names, pack_page,
};

use super::{Mount, sys};

/// Bytes that look random and depend on `seed` alone (splitmix64).
pub(crate) fn fill(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend((word ^ (word >> 31)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// A model directory to be.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    /// Its directory's name.
    pub(crate) name: String,
    /// Its manifest.
    pub(crate) manifest: Manifest,
}

impl Model {
    /// Two layers of pages of 32 tokens: 2 KV heads x 16 in f16, a page file is 8192 bytes.
    pub(crate) fn small() -> Model {
        Model::with(|_| {})
    }

    /// [`Model::small`] with so many bytes beside K and V of each token in the second layer.
    pub(crate) fn with_side_rows(row_bytes: u32) -> Model {
        let side = SideRows { name: "index_k".to_owned(), row_bytes };
        Model::with(|fields| {
            fields.layers = Some(vec![LayerKind::Attention, LayerKind::WithSide(side)]);
        })
    }

    /// [`Model::small`] with other fields.
    pub(crate) fn with(change: impl FnOnce(&mut ManifestFields)) -> Model {
        let mut fields = ManifestFields::new("test/small", Dtype::F16, 2, 2, 16);
        fields.page_tokens = 32;
        change(&mut fields);
        Model { name: "small".to_owned(), manifest: Manifest::new(fields).unwrap() }
    }

    /// The same under another directory name.
    pub(crate) fn named(mut self, name: &str) -> Model {
        name.clone_into(&mut self.name);
        self
    }

    /// Tokens of a full page.
    pub(crate) fn page_tokens(&self) -> u32 {
        self.manifest.geometry().page_tokens()
    }

    /// Bytes of one row of a tail.
    pub(crate) fn row_bytes(&self) -> usize {
        usize::try_from(self.manifest.geometry().row_bytes()).unwrap()
    }

    /// Where a page stands.
    pub(crate) fn place(&self, layer: u32, start: u64) -> PagePlace {
        PagePlace::new(&self.manifest, Layer(layer), TokenStart(start)).unwrap()
    }

    /// Rows of a tail: the same for equal `seed`, and a longer one begins with a shorter one.
    pub(crate) fn rows(&self, seed: u64, tokens: u32) -> Vec<u8> {
        fill(seed, self.row_bytes() * tokens as usize)
    }

    /// The same of a layer, whose rows may have a part beside K and V.
    pub(crate) fn layer_rows(&self, layer: u32, seed: u64, tokens: u32) -> Vec<u8> {
        let row_bytes = self.manifest.layer_geometry(Layer(layer)).row_bytes();
        fill(seed, usize::try_from(row_bytes).unwrap() * tokens as usize)
    }

    /// A full page file with the rows of `seed`.
    pub(crate) fn page(&self, layer: u32, start: u64, seed: u64) -> Vec<u8> {
        self.short_page(layer, start, seed, self.page_tokens())
    }

    /// A page file of that many tokens.
    pub(crate) fn short_page(&self, layer: u32, start: u64, seed: u64, tokens: u32) -> Vec<u8> {
        let place = self.place(layer, start);
        pack_page(&place, &self.layer_rows(layer, seed, tokens), tokens).unwrap()
    }

    /// The public checksum of a page file at its place, as `user.kvfs.checksum` shows it.
    pub(crate) fn checksum(&self, layer: u32, start: u64, file: &[u8]) -> String {
        let place = self.place(layer, start);
        let header = place.check_header(&file[..4096], file.len() as u64).unwrap();
        let mut hasher = PageHasher::new();
        hasher.update(file);
        let digest = hasher.finish(&place.identity(header.tokens));
        digest.page.to_string()
    }

    /// Makes the model's directory with its manifest and `sequences/`.
    pub(crate) fn install(&self, mount: &Mount) {
        let directory = self.directory(mount);
        std::fs::create_dir(&directory).unwrap();
        let manifest = directory.join(names::MANIFEST);
        sys::write_and_close(manifest, self.manifest.to_json().as_bytes()).unwrap();
        std::fs::create_dir(directory.join(names::SEQUENCES)).unwrap();
    }

    /// The model's directory.
    pub(crate) fn directory(&self, mount: &Mount) -> PathBuf {
        mount.join("models").join(&self.name)
    }

    /// A sequence's directory.
    pub(crate) fn sequence(&self, mount: &Mount, sequence: &str) -> PathBuf {
        self.directory(mount).join(names::SEQUENCES).join(sequence)
    }

    /// A layer's directory, which is made if it is missing.
    pub(crate) fn layer(&self, mount: &Mount, sequence: &str, layer: u32) -> PathBuf {
        let name = names::format_layer(Layer(layer));
        let directory = self.sequence(mount, sequence).join(name);
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    /// The path of a page, in a layer directory that exists afterwards.
    pub(crate) fn page_path(
        &self, mount: &Mount, sequence: &str, layer: u32, start: u64,
    ) -> PathBuf {
        let name = names::format_page(TokenStart(start));
        self.layer(mount, sequence, layer).join(name)
    }

    /// The path of a tail, in a layer directory that exists afterwards.
    pub(crate) fn tail_path(
        &self, mount: &Mount, sequence: &str, layer: u32, start: u64,
    ) -> PathBuf {
        let name = names::format_tail(TokenStart(start));
        self.layer(mount, sequence, layer).join(name)
    }

    /// The path of a sequence's token file, in a directory that exists afterwards.
    pub(crate) fn tokens_path(&self, mount: &Mount, sequence: &str) -> PathBuf {
        let directory = self.sequence(mount, sequence);
        std::fs::create_dir_all(&directory).unwrap();
        directory.join(names::TOKENS)
    }
}

//! A sequence as another store's records tell it, read from the remote and checked as far as
//! records can be.

use std::io;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use super::super::prefixes::TOKEN_BYTES;
use super::openness::{Records, grants_all, is_open_to_all, may_all_enter};
use kvfs_page::{
    Layer, LayerKind, MAX_POSITIONS_BYTES, Manifest, ModelIdentity, PageIdentity, Positions,
    PrefixHash, TokenStart, names,
};
use kvfs_storage::ingest::model::{MANIFEST_BYTES_MAX, Model};
use kvfs_storage::store::database::decode;
use kvfs_storage::store::disk::{DiskFile, read_all};
use kvfs_storage::store::record::{
    Entry, Inode, InodeId, Kind, ObjectId, ObjectRecord, PageRecord, RemoteCopy, RemoteState, Role,
    Time,
};
use kvfs_storage::store::{Store, keys};
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::names::table::Table;
use kvfs_storage::tier::remote::{RemoteError, Result};

/// Token files of 16 million tokens are published, no larger ones.
const TOKENS_BYTES_MAX: u64 = 64 << 20;

/// What is wanted of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted<'a> {
    /// What it shares with a prompt, four bytes for each token.
    Prompt(&'a [u8]),
    /// All up to the page of this number, which ends this prefix.
    Page(u32, PrefixHash),
}

/// A sequence, from its beginning to the end of a page.
#[derive(Debug)]
pub(super) struct ForeignSequence {
    pub(super) name: Vec<u8>,
    /// Four bytes each.
    pub(super) tokens: Vec<u8>,
    pub(super) layers: Vec<(Layer, Vec<ForeignPage>)>,
}

/// A full page.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForeignPage {
    pub(super) record: PageRecord,
    /// Checksum of the object.
    pub(super) checksum: [u8; 16],
    pub(super) length: u64,
    pub(super) mtime: Time,
    pub(super) copy: RemoteCopy,
}

/// A regular file of the other store.
struct File {
    role: Role,
    length: u64,
    mtime: Time,
    object: ObjectId,
    /// Everybody may read it.
    is_open: bool,
}

/// Records of another store, and the remote that has the bytes.
pub(super) struct Source<'a> {
    pub(super) table: &'a Table,
    pub(super) exchange: &'a Exchange,
    pub(super) store: &'a Store,
}

impl Source<'_> {
    /// The manifest of a model's directory; none if there is none that this kvfs understands.
    pub(super) fn manifest(
        &self, model: InodeId,
    ) -> Result<Option<Arc<(ModelIdentity, Manifest)>>> {
        let bytes = self.bytes(model, names::MANIFEST, MANIFEST_BYTES_MAX)?;
        let manifest = bytes.and_then(|bytes| Manifest::parse(&bytes).ok());
        Ok(manifest.map(|manifest| Arc::new((manifest.identity(), manifest))))
    }

    /// A sequence as far as it is wanted; none if it does not have what it was said to have.
    pub(super) fn sequence(
        &self, sequence: InodeId, rules: &Model, wanted: Wanted<'_>,
    ) -> Result<Option<ForeignSequence>> {
        let Some(directory) = self.inode(sequence)? else { return Ok(None) };
        if !is_open_to_all(self, sequence)? {
            return Ok(None);
        }
        let Kind::Directory { name, .. } = directory.kind else { return Ok(None) };
        let tokens = self.bytes(sequence, names::TOKENS, TOKENS_BYTES_MAX)?;
        let Some(mut tokens) = tokens else { return Ok(None) };
        let Some(rows) = self.rows_of_tokens(sequence)? else { return Ok(None) };
        let known = usize::try_from(rows).unwrap_or(usize::MAX).saturating_mul(TOKEN_BYTES);
        tokens.truncate(known);
        let page_bytes = rules.manifest.geometry().page_tokens() as usize * TOKEN_BYTES;
        let end = match wanted {
            Wanted::Prompt(prompt) => {
                let same = tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
                // The page in which they part is of use as far as they agree.
                let pages = (same - same % TOKEN_BYTES).div_ceil(page_bytes);
                pages.min(tokens.len() / page_bytes) * page_bytes
            }
            Wanted::Page(number, hash) => {
                let end = (number as usize).saturating_add(1).saturating_mul(page_bytes);
                if !ends_with(&tokens, end, page_bytes, rules, hash) {
                    return Ok(None);
                }
                end
            }
        };
        tokens.truncate(end);
        let pages = end / page_bytes;
        let kept = (0..rules.manifest.geometry().num_layers()).map(Layer).filter(|layer| {
            let kind = rules.manifest.layer_kind(*layer);
            kind.as_ref().is_some_and(LayerKind::has_rows_of_tokens)
        });
        let mut layers = Vec::new();
        for layer in kept {
            let Some(pages) = self.pages(sequence, layer, pages, rules)? else { return Ok(None) };
            layers.push((layer, pages));
        }
        Ok((end > 0).then_some(ForeignSequence { name, tokens, layers }))
    }

    /// Rows from the first that are what the tokens make them: those behind were computed after tokens before them had
    /// been removed or moved. None if that cannot be told.
    fn rows_of_tokens(&self, sequence: InodeId) -> Result<Option<u64>> {
        if self.entry(sequence, names::POSITIONS)?.is_none() {
            return Ok(Some(u64::MAX));
        }
        let json = self.bytes(sequence, names::POSITIONS, MAX_POSITIONS_BYTES as u64)?;
        let positions = json.and_then(|json| Positions::parse(&json).ok());
        Ok(positions.map(|positions| positions.edited_at()))
    }

    /// Those of the first `count` pages of a layer that the remote has; none at all of a layer of which
    /// something is not open to everybody.
    fn pages(
        &self, sequence: InodeId, layer: Layer, count: usize, rules: &Model,
    ) -> Result<Option<Vec<ForeignPage>>> {
        let Some(directory) = self.entry(sequence, &names::format_layer(layer))? else {
            return Ok(Some(Vec::new()));
        };
        if !self.inode(directory)?.is_some_and(|directory| may_all_enter(&directory)) {
            return Ok(None);
        }
        let page_tokens = u64::from(rules.manifest.geometry().page_tokens());
        let mut pages = Vec::new();
        for start in (0..count as u64).map(|number| TokenStart(number * page_tokens)) {
            let Some(file) = self.file(directory, &names::format_page(start))? else { continue };
            if !file.is_open {
                return Ok(None);
            }
            pages.extend(self.page(&file, (layer, start), rules)?);
        }
        Ok(Some(pages))
    }

    /// A page, if its record says what its place says.
    fn page(
        &self, file: &File, (layer, start): (Layer, TokenStart), rules: &Model,
    ) -> Result<Option<ForeignPage>> {
        let geometry = rules.manifest.layer_geometry(layer);
        let Role::Page(record) = file.role else { return Ok(None) };
        let expected = PageIdentity {
            model: rules.identity,
            layer,
            start,
            tokens: geometry.page_tokens(),
            dtype: geometry.dtype(),
        };
        let length = geometry.file_bytes(geometry.page_tokens());
        if PageIdentity::from(&record) != expected || file.length != length {
            return Ok(None);
        }
        let object: Option<ObjectRecord> = self.record(&keys::object(file.object))?;
        let checksum = object.and_then(|object| object.checksum);
        let copy: Option<RemoteCopy> = self.record(&keys::remote_copy(file.object))?;
        Ok(checksum.zip(copy).map(|(checksum, copy)| ForeignPage {
            record,
            checksum,
            length,
            mtime: file.mtime,
            copy: RemoteCopy { state: RemoteState::Only, ..copy },
        }))
    }

    fn record<T: DeserializeOwned>(&self, key: &[u8]) -> Result<Option<T>> {
        let Some(row) = self.table.get(key)? else { return Ok(None) };
        let damaged = |error| RemoteError::Corrupt(format!("a record of another store: {error}"));
        decode(&row.value).map(Some).map_err(damaged)
    }

    fn file(&self, parent: InodeId, name: &str) -> Result<Option<File>> {
        let Some(id) = self.entry(parent, name)? else { return Ok(None) };
        let Some(inode) = self.inode(id)? else { return Ok(None) };
        let file = inode.file().and_then(|file| {
            let (role, length, mtime) = (file.role, file.size, inode.mtime);
            let is_open = grants_all(&inode, 0o4);
            file.object.map(|object| File { role, length, mtime, object, is_open })
        });
        Ok(file)
    }

    /// The bytes of a small file, compared with the hash that the remote knows them by.
    fn bytes(&self, parent: InodeId, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>> {
        let file = self.file(parent, name)?.filter(|file| file.length <= bytes_max);
        let Some(file) = file else { return Ok(None) };
        let copy: Option<RemoteCopy> = self.record(&keys::remote_copy(file.object))?;
        let Some(copy) = copy else { return Ok(None) };
        let scratch: Arc<dyn DiskFile> = self.store.scratch().map_err(RemoteError::local)?.into();
        let what = (file.object, file.length);
        self.exchange.download_unrecorded(self.store, what, &copy, &scratch)?;
        let read = || -> io::Result<Vec<u8>> { read_all(scratch.as_ref(), bytes_max) };
        read().map(Some).map_err(RemoteError::local)
    }
}

impl Records for Source<'_> {
    type Error = RemoteError;

    fn inode(&self, id: InodeId) -> Result<Option<Inode>> {
        self.record(&keys::inode(id))
    }

    fn entry(&self, parent: InodeId, name: &str) -> Result<Option<InodeId>> {
        let entry: Option<Entry> = self.record(&keys::entry(parent, name.as_bytes()))?;
        Ok(entry.map(|entry| entry.inode))
    }
}

/// Whether the pages up to byte `end` have this hash.
fn ends_with(
    tokens: &[u8], end: usize, page_bytes: usize, rules: &Model, hash: PrefixHash,
) -> bool {
    let Some(tokens) = tokens.get(..end) else { return false };
    let root = rules.manifest.prefix_root();
    let chain = tokens.chunks_exact(page_bytes);
    chain.fold(root, |parent, page| Some(PrefixHash::next(parent, page))) == Some(hash)
}

//! Which sequences of one other store have which prefixes: its own records of that, in memory.
//!
//! They come in the chunks of its manifest of names, and what has not changed since the last one is
//! not read again.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::source::Source;
use kvfs_page::{Manifest, ModelIdentity, PrefixHash};
use kvfs_storage::store::Store;
use kvfs_storage::store::database::decode;
use kvfs_storage::store::keys;
use kvfs_storage::store::record::InodeId;
use kvfs_storage::tier::content::ContentHash;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::names::Row;
use kvfs_storage::tier::remote::names::table::Table;
use kvfs_storage::tier::remote::{Result, Sequence, StoreId};

/// Another store, as it was when it published last.
#[derive(Debug)]
pub(super) struct ForeignStore {
    pub(super) table: Table,
    /// In the order of the records, which is that of model and hash.
    parts: Vec<Arc<Part>>,
    models: Vec<ForeignModel>,
    /// Sequences that did not have what they were said to have.
    refuted: Mutex<HashSet<InodeId>>,
}

/// The records of one chunk.
#[derive(Debug)]
struct Part {
    chunk: ContentHash,
    holders: Vec<Holder>,
}

/// A sequence has a prefix, whose last page is this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Holder {
    model: u64,
    hash: [u8; 32],
    sequence: u64,
    page: u32,
}

/// A model's directory in the other store. `None` if its manifest could not be read.
#[derive(Clone, Debug)]
struct ForeignModel {
    directory: InodeId,
    manifest: Option<Arc<(ModelIdentity, Manifest)>>,
}

impl ForeignStore {
    /// Reads at most `room` prefixes; those that `old` has read are not read again.
    pub(super) fn read(
        table: Table, old: Option<&Arc<ForeignStore>>, room: usize,
        (exchange, store): (&Exchange, &Store),
    ) -> Result<ForeignStore> {
        let (mut parts, mut count) = (Vec::new(), 0);
        for entry in table.chunks_with(&keys::table(b'H')) {
            let known = old.and_then(|old| old.part(entry.hash()));
            let part = match known {
                Some(part) => part,
                None => Arc::new(Part::of(entry.hash(), &table.chunk(entry)?)),
            };
            count += part.holders.len();
            if count > room {
                log::warn!("store {}: more prefixes than are kept in memory", table.store_id());
                break;
            }
            parts.push(part);
        }
        let mut models: Vec<ForeignModel> = Vec::new();
        let holders = || parts.iter().flat_map(|part: &Arc<Part>| part.holders.iter());
        for directory in holders().map(|holder| InodeId(holder.model)) {
            if models.last().is_some_and(|model| model.directory == directory) {
                continue;
            }
            let known = old.and_then(|old| old.model(directory));
            let manifest = match known.filter(|known| known.manifest.is_some()) {
                Some(known) => known.manifest.clone(),
                None => Source { table: &table, exchange, store }.manifest(directory)?,
            };
            models.push(ForeignModel { directory, manifest });
        }
        table.forget_chunks();
        Ok(ForeignStore { table, parts, models, refuted: Mutex::default() })
    }

    fn part(&self, chunk: ContentHash) -> Option<Arc<Part>> {
        self.parts.iter().find(|part| part.chunk == chunk).cloned()
    }

    fn model(&self, directory: InodeId) -> Option<&ForeignModel> {
        self.models.iter().find(|model| model.directory == directory)
    }

    pub(super) fn id(&self) -> StoreId {
        self.table.store_id()
    }

    pub(super) fn sequence(&self) -> Sequence {
        self.table.sequence()
    }

    /// How many prefixes.
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.holders.len()).sum()
    }

    /// Up to `count` sequences that have a prefix, in models that describe the same cache.
    pub(super) fn holders(
        &self, manifest: &Manifest, hash: &PrefixHash, count: usize,
    ) -> Vec<(InodeId, u32)> {
        let identity = manifest.identity();
        let is_same = |model: &&ForeignModel| {
            let known = model.manifest.as_ref();
            known.is_some_and(|known| known.0 == identity && known.1.same_cache(manifest))
        };
        let refuted = self.refuted();
        let models = self.models.iter().filter(is_same);
        let found = models.flat_map(|model| self.of_model(model.directory, hash));
        let found = found.map(|holder| (InodeId(holder.sequence), holder.page));
        found.filter(|(sequence, _)| !refuted.contains(sequence)).take(count).collect()
    }

    fn of_model(&self, model: InodeId, hash: &PrefixHash) -> impl Iterator<Item = &Holder> {
        let first = (model.0, hash.0);
        let key = |holder: &Holder| (holder.model, holder.hash);
        let is_before = |part: &Arc<Part>| part.holders.last().is_none_or(|last| key(last) < first);
        let begin = self.parts.partition_point(is_before);
        let holders = self.parts[begin..].iter().flat_map(move |part| {
            let at = part.holders.partition_point(|holder| key(holder) < first);
            part.holders[at..].iter()
        });
        holders.take_while(move |holder| key(holder) == first)
    }

    /// A sequence does not have what it was said to have.
    pub(super) fn refute(&self, sequence: InodeId) {
        self.refuted().insert(sequence);
    }

    fn refuted(&self) -> MutexGuard<'_, HashSet<InodeId>> {
        self.refuted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    fn of(chunk: ContentHash, rows: &[Row]) -> Part {
        Part { chunk, holders: rows.iter().filter_map(Holder::parse).collect() }
    }
}

impl Holder {
    fn parse(row: &Row) -> Option<Holder> {
        let (model, hash, sequence) = keys::split_holder(&row.key)?;
        let page = decode(&row.value).ok()?;
        Some(Holder { model: model.0, hash, sequence: sequence.0, page })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfs_storage::store::database::encode;

    #[test]
    fn a_record_is_read_back_and_anything_else_is_none() {
        let key = keys::of_sequence(keys::holders(InodeId(3), &[9; 32]), InodeId(5));
        let row = |key: &[u8], value: Vec<u8>| Row { key: key.to_vec(), value, blob: None };
        let holder = Holder { model: 3, hash: [9; 32], sequence: 5, page: 7 };
        assert_eq!(Holder::parse(&row(&key, encode(&7_u32))), Some(holder));
        assert_eq!(Holder::parse(&row(&key[1..], encode(&7_u32))), None);
        assert_eq!(Holder::parse(&row(&key[..48], encode(&7_u32))), None);
        assert_eq!(Holder::parse(&row(&key, Vec::new())), None);
        assert_eq!(Holder::parse(&row(&keys::inode(InodeId(3)), encode(&7_u32))), None);
    }
}

//! Sequences of other stores that share the remote: found by their prefixes, and taken over.
//!
//! Every store's manifest of names tells which of its sequences has which prefix. Each mount reads
//! these records of all other stores in the background ([`index`]), so a question is answered from
//! memory; an absent prefix is never remembered. When somebody wants the pages, the sequence's own
//! records are read ([`source`]) and it appears here ([`adopt`]): as `NAME@STORE`, with names and
//! tokens, and pages whose bytes come when they are opened ([`arrive`]).
//!
//! Whoever can write to the remote can write anything there, and what was true when it was published
//! may not be any more. So nothing is believed: the tokens must be those of the prompt or give the
//! hash, the manifest must describe the same cache, a page must be what its place and its checksum
//! say. Whatever fails counts as absent.

mod adopt;
mod arrive;
mod index;
mod openness;
mod source;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(super) use adopt::{Adoption, Provenance};
use index::ForeignStore;
pub(super) use openness::is_open_to_all;

use super::remote_memory::RemoteMemory;
use super::{FileSystem, FsError};
use crate::core::Core;
use kvfs_page::{Manifest, PrefixHash};
use kvfs_storage::store::format;
use kvfs_storage::store::record::InodeId;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::names::{self, table::Table};
use kvfs_storage::tier::remote::{BlobStore, RemoteError, State as RemoteHealth, StoreId};

/// Of a page whose bytes have not come yet: where they come from.
pub(super) const ORIGIN: &[u8] = b"user.kvfs.origin";

/// Stores whose records are read; one question looks at each.
const STORES_MAX: usize = 256;
/// Prefixes that are kept in memory, 56 bytes each.
const PREFIXES_MAX: usize = 1 << 20;
/// Sequences of other stores that are looked at for one answer: each costs some reads of the remote.
const CANDIDATES_MAX: usize = 4;

/// What is known of other stores.
#[derive(Debug, Default)]
pub(super) struct Foreign {
    stores: Mutex<Vec<Arc<ForeignStore>>>,
    /// Stores whose manifests are damaged, or not the newest: told once.
    damaged: Mutex<BTreeSet<StoreId>>,
    /// Held while a sequence is taken over.
    adopting: Mutex<()>,
}

impl Foreign {
    fn stores(&self) -> MutexGuard<'_, Vec<Arc<ForeignStore>>> {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prefixes that are known, and in how many stores.
    pub(super) fn count(&self) -> (usize, usize) {
        let stores = self.stores();
        (stores.iter().map(|store| store.len()).sum(), stores.len())
    }

    /// Sequences of other stores that have a prefix of this cache, and the page that ends it.
    fn holders(
        &self, manifest: &Manifest, hash: &PrefixHash,
    ) -> Vec<(Arc<ForeignStore>, InodeId, u32)> {
        if manifest.describes_states() {
            // States stay where they are, and without them nobody can go on after a page.
            return Vec::new();
        }
        let stores = self.stores().clone();
        let found = stores.iter().flat_map(|store| {
            let holders = store.holders(manifest, hash, CANDIDATES_MAX);
            holders.into_iter().map(|(sequence, page)| (Arc::clone(store), sequence, page))
        });
        found.take(CANDIDATES_MAX).collect()
    }

    /// Whether any other store has published prefixes.
    pub(super) fn has_stores(&self) -> bool {
        !self.stores().is_empty()
    }

    /// Whether another store claims to have a prefix.
    pub(super) fn has(&self, manifest: &Manifest, hash: &PrefixHash) -> bool {
        if manifest.describes_states() {
            return false;
        }
        let stores = self.stores().clone();
        stores.iter().any(|store| !store.holders(manifest, hash, 1).is_empty())
    }

    /// What a sequence was said to have did not hold: it counts as absent until its store publishes
    /// again.
    fn refute(&self, store: StoreId, sequence: InodeId) {
        let stores = self.stores().clone();
        if let Some(store) = stores.iter().find(|known| known.id() == store) {
            store.refute(sequence);
        }
    }
}

/// Reads what other stores have published since the last time.
pub fn refresh_foreign(fs: &FileSystem) -> Result<(), FsError> {
    let Some(tiers) = &fs.tiers else { return Ok(()) };
    let Some(exchange) = &tiers.exchange else { return Ok(()) };
    let RemoteHealth::Up { .. } = exchange.remote().state() else { return Ok(()) };
    let (own, _) = RemoteMemory::of(&fs.core).identity()?;
    let remote = Arc::clone(exchange.remote()) as Arc<dyn BlobStore>;
    let published = names::stores(remote.as_ref()).map_err(FsError::Remote)?;
    let known = fs.foreign.stores().clone();
    let (mut stores, mut room) = (Vec::new(), PREFIXES_MAX);
    for id in published.into_iter().filter(|id| *id != own).take(STORES_MAX) {
        if tiers.is_closing() {
            return Ok(());
        }
        let old = known.iter().find(|store| store.id() == id);
        let read = fs.foreign.read(&fs.core, exchange, (&remote, id), old, room);
        let Some(store) = read.map_err(FsError::Remote)? else { continue };
        room = room.saturating_sub(store.len());
        stores.push(store);
    }
    *fs.foreign.stores() = stores;
    RemoteMemory::of(&fs.core).note_manifests_seen(exchange.remote())
}

impl Foreign {
    /// What a store has by now. One that cannot be read stays as it was known.
    fn read(
        &self, core: &Core, exchange: &Exchange, (remote, id): (&Arc<dyn BlobStore>, StoreId),
        old: Option<&Arc<ForeignStore>>, room: usize,
    ) -> Result<Option<Arc<ForeignStore>>, RemoteError> {
        let read = Table::newer(remote, id, old.map(|store| store.sequence())).and_then(|table| {
            let table = table.filter(|table| table.layout() == format::VERSION);
            let read = |table| ForeignStore::read(table, old, room, (exchange, &core.store));
            table.map(read).transpose()
        });
        let mut damaged = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(Some(store)) => {
                damaged.remove(&id);
                Ok(Some(Arc::new(store)))
            }
            Ok(None) => Ok(old.cloned()),
            Err(error) if error.is_outage() => Err(error),
            Err(error @ RemoteError::Corrupt(_)) if damaged.insert(id) => {
                core.observer.failed(&format!("what store {id} has is not known: {error}"));
                Ok(old.cloned())
            }
            Err(error) => {
                log::debug!("the prefixes of store {id} are not read: {error}");
                Ok(old.cloned())
            }
        }
    }
}

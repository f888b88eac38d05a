//! A remote in memory that is as it was when the power of this machine was cut.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use kvfs::tier::remote::counters::Counters;
use kvfs::tier::remote::{
    BlobStore, Connector, Extent, Listed, Listing, Put, PutMode, RemoteError, RemoteName,
    RemotePrefix, Result, Sink, Source, Stat,
};

use crate::disk::SimulatedDisk;
use crate::log::Step;

const PLACE: &str = "memory";

/// Everything in it.
pub(crate) type Blobs = BTreeMap<RemoteName, Blob>;

#[derive(Clone, Debug)]
pub(crate) struct Blob {
    bytes: Arc<Vec<u8>>,
    modified: SystemTime,
}

/// The remote. Clones are the same remote.
#[derive(Clone, Debug)]
pub(crate) struct MemoryRemote {
    blobs: Arc<Mutex<Arc<Blobs>>>,
    /// Whose log tells what it held when.
    disk: SimulatedDisk,
}

impl MemoryRemote {
    pub(crate) fn holding(blobs: &Arc<Blobs>, disk: &SimulatedDisk) -> MemoryRemote {
        MemoryRemote { blobs: Arc::new(Mutex::new(Arc::clone(blobs))), disk: disk.clone() }
    }

    pub(crate) fn blobs(&self) -> Arc<Blobs> {
        Arc::clone(&self.held())
    }

    fn held(&self) -> MutexGuard<'_, Arc<Blobs>> {
        self.blobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Blobs) -> T) -> T {
        let mut held = self.held();
        let outcome = change(Arc::make_mut(&mut held));
        self.disk.note(Step::Remote(Arc::clone(&held)));
        outcome
    }
}

impl Connector for MemoryRemote {
    fn place(&self) -> String {
        PLACE.to_owned()
    }
    fn connect(&self, _: &Counters) -> Result<Arc<dyn BlobStore>> {
        Ok(Arc::new(self.clone()))
    }
}

fn missing(name: RemoteName) -> RemoteError {
    RemoteError::Missing(format!("{name:?}"))
}

fn is_in(name: RemoteName, prefix: RemotePrefix) -> bool {
    match (prefix, name) {
        (RemotePrefix::Blobs, RemoteName::Blob(_))
        | (RemotePrefix::Chunks, RemoteName::Chunk(_))
        | (RemotePrefix::Manifests, RemoteName::Manifest(..)) => true,
        (RemotePrefix::ManifestsOf(store), RemoteName::Manifest(of, _)) => store == of,
        _ => false,
    }
}

impl BlobStore for MemoryRemote {
    fn place(&self) -> &str {
        PLACE
    }

    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put> {
        if mode == PutMode::IfAbsent && self.held().contains_key(&name) {
            return Ok(Put::AlreadyThere);
        }
        let mut bytes = vec![0; usize::try_from(source.length()).unwrap()];
        source.read_exact_at(&mut bytes, 0).map_err(RemoteError::local)?;
        let blob = Blob { bytes: Arc::new(bytes), modified: SystemTime::now() };
        self.change(|blobs| blobs.insert(name, blob));
        Ok(Put::Stored)
    }

    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64> {
        let blob = self.held().get(&name).cloned().ok_or_else(|| missing(name))?;
        let size = blob.bytes.len() as u64;
        let extent = extent.within(size);
        let (offset, bytes) =
            extent.map_err(|why| RemoteError::Corrupt(format!("{name:?} {why}")))?;
        let range = usize::try_from(offset).unwrap()..usize::try_from(offset + bytes).unwrap();
        sink.write_all_at(&blob.bytes[range], 0).map_err(RemoteError::local)?;
        Ok(bytes)
    }

    fn head(&self, name: RemoteName) -> Result<Option<Stat>> {
        let held = self.held();
        let stat = |blob: &Blob| Stat { bytes: blob.bytes.len() as u64, modified: blob.modified };
        Ok(held.get(&name).map(stat))
    }

    fn refresh(&self, name: RemoteName) -> Result<()> {
        self.change(|blobs| match blobs.get_mut(&name) {
            Some(blob) => {
                blob.modified = SystemTime::now();
                Ok(())
            }
            None => Err(missing(name)),
        })
    }

    fn delete(&self, name: RemoteName) -> Result<()> {
        self.change(|blobs| blobs.remove(&name));
        Ok(())
    }

    fn delete_if_older(&self, name: RemoteName, than: SystemTime) -> Result<bool> {
        let is_older = self.held().get(&name).is_some_and(|blob| blob.modified < than);
        if is_older {
            self.delete(name)?;
        }
        Ok(is_older)
    }

    fn settling(&self) -> Duration {
        Duration::ZERO
    }

    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        let held = self.held();
        let objects = held
            .iter()
            .filter(|(name, _)| is_in(**name, prefix) && after.is_none_or(|after| **name > after))
            .map(|(name, blob)| {
                let stat = Stat { bytes: blob.bytes.len() as u64, modified: blob.modified };
                Listed { name: *name, stat }
            })
            .collect();
        Ok(Listing { objects, is_last: true })
    }

    fn sweep(&self, _: SystemTime) -> Result<u64> {
        Ok(0)
    }

    fn is_vacant(&self) -> Result<bool> {
        Ok(self.held().is_empty())
    }
}

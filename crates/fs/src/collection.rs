//! Garbage collection on request: whoever sets `user.kvfs.gc` of the root to `collect` or `dry-run`
//! starts one, and reads there what it found and did.
//!
//! In the remote, what no manifest of names needs is deleted ([`kvfs_storage::tier::remote::gc`]). Our own
//! manifest is published anew before, so that what was deleted since the last one is not kept by
//! it. In the store, object files that no record refers to go; a crash leaves them, and the mount
//! sweeps them up when it begins, so there should be none.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::tiers::Tiers;
use super::{FileSystem, FsError};
use kvfs_storage::store::disk::{DiskDirectory, DiskPath};
use kvfs_storage::store::record::{EncodedCopy, InodeId, ObjectId, ObjectRecord};
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::gc::{Collected, collect};
use kvfs_storage::tier::remote::{BlobStore, RemoteError, State as RemoteHealth};

/// How long the manifest of names may take. The mover publishes it between two batches.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(300);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Longest text of an error: the attribute stays small.
const ERROR_CHARACTERS_MAX: usize = 160;

/// The collection that is running, or what the last one found.
#[derive(Debug, Default)]
pub(super) struct Collection(Mutex<Progress>);

#[derive(Debug, Default)]
enum Progress {
    #[default]
    Never,
    Running,
    Done(String),
}

impl Collection {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Manifests of names that somebody waits for.
#[derive(Debug, Default)]
pub(super) struct Publication {
    asked: AtomicBool,
    done: AtomicU64,
}

impl Publication {
    /// Whether somebody waits for a manifest, who is taken note of.
    pub(super) fn take_request(&self) -> bool {
        self.asked.swap(false, Ordering::AcqRel)
    }

    /// The manifest that was begun after the request is there, or is to be tried again.
    pub(super) fn answer(&self, is_there: bool) {
        if is_there {
            self.done.fetch_add(1, Ordering::AcqRel);
        } else {
            self.asked.store(true, Ordering::Release);
        }
    }
}

impl FileSystem {
    /// Whether setting an attribute starts a collection, and whether that shall only look.
    pub fn asks_for_collection(
        &self, id: InodeId, name: &[u8], value: &[u8],
    ) -> Result<Option<bool>, FsError> {
        match (id == InodeId::ROOT && name == super::extended::GC, value) {
            (false, _) => Ok(None),
            (true, b"collect") => Ok(Some(false)),
            (true, b"dry-run") => Ok(Some(true)),
            (true, _) => Err(FsError::Invalid),
        }
    }

    /// Takes the place of the one collection that runs at a time.
    pub fn begin_collection(&self) -> Result<(), FsError> {
        let mut progress = self.collection.progress();
        if matches!(*progress, Progress::Running) {
            return Err(FsError::InUse);
        }
        *progress = Progress::Running;
        Ok(())
    }

    /// Collects, after [`FileSystem::begin_collection`].
    pub fn collect_garbage(&self, dry_run: bool) {
        let report = match self.collected(dry_run) {
            Ok(report) => report,
            Err(error) => {
                self.core.observer.failed(&format!("garbage was not collected: {error}"));
                let text: String = error.to_string().chars().take(ERROR_CHARACTERS_MAX).collect();
                format!("error: {text}")
            }
        };
        *self.collection.progress() = Progress::Done(report);
    }

    /// `running`, or lines `key: value` of what the last collection found.
    pub(super) fn collection_report(&self) -> Result<String, FsError> {
        match &*self.collection.progress() {
            Progress::Never => Err(FsError::NoAttribute),
            Progress::Running => Ok("running".to_owned()),
            Progress::Done(report) => Ok(report.clone()),
        }
    }

    fn collected(&self, dry_run: bool) -> Result<String, FsError> {
        let mut text = String::new();
        let mut line = |key: &str, value: u64| {
            let _ = writeln!(text, "{key}: {value}");
        };
        let exchange =
            self.tiers.as_ref().and_then(|tiers| Some((tiers, tiers.exchange.as_ref()?)));
        if let Some((tiers, exchange)) = exchange {
            publish_anew(tiers, exchange)?;
            let (remote, grace) = (exchange.remote().as_ref(), exchange.grace());
            let found: Collected = collect(remote, grace, dry_run).map_err(FsError::Remote)?;
            line("stores", found.stores);
            line("referenced", found.referenced);
            line("young", found.young);
            line("deleted", found.deleted);
            line("deleted_bytes", found.deleted_bytes);
            line("swept", found.swept);
            line("unfinished", found.is_unfinished.into());
        }
        line("store_deleted", self.collect_store(dry_run)?);
        let packs = &self.core.store.packs;
        let freed = if dry_run { packs.packed().invalid_bytes() } else { packs.compact_all()? };
        line("packs_freed_bytes", freed);
        Ok(text)
    }

    /// Removes object files without a record; how many.
    fn collect_store(&self, dry_run: bool) -> Result<u64, FsError> {
        let below = {
            let mut state = self.core.state();
            let below = state.metadata.new_object();
            state.metadata.staged.remove(&below);
            below
        };
        let (mut unknown, mut encoded) = (HashSet::new(), HashSet::new());
        for shard in 0..=u8::MAX {
            for name in self.core.store.disk.list(DiskDirectory::ObjectShard(shard))? {
                match DiskPath::stored(&name) {
                    Some(DiskPath::Object(object)) => unknown.insert(object),
                    Some(DiskPath::Encoded(object)) => encoded.insert(object),
                    _ => false,
                };
            }
        }
        // What was put there before its record is durable has one afterwards.
        self.commit()?;
        let snapshot = self.core.state().metadata.snapshot()?;
        snapshot.for_each::<ObjectRecord>(b'O', |object, _| {
            unknown.remove(&ObjectId(object));
        })?;
        unknown.retain(|object| *object < below);
        if !unknown.is_empty() {
            self.spare_open_files(&mut unknown)?;
        }
        snapshot.for_each::<EncodedCopy>(b'Z', |object, _| {
            encoded.remove(&ObjectId(object));
        })?;
        let raw = unknown.iter().map(|object| DiskPath::Object(*object));
        let encoded = encoded.into_iter().map(DiskPath::Encoded);
        let garbage: Vec<DiskPath> = raw.chain(encoded).collect();
        for path in garbage.iter().filter(|_| !dry_run) {
            match self.core.store.remove(path) {
                // The commit that took its record away was first.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                outcome => outcome?,
            }
        }
        Ok(garbage.len() as u64)
    }

    /// A file that was removed while somebody has it open has no record either.
    fn spare_open_files(&self, unknown: &mut HashSet<ObjectId>) -> Result<(), FsError> {
        let state = self.core.state();
        for (id, node) in &state.nodes {
            let inode = state.metadata.inode(*id)?;
            let object = inode.as_ref().and_then(|inode| inode.file()).and_then(|file| file.object);
            for object in object.into_iter().chain(node.replacement) {
                unknown.remove(&object);
            }
        }
        for object in state.unsettled.values() {
            unknown.remove(object);
        }
        Ok(())
    }
}

/// Waits for a manifest of names that is younger than this call.
fn publish_anew(tiers: &Tiers, exchange: &Exchange) -> Result<(), FsError> {
    let publication = &tiers.publication;
    let before = publication.done.load(Ordering::Acquire);
    publication.asked.store(true, Ordering::Release);
    let start = Instant::now();
    while publication.done.load(Ordering::Acquire) == before {
        if let RemoteHealth::Down { error, .. } = exchange.remote().state() {
            return Err(FsError::Remote(error));
        }
        if tiers.is_closing() || start.elapsed() > PUBLISHED_WITHIN {
            let place = exchange.remote().place();
            let what = format!("remote {place}: the names of this store were not published");
            return Err(FsError::Remote(RemoteError::Unreachable(what)));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}

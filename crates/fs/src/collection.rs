//! Garbage collection on request: whoever sets `user.kvfs.gc` of the root to `collect` or `dry-run`
//! starts one, and reads there what it found and did. Ids of stores behind the word are those that are gone for good.
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

use super::demotion::Commits;
use super::remote_memory::RemoteMemory;
use super::tiers::Tiers;
use super::{FileSystem, FsError};
use crate::core::Core;
use kvfs_storage::store::disk::{DiskDirectory, DiskPath};
use kvfs_storage::store::record::{EncodedCopy, InodeId, ObjectId, ObjectRecord};
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::gc::{Collected, collect_without};
use kvfs_storage::tier::remote::{Remote, RemoteError, State as RemoteHealth, StoreId};

/// How long the manifest of names may take. The mover publishes it between two batches.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(300);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Longest text of an error: the attribute stays small, and the reason and what to do about it are told whole.
const ERROR_CHARACTERS_MAX: usize = 1000;

/// The collection that is running, or what the last one found.
#[derive(Debug, Default)]
pub struct Collection(Mutex<Progress>);

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

    pub(super) fn is_running(&self) -> bool {
        matches!(*self.progress(), Progress::Running)
    }

    /// Takes the place of the one collection that runs at a time.
    pub fn begin(&self) -> Result<(), FsError> {
        let mut progress = self.progress();
        if matches!(*progress, Progress::Running) {
            return Err(FsError::InUse);
        }
        *progress = Progress::Running;
        Ok(())
    }

    /// `running`, or lines `key: value` of what the last collection found.
    pub(super) fn report(&self) -> Result<String, FsError> {
        match &*self.progress() {
            Progress::Never => Err(FsError::NoAttribute),
            Progress::Running => Ok("running".to_owned()),
            Progress::Done(report) => Ok(report.clone()),
        }
    }
}

/// What somebody wants collected.
#[derive(Debug, PartialEq, Eq)]
pub struct CollectionRequest {
    /// Only to be looked for.
    dry_run: bool,
    /// Stores whose names are not expected in the remote any more.
    gone: Vec<StoreId>,
}

impl CollectionRequest {
    /// What setting an attribute asks for, if that is a collection.
    pub fn of_attribute(
        id: InodeId, name: &[u8], value: &[u8],
    ) -> Result<Option<CollectionRequest>, FsError> {
        if id == InodeId::ROOT && name == super::extended::GC {
            CollectionRequest::parse(value).map(Some).ok_or(FsError::Invalid)
        } else {
            Ok(None)
        }
    }

    fn parse(text: &[u8]) -> Option<CollectionRequest> {
        let mut words = str::from_utf8(text).ok()?.split(' ');
        let dry_run = match words.next()? {
            "collect" => false,
            "dry-run" => true,
            _ => return None,
        };
        Some(CollectionRequest {
            dry_run,
            gone: words.map(|id| id.parse().ok()).collect::<Option<_>>()?,
        })
    }
}

/// Manifests of names that somebody waits for.
#[derive(Debug, Default)]
pub(super) struct Publication {
    asked: AtomicBool,
    done: AtomicU64,
    /// Why there is none, as of the last round of moving.
    hindrance: Mutex<Option<RemoteError>>,
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

    /// A round of moving has ended so. What it was refused with stays as it is until somebody does something about
    /// that; an outage, a full remote or a busy disk may pass.
    pub(super) fn note_round(&self, failure: Option<&FsError>) {
        let lasting = failure.and_then(|failure| match failure {
            FsError::Remote(
                error @ (RemoteError::Foreign(_)
                | RemoteError::Denied(_)
                | RemoteError::Key(_)
                | RemoteError::Other(_)),
            ) => Some(error.clone()),
            _ => None,
        });
        *self.hindrance.lock().unwrap_or_else(PoisonError::into_inner) = lasting;
    }

    fn hindrance(&self) -> Option<RemoteError> {
        self.hindrance.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for a manifest that is younger than this call, as long as nothing is in the way of one.
    fn wait(
        &self, within: Duration, is_in_the_way: impl Fn() -> Option<RemoteError>,
    ) -> Result<(), RemoteError> {
        let before = self.done.load(Ordering::Acquire);
        self.asked.store(true, Ordering::Release);
        let start = Instant::now();
        while self.done.load(Ordering::Acquire) == before {
            if let Some(error) = self.hindrance().or_else(&is_in_the_way) {
                return Err(error);
            }
            if start.elapsed() > within {
                return Err(not_published(&format!("within {} s", within.as_secs())));
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }
}

fn not_published(when: &str) -> RemoteError {
    RemoteError::Other(format!(
        "the names of this store were not published {when}: see kvfs status, and run kvfs gc again"
    ))
}

/// Collects, after the place of the one collection was taken (`collection.begin`).
pub fn collect_garbage(fs: &FileSystem, request: &CollectionRequest) {
    let collecting = Collecting {
        core: &fs.core,
        tiers: fs.tiers.as_ref(),
        remote_memory: RemoteMemory::of(&fs.core),
        commits: fs,
    };
    let report = match collecting.collected(request) {
        Ok(report) => report,
        Err(error) => {
            fs.core.observer.failed(&format!("garbage was not collected: {error}"));
            let text = match &error {
                FsError::Remote(error) => error.told_once(),
                other => other.to_string(),
            };
            let text: String = text.chars().take(ERROR_CHARACTERS_MAX).collect();
            format!("error: {text}")
        }
    };
    *fs.collection.progress() = Progress::Done(report);
}

/// What a collection needs.
#[derive(Debug)]
struct Collecting<'a> {
    core: &'a Core,
    tiers: Option<&'a Tiers>,
    remote_memory: RemoteMemory<'a>,
    commits: &'a dyn Commits,
}

impl Collecting<'_> {
    /// What it found and did.
    fn collected(&self, request: &CollectionRequest) -> Result<String, FsError> {
        let dry_run = request.dry_run;
        let mut text = String::new();
        let mut line = |key: &str, value: u64| {
            let _ = writeln!(text, "{key}: {value}");
        };
        let exchange = self.tiers.and_then(|tiers| Some((tiers, tiers.exchange.as_ref()?)));
        if exchange.is_none() && !request.gone.is_empty() {
            let why = "the mount has no remote: of no store anything is expected there";
            return Err(FsError::Remote(RemoteError::Other(why.to_owned())));
        }
        if let Some((tiers, exchange)) = exchange {
            publish_anew(tiers, exchange)?;
            let (remote, grace) = (exchange.remote().as_ref(), exchange.grace());
            let found = collect_without(remote, grace, dry_run, &request.gone);
            let found: Collected = found.map_err(FsError::Remote)?;
            if !dry_run {
                self.remote_memory.note_manifests_seen(remote)?;
                forget_stores(self.core, remote, &request.gone)?;
            }
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
        self.commits.commit()?;
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

/// Nothing of these stores is expected in the remote any more, by this mount and those after it.
fn forget_stores(core: &Core, remote: &Remote, gone: &[StoreId]) -> Result<(), FsError> {
    let mut state = core.state_to_change()?;
    for store in gone {
        remote.forget_store(*store);
        state.metadata.set_manifest_seen(store.0, None, remote.is_sealed());
    }
    Ok(())
}

/// Waits for a manifest of names that is younger than this call.
fn publish_anew(tiers: &Tiers, exchange: &Exchange) -> Result<(), FsError> {
    let is_in_the_way = || match exchange.remote().state() {
        RemoteHealth::Down { error, .. } => Some(error),
        _ if tiers.is_closing() => Some(not_published("before the mount ended")),
        _ => None,
    };
    tiers.publication.wait(PUBLISHED_WITHIN, is_in_the_way).map_err(FsError::Remote)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_stores_that_are_gone_or_none() {
        let request = |text: &str| CollectionRequest::parse(text.as_bytes());
        let id = StoreId(7);
        assert_eq!(request("collect"), Some(CollectionRequest { dry_run: false, gone: vec![] }));
        let expected = Some(CollectionRequest { dry_run: true, gone: vec![id, id] });
        assert_eq!(request(&format!("dry-run {id} {id}")), expected);
        for other in ["", "all", "collect 7", "collect ", " collect", "collect  7"] {
            assert_eq!(request(other), None, "{other}");
        }
    }

    #[test]
    fn nobody_waits_for_names_that_may_not_be_published() {
        let publication = Publication::default();
        let wait = |within| publication.wait(Duration::from_secs(within), || None);
        let foreign = || FsError::Remote(RemoteError::Foreign("somebody else".to_owned()));
        publication.note_round(Some(&foreign()));
        let start = Instant::now();
        assert!(matches!(wait(300), Err(RemoteError::Foreign(_))));
        assert!(start.elapsed() < Duration::from_secs(100));
        // What may pass is waited for, and so is what nobody has tried yet.
        for passing in [None, Some(FsError::Remote(RemoteError::Full("no room".to_owned())))] {
            publication.note_round(passing.as_ref());
            assert!(matches!(wait(0), Err(RemoteError::Other(_))));
        }
        let down = || Some(RemoteError::Unreachable("away".to_owned()));
        let outage = publication.wait(Duration::from_secs(300), down);
        assert!(matches!(outage, Err(RemoteError::Unreachable(_))));
    }

    #[test]
    fn the_reason_is_told_as_soon_as_there_is_one() {
        let publication = Publication::default();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| publication.wait(Duration::from_secs(300), || None));
            while !publication.take_request() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let denied = FsError::Remote(RemoteError::Denied("no".to_owned()));
            publication.note_round(Some(&denied));
            publication.answer(false);
            assert!(matches!(waits.join().unwrap(), Err(RemoteError::Denied(_))));
            publication.note_round(None);
            let waits = scope.spawn(|| publication.wait(Duration::from_secs(300), || None));
            // The request that nobody answered is still there: the second one may be the same.
            while !waits.is_finished() {
                publication.answer(true);
                std::thread::sleep(Duration::from_millis(1));
            }
            waits.join().unwrap().unwrap();
        });
    }
}

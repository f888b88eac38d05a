//! A new store takes over the names that another one published to the remote.
//!
//! The store has no names yet, so nothing is merged: the rows of the newest whole manifest become
//! its records, in one transaction. Before that, the bytes that must be on this machine are fetched:
//! manifests of models, without which no page can be checked, and files that grow. Everything else
//! comes when it is opened. Files whose bytes the remote does not have are left out, names and all.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::NAME_BYTES_MAX;
use kvfs_page::names as page_names;
use kvfs_storage::store::database::{self, Put, decode, encode};
use kvfs_storage::store::disk::{DiskDirectory, DiskFile, DiskPath, shard};
use kvfs_storage::store::record::{
    Entry, Inode, InodeId, ObjectId, ObjectKind, ObjectRecord, RemoteCopy, RemoteState, Time,
    Totals,
};
use kvfs_storage::store::{Store, StoreError, format, keys};
use kvfs_storage::tier::encoding::ColdEncoding;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::hold::Grace;
use kvfs_storage::tier::remote::names::published::{self, PublishedStore};
use kvfs_storage::tier::remote::names::{self, Names};
use kvfs_storage::tier::remote::{
    BlobName, BlobStore, Limits, Remote, RemoteError, RemoteName, RemotePrefix, State, StoreId,
    for_each,
};

/// How long a mount of a new store waits for its remote: for the first answer, and where nobody has said whose names
/// it is to have, for everything. Whoever named a store waits as long as they come.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Bounds of the remote that [`rebuild`] is given.
pub fn limits(from: RebuildFrom) -> Limits {
    let is_asked_for = matches!(from, RebuildFrom::Store(_));
    Limits { total_max: (!is_asked_for).then_some(ANSWER_MAX), ..Limits::default() }
}

/// Whose names a new store takes over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RebuildFrom {
    /// Those of the only store that has published there, if there is just one.
    #[default]
    OnlyStore,
    /// Nobody's: it starts empty.
    Nothing,
    /// Those of this store.
    Store(StoreId),
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rebuilt {
    /// Nobody has published names there, or the store is to start empty.
    NotNeeded,
    /// The names of a store were taken over.
    From {
        /// Which.
        store: StoreId,
        /// Files taken over.
        files: u64,
        /// Files that the remote does not have.
        left_out: u64,
        /// Why newer manifests of its names were not used.
        passed_over: Vec<String>,
    },
}

/// Why a new store was not rebuilt although it should be.
#[derive(Debug)]
pub enum RebuildError {
    /// The remote does not answer, or not with what was published.
    Remote(RemoteError),
    /// The remote answers, but the names did not come in time, and nobody has asked to wait for them.
    Slow {
        /// Where it is.
        place: String,
        /// Whose names those are, if that was told.
        store: Option<StoreId>,
    },
    /// Its manifest is of another version of the store.
    Version(u32),
    /// The chosen store has not published there.
    Unknown(StoreId),
    /// Several stores have published, and none was chosen.
    Several(Vec<PublishedStore>),
    /// The store has names of its own: nothing is merged.
    NotNew(StoreId),
    /// The store on this machine failed.
    Store(StoreError),
}

impl std::fmt::Display for RebuildError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RebuildError::Remote(error @ RemoteError::Key(_)) => write!(formatter, "{error}"),
            RebuildError::Remote(error) => write!(
                formatter,
                "the store is new, and whether its remote has names for it cannot be told: {} \
                 (rebuild_from=none starts empty)",
                error.told_once()
            ),
            RebuildError::Slow { place, store: None } => write!(
                formatter,
                "the store is new, and its remote {place} did not tell within {} s which stores have \
                 names there: check the network and the server, or choose a store with \
                 --rebuild-from ID (kvfs remote ls {place}), which waits longer, or start empty with \
                 --rebuild-from none",
                ANSWER_MAX.as_secs()
            ),
            RebuildError::Slow { place, store: Some(store) } => write!(
                formatter,
                "the store is new, and the names of store {store} in its remote {place} did not come \
                 within {} s: check the network and the server, or wait for them with \
                 --rebuild-from {store}, or start empty with --rebuild-from none",
                ANSWER_MAX.as_secs()
            ),
            RebuildError::Version(version) => write!(
                formatter,
                "the names in the remote are of store format {version}, this kvfs has {}: use the \
                 kvfs that published them, or rebuild_from=none",
                format::VERSION
            ),
            RebuildError::Unknown(id) => {
                write!(formatter, "rebuild_from: no store {id} has published to the remote")
            }
            RebuildError::Several(stores) => write!(
                formatter,
                "the store is new, and its remote has the names of several stores: choose one with \
                 --rebuild-from ID, or start empty with --rebuild-from none\n{}",
                published::table(stores)
            ),
            RebuildError::NotNew(id) => write!(
                formatter,
                "rebuild_from: the store has names of its own, those of {id} go to a new store only \
                 (mount an empty directory, or leave the option away)"
            ),
            RebuildError::Store(error) => write!(formatter, "{error}"),
        }
    }
}

impl std::error::Error for RebuildError {}

impl From<StoreError> for RebuildError {
    fn from(error: StoreError) -> RebuildError {
        RebuildError::Store(error)
    }
}

impl From<RemoteError> for RebuildError {
    fn from(error: RemoteError) -> RebuildError {
        RebuildError::Remote(error)
    }
}

impl From<io::Error> for RebuildError {
    fn from(error: io::Error) -> RebuildError {
        RebuildError::Store(StoreError::Io(error))
    }
}

/// Rebuilds a store that has neither names nor a remote yet. The remote has the bounds of [`limits`].
pub fn rebuild(
    store: &Store, remote: &Arc<Remote>, from: RebuildFrom,
) -> Result<Rebuilt, RebuildError> {
    if from == RebuildFrom::Nothing {
        return Ok(Rebuilt::NotNeeded);
    }
    match remote.wait_for_answer(ANSWER_MAX) {
        State::Up { .. } => {}
        State::Down { error, .. } => return Err(error.into()),
        State::Connecting => {
            let what = format!("remote {}: no answer", BlobStore::place(remote.as_ref()));
            return Err(RemoteError::Timeout(what).into());
        }
    }
    let slow = |error, store| match error {
        RebuildError::Remote(_) if remote.is_late() => {
            let place = BlobStore::place(remote.as_ref()).to_owned();
            RebuildError::Slow { place, store }
        }
        error => error,
    };
    match choose(remote, from).map_err(|error| slow(error, None))? {
        Some(id) => take_over(store, remote, id).map_err(|error| slow(error, Some(id))),
        None => Ok(Rebuilt::NotNeeded),
    }
}

/// Whose names are taken over.
fn choose(remote: &Remote, from: RebuildFrom) -> Result<Option<StoreId>, RebuildError> {
    let published = names::stores(remote)?;
    match (from, published.as_slice()) {
        (RebuildFrom::Store(id), _) if published.contains(&id) => Ok(Some(id)),
        (RebuildFrom::Store(id), _) => Err(RebuildError::Unknown(id)),
        (_, []) => Ok(None),
        (_, [id]) => Ok(Some(*id)),
        (_, _) => Err(RebuildError::Several(published::stores(remote)?)),
    }
}

fn take_over(store: &Store, remote: &Arc<Remote>, id: StoreId) -> Result<Rebuilt, RebuildError> {
    let blobs: Arc<dyn BlobStore> = Arc::clone(remote) as Arc<dyn BlobStore>;
    let Some(names) = names::read_latest(&blobs, id)? else {
        return Err(RebuildError::Unknown(id));
    };
    if names.layout() != format::VERSION {
        return Err(RebuildError::Version(names.layout()));
    }
    let exchange = Exchange::new(Arc::clone(remote), Grace::default(), ColdEncoding::None);
    let mut plan = Plan::new(&names, remote)?;
    plan.fetch_local(store, &exchange)?;
    let files = database::fill(store.metadata()?, |put| {
        put(&keys::rebuilt_from(), &encode(&id.0))?;
        plan.write(&names, put)
    })?;
    let passed_over = names.damaged.iter().map(|damaged| damaged.error.to_string()).collect();
    Ok(Rebuilt::From { store: id, files, left_out: plan.left_out.len() as u64, passed_over })
}

/// A copy on record, whose object may be missing in the remote.
struct CopyOnRecord {
    object: ObjectId,
    blob: BlobName,
    /// The record, where the bytes must be on this machine.
    local: Option<RemoteCopy>,
}

/// Which of the objects that are named the remote has. What else a listing has is not remembered: it may be anything.
struct Present<'a> {
    remote: &'a Remote,
    wanted: HashMap<RemoteName, bool>,
}

impl Present<'_> {
    fn of<'a>(remote: &'a Remote, copies: &[CopyOnRecord]) -> Result<Present<'a>, RemoteError> {
        let mut wanted = HashMap::new();
        for copy in copies {
            let names = remote.listed_names(RemoteName::Blob(copy.blob))?;
            wanted.extend(names.into_iter().map(|name| (name, false)));
        }
        for_each(remote, RemotePrefix::Blobs, |found| {
            if let Some(is_there) = wanted.get_mut(&found.name) {
                *is_there = true;
            }
            Ok(())
        })?;
        Ok(Present { remote, wanted })
    }

    fn has(&self, blob: BlobName) -> Result<bool, RemoteError> {
        let names = self.remote.listed_names(RemoteName::Blob(blob))?;
        Ok(names.iter().any(|name| self.wanted.get(name) == Some(&true)))
    }
}

/// An object whose bytes must be on this machine.
#[derive(Clone, Copy, Debug)]
struct Local {
    kind: ObjectKind,
    length: u64,
    mtime: Time,
    copy: RemoteCopy,
}

/// What becomes of the rows.
#[derive(Debug, Default)]
struct Plan {
    local: HashMap<ObjectId, Local>,
    /// Objects whose bytes the remote has.
    kept: HashSet<ObjectId>,
    /// Files without bytes.
    left_out: HashSet<InodeId>,
    /// Those that say where rows stand.
    positions: HashSet<InodeId>,
    owners: HashMap<ObjectId, InodeId>,
}

impl Plan {
    /// Looks at all rows, and which of their objects the remote has.
    fn new(names: &Names, remote: &Remote) -> Result<Plan, RebuildError> {
        let mut plan = Plan::default();
        let mut local_records: HashMap<ObjectId, ObjectRecord> = HashMap::new();
        let mut times: HashMap<InodeId, Time> = HashMap::new();
        let copies = plan.read(names, &mut local_records, &mut times)?;
        let present = Present::of(remote, &copies)?;
        for CopyOnRecord { object, blob, local } in copies {
            let Some(owner) = plan.owners.get(&object) else { continue };
            if !present.has(blob)? {
                continue;
            }
            plan.left_out.remove(owner);
            plan.kept.insert(object);
            if let (Some(copy), Some(&ObjectRecord { kind, length, .. })) =
                (local, local_records.get(&object))
            {
                let mtime = times.get(owner).copied().unwrap_or_default();
                plan.local.insert(object, Local { kind, length, mtime, copy });
            }
        }
        Ok(plan)
    }

    /// Those of inodes come before those of objects, and these before those of copies, which are returned.
    fn read(
        &mut self, names: &Names, local_records: &mut HashMap<ObjectId, ObjectRecord>,
        times: &mut HashMap<InodeId, Time>,
    ) -> Result<Vec<CopyOnRecord>, RebuildError> {
        let mut copies = Vec::new();
        for row in names.rows() {
            let row = row?;
            let Some(number) = keys::number(&row.key) else {
                continue;
            };
            match row.key.first() {
                Some(b'E') => self.note_entry(&row.key, &decode(&row.value)?),
                Some(b'I') => self.note_inode(InodeId(number), &decode(&row.value)?, times),
                Some(b'O') => {
                    let record: ObjectRecord = decode(&row.value)?;
                    if matches!(record.kind, ObjectKind::Rows | ObjectKind::Manifest) {
                        local_records.insert(ObjectId(number), record);
                    }
                }
                Some(b'R') => {
                    let object = ObjectId(number);
                    let (Some(blob), true) = (row.blob, self.owners.contains_key(&object)) else {
                        continue;
                    };
                    let is_local = local_records.contains_key(&object);
                    let local = is_local.then(|| decode(&row.value)).transpose()?;
                    copies.push(CopyOnRecord { object, blob, local });
                }
                _ => {}
            }
        }
        Ok(copies)
    }

    /// Without its `positions.json` tokens that were removed from a sequence would count again: it stays, with bytes
    /// or without.
    fn note_entry(&mut self, key: &[u8], entry: &Entry) {
        if keys::split_entry(key).is_some_and(|(_, name)| name == page_names::POSITIONS.as_bytes())
        {
            self.positions.insert(entry.inode);
        }
    }

    /// A file is left out until its bytes are found.
    fn note_inode(&mut self, id: InodeId, inode: &Inode, times: &mut HashMap<InodeId, Time>) {
        let Some(file) = inode.file() else {
            return;
        };
        let stays = self.positions.contains(&id);
        if !stays {
            self.left_out.insert(id);
        }
        if let Some(object) = file.object {
            self.owners.insert(object, id);
            if stays {
                self.kept.insert(object);
            }
            if file.role.is_append_only() || file.role.is_sealed() {
                times.insert(id, inode.mtime);
            }
        }
    }

    /// Fetches what must be here. What turns out to be damaged is left out as well.
    fn fetch_local(&mut self, store: &Store, exchange: &Exchange) -> Result<(), RebuildError> {
        let mut directories = BTreeSet::new();
        let mut objects: Vec<(ObjectId, Local)> =
            self.local.iter().map(|(object, local)| (*object, *local)).collect();
        objects.sort_unstable_by_key(|(object, _)| *object);
        for (object, local) in objects {
            match fetch(store, exchange, object, &local) {
                Ok(()) => {
                    directories.insert(DiskDirectory::ObjectShard(shard(object)));
                }
                Err(error @ (RemoteError::Missing(_) | RemoteError::Corrupt(_))) => {
                    log::warn!("object {object} is left out: {error}");
                    self.kept.remove(&object);
                    self.left_out.extend(self.owners.get(&object));
                }
                Err(RemoteError::Local(error)) => {
                    let error = io::Error::new(error.kind(), error.to_string());
                    return Err(error.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
        for directory in directories {
            store.disk.sync_directory(directory)?;
        }
        Ok(())
    }

    /// Writes the records; returns how many files there are.
    fn write(&self, names: &Names, put: &mut Put<'_>) -> Result<u64, RebuildError> {
        let mut totals = Totals::default();
        let (mut files, mut highest) = (0, 0);
        for row in names.rows() {
            let row = row?;
            let number = keys::number(&row.key).unwrap_or_default();
            let (id, object) = (InodeId(number), ObjectId(number));
            let value = match row.key.first() {
                Some(b'E') => {
                    let entry: Entry = decode(&row.value)?;
                    let is_kept = !self.left_out.contains(&entry.inode) && has_name(&row.key);
                    is_kept.then_some(row.value)
                }
                Some(b'I' | b'X') if self.left_out.contains(&id) => None,
                Some(b'I') => {
                    highest = highest.max(number);
                    let inode: Inode = decode(&row.value)?;
                    files += u64::from(inode.file().is_some());
                    if inode.file().is_some_and(|file| file.unsettled) {
                        put(&keys::unsettled(id), &encode(&()))?;
                    }
                    Some(row.value)
                }
                Some(b'O') if self.kept.contains(&object) => {
                    highest = highest.max(number);
                    let record = recorded(decode(&row.value)?);
                    totals.add(&record);
                    Some(encode(&record))
                }
                Some(b'R') if self.kept.contains(&object) => self.copy_record(object, row.value),
                Some(b'X') => Some(row.value),
                _ => None,
            };
            if let Some(value) = value {
                put(&row.key, &value)?;
            }
        }
        put(&keys::totals(), &encode(&totals))?;
        let epoch = u32::try_from(highest >> 32).unwrap_or(u32::MAX);
        put(&keys::epoch(), &encode(&(epoch, true)))?;
        Ok(files)
    }

    /// What grows has no copy to rely upon; a manifest is here as well.
    fn copy_record(&self, object: ObjectId, value: Vec<u8>) -> Option<Vec<u8>> {
        match self.local.get(&object) {
            Some(Local { kind: ObjectKind::Rows, .. }) => None,
            Some(local) => Some(encode(&RemoteCopy { state: RemoteState::Named, ..local.copy })),
            None => Some(value),
        }
    }
}

/// Whether the key of an entry holds a name that a directory can have: a kernel gives up a listing
/// with any other, and the rows come from whoever can write to the remote.
fn has_name(key: &[u8]) -> bool {
    keys::split_entry(key).is_some_and(|(_, name)| {
        let is_text = !name.is_empty() && !name.iter().any(|byte| b"/\0".contains(byte));
        is_text && name.len() <= NAME_BYTES_MAX && ![b".".as_slice(), b".."].contains(&name)
    })
}

/// The length of what grows is not on record.
fn recorded(record: ObjectRecord) -> ObjectRecord {
    match record.kind {
        ObjectKind::Rows => ObjectRecord { length: 0, ..record },
        _ => record,
    }
}

fn fetch(
    store: &Store, exchange: &Exchange, object: ObjectId, local: &Local,
) -> Result<(), RemoteError> {
    let incoming = DiskPath::Incoming(object);
    let make = || -> io::Result<Arc<dyn DiskFile>> {
        match store.disk.remove(&incoming) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(store.disk.create(&incoming)?.into())
    };
    let file = make().map_err(RemoteError::local)?;
    exchange.download_unrecorded(store, (object, local.length), &local.copy, &file)?;
    let place = || {
        file.set_modified(local.mtime)?;
        file.sync()?;
        store.disk.rename(&incoming, &DiskPath::Object(object))
    };
    place().map_err(RemoteError::local)
}

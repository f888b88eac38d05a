//! Metadata as the running mount sees it: `meta.redb` and the uncommitted layers above it.
//!
//! ```text
//! volatile     names and inodes that must not survive a crash: files still being written for
//!              the first time, and unlinked files that somebody holds open
//! active       changes since the last freeze
//! committing   the frozen layer that is being written out, if any
//! base         meta.redb as of the last commit
//! ```
//!
//! A name enters `active` only when its object may be published, so a crash can leave garbage
//! files but never a name without its bytes. One mutex of the caller guards all of it; nothing
//! here waits for the disk except [`Writer::write`], which runs outside of that mutex.

pub mod at_risk;
mod attributes;
mod clock;
pub mod discarded;
mod encoded;
pub(super) mod events;
pub mod held_back;
pub mod live;
mod opening;
mod prefixes;
mod remote;
pub mod reopening;
pub(super) mod scan;
mod uses;
pub mod watches;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use redb::{Database, ReadableDatabase};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use attributes::Attribute;
pub use prefixes::{LEAD_TOKENS_MAX, TokensChange};

use super::StoreError;
use super::arrivals::Arrivals;
use super::database::{Backend, RECORDS, Snapshot, Writer, decode, encode, guarded};
use super::held_back::HeldBack;
use super::keys;
use super::layer::Layer;
use super::record::{
    Entry, Inode, InodeId, ObjectId, ObjectKind, ObjectRecord, OnlyRemote, Totals,
};
use crate::page::names;
use at_risk::Touched;
use discarded::Discarded;
pub use opening::Integrity;
use opening::Opened;
use watches::Watches;

/// Where a change goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Part of the next commit.
    Durable,
    /// Forgotten in a crash.
    Volatile,
}

/// The layers and the base.
pub struct Metadata {
    volatile: Layer,
    active: Layer,
    committing: Option<Arc<Layer>>,
    base: redb::ReadOnlyTable<&'static [u8], &'static [u8]>,
    /// Whether the next mount would find `base`.
    on_disk: OnDisk,
    database: Arc<Database>,
    /// Objects whose file still lies in `staging/`.
    pub staged: BTreeSet<ObjectId>,
    /// Objects whose files may go at once.
    pub discarded: Discarded,
    /// The last one that was given.
    next_number: u64,
    /// What the store holds, uncommitted changes included.
    pub totals: Totals,
    /// What only the remote has, uncommitted changes included.
    pub only_remote: OnlyRemote,
    /// There are tiers below the raw files: what comes to rest is noted in `arrivals`.
    pub has_tiers: bool,
    /// The store had copies in a remote when it was opened.
    pub has_remote_copies: bool,
    /// Files that came to rest and that nobody has looked at since, to copy or to encode them.
    /// Some 16 bytes each, so a million that wait for a remote that is down are 16 MB.
    pub arrivals: Arrivals,
    /// Pages that wait there for the remote in place of the disk.
    pub held_back: HeldBack,
    /// Sequences whose token files the prefix index has not seen as they are. Some 32 bytes each,
    /// until the next round of indexing.
    pub unindexed: BTreeMap<InodeId, TokensChange>,
    /// The `positions.json` of sequences, which say what their tokens are worth: every question may
    /// need one, so they stay on the disk. Some 16 bytes for each sequence that was edited.
    pub positions: BTreeSet<InodeId>,
    /// The last mount ended without a crash.
    pub was_clean: bool,
    /// Whether records that the disk lost would have been missed.
    pub integrity: Integrity,
    /// Counts freezes; a change made now is durable once this freeze is.
    pub generation: u64,
    /// Counts changes of what a manifest of names tells of names and files.
    pub names_changed: u64,
    /// Who relies on names of some directories.
    pub watches: Watches,
    /// What a daemon would lose, told to the next one.
    pub touched: Touched,
}

/// What the disk has of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnDisk {
    /// What the last commit wrote.
    Base,
    /// That, or what a commit wrote that failed.
    Unknown,
}

impl Metadata {
    /// Opens or creates the database on a store's disk and starts a new epoch of numbers.
    pub fn open(backend: Backend) -> Result<Metadata, StoreError> {
        guarded(|| Metadata::open_unguarded(backend))
    }

    fn open_unguarded(backend: Backend) -> Result<Metadata, StoreError> {
        let Opened { database, epoch, was_clean, only_remote, integrity } = opening::open(backend)?;
        let database = Arc::new(database);
        let base = database.begin_read()?.open_table(RECORDS)?;
        let copies = keys::table(b'R');
        let first = base.range(copies.as_slice()..)?.next().transpose()?;
        let has_remote_copies = first.is_some_and(|(key, _)| key.value().starts_with(&copies));
        let totals = base.get(keys::totals().as_slice())?.map(|value| decode(value.value()));
        Ok(Metadata {
            totals: totals.transpose()?.unwrap_or_default(),
            only_remote,
            volatile: Layer::default(),
            active: Layer::default(),
            committing: None,
            base,
            database,
            staged: BTreeSet::new(),
            discarded: Discarded::after(u64::from(epoch) << 32),
            next_number: u64::from(epoch) << 32,
            has_tiers: false,
            has_remote_copies,
            on_disk: OnDisk::Base,
            arrivals: Arrivals::default(),
            held_back: HeldBack::default(),
            unindexed: BTreeMap::new(),
            positions: BTreeSet::new(),
            was_clean,
            integrity,
            generation: 1,
            names_changed: 1,
            watches: Watches::default(),
            touched: Touched::default(),
        })
    }

    /// What writes frozen layers out.
    pub fn writer(&self) -> Writer {
        Writer::new(Arc::clone(&self.database))
    }

    /// A number for a new inode or object. An epoch has 2^32; a mount that lives to use them up
    /// runs on into the next epoch's, which [`Metadata::open`] will then skip by starting higher.
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        if self.next_number.trailing_zeros() >= 32 {
            self.put_epoch(false);
        }
        self.next_number
    }

    /// Notes, as part of the next commit, whether this mount ends in good order.
    pub fn put_epoch(&mut self, clean: bool) {
        let epoch = u32::try_from(self.next_number >> 32).unwrap_or(u32::MAX);
        self.put(Life::Durable, keys::epoch(), &(epoch, clean));
    }

    /// Whether what is known of an inode would be forgotten in a crash.
    pub fn life(&self, inode: InodeId) -> Life {
        let volatile = self.volatile.records.contains_key(&keys::inode(inode));
        if volatile { Life::Volatile } else { Life::Durable }
    }

    /// A number for a new inode.
    pub fn new_inode(&mut self) -> InodeId {
        InodeId(self.number())
    }

    /// A number for a new object, whose file is made in `staging/`.
    pub fn new_object(&mut self) -> ObjectId {
        let object = ObjectId(self.number());
        self.staged.insert(object);
        object
    }

    fn get<T: DeserializeOwned>(&self, key: &[u8]) -> Result<Option<T>, StoreError> {
        let layers = [Some(&self.volatile), Some(&self.active), self.committing.as_deref()];
        for layer in layers.into_iter().flatten() {
            if let Some(change) = layer.records.get(key) {
                return change.as_deref().map(decode).transpose();
            }
        }
        guarded(|| self.base.get(key)?.map(|value| decode(value.value())).transpose())
    }

    fn put<T: Serialize>(&mut self, life: Life, key: Vec<u8>, value: &T) {
        self.note_change(life, &key);
        self.layer(life).put(key, encode(value));
    }

    fn note_change(&mut self, life: Life, key: &[u8]) {
        let is_told = life == Life::Durable && matches!(key.first(), Some(b'E' | b'I' | b'X'));
        self.names_changed += u64::from(is_told);
        // Of an inode it depends on what is changed.
        if let Some(id) = keys::number(key).filter(|_| is_told && key[0] != b'I') {
            self.touched.note(id);
        }
    }

    fn remove(&mut self, life: Life, key: Vec<u8>) {
        self.note_change(life, &key);
        match life {
            Life::Volatile => self.volatile.records.remove(&key),
            Life::Durable => self.active.records.insert(key, None),
        };
    }

    fn layer(&mut self, life: Life) -> &mut Layer {
        match life {
            Life::Volatile => &mut self.volatile,
            Life::Durable => &mut self.active,
        }
    }

    /// One inode.
    pub fn inode(&self, inode: InodeId) -> Result<Option<Inode>, StoreError> {
        self.get(&keys::inode(inode))
    }

    /// One inode as of the last commit.
    pub fn committed_inode(&self, inode: InodeId) -> Result<Option<Inode>, StoreError> {
        let key = keys::inode(inode);
        guarded(|| self.base.get(key.as_slice())?.map(|value| decode(value.value())).transpose())
    }

    /// Stores an inode.
    pub fn put_inode(&mut self, life: Life, inode: InodeId, record: &Inode) {
        at_risk::note_inode(self, life, inode, Some(record));
        self.put(life, keys::inode(inode), record);
        if let Some(file) = record.file().filter(|_| self.has_tiers) {
            let is_kept = life == Life::Durable || self.held_back.contains(inode);
            match file.object {
                Some(object) if is_kept && file.is_settled() => {
                    if !self.is_named(file) {
                        self.arrivals.note_at_rest(inode, object, file.size);
                    }
                }
                _ => self.arrivals.note_writing(inode),
            }
        }
        if life == Life::Durable && record.file().is_some() {
            let unsettled = record.file().is_some_and(|file| file.unsettled);
            let marked = self.get::<()>(&keys::unsettled(inode)).ok().flatten().is_some();
            match (unsettled, marked) {
                (true, false) => self.put(life, keys::unsettled(inode), &()),
                (false, true) => self.remove(life, keys::unsettled(inode)),
                _ => {}
            }
        }
    }

    /// Forgets an inode and its extended attributes.
    pub fn remove_inode(&mut self, life: Life, inode: InodeId) -> Result<(), StoreError> {
        self.arrivals.remove(inode);
        self.held_back.remove(inode);
        for name in self.attribute_names(inode)? {
            self.remove(life, keys::attribute(inode, &name));
        }
        if life == Life::Durable && self.get::<()>(&keys::unsettled(inode))?.is_some() {
            self.remove(life, keys::unsettled(inode));
        }
        at_risk::note_inode(self, life, inode, None);
        self.remove(life, keys::inode(inode));
        self.positions.remove(&inode);
        Ok(())
    }

    /// A name in a directory.
    pub fn entry(&self, parent: InodeId, name: &[u8]) -> Result<Option<Entry>, StoreError> {
        self.get(&keys::entry(parent, name))
    }

    /// Stores a name.
    pub fn put_entry(&mut self, life: Life, parent: InodeId, name: &[u8], entry: Entry) {
        if self.watches.are_of(parent) {
            let old = self.entry(parent, name).ok().flatten();
            let is_other = match old {
                Some(old) => old.inode != entry.inode,
                // Where rows are looked for, a page comes first.
                None => names::parse_page(name).is_some_and(|start| {
                    let tail = names::format_tail(start);
                    !matches!(self.entry(parent, tail.as_bytes()), Ok(None))
                }),
            };
            if is_other {
                self.watches.tell_of_name(parent, name);
            }
        }
        self.note_tokens(parent, name);
        self.note_positions(parent, name, entry.inode);
        self.touched.note_name(entry.inode.0);
        self.put(life, keys::entry(parent, name), &entry);
    }

    /// Removes a name.
    pub fn remove_entry(&mut self, life: Life, parent: InodeId, name: &[u8]) {
        self.watches.tell_of_name(parent, name);
        self.note_tokens(parent, name);
        self.remove(life, keys::entry(parent, name));
    }

    /// One object.
    pub fn object(&self, object: ObjectId) -> Result<Option<ObjectRecord>, StoreError> {
        self.get(&keys::object(object))
    }

    /// Stores an object.
    pub fn put_object(&mut self, object: ObjectId, record: &ObjectRecord) {
        let old = self.object(object).ok().flatten();
        self.count(old.as_ref(), Some(record));
        self.put(Life::Durable, keys::object(object), record);
    }

    fn count(&mut self, old: Option<&ObjectRecord>, new: Option<&ObjectRecord>) {
        let totals = &mut self.totals;
        if let Some(old) = old {
            totals.objects = totals.objects.saturating_sub(1);
            totals.pages = totals.pages.saturating_sub(u64::from(old.kind == ObjectKind::Page));
            totals.bytes = totals.bytes.saturating_sub(old.length);
        }
        if let Some(new) = new {
            totals.add(new);
        }
    }

    /// The records as of the last commit, to be read without holding anything up.
    pub fn snapshot(&self) -> Result<Snapshot, StoreError> {
        Snapshot::open(&self.database)
    }

    /// The next commit will make the object's bytes durable.
    pub fn publishes(&self, object: ObjectId) -> bool {
        self.active.publish.contains(&object)
    }

    /// The commit that is under way makes the object's bytes durable, as they are recorded.
    pub fn is_committing(&self, object: ObjectId) -> bool {
        self.committing.as_ref().is_some_and(|layer| layer.publish.contains(&object))
    }

    /// Forgets an object whose file is still in use. Should nobody remove it, because of a crash,
    /// recovery will: it is in `staging/`, or in `objects/` without a record.
    pub fn disown_object(&mut self, object: ObjectId) {
        if !held_back::forget_object(self, object) {
            let old = self.object(object).ok().flatten();
            self.count(old.as_ref(), None);
            self.remove(Life::Durable, keys::object(object));
        }
        // What cannot be read is for fsck to find.
        let _ = self.forget_remote_copy(object);
        let _ = self.forget_encoded_copy(object);
        self.active.publish.remove(&object);
    }

    /// Forgets an object; its file goes after the commit, or at once if no commit has seen it.
    pub fn remove_object(&mut self, object: ObjectId) {
        self.disown_object(object);
        self.staged.remove(&object);
        if self.discarded.take_in(object) {
            // Nothing that the next commit would have to remove.
            self.active.records.remove(&keys::object(object));
            self.active.has_let_go = true;
        } else {
            self.active.removals.insert(object);
        }
    }

    /// The object's bytes must be durable before the changes made since the last freeze are.
    pub fn publish(&mut self, object: ObjectId) {
        self.active.publish.insert(object);
    }

    /// Moves what is known of a file from the volatile layer into the next commit.
    pub fn make_durable(&mut self, inode: InodeId, name: Option<(InodeId, &[u8])>) {
        let mut keys_moved: Vec<Vec<u8>> = self
            .volatile
            .range(&keys::attributes(inode), &keys::attributes(inode))
            .map(|(key, _)| key.to_vec())
            .collect();
        keys_moved.push(keys::inode(inode));
        keys_moved.extend(name.map(|(parent, name)| keys::entry(parent, name)));
        for key in keys_moved {
            if let Some(value) = self.volatile.records.remove(&key) {
                self.note_change(Life::Durable, &key);
                self.active.records.insert(key, value);
            }
        }
        if let Some(object) = held_back::let_go(self, inode) {
            self.publish(object);
        }
    }

    /// Freezes the active layer, if there is anything in it and none is being written.
    pub fn freeze(&mut self) -> Option<Arc<Layer>> {
        if self.committing.is_some() || self.active.is_empty() {
            return None;
        }
        let totals = self.totals;
        self.put(Life::Durable, keys::totals(), &totals);
        self.only_remote.epoch = u32::try_from(self.next_number >> 32).unwrap_or(u32::MAX);
        let only_remote = self.only_remote;
        self.put(Life::Durable, keys::only_remote(), &only_remote);
        let frozen = Arc::new(std::mem::take(&mut self.active));
        self.committing = Some(Arc::clone(&frozen));
        self.discarded.note_freeze(self.next_number);
        self.touched.note_freeze();
        self.generation += 1;
        Some(frozen)
    }

    /// Adds a record to the frozen layer; the caller has dropped its own reference to it.
    pub fn amend_frozen(&mut self, object: ObjectId, record: &ObjectRecord) {
        if let Some(layer) = &mut self.committing {
            let records = &mut Arc::make_mut(layer).records;
            records.insert(keys::object(object), Some(encode(record)));
        }
    }

    /// The frozen layer.
    pub fn frozen(&self) -> Option<Arc<Layer>> {
        self.committing.clone()
    }

    /// The frozen layer is durable: read it from the base from now on.
    pub fn thaw_committed(&mut self) -> Result<(), StoreError> {
        self.base = self.database.begin_read()?.open_table(RECORDS)?;
        self.committing = None;
        self.touched.note_durable();
        Ok(())
    }

    /// The frozen layer could not be written: it goes back below the active one. Files of removed objects that the
    /// database does not know may go at once, and must where the disk is full of them. Once the database has begun to
    /// write something and failed, nobody can tell what it knows on the disk.
    pub fn thaw_failed(&mut self, has_begun: bool) {
        if has_begun {
            self.on_disk = OnDisk::Unknown;
        }
        if let Some(layer) = self.committing.take() {
            self.active.absorb_older(Arc::unwrap_or_clone(layer));
            self.touched.note_failure();
        }
        if self.on_disk == OnDisk::Unknown {
            return;
        }
        let Metadata {
            active: Layer { publish, removals, has_let_go, .. }, base, discarded, ..
        } = self;
        publish.retain(|object| !removals.contains(object));
        let is_unknown = |object: &ObjectId| {
            let found = guarded(|| Ok(base.get(keys::object(*object).as_slice())?.is_some()));
            found.is_ok_and(|is_known| !is_known)
        };
        let unknown: Vec<ObjectId> = removals.iter().copied().filter(is_unknown).collect();
        removals.retain(|object| unknown.binary_search(object).is_err());
        *has_let_go |= !unknown.is_empty();
        discarded.take_in_failed(unknown);
    }
}

impl std::fmt::Debug for Metadata {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Metadata")
            .field("uncommitted", &self.uncommitted())
            .field("staged", &self.staged.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

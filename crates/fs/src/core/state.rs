//! What the running mount knows: metadata, the inodes that the kernel holds, open handles.
//!
//! All of it is guarded by one mutex. Operations take it for microseconds; hashing, copying and
//! syncing happen outside of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use crate::FsError;
use crate::attributes::{Attributes, Place};
use crate::core::handle::Handle;
use crate::core::node::Node;
use crate::core::orphan;
use crate::core::recalled::{has_predecessors, number_of};
use crate::core::unsettled::Unsettled;
use crate::extended::{LOSSY, PIN};
use crate::health::Refusal;
use crate::on_corrupt::Damaged;
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::Store;
use kvfs_storage::store::keys;
use kvfs_storage::store::metadata::{Attribute, Life, Metadata};
use kvfs_storage::store::record::{
    DirectoryClass, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind, ObjectRecord,
    Role, Time,
};

/// Names of a path that a message shows: it stays a line, however deep directories are.
const SHOWN_MAX: usize = 64;

/// The guarded state. What clients make many of stands in trees: a hash table that grows past half a million
/// entries moves all of them at once, and everybody waits for the half second that this takes.
#[derive(Debug)]
pub(crate) struct State {
    /// Names, inodes and objects.
    pub(crate) metadata: Metadata,
    /// Inodes held by the kernel or by handles.
    pub(crate) nodes: BTreeMap<InodeId, Node>,
    /// Threads that wait for [`Core::released`](crate::core::Core).
    pub(crate) waiting_for_release: u32,
    /// Open handles.
    pub(crate) handles: BTreeMap<u64, Handle>,
    pub(crate) next_handle: u64,
    /// Manifests in use, by model directory.
    pub(crate) models: BTreeMap<InodeId, Arc<Model>>,
    /// Files written for the first time: where their volatile name stands.
    pub(crate) fresh: BTreeMap<InodeId, Place>,
    /// Pages and manifests being written in place, by where they will appear.
    pub(crate) pending: BTreeMap<Place, Vec<InodeId>>,
    /// Files that lost their last name while somebody knew their inodes, as long as he does, and the bytes that go with them.
    pub(crate) orphans: BTreeMap<InodeId, u64>,
    /// When the disk had too little room beside those, last.
    pub(crate) short_since: Option<Instant>,
    /// Files that somebody may have written to since they were last at rest, and where.
    pub(crate) unsettled: Unsettled,
    /// Files whose bytes are being sealed under another name: no new writers.
    pub(crate) sealing: BTreeSet<InodeId>,
    /// Tails that may be full: to be sealed when there is room.
    pub(crate) full_tails: BTreeSet<InodeId>,
    /// Files that count as misses, since no copy of their bytes is good.
    pub(crate) damaged: Damaged,
    /// Files of which the last look found no good copy, and the object that they had then.
    pub(crate) known_damage: Damaged,
    /// The same as it is on record.
    pub(crate) recorded_damage: Damaged,
    /// Why the last commit failed, if it did, and can be tried again.
    pub(crate) commit_failure: Option<CommitFailure>,
    /// Why the store takes no changes, if so.
    pub(crate) refusal: Option<Refusal>,
}

/// Why a commit failed.
#[derive(Clone, Debug)]
pub(crate) struct CommitFailure {
    pub(crate) why: String,
    /// Whether it was not begun, since the disk has no room for what it might take.
    pub(crate) lacks_room: bool,
}

impl State {
    /// The state of a fresh mount.
    pub(crate) fn new(metadata: Metadata) -> State {
        State {
            metadata,
            nodes: BTreeMap::new(),
            waiting_for_release: 0,
            handles: BTreeMap::new(),
            next_handle: 1,
            models: BTreeMap::new(),
            fresh: BTreeMap::new(),
            pending: BTreeMap::new(),
            orphans: BTreeMap::new(),
            short_since: None,
            unsettled: Unsettled::default(),
            sealing: BTreeSet::new(),
            full_tails: BTreeSet::new(),
            damaged: Damaged::new(),
            known_damage: Damaged::new(),
            recorded_damage: Damaged::new(),
            commit_failure: None,
            refusal: None,
        }
    }

    /// One inode, which must exist.
    pub(crate) fn inode(&self, id: InodeId) -> Result<Inode, FsError> {
        self.metadata.inode(id)?.ok_or_else(|| why_absent(self, id))
    }

    /// A directory and its class. One that the daemon has removed while the kernel knew it under a name is
    /// stale, not absent: whoever has come by that name looks it up anew, since another may have it.
    pub(crate) fn directory(&self, id: InodeId) -> Result<(Inode, DirectoryClass), FsError> {
        let inode = self.inode(id)?;
        match inode.kind {
            Kind::Directory { class, .. } => Ok((inode, class)),
            Kind::Special { file_type: libc::S_IFDIR, .. } => Err(FsError::Stale),
            _ => Err(FsError::NotDirectory),
        }
    }

    /// A name in a directory, if it is there.
    pub(crate) fn entry(&self, parent: InodeId, name: &[u8]) -> Result<Option<Entry>, FsError> {
        Ok(self.metadata.entry(parent, name)?)
    }

    /// Whether a page or manifest is being written under this name: it may be another file soon.
    pub(crate) fn is_pending(&self, parent: InodeId, name: &[u8]) -> bool {
        !self.pending.is_empty()
            && self.pending.contains_key(&Place { parent, name: name.to_vec() })
    }

    /// Stores a changed inode where it already lives.
    pub(crate) fn put_inode(&mut self, id: InodeId, inode: &Inode) {
        let life = self.metadata.life(id);
        self.metadata.put_inode(life, id, inode);
    }

    /// The object that holds the current bytes of a file.
    pub(crate) fn current_object(&self, id: InodeId, file: &FileRecord) -> Option<ObjectId> {
        self.nodes.get(&id).and_then(|node| node.replacement).or(file.object)
    }

    /// Notes a change of a directory's names.
    pub(crate) fn touch_directory(
        &mut self, id: InodeId, links_change: i32,
    ) -> Result<(), FsError> {
        let mut inode = self.inode(id)?;
        let now = Time::now();
        (inode.mtime, inode.ctime) = (now, now);
        inode.links = inode.links.saturating_add_signed(links_change);
        self.put_inode(id, &inode);
        Ok(())
    }

    /// What `stat` shows. While somebody may be writing, the file on the disk knows better than
    /// the record.
    pub(crate) fn attributes(&self, store: &Store, id: InodeId) -> Result<Attributes, FsError> {
        let inode = self.inode(id)?;
        self.attributes_of(store, id, &inode)
    }

    /// [`State::attributes`] of a record at hand.
    pub(crate) fn attributes_of(
        &self, store: &Store, id: InodeId, inode: &Inode,
    ) -> Result<Attributes, FsError> {
        let mut attributes = Attributes::of_record(id, inode);
        let Some(file) = inode.file() else {
            return Ok(attributes);
        };
        if (file.unsettled || self.unsettled.contains_key(id))
            && let Some(object) = self.current_object(id, file)
        {
            let stat = store.stat_object(object)?;
            attributes.size = stat.length;
            attributes.blocks = stat.blocks.max(u64::from(stat.length > 0));
            attributes.mtime = self.unsettled.modified(object, stat.mtime);
            // A write changes ctime as well; utimensat may have set mtime into the future.
            attributes.ctime = inode.ctime.max(attributes.mtime.min(Time::now()));
            attributes.is_at_rest = false;
        } else if let Some(object) = file.object.filter(|_| file.size > 0)
            && self.metadata.is_only_remote(object)?
        {
            // Nothing of it takes space here.
            attributes.blocks = 1;
        }
        Ok(attributes)
    }

    /// Opens a handle.
    pub(crate) fn add_handle(&mut self, handle: Handle) -> u64 {
        let number = number_of(self.next_handle, handle.writes);
        self.next_handle += 1;
        self.put_handle(number, handle);
        number
    }

    /// Opens a handle that has this number.
    pub(crate) fn put_handle(&mut self, number: u64, handle: Handle) {
        let node = self.nodes.entry(handle.inode).or_default();
        node.served += u32::from(handle.served.is_file());
        if handle.writes {
            node.writers += 1;
        } else {
            node.readers += 1;
        }
        self.handles.insert(number, handle);
    }

    /// Makes a first-time file part of the next commit, written out or not.
    pub(crate) fn make_durable(&mut self, id: InodeId) -> Result<(), FsError> {
        let Some(place) = self.fresh.remove(&id) else {
            return Ok(());
        };
        let is_page = self.metadata.held_back.contains(id);
        self.metadata.make_durable(id, Some((place.parent, &place.name)));
        if is_page {
            // Its records say all of it.
            return Ok(());
        }
        let mut inode = self.inode(id)?;
        if let Some(file) = inode.file_mut() {
            file.unsettled = self.unsettled.contains_key(id);
            if let Some(object) = file.object {
                self.publish(object, ObjectKind::File, 0)?;
            }
        }
        self.put_inode(id, &inode);
        Ok(())
    }

    /// Makes the bytes of a file that is no page part of the next commit, without a checksum.
    pub(crate) fn publish(
        &mut self, object: ObjectId, kind: ObjectKind, length: u64,
    ) -> Result<(), FsError> {
        let references = self.metadata.object(object)?.map_or(1, |record| record.references);
        let record = ObjectRecord { kind, length, checksum: None, references };
        self.metadata.put_object(object, &record);
        self.metadata.publish(object);
        Ok(())
    }

    /// Drops one reference to an object; the last one takes the file along.
    pub(crate) fn drop_object(&mut self, object: ObjectId) -> Result<(), FsError> {
        match self.metadata.object(object)? {
            Some(mut record) if record.references > 1 => {
                record.references -= 1;
                self.metadata.put_object(object, &record);
            }
            _ => {
                self.metadata.remove_object(object);
            }
        }
        Ok(())
    }

    /// Whether a sealed file is the same, byte for byte.
    pub(crate) fn has_content(
        &self, inode: &Inode, role: Role, checksum: [u8; 16],
    ) -> Result<bool, FsError> {
        let file = inode.file().filter(|file| file.role == role);
        let Some(object) = file.and_then(|file| file.object) else {
            return Ok(false);
        };
        let record = self.metadata.object(object)?;
        Ok(record.is_some_and(|record| record.checksum == Some(checksum)))
    }

    /// Gives an inode the extended attributes of the file that it takes the place of. What was done to
    /// its own bytes stays told.
    pub(crate) fn replace_attributes(
        &mut self, id: InodeId, attributes: &[Attribute],
    ) -> Result<(), FsError> {
        let life = self.metadata.life(id);
        for name in self.metadata.attribute_names(id)? {
            // A pin is the inode's, which stays.
            if name != LOSSY && name != PIN {
                self.metadata.remove_attribute(life, id, &name);
            }
        }
        for (name, value) in attributes {
            self.metadata.put_attribute(life, id, name, value);
        }
        Ok(())
    }

    /// Whether a program runs from a file.
    pub(crate) fn is_running(&self, id: InodeId) -> bool {
        let mut handles = self.handles.values();
        handles.any(|handle| handle.inode == id && handle.executes)
    }

    /// Removes a name from where it is kept.
    pub(crate) fn remove_name(&mut self, place: &Place, id: InodeId) {
        let fresh = self.fresh.contains_key(&id);
        let life = if fresh { Life::Volatile } else { Life::Durable };
        self.metadata.remove_entry(life, place.parent, &place.name);
    }

    /// Takes one name away from an inode. With the last one it goes, as soon as nobody holds it.
    pub(crate) fn drop_link(&mut self, id: InodeId, inode: &mut Inode) -> Result<(), FsError> {
        inode.links = inode.links.saturating_sub(1);
        inode.ctime = Time::now();
        if inode.links > 0 {
            self.put_inode(id, inode);
            return Ok(());
        }
        self.metadata.remove_inode(Life::Durable, id)?;
        self.forget_page(id, inode)?;
        self.fresh.remove(&id);
        self.unsettled.remove(id);
        if self.nodes.contains_key(&id) {
            orphan::disown_bytes(self, id, inode)?;
            self.metadata.put_inode(Life::Volatile, id, inode);
            return Ok(());
        }
        self.drop_orphan(id, inode)
    }

    /// Makes the version that a truncating writer made the file's own. Returns the old one.
    pub(crate) fn adopt(
        &mut self, id: InodeId, inode: &mut Inode,
    ) -> Result<Option<ObjectId>, FsError> {
        let Some(new) = self.nodes.get_mut(&id).and_then(|node| node.replacement.take()) else {
            return Ok(None);
        };
        let file = inode.file_mut().ok_or(FsError::Invalid)?;
        Ok(file.object.replace(new))
    }

    /// Takes the old name away after its bytes were published under another.
    pub(crate) fn remove_source(
        &mut self, id: InodeId, from: &Place, taken: bool,
    ) -> Result<(), FsError> {
        let mut source = self.inode(id)?;
        if taken {
            self.unsettled.remove(id);
            if let Some(file) = source.file_mut() {
                file.object = None;
            }
        }
        // Another name of the file still leads to it.
        if let Some(node) = self.nodes.get_mut(&id).filter(|_| source.links == 1) {
            node.stale = true;
        }
        self.remove_name(from, id);
        self.touch_directory(from.parent, 0)?;
        self.drop_link(id, &mut source)
    }

    /// Refuses an inode whose name leads to another one now, unless a descriptor asks: the kernel
    /// then looks the name up again.
    pub(crate) fn check_current(&self, id: InodeId) -> Result<(), FsError> {
        match self.nodes.get(&id) {
            Some(node) if node.stale && node.handles() == 0 => Err(FsError::Stale),
            _ => Ok(()),
        }
    }

    /// Lets the next commit see a file that is still being written, as it is.
    pub(crate) fn expose(&mut self, id: InodeId, inode: &mut Inode) -> Result<(), FsError> {
        let unsettled = self.unsettled.get(id).copied();
        if let Some(old) = self.adopt(id, inode)? {
            if let Some(file) = inode.file_mut() {
                file.unsettled = true;
            }
            // Its file may be older: after a crash the record counts as long as that is empty.
            let made = unsettled.and_then(|new| self.unsettled.made_after_its_file(new));
            inode.mtime = inode.mtime.max(made.unwrap_or_default());
            self.put_inode(id, inode);
            if let Some(new) = unsettled {
                self.publish(new, ObjectKind::File, 0)?;
            }
            self.drop_object(old)?;
        }
        self.make_durable(id)?;
        *inode = self.inode(id)?;
        Ok(())
    }

    /// The end of an inode without names that nobody holds.
    pub(crate) fn drop_orphan(&mut self, id: InodeId, inode: &Inode) -> Result<(), FsError> {
        self.orphans.remove(&id);
        self.metadata.remove_inode(Life::Volatile, id)?;
        // Whoever truncated it after the last name went made it change again.
        self.unsettled.remove(id);
        self.damaged.remove(&id);
        if let Some(object) = inode.file().and_then(|file| file.object) {
            self.drop_object(object)?;
        }
        Ok(())
    }

    /// Forgets a node that neither the kernel nor a handle holds any more.
    pub(crate) fn drop_node_if_idle(&mut self, id: InodeId) -> Result<(), FsError> {
        let Some(node) = self.nodes.get(&id) else {
            return Ok(());
        };
        if node.lookups > 0 || node.is_in_use() || node.pending.is_some() {
            return Ok(());
        }
        // A replacement that is not settled yet must not be forgotten with the node.
        if node.replacement.is_some() && self.metadata.inode(id)?.is_some_and(|i| i.links > 0) {
            return Ok(());
        }
        let replacement = node.replacement;
        self.nodes.remove(&id);
        if self.metadata.life(id) == Life::Volatile
            && let Some(inode) = self.metadata.inode(id)?
            && inode.links == 0
        {
            self.drop_orphan(id, &inode)?;
            if let Some(object) = replacement {
                self.drop_object(object)?;
            }
        }
        Ok(())
    }

    /// Some path of a file, for messages. It looks through all names, since nothing else needs to
    /// find them by inode: only for what hardly ever happens.
    pub(crate) fn any_path(&self, id: InodeId) -> Option<String> {
        let mut place = None;
        let scanned = self.metadata.scan_table::<Entry>(b'E', |key, entry| {
            if entry.inode == id
                && let (Some(parent), Some((_, name))) = (keys::number(key), keys::split_entry(key))
            {
                place = Some((InodeId(parent), name.to_vec()));
            }
        });
        if let Err(error) = scanned {
            log::warn!("looking for a name of inode {}: {error}", id.0);
        }
        place.map(|(parent, name)| self.path(parent, &name))
    }

    /// The path of a directory itself.
    pub(crate) fn directory_path(&self, id: InodeId) -> Option<String> {
        match self.metadata.inode(id).ok()??.kind {
            Kind::Directory { parent, name, .. } => Some(self.path(parent, &name)),
            _ => None,
        }
    }

    /// The path of a name in a directory of the mount, for messages.
    pub(crate) fn path(&self, directory: InodeId, name: &[u8]) -> String {
        let mut parts = vec![shown(name)];
        let mut at = directory;
        while at != InodeId::ROOT && parts.len() < SHOWN_MAX {
            let Ok(Inode { kind: Kind::Directory { parent, name, .. }, .. }) = self.inode(at)
            else {
                break;
            };
            parts.push(shown(&name));
            at = parent;
        }
        if at != InodeId::ROOT {
            parts.push("...".to_owned());
        }
        parts.reverse();
        parts.join("/")
    }
}

/// Why the kernel asks for an inode that is not there: it may have been lost with a daemon that died, and then there may be
/// another one at its path.
fn why_absent(state: &State, id: InodeId) -> FsError {
    let may_be_lost = has_predecessors(state.next_handle) && state.metadata.is_older(id);
    if may_be_lost { FsError::Stale } else { FsError::NotFound }
}

/// A name for a message: whatever it contains, the message stays one line.
fn shown(name: &[u8]) -> String {
    kvfs_page::escaped_bytes(name)
}

//! All records of a store in memory, and what a repair changes in them.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{AGAIN, Finding, FsckOptions, Report};
use crate::store::database::{decode, encode};
use crate::store::disk::DiskPath;
use crate::store::quarantine::{self, Take};
use crate::store::record::{
    DEPTH_MAX, DirectoryClass, EncodedCopy, Entry, Inode, InodeId, Kind, ObjectId, ObjectRecord,
    RemoteCopy, RemoteState, Totals,
};
use crate::store::records::{Changes, Records};
use crate::store::{Store, StoreError, keys};

/// A name in a directory.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) parent: InodeId,
    pub(super) name: Vec<u8>,
    pub(super) inode: InodeId,
    pub(super) file_type: u32,
    /// A repair keeps it.
    pub(super) kept: bool,
}

/// The records as they will be after a repair.
#[derive(Debug)]
pub(super) struct Image<'a> {
    pub(super) store: &'a Store,
    pub(super) options: &'a FsckOptions,
    pub(super) report: Report,
    pub(super) inodes: HashMap<InodeId, Inode>,
    pub(super) names: Vec<Named>,
    pub(super) objects: BTreeMap<ObjectId, ObjectRecord>,
    /// Copies in the remote.
    pub(super) remote: BTreeMap<ObjectId, RemoteCopy>,
    /// Encoded copies on the disk.
    pub(super) encoded: BTreeMap<ObjectId, EncodedCopy>,
    /// Keys of the extended attributes.
    pub(super) attributes: Vec<Vec<u8>>,
    /// Inodes that recovery is to look at.
    pub(super) marks: HashSet<InodeId>,
    pub(super) totals: Totals,
    /// What the object records alone add up to.
    pub(super) counted: Totals,
    pub(super) epoch: u32,
    /// The highest epoch that any number is of.
    pub(super) epoch_in_use: u32,
    pub(super) was_clean: bool,
    /// What a repair writes.
    pub(super) changes: Changes,
    /// What a repair has moved to quarantine, or would.
    pub(super) quarantine: Vec<(ObjectId, Take)>,
    /// What a repair removes last.
    pub(super) garbage: Vec<DiskPath>,
    /// Files that cannot be kept, and why.
    pub(super) lost: BTreeMap<InodeId, String>,
    /// Inodes whose names a repair changes: their link counts follow.
    pub(super) touched: HashSet<InodeId>,
    /// Some record of an inode could not be decoded.
    pub(super) has_lost_records: bool,
    next_number: u64,
}

impl<'a> Image<'a> {
    /// Reads everything. A record that cannot be decoded is a finding and counts as absent.
    pub(super) fn load(
        store: &'a Store, options: &'a FsckOptions, records: &Records,
    ) -> Result<Image<'a>, StoreError> {
        let mut image = Image {
            store,
            options,
            report: Report::default(),
            inodes: HashMap::new(),
            names: Vec::new(),
            objects: BTreeMap::new(),
            remote: BTreeMap::new(),
            encoded: BTreeMap::new(),
            attributes: Vec::new(),
            marks: HashSet::new(),
            totals: Totals::default(),
            counted: Totals::default(),
            epoch: 0,
            epoch_in_use: 0,
            was_clean: true,
            changes: Changes::new(),
            quarantine: Vec::new(),
            garbage: Vec::new(),
            lost: BTreeMap::new(),
            touched: HashSet::new(),
            has_lost_records: false,
            next_number: 0,
        };
        records.scan(b'C', |key, value| {
            if let Some(last) = image.decoded::<(u32, bool)>(key, value, "the epoch") {
                (image.epoch, image.was_clean) = last;
            }
        })?;
        records.scan(b'T', |key, value| {
            image.totals = image.decoded(key, value, "the totals").unwrap_or_default();
        })?;
        records.scan(b'I', |key, value| image.load_inode(key, value))?;
        records.scan(b'E', |key, value| image.load_name(key, value))?;
        records.scan(b'O', |key, value| image.load_object(key, value))?;
        records.scan(b'R', |key, value| {
            let what = numbered("remote copy of object", key);
            let copy = image.decoded(key, value, &what);
            image.remote.extend(keys::number(key).map(ObjectId).zip(copy));
        })?;
        records.scan(b'Z', |key, value| {
            let what = numbered("encoded copy of object", key);
            let copy = image.decoded(key, value, &what);
            image.encoded.extend(keys::number(key).map(ObjectId).zip(copy));
        })?;
        records.scan(b'X', |key, _| image.attributes.push(key.to_vec()))?;
        records.scan(b'U', |key, _| {
            image.marks.extend(keys::number(key).map(InodeId));
        })?;
        image.report.inodes = image.inodes.len() as u64;
        image.report.objects = image.objects.len() as u64;
        let inodes = image.inodes.keys().map(|id| id.0);
        let objects = image.objects.keys().map(|id| id.0);
        let highest = inodes.chain(objects).max().unwrap_or(0) >> 32;
        image.epoch_in_use = u32::try_from(highest).unwrap_or(u32::MAX);
        image.next_number = (u64::from(image.epoch.max(image.epoch_in_use)) + 1) << 32;
        Ok(image)
    }

    fn load_inode(&mut self, key: &[u8], value: &[u8]) {
        let what = numbered("inode", key);
        if let (Some(id), Some(inode)) = (keys::number(key), self.decoded(key, value, &what)) {
            self.inodes.insert(InodeId(id), inode);
        }
    }

    fn load_object(&mut self, key: &[u8], value: &[u8]) {
        let what = numbered("object", key);
        if let (Some(id), Some(record)) = (keys::number(key), self.decoded(key, value, &what)) {
            self.counted.add(&record);
            self.objects.insert(ObjectId(id), record);
        }
    }

    fn load_name(&mut self, key: &[u8], value: &[u8]) {
        let place = keys::number(key).zip(keys::split_entry(key));
        let what = place.map_or_else(
            || "a name without a directory".to_owned(),
            |(parent, (_, name))| {
                format!("{} in directory {parent}", kvfs_page::escaped_bytes(name))
            },
        );
        let entry = self.decoded::<Entry>(key, value, &what);
        let (Some((parent, (_, name))), Some(entry)) = (place, entry) else {
            return;
        };
        let parent = InodeId(parent);
        let valid = !name.is_empty()
            && name.len() <= 255
            && name != b"."
            && name != b".."
            && !name.contains(&b'/')
            && !name.contains(&0);
        if !valid || keys::entry(parent, name) != key {
            self.find(&format!("{what}: a name that cannot be looked up, removed"), true);
            self.changes.insert(key.to_vec(), None);
            return;
        }
        self.names.push(Named {
            parent,
            name: name.to_vec(),
            inode: entry.inode,
            file_type: entry.file_type,
            kept: true,
        });
    }

    fn decoded<T: serde::de::DeserializeOwned>(
        &mut self, key: &[u8], value: &[u8], what: &str,
    ) -> Option<T> {
        let decoded = decode(value).ok();
        if decoded.is_none() {
            self.has_lost_records |= key.first() == Some(&b'I');
            self.find(&format!("{what}: the record cannot be decoded, removed"), true);
            self.changes.insert(key.to_vec(), None);
        }
        decoded
    }

    /// A store that was made and never mounted, or not until anything was committed.
    pub(super) fn is_empty(&self) -> bool {
        (self.epoch == 0 || !self.was_clean)
            && self.inodes.is_empty()
            && self.names.is_empty()
            && self.objects.is_empty()
    }

    /// Notes that something is wrong, and whether a repair mends it.
    pub(super) fn find(&mut self, what: &str, mendable: bool) {
        self.report
            .findings
            .push(Finding { what: what.to_owned(), repaired: mendable && self.options.repair });
    }

    /// Puts the bytes of an object into quarantine, if this is a repair. The error says what was in the way, and what to
    /// do: nothing about that object may be changed then.
    pub(super) fn set_aside(
        &mut self, object: ObjectId, take: Take, reason: &str,
    ) -> Result<(), String> {
        if self.options.repair
            && let Err(error) = quarantine::put(self.store, object, take, reason)
        {
            let path = DiskPath::Quarantine(object.to_string()).relative();
            return Err(format!("cannot be moved to {} ({error}), {AGAIN}", path.display()));
        }
        self.quarantine.push((object, take));
        Ok(())
    }

    /// A number that nothing has.
    pub(super) fn new_number(&mut self) -> u64 {
        self.next_number += 1;
        self.put_epoch(u32::try_from(self.next_number >> 32).unwrap_or(u32::MAX));
        self.next_number
    }

    /// Raises the epoch of the last mount.
    pub(super) fn put_epoch(&mut self, epoch: u32) {
        self.changes.insert(keys::epoch(), Some(encode(&(epoch, self.was_clean))));
    }

    /// Stores an inode.
    pub(super) fn put_inode(&mut self, id: InodeId, inode: Inode) {
        self.changes.insert(keys::inode(id), Some(encode(&inode)));
        self.inodes.insert(id, inode);
    }

    /// Removes an inode; its attributes and mark follow in `rest`.
    pub(super) fn remove_inode(&mut self, id: InodeId) {
        self.changes.insert(keys::inode(id), None);
        self.inodes.remove(&id);
    }

    /// Stores the record of an object.
    pub(super) fn put_object(&mut self, id: ObjectId, record: ObjectRecord) {
        self.changes.insert(keys::object(id), Some(encode(&record)));
        self.objects.insert(id, record);
    }

    /// Whether the remote has an object for sure, and the disk need not.
    pub(super) fn is_in_remote(&self, id: ObjectId) -> bool {
        self.remote.get(&id).is_some_and(|copy| copy.state != RemoteState::Held)
    }

    /// Whether the disk's copy of an object does not count any more.
    pub(super) fn has_left(&self, id: ObjectId) -> bool {
        self.remote.get(&id).is_some_and(|copy| copy.state == RemoteState::Only)
    }

    /// Notes that the disk has no encoded copy of an object, or none that counts.
    pub(super) fn remove_encoded(&mut self, id: ObjectId) {
        self.changes.insert(keys::encoded_copy(id), None);
        self.encoded.remove(&id);
    }

    /// Notes that only the remote has an object.
    pub(super) fn leave_to_remote(&mut self, id: ObjectId) {
        if let Some(copy) = self.remote.get_mut(&id)
            && copy.state != RemoteState::Only
        {
            copy.state = RemoteState::Only;
            self.changes.insert(keys::remote_copy(id), Some(encode(copy)));
        }
    }

    /// Removes the record of an object.
    pub(super) fn remove_object(&mut self, id: ObjectId) {
        self.changes.insert(keys::object(id), None);
        self.objects.remove(&id);
    }

    /// Removes a name.
    pub(super) fn remove_name(&mut self, index: usize) {
        let name = &mut self.names[index];
        name.kept = false;
        self.touched.extend([name.parent, name.inode]);
        let key = keys::entry(name.parent, &name.name);
        self.changes.insert(key, None);
    }

    /// Adds a name, or corrects the type of one.
    pub(super) fn add_name(&mut self, parent: InodeId, name: &[u8], inode: InodeId) {
        let file_type = self.inodes.get(&inode).map_or(0, Inode::file_type);
        let entry = Entry { inode, file_type };
        self.touched.extend([parent, inode]);
        self.changes.insert(keys::entry(parent, name), Some(encode(&entry)));
        self.names.push(Named { parent, name: name.to_vec(), inode, file_type, kept: true });
    }

    /// The class of a directory.
    pub(super) fn class(&self, id: InodeId) -> Option<DirectoryClass> {
        match self.inodes.get(&id)?.kind {
            Kind::Directory { class, .. } => Some(class),
            _ => None,
        }
    }

    /// The path of a name, for messages.
    pub(super) fn path(&self, parent: InodeId, name: &[u8]) -> String {
        let mut parts = vec![kvfs_page::escaped_bytes(name)];
        let mut at = parent;
        while at != InodeId::ROOT {
            match self.inodes.get(&at).map(|inode| &inode.kind) {
                Some(Kind::Directory { parent, name, .. }) if parts.len() < DEPTH_MAX => {
                    parts.push(kvfs_page::escaped_bytes(name));
                    at = *parent;
                }
                _ => {
                    parts.push(format!("<directory {}>", at.0));
                    break;
                }
            }
        }
        parts.reverse();
        parts.join("/")
    }

    /// The path of a name by its index.
    pub(super) fn path_of(&self, index: usize) -> String {
        let name = &self.names[index];
        self.path(name.parent, &name.name)
    }
}

fn numbered(what: &str, key: &[u8]) -> String {
    match keys::number(key) {
        Some(number) => format!("{what} {number:016x}"),
        None => format!("{what} without a number"),
    }
}

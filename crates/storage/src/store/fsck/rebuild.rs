//! `meta.redb` is lost or damaged: the records are made again from what the object files say about
//! themselves ([`crate::store::description`]), and from what can still be read of the old ones.
//!
//! Files come back where they stood, with owner, mode, times and checksum as their object's note tells, and where the
//! old records know their names, under those. What nothing is told of, or something that cannot be, comes to
//! `files/lost+found`. Directories that no record tells of are made for their owner alone; so are symbolic links, empty
//! directories, extended attributes and files that only a remote has gone then.
//!
//! The new database is made beside the old one, which then goes to `quarantine/`. The check that
//! follows compares all bytes and says what is wrong.

use std::collections::{BTreeMap, HashMap};
use std::io;

use super::names::{FILES, new_directory};
use super::salvage::Salvaged;
use super::tree::Tree;
use crate::store::description::Description;
use crate::store::disk::{DiskDirectory, DiskPath, shard};
use crate::store::record::{
    DirectoryClass, EncodedCopy, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind,
    ObjectRecord, RemoteCopy, RemoteState, Role, Totals,
};
use crate::store::{Store, StoreError, database, keys, last_mount};
use crate::tier::encoded::{checksum_of_copy, recognise};

/// Name of the old database in `quarantine/`.
const OLD_DATABASE: &str = "meta.redb";

/// What was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// Files that are where they were.
    pub files: u64,
    /// Files that came to `files/lost+found`.
    pub lost: u64,
}

/// An object's files.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    raw: bool,
    encoded: bool,
}

/// Makes the records.
pub(super) fn rebuild(store: &Store) -> Result<Rebuilt, StoreError> {
    let found = objects(store)?;
    let salvaged = Salvaged::read(store);
    let highest = found.keys().next_back().map_or(0, |object| object.0 >> 32);
    let highest = u32::try_from(highest).unwrap_or(u32::MAX).max(salvaged.epoch);
    let highest = highest.max(last_mount::noted(store.disk.as_ref()).unwrap_or(0));
    let mut making = Making {
        store,
        files: salvaged.files(),
        tree: Tree::new(highest.saturating_add(1), &salvaged),
        salvaged,
        found,
        objects: BTreeMap::new(),
        rebuilt: Rebuilt::default(),
    };
    making.add_all()?;
    let rebuilt = making.rebuilt;
    making.write()?;
    Ok(rebuilt)
}

/// The records that are being made.
struct Making<'a> {
    store: &'a Store,
    /// Objects on the disk.
    found: BTreeMap<ObjectId, Found>,
    salvaged: Salvaged,
    /// Files of the old records by their object.
    files: HashMap<ObjectId, Vec<InodeId>>,
    tree: Tree,
    objects: BTreeMap<ObjectId, (ObjectRecord, Option<EncodedCopy>)>,
    rebuilt: Rebuilt,
}

impl Making<'_> {
    /// Names that the old records tell come first. Of two notes that tell the same name the newer one counts: a file
    /// that took the place of another one is newer, and so is its number.
    fn add_all(&mut self) -> Result<(), StoreError> {
        let newest_first: Vec<_> =
            self.found.iter().rev().map(|(id, found)| (*id, *found)).collect();
        let mut unknown = Vec::new();
        for (object, found) in newest_first {
            match self.known_files(object) {
                files if files.is_empty() => unknown.push((object, found)),
                files => self.add_known(object, found, &files)?,
            }
        }
        self.add_others();
        for (object, found) in unknown {
            let (id, note) = (self.tree.new_inode(), self.note(object));
            let (inode, record, paths) = match note {
                Some(Description { paths, inode, object: record }) => (inode, record, paths),
                None => (nameless(object), UNKNOWN, Vec::new()),
            };
            self.add(id, inode, &paths, object);
            self.settle(object, found, id, record)?;
        }
        self.tree.name_finished_sequences();
        Ok(())
    }

    /// Files of the old records that have this object, and a name.
    fn known_files(&self, object: ObjectId) -> Vec<InodeId> {
        let files = self.files.get(&object).into_iter().flatten();
        files.filter(|id| self.salvaged.places.contains_key(id)).copied().collect()
    }

    fn note(&self, object: ObjectId) -> Option<Description> {
        let is_own =
            |note: &Description| note.inode.file().is_some_and(|file| file.object == Some(object));
        self.store.description(object).filter(is_own)
    }

    /// The note tells what the file is. Of several files that share an object it tells of one, and not of which.
    fn add_known(
        &mut self, object: ObjectId, found: Found, files: &[InodeId],
    ) -> Result<(), StoreError> {
        let note = self.note(object);
        let record = note.as_ref().map(|note| note.object);
        let record = record.or_else(|| self.salvaged.objects.get(&object).copied());
        for &id in files {
            let old = self.salvaged.inodes.get(&id).cloned();
            let (inode, paths) = match &note {
                Some(note) if files.len() == 1 => (Some(note.inode.clone()), &note.paths[..]),
                _ => (old, &[][..]),
            };
            let Some(inode) = inode else { continue };
            self.add(id, inode, paths, object);
            self.settle(object, found, id, record.unwrap_or(UNKNOWN))?;
        }
        Ok(())
    }

    /// A file with an object on the disk.
    fn add(&mut self, id: InodeId, inode: Inode, paths: &[Vec<u8>], object: ObjectId) {
        let places = self.salvaged.places.get(&id).map_or(&[][..], Vec::as_slice);
        let is_named = self.tree.add(id, inode, places, paths);
        if !is_named {
            self.tree.lose(id, object);
        }
        let count = if is_named { &mut self.rebuilt.files } else { &mut self.rebuilt.lost };
        *count += 1;
    }

    /// What has no bytes on the disk: symbolic links, devices, files without any bytes, and those that only the
    /// remote has.
    fn add_others(&mut self) {
        let Making { found, salvaged, tree, objects, rebuilt, .. } = self;
        for (id, inode) in salvaged.inodes.iter().filter(|(_, inode)| !inode.is_directory()) {
            let object = inode.file().and_then(|file| file.object);
            let record = object.map(|object| (object, salvaged.objects.get(&object)));
            let is_elsewhere = match record {
                None => true,
                Some((object, record)) => {
                    let is_remote = salvaged.remote.contains_key(&object) && record.is_some();
                    is_remote && !found.contains_key(&object)
                }
            };
            let places = salvaged.places.get(id).filter(|_| is_elsewhere);
            let Some(places) = places else { continue };
            if !tree.add(*id, inode.clone(), places, &[]) {
                tree.inodes.remove(id);
                continue;
            }
            rebuilt.files += u64::from(inode.file().is_some());
            if let Some((object, Some(record))) = record {
                objects.insert(object, (*record, None));
            }
        }
    }

    fn settle(
        &mut self, object: ObjectId, found: Found, id: InodeId, record: ObjectRecord,
    ) -> Result<(), StoreError> {
        if let Some(inode) = self.tree.inodes.get_mut(&id) {
            let settled = settle(self.store, (object, found), inode, record)?;
            self.objects.insert(object, settled);
        }
        Ok(())
    }

    /// Copies in the remote stay as they are on record: the manifest that names them does. Where the disk has an object
    /// after all, the check that follows compares it, and takes the remote's copy instead if it has to.
    fn remote_copy(&self, object: ObjectId) -> Option<RemoteCopy> {
        let copy = self.salvaged.remote.get(&object)?;
        let is_here = self.found.contains_key(&object);
        let state = match copy.state {
            RemoteState::Only if is_here => RemoteState::Named,
            state => state,
        };
        Some(RemoteCopy { state, ..*copy })
    }

    /// Writes the records beside the old database, and exchanges the two.
    fn write(mut self) -> Result<(), StoreError> {
        self.tree.count_links();
        let store = self.store;
        match store.disk.remove(&DiskPath::MetadataStaging) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let storage = store.disk.database(&DiskPath::MetadataStaging)?;
        database::fill(store.database(storage), |put| self.put_all(put))?;
        if store.disk.stat(&DiskPath::Metadata).is_ok() {
            let old = DiskPath::Quarantine(OLD_DATABASE.to_owned());
            store.disk.rename(&DiskPath::Metadata, &old)?;
            store.disk.sync_directory(DiskDirectory::Quarantine)?;
        }
        store.disk.rename(&DiskPath::MetadataStaging, &DiskPath::Metadata)?;
        store.disk.sync_directory(DiskDirectory::Store)?;
        Ok(())
    }

    fn put_all(&self, put: &mut database::Put<'_>) -> Result<(), StoreError> {
        let (tree, mut totals) = (&self.tree, Totals::default());
        let mut references: HashMap<ObjectId, u32> = HashMap::new();
        for object in tree.inodes.values().filter_map(|inode| inode.file()?.object) {
            *references.entry(object).or_default() += 1;
        }
        for (object, (record, copy)) in &self.objects {
            let references = references.get(object).copied().unwrap_or(0);
            totals.add(record);
            put(
                &keys::object(*object),
                &database::encode(&ObjectRecord { references, ..*record }),
            )?;
            if let Some(copy) = copy {
                put(&keys::encoded_copy(*object), &database::encode(copy))?;
            }
            if let Some(copy) = self.remote_copy(*object) {
                put(&keys::remote_copy(*object), &database::encode(&copy))?;
            }
        }
        for (id, inode) in &tree.inodes {
            put(&keys::inode(*id), &database::encode(inode))?;
            if inode.file().is_some_and(|file| file.unsettled) {
                put(&keys::unsettled(*id), &database::encode(&()))?;
            }
        }
        for ((parent, name), id) in &tree.names {
            let file_type = tree.inodes.get(id).map_or(0, Inode::file_type);
            put(&keys::entry(*parent, name), &database::encode(&Entry { inode: *id, file_type }))?;
        }
        let is_kept =
            |key: &[u8]| keys::number(key).is_some_and(|id| tree.inodes.contains_key(&InodeId(id)));
        for (key, value) in self.salvaged.attributes.iter().filter(|(key, _)| is_kept(key)) {
            put(key, value)?;
        }
        for (key, value) in &self.salvaged.others {
            put(key, value)?;
        }
        put(&keys::totals(), &database::encode(&totals))?;
        // As after a crash: what no record refers to is swept by the next mount.
        put(&keys::epoch(), &database::encode(&(tree.epoch, false)))
    }
}

fn objects(store: &Store) -> Result<BTreeMap<ObjectId, Found>, StoreError> {
    let mut objects: BTreeMap<ObjectId, Found> = BTreeMap::new();
    for number in 0..=u8::MAX {
        for name in store.disk.list(DiskDirectory::ObjectShard(number))? {
            match DiskPath::stored(&name) {
                Some(DiskPath::Object(object)) if shard(object) == number => {
                    objects.entry(object).or_default().raw = true;
                }
                Some(DiskPath::Encoded(object)) if shard(object) == number => {
                    objects.entry(object).or_default().encoded = true;
                }
                _ => {}
            }
        }
    }
    Ok(objects)
}

/// What is on record of a file that says nothing about itself.
const UNKNOWN: ObjectRecord =
    ObjectRecord { kind: ObjectKind::File, length: 0, checksum: None, references: 1 };

fn nameless(object: ObjectId) -> Inode {
    let (role, object) = (Role::Plain, Some(object));
    let file = FileRecord { role, object, size: 0, blocks: 0, unsettled: true };
    let base = new_directory(DirectoryClass::Plain, FILES, b"");
    Inode { kind: Kind::File(file), mode: 0o600, links: 1, ..base }
}

/// What is known better from the object's files than from its note.
fn settle(
    store: &Store, (object, found): (ObjectId, Found), inode: &mut Inode, mut record: ObjectRecord,
) -> Result<(ObjectRecord, Option<EncodedCopy>), StoreError> {
    let copy = if found.encoded { recognise(store, object)? } else { None };
    let Some(file) = inode.file_mut() else {
        return Ok((record, None));
    };
    match copy {
        // Only what is at rest is encoded.
        Some((_, copy)) if record.checksum.is_some() => return Ok((record, Some(copy))),
        Some((length, copy)) if !found.raw => {
            (file.size, file.blocks, file.unsettled) = (length, length.div_ceil(512), false);
            record.length = length;
            record.checksum = checksum_of_copy(store, object, length, &copy)?.map(|sum| sum.0);
            return Ok((record, Some(copy)));
        }
        _ => {}
    }
    if file.unsettled && found.raw {
        let stat = store.disk.stat(&DiskPath::Object(object))?;
        let is_append_only = file.role.is_append_only();
        (file.size, file.blocks, file.unsettled) = (stat.length, stat.blocks, is_append_only);
        record.length = if is_append_only { 0 } else { stat.length };
        (inode.mtime, inode.ctime) = (stat.mtime, stat.mtime);
    }
    Ok((record, None))
}

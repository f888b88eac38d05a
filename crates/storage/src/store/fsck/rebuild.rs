//! `meta.redb` is lost or beyond reading: the records are made again from what the object files say
//! about themselves ([`crate::store::description`]).
//!
//! Files come back where they stood when they were last changed or renamed, with owner, mode, times
//! and checksum; what says nothing, or something that cannot be, comes to `files/lost+found`.
//! Directories are made for their owner alone, since nothing is known of them. Symbolic links,
//! empty directories and extended attributes are gone.
//!
//! The new database is made beside the old one, which then goes to `quarantine/`. The check that
//! follows compares all bytes and says what is wrong.

use std::collections::{BTreeMap, HashMap};
use std::io;

use super::names::{FILES, FIXED, new_directory};
use crate::page::classify::{self, FileClass};
use crate::page::names;
use crate::store::description::Description;
use crate::store::disk::{DiskDirectory, DiskPath, shard};
use crate::store::record::{
    DirectoryClass, EncodedCopy, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind,
    ObjectRecord, Role, Totals,
};
use crate::store::{Store, StoreError, database, keys};
use crate::tier::encoded::{checksum_of_copy, recognise};

/// Name of the old database in `quarantine/`.
const OLD_DATABASE: &str = "meta.redb";

/// Ends the name of a sequence of which there are two.
const REBUILT_SUFFIX: &[u8] = b".rebuilt";

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
    let highest = found.keys().next_back().map_or(0, |object| object.0);
    let mut tree = Tree::new(u32::try_from(highest >> 32).unwrap_or(u32::MAX).saturating_add(1));
    // A file that took the place of another one is newer, and so is its number.
    for (&object, found) in found.iter().rev() {
        tree.add(store, object, *found)?;
    }
    tree.name_finished_sequences();
    let rebuilt = tree.rebuilt;
    write(store, tree)?;
    Ok(rebuilt)
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

/// The records that are being made.
struct Tree {
    /// Of the numbers that are given to inodes: no mount had it.
    epoch: u32,
    inodes: BTreeMap<InodeId, Inode>,
    names: HashMap<(InodeId, Vec<u8>), InodeId>,
    objects: BTreeMap<ObjectId, (ObjectRecord, Option<EncodedCopy>)>,
    rebuilt: Rebuilt,
}

impl Tree {
    fn new(epoch: u32) -> Tree {
        let mut tree = Tree {
            epoch,
            inodes: BTreeMap::new(),
            names: HashMap::new(),
            objects: BTreeMap::new(),
            rebuilt: Rebuilt::default(),
        };
        for (id, class, name) in FIXED {
            let directory = new_directory(class, InodeId::ROOT, name.as_bytes());
            tree.inodes.insert(id, directory);
            if id != InodeId::ROOT {
                tree.name(InodeId::ROOT, name.as_bytes(), id);
            }
        }
        tree
    }

    fn new_inode(&self) -> InodeId {
        InodeId(u64::from(self.epoch) << 32 | self.inodes.len() as u64)
    }

    fn add(&mut self, store: &Store, object: ObjectId, found: Found) -> Result<(), StoreError> {
        let id = self.new_inode();
        let note = store
            .description(object)
            .filter(|note| note.inode.file().is_some_and(|file| file.object == Some(object)));
        let (inode, record, paths) = match note {
            Some(Description { paths, inode, object: record }) => (inode, record, paths),
            None => (nameless(object), UNKNOWN, Vec::new()),
        };
        self.inodes.insert(id, inode);
        let mut named = false;
        for path in paths {
            named |= self.place(id, &path);
        }
        if !named {
            self.lose(id, object);
        }
        let Some(inode) = self.inodes.get_mut(&id) else {
            return Ok(());
        };
        let (record, copy) = settle(store, (object, found), inode, record)?;
        self.objects.insert(object, (record, copy));
        let count = if named { &mut self.rebuilt.files } else { &mut self.rebuilt.lost };
        *count += 1;
        Ok(())
    }

    /// Gives a file a name, if it can stand there and nothing newer does.
    fn place(&mut self, id: InodeId, path: &[u8]) -> bool {
        let mut parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        let Some(name) = parts.pop().filter(|name| is_name(name)) else {
            return false;
        };
        let Some(parent) = self.directory(&parts, id) else {
            return false;
        };
        let class = self.class(parent).map(|class| (class, classify::file(class, name)));
        let Some(file) = self.inodes.get_mut(&id).and_then(Inode::file_mut) else {
            return false;
        };
        let fits = match (class, file.role) {
            (Some((DirectoryClass::Layer(layer), FileClass::Page(start))), Role::Page(page)) => {
                (page.layer, page.start) == (layer, start)
            }
            (Some((DirectoryClass::Layer(layer), FileClass::State(row))), Role::Page(page)) => {
                page.is_state() && (page.layer, page.start) == (layer, row)
            }
            // That of an engine whose manifest does not say what it is.
            (Some((_, FileClass::State(_))), Role::Plain)
            | (Some((_, FileClass::Manifest)), Role::Manifest)
            | (Some((_, FileClass::Tokens)), Role::Tokens)
            | (Some((_, FileClass::Plain)), _) => true,
            (Some((_, FileClass::Tail(there))), Role::Tail { start, .. }) if there == start => {
                file.role = Role::Tail { start, directory: parent };
                true
            }
            _ => false,
        };
        if !fits || self.names.contains_key(&(parent, name.to_vec())) {
            return false;
        }
        self.name(parent, name, id);
        true
    }

    /// The directory of that path, made where it is missing for the owner of a file in it.
    fn directory(&mut self, parts: &[&[u8]], file: InodeId) -> Option<InodeId> {
        let (uid, gid) = self.inodes.get(&file).map(|inode| (inode.uid, inode.gid))?;
        let mut at = InodeId::ROOT;
        for &part in parts {
            if let Some(next) = self.names.get(&(at, part.to_vec())) {
                at = *next;
                self.class(at)?;
                continue;
            }
            let class = classify::directory(self.class(at)?, part).filter(|_| is_name(part))?;
            let id = self.new_inode();
            let made = Inode { mode: 0o700, uid, gid, ..new_directory(class, at, part) };
            self.inodes.insert(id, made);
            self.name(at, part, id);
            at = id;
        }
        Some(at)
    }

    /// A file of which nobody knows where it was.
    fn lose(&mut self, id: InodeId, object: ObjectId) {
        let directory = self.directory(&[b"files", super::links::LOST_AND_FOUND], id);
        if let Some(file) = self.inodes.get_mut(&id).and_then(Inode::file_mut)
            && file.role.is_append_only()
        {
            file.role = Role::Plain;
        }
        self.name(directory.unwrap_or(FILES), format!("#{object}").as_bytes(), id);
    }

    fn name(&mut self, parent: InodeId, name: &[u8], id: InodeId) {
        self.names.insert((parent, name.to_vec()), id);
    }

    fn class(&self, id: InodeId) -> Option<DirectoryClass> {
        match self.inodes.get(&id)?.kind {
            Kind::Directory { class, .. } => Some(class),
            _ => None,
        }
    }

    /// Sequences that an operation made beside the one of that name ([`names::WORK_SUFFIX`]) get it. Their files
    /// say where they were made, not that the directory was renamed since, and what bears that name is taken for
    /// the rest of a crash, and removed. Where another one has the name, both stay.
    fn name_finished_sequences(&mut self) {
        let suffix = names::WORK_SUFFIX.as_bytes();
        let sequences = DirectoryClass::Sequences;
        let is_work = |(parent, name): &(InodeId, Vec<u8>)| {
            name.ends_with(suffix) && self.class(*parent) == Some(sequences)
        };
        let mut found: Vec<_> = self.names.keys().filter(|key| is_work(key)).cloned().collect();
        found.sort_unstable();
        for (parent, name) in found {
            let mut plain = name.clone();
            while let Some(rest) = plain.strip_suffix(suffix) {
                plain.truncate(rest.len());
            }
            let mut wanted = [plain.clone(), [&plain[..], REBUILT_SUFFIX].concat()].into_iter();
            let is_free = |wanted: &Vec<u8>| {
                is_name(wanted) && !self.names.contains_key(&(parent, wanted.clone()))
            };
            let Some(free) = wanted.find(is_free) else { continue };
            let Some(id) = self.names.remove(&(parent, name)) else { continue };
            let inode = self.inodes.get_mut(&id).map(|inode| &mut inode.kind);
            if let Some(Kind::Directory { name, .. }) = inode {
                name.clone_from(&free);
            }
            self.name(parent, &free, id);
        }
    }

    /// Link counts follow from the names.
    fn count_links(&mut self) {
        let mut links: HashMap<InodeId, u32> = HashMap::new();
        for ((parent, _), id) in &self.names {
            if self.class(*id).is_some() {
                *links.entry(*parent).or_default() += 1;
            } else {
                *links.entry(*id).or_default() += 1;
            }
        }
        for (id, inode) in &mut self.inodes {
            let own = if inode.is_directory() { 2 } else { 0 };
            inode.links = own + links.get(id).copied().unwrap_or(0);
        }
    }
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

fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && name.len() <= 255 && name != b"." && name != b".." && !name.contains(&0)
}

/// Writes the records beside the old database, and exchanges the two.
fn write(store: &Store, mut tree: Tree) -> Result<(), StoreError> {
    tree.count_links();
    match store.disk.remove(&DiskPath::MetadataStaging) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let storage = store.disk.database(&DiskPath::MetadataStaging)?;
    database::fill(store.database(storage), |put| put_all(&tree, put))?;
    if store.disk.stat(&DiskPath::Metadata).is_ok() {
        let old = DiskPath::Quarantine(OLD_DATABASE.to_owned());
        store.disk.rename(&DiskPath::Metadata, &old)?;
        store.disk.sync_directory(DiskDirectory::Quarantine)?;
    }
    store.disk.rename(&DiskPath::MetadataStaging, &DiskPath::Metadata)?;
    store.disk.sync_directory(DiskDirectory::Store)?;
    Ok(())
}

fn put_all(tree: &Tree, put: &mut database::Put<'_>) -> Result<(), StoreError> {
    let mut totals = Totals::default();
    for (object, (record, copy)) in &tree.objects {
        totals.add(record);
        put(&keys::object(*object), &database::encode(record))?;
        if let Some(copy) = copy {
            put(&keys::encoded_copy(*object), &database::encode(copy))?;
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
    put(&keys::totals(), &database::encode(&totals))?;
    // As after a crash: what no record refers to is swept by the next mount.
    put(&keys::epoch(), &database::encode(&(tree.epoch, false)))
}

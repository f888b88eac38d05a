//! What can still be read of a damaged database: names and attributes that no object's file tells, and what only a
//! remote has.
//!
//! None of it is checked by anything, so whatever an object's own note tells is believed instead, and a directory
//! counts only where it stands in others up to the root.

use std::collections::{BTreeMap, HashMap};

use twox_hash::XxHash3_128;

use super::names::{FIXED, new_directory};
use crate::store::database::{Backend, RawRecord, decode, encode};
use crate::store::disk::DiskPath;
use crate::store::overlay::Overlay;
use crate::store::record::{
    Entry, Inode, InodeId, Kind, ObjectId, ObjectRecord, RemoteCopy, RemoteIdentity, RemotePlace,
    Time,
};
use crate::store::records::Records;
use crate::store::{Store, StoreError, keys};

/// A name in a directory.
pub(super) type Place = (InodeId, Vec<u8>);

/// Records of a damaged database that can be decoded.
#[derive(Debug, Default)]
pub(super) struct Salvaged {
    pub(super) inodes: BTreeMap<InodeId, Inode>,
    pub(super) objects: BTreeMap<ObjectId, ObjectRecord>,
    pub(super) remote: BTreeMap<ObjectId, RemoteCopy>,
    /// Names of what is no directory.
    pub(super) places: HashMap<InodeId, Vec<Place>>,
    /// Extended attributes.
    pub(super) attributes: Vec<RawRecord>,
    /// What is known of the clock, the remote and its stores.
    pub(super) others: Vec<RawRecord>,
    /// The highest epoch of any number.
    pub(super) epoch: u32,
}

impl Salvaged {
    /// Reads what can be read. The database is left as it is.
    pub(super) fn read(store: &Store) -> Salvaged {
        let mut salvaged = Salvaged::default();
        match backend(store) {
            Ok(None) => {}
            Ok(Some(backend)) => {
                for (key, value) in &Records::read_damaged(backend) {
                    salvaged.add(key, value);
                }
            }
            Err(error) => log::debug!("nothing can be read of the old records: {error}"),
        }
        let inodes = salvaged.inodes.keys().map(|id| id.0);
        let objects = salvaged.objects.keys().map(|object| object.0);
        let highest = inodes.chain(objects).max().unwrap_or(0) >> 32;
        salvaged.epoch = salvaged.epoch.max(u32::try_from(highest).unwrap_or(u32::MAX));
        salvaged
    }

    fn add(&mut self, key: &[u8], value: &[u8]) {
        // A record whose key was cut off ends in zeros, and nothing has this number: no mount could show it.
        let number = keys::number(key).filter(|number| *number != 0);
        match (key.first(), number) {
            (Some(b'C'), _) => {
                let last: Option<(u32, bool)> = decode(value).ok();
                self.epoch = last.map_or(0, |(epoch, _)| epoch);
            }
            (Some(b'I'), Some(id)) => {
                self.inodes.extend(decode(value).ok().map(|it| (InodeId(id), it)));
            }
            (Some(b'O'), Some(id)) => {
                self.objects.extend(decode(value).ok().map(|it| (ObjectId(id), it)));
            }
            (Some(b'R'), Some(id)) => {
                self.remote.extend(decode(value).ok().map(|it| (ObjectId(id), it)));
            }
            (Some(b'X'), Some(_)) => self.attributes.push((key.to_vec(), value.to_vec())),
            (Some(b'E'), Some(parent)) => {
                let (parent, name) =
                    (InodeId(parent), keys::split_entry(key).map(|(_, name)| name));
                let entry = decode::<Entry>(value).ok();
                if let Some((name, entry)) = name.zip(entry)
                    && entry.inode.0 != 0
                    && keys::entry(parent, name) == key
                {
                    self.places.entry(entry.inode).or_default().push((parent, name.to_vec()));
                }
            }
            (Some(b'N'), None) => self.others.extend(new_identity(key, value)),
            (Some(b'P'), None) if decode::<RemotePlace>(value).is_ok() => self.keep(key, value),
            (Some(b'K'), None) if decode::<Time>(value).is_ok() => self.keep(key, value),
            (Some(b'V' | b'S'), Some(_)) if decode::<u64>(value).is_ok() => self.keep(key, value),
            _ => {}
        }
    }

    fn keep(&mut self, key: &[u8], value: &[u8]) {
        self.others.push((key.to_vec(), value.to_vec()));
    }

    /// The directories by the one that they say they stand in.
    pub(super) fn directories(&self) -> HashMap<InodeId, Vec<(&[u8], InodeId)>> {
        let mut found: HashMap<InodeId, Vec<(&[u8], InodeId)>> = HashMap::new();
        for (id, inode) in &self.inodes {
            if let Kind::Directory { parent, name, .. } = &inode.kind {
                found.entry(*parent).or_default().push((name, *id));
            }
        }
        found
    }

    /// A directory that every mount has, with owner, mode and times that it had.
    pub(super) fn fixed(&self, index: usize) -> (InodeId, Inode) {
        let (id, class, name) = FIXED[index];
        let expected = new_directory(class, InodeId::ROOT, name.as_bytes());
        let known = self.inodes.get(&id).filter(|inode| inode.kind == expected.kind);
        (id, known.cloned().unwrap_or(expected))
    }

    /// The files of each object.
    pub(super) fn files(&self) -> HashMap<ObjectId, Vec<InodeId>> {
        let mut files: HashMap<ObjectId, Vec<InodeId>> = HashMap::new();
        for (id, inode) in &self.inodes {
            if let Some(object) = inode.file().and_then(|file| file.object) {
                files.entry(object).or_default().push(*id);
            }
        }
        files
    }
}

fn backend(store: &Store) -> Result<Option<Backend>, StoreError> {
    if !store.has_metadata()? {
        return Ok(None);
    }
    let storage = Overlay::new(store.disk.database(&DiskPath::Metadata)?)?;
    Ok(Some(store.database(Box::new(storage))))
}

/// Names that were lost here are still in the manifest that the store published: it goes on as another store, so that
/// they stay there, with the same remote.
fn new_identity(key: &[u8], value: &[u8]) -> Option<RawRecord> {
    let old: RemoteIdentity = decode(value).ok()?;
    let name = [b"rebuilt from ".as_slice(), &old.store.to_be_bytes()].concat();
    let identity = RemoteIdentity { store: XxHash3_128::oneshot(&name), ..old };
    Some((key.to_vec(), encode(&identity)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::record::DirectoryClass;

    /// A lost sector may begin in the middle of a key: the rest of it reads as zeros.
    #[test]
    fn a_record_whose_key_or_value_was_cut_off_is_none() {
        let mut salvaged = Salvaged::default();
        let directory = new_directory(DirectoryClass::Plain, InodeId(3), b"d");
        let entry = |id| Entry { inode: InodeId(id), file_type: libc::S_IFREG };
        let whole = (keys::inode(InodeId(1 << 32)), encode(&directory));
        let cut = (keys::inode(InodeId(0)), encode(&directory));
        let name = (keys::entry(InodeId(3), b"a"), encode(&entry(7)));
        let cut_name = (keys::entry(InodeId(3), b"b"), encode(&entry(0)));
        for (key, value) in [&whole, &cut, &name, &cut_name] {
            salvaged.add(key, value);
        }
        assert_eq!(salvaged.inodes.keys().copied().collect::<Vec<_>>(), [InodeId(1 << 32)]);
        let expected = HashMap::from([(InodeId(7), vec![(InodeId(3), b"a".to_vec())])]);
        assert_eq!(salvaged.places, expected);
    }

    #[test]
    fn what_is_known_of_the_remote_is_kept_if_it_can_be_read() {
        let place = RemotePlace { place: "/remote".to_owned(), since_seconds: 5 };
        let records = [
            (b"P".to_vec(), encode(&place)),
            (b"K".to_vec(), encode(&Time::now())),
            (keys::manifest_seen(7 << 64, true), encode(&3_u64)),
        ];
        let mut salvaged = Salvaged::default();
        for (key, value) in &records {
            salvaged.add(key, &[0xff; 3]);
            salvaged.add(key, value);
        }
        assert_eq!(salvaged.others, records);
    }
}

//! A commit puts small files that are at rest into packs, instead of giving each a file of its own.

use std::collections::{HashMap, HashSet};
use std::io;

use crate::core::Core;
use crate::core::state::State;
use kvfs_page::content_checksum;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::commit::{Flushed, may_pass};
use kvfs_storage::store::database::decode;
use kvfs_storage::store::disk::{Access, read_all};
use kvfs_storage::store::keys;
use kvfs_storage::store::layer::Layer;
use kvfs_storage::store::packs::{APPENDED_BYTES_MAX, Appended, Small};
use kvfs_storage::store::record::{DirectoryClass, FileRecord, Inode, InodeId, ObjectId};

/// Files that get the bytes in a pack before others may have the state: a microsecond each.
const ADOPTED_AT_A_TIME: usize = 64;

/// What a file takes in a pack beside its bytes: two headers, its note and its part of an index.
const BYTES_BESIDE: u64 = 512;

/// A file that may be put into a pack.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: InodeId,
    object: ObjectId,
    /// Of its copy in memory, if the disk does not have that yet.
    version: Option<u64>,
    /// As the layer knows it, and then as it was read.
    length: u64,
    /// Of its bytes, once they were read.
    checksum: [u8; 16],
}

/// What a commit has put into packs.
#[derive(Debug, Default)]
pub(super) struct PutIntoPacks {
    /// With their lengths and checksums.
    pub(super) objects: HashMap<ObjectId, (u64, [u8; 16])>,
    /// Copies in memory whose bytes the disk has now.
    pub(super) flushed: Vec<Flushed>,
}

/// What puts small files into packs.
pub(super) struct Packer<'a> {
    pub(super) core: &'a Core,
}

/// Whether a file that is made in a directory will most likely be small enough for a pack: as a page of that
/// geometry, or as the file was that came to rest there last.
pub(crate) fn gets_small_files(core: &Core, directory: InodeId) -> bool {
    let bytes_max = core.store.packs.packed_bytes_max();
    if bytes_max == 0 {
        return false;
    }
    let mut state = core.state();
    match state.directory(directory) {
        Ok((_, DirectoryClass::Layer(layer))) => {
            let model = core.model_of(&mut state, directory);
            model.is_ok_and(|model| model.file_bytes_max(layer) <= bytes_max)
        }
        _ => state.nodes.get(&directory).is_some_and(|node| node.has_small_files),
    }
}

impl Packer<'_> {
    /// Puts small files of a frozen layer into packs, durably. One that somebody has open by then keeps a file of
    /// its own: the kernel reads that.
    pub(super) fn pack(&self, frozen: &Layer) -> Result<PutIntoPacks, StoreError> {
        self.core.store.packs.check()?;
        let mut put = PutIntoPacks::default();
        let candidates = self.those_with_room(self.small_files(frozen))?;
        if candidates.is_empty() {
            return Ok(put);
        }
        let mut appended = Vec::with_capacity(candidates.len());
        let written = self.append_to_packs(&candidates, &mut appended);
        let written = written.and_then(|()| Ok(self.core.store.packs.sync()?));
        if let Err(error) = written {
            let bytes: Vec<Appended> = appended.iter().map(|(_, bytes)| *bytes).collect();
            self.core.store.packs.give_up(&bytes);
            // Whatever its reason, after a failed sync nothing may count as durable.
            self.core.store.packs.check()?;
            // A file of its own may need no more room: it is on the disk already.
            let passes = matches!(&error, StoreError::Io(error) if may_pass(error));
            return if passes { Ok(put) } else { Err(error) };
        }
        for some in appended.chunks(ADOPTED_AT_A_TIME) {
            let adopted: Vec<(Candidate, Appended)> = {
                let mut state = self.core.state();
                let idle = some.iter().filter(|(file, _)| file.may_be_packed(&state));
                let idle: Vec<(Candidate, Appended)> = idle.copied().collect();
                let bytes: Vec<Appended> = idle.iter().map(|(_, bytes)| *bytes).collect();
                self.core.store.packs.adopt(&bytes);
                for (file, _) in &idle {
                    state.metadata.staged.remove(&file.object);
                }
                idle
            };
            let (bytes, left): (Vec<Appended>, Vec<Appended>) = {
                let objects: HashSet<ObjectId> =
                    adopted.iter().map(|(file, _)| file.object).collect();
                let some = some.iter().map(|(_, bytes)| *bytes);
                some.partition(|bytes| objects.contains(&bytes.object()))
            };
            self.core.store.packs.note_adopted(&bytes);
            self.core.store.packs.give_up(&left);
            for (file, _) in adopted {
                put.objects.insert(file.object, (file.length, file.checksum));
                match file.version {
                    Some(version) => put.flushed.push(Flushed { object: file.object, version }),
                    None => self.core.store.packs.remove_staged(file.object)?,
                }
            }
        }
        Ok(put)
    }

    /// Where the disk has no room for all of them beside their files, those that have none on the disk yet.
    fn those_with_room(&self, mut files: Vec<Candidate>) -> io::Result<Vec<Candidate>> {
        let bytes: u64 = files.iter().map(|file| file.length + BYTES_BESIDE).sum();
        if !files.is_empty() && self.core.store.disk.space()?.available_bytes < bytes {
            files.retain(|file| self.core.store.buffer.holds(file.object));
        }
        Ok(files)
    }

    /// The files of a frozen layer that are small enough, and were at rest when it was frozen.
    fn small_files(&self, frozen: &Layer) -> Vec<Candidate> {
        let bytes_max = self.core.store.packs.packed_bytes_max();
        if bytes_max == 0 {
            return Vec::new();
        }
        let is_small = |file: &FileRecord| {
            file.size <= bytes_max && !file.unsettled && !file.role.is_append_only()
        };
        let mut candidates = Vec::new();
        for (key, value) in frozen.range(b"I", b"I") {
            let inode = value.and_then(|value| decode::<Inode>(value).ok());
            let file = inode.as_ref().and_then(Inode::file).filter(|file| is_small(file));
            let Some(object) = file.and_then(|file| file.object) else { continue };
            let is_new = frozen.publish.contains(&object) && !self.core.store.packs.holds(object);
            if let Some(id) = keys::number(key).map(InodeId).filter(|_| is_new) {
                let length = file.map_or(0, |file| file.size);
                candidates.push(Candidate { id, object, version: None, length, checksum: [0; 16] });
            }
        }
        // Most files are left alone by the time of their commit: the rest need not be read.
        let mut idle = Vec::with_capacity(candidates.len());
        for some in candidates.chunks(ADOPTED_AT_A_TIME) {
            let state = self.core.state();
            idle.extend(some.iter().filter(|file| file.may_be_packed(&state)));
        }
        idle
    }

    /// Adds the bytes of files to packs. What has gone meanwhile is left out.
    fn append_to_packs(
        &self, candidates: &[Candidate], appended: &mut Vec<(Candidate, Appended)>,
    ) -> Result<(), StoreError> {
        let bytes_max = self.core.store.packs.packed_bytes_max();
        let (mut files, mut some, mut bytes) = (Vec::new(), Vec::new(), 0);
        for file in candidates {
            // Looked at before the bytes are: whoever changes them later makes another version.
            let version =
                self.core.store.ram.as_ref().and_then(|ram| ram.dirty_version(file.object));
            let Some(small) = self.read_small(file.object, bytes_max)? else { continue };
            bytes += small.bytes.len();
            let (length, checksum) = (small.bytes.len() as u64, content_checksum(&small.bytes).0);
            some.push(small);
            files.push(Candidate { version, length, checksum, ..*file });
            if bytes >= APPENDED_BYTES_MAX {
                appended.extend(files.drain(..).zip(self.core.store.packs.append(&some)?));
                some.clear();
                bytes = 0;
            }
        }
        appended.extend(files.into_iter().zip(self.core.store.packs.append(&some)?));
        Ok(())
    }

    fn read_small(&self, object: ObjectId, bytes_max: u64) -> io::Result<Option<Small>> {
        let file = match self.core.store.open_written(object, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let stat = file.stat()?;
        if stat.length > bytes_max || !file.is_at_rest()? {
            return Ok(None);
        }
        let bytes = read_all(file.as_ref(), bytes_max)?;
        Ok((bytes.len() as u64 == stat.length).then_some(Small {
            object,
            mtime: stat.mtime,
            bytes,
        }))
    }
}

impl Candidate {
    /// Whether nobody has a file open or changes it, no other shares its bytes, and no commit has published them.
    /// A file in `objects/` stays one: it would come back after a power cut, and count.
    fn may_be_packed(&self, state: &State) -> bool {
        let node = state.nodes.get(&self.id);
        let is_idle = node.is_none_or(|node| {
            !node.is_in_use() && node.pending.is_none() && node.replacement.is_none()
        });
        if !is_idle
            || state.unsettled.is_changing(self.object)
            || state.sealing.contains(&self.id)
            || !state.metadata.staged.contains(&self.object)
            || state.metadata.publishes(self.object)
        {
            return false;
        }
        let inode = state.metadata.inode(self.id).ok().flatten();
        let current = inode.as_ref().and_then(Inode::file).and_then(|file| file.object);
        let record = state.metadata.object(self.object).ok().flatten();
        current == Some(self.object) && record.is_some_and(|record| record.references == 1)
    }
}

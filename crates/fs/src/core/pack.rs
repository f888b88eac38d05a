//! A commit puts small files that are at rest into packs, instead of giving each a file of its own.

use std::collections::HashSet;
use std::io;

use crate::core::Core;
use crate::core::state::State;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::commit::Flushed;
use kvfs_storage::store::database::decode;
use kvfs_storage::store::disk::{Access, read_all};
use kvfs_storage::store::keys;
use kvfs_storage::store::layer::Layer;
use kvfs_storage::store::packs::{APPENDED_BYTES_MAX, Appended, Small};
use kvfs_storage::store::record::{FileRecord, Inode, InodeId, ObjectId};

/// Files that get the bytes in a pack before others may have the state: a microsecond each.
const ADOPTED_AT_A_TIME: usize = 64;

/// A file that may be put into a pack.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: InodeId,
    object: ObjectId,
    /// Of its copy in memory, if the disk does not have that yet.
    version: Option<u64>,
}

/// What a commit has put into packs.
#[derive(Debug, Default)]
pub(super) struct PutIntoPacks {
    pub(super) objects: HashSet<ObjectId>,
    /// Copies in memory whose bytes the disk has now.
    pub(super) flushed: Vec<Flushed>,
}

/// What puts small files into packs.
pub(super) struct Packer<'a> {
    pub(super) core: &'a Core,
}

impl Packer<'_> {
    /// Puts small files of a frozen layer into packs, durably. One that somebody has open by then keeps a file of
    /// its own: the kernel reads that.
    pub(super) fn pack(&self, frozen: &Layer) -> Result<PutIntoPacks, StoreError> {
        self.core.store.packs.check()?;
        let mut put = PutIntoPacks::default();
        let candidates = self.small_files(frozen);
        if candidates.is_empty() {
            return Ok(put);
        }
        let appended = self.append_to_packs(&candidates)?;
        self.core.store.packs.sync()?;
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
            let bytes: Vec<Appended> = adopted.iter().map(|(_, bytes)| *bytes).collect();
            self.core.store.packs.note_adopted(&bytes);
            for (file, _) in adopted {
                put.objects.insert(file.object);
                match file.version {
                    Some(version) => put.flushed.push(Flushed { object: file.object, version }),
                    None => self.core.store.packs.remove_staged(file.object)?,
                }
            }
        }
        Ok(put)
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
                candidates.push(Candidate { id, object, version: None });
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
        &self, candidates: &[Candidate],
    ) -> Result<Vec<(Candidate, Appended)>, StoreError> {
        let bytes_max = self.core.store.packs.packed_bytes_max();
        let mut appended = Vec::with_capacity(candidates.len());
        let (mut files, mut some, mut bytes) = (Vec::new(), Vec::new(), 0);
        for file in candidates {
            // Looked at before the bytes are: whoever changes them later makes another version.
            let version =
                self.core.store.ram.as_ref().and_then(|ram| ram.dirty_version(file.object));
            let Some(small) = self.read_small(file.object, bytes_max)? else { continue };
            bytes += small.bytes.len();
            some.push(small);
            files.push(Candidate { version, ..*file });
            if bytes >= APPENDED_BYTES_MAX {
                appended.extend(files.drain(..).zip(self.core.store.packs.append(&some)?));
                some.clear();
                bytes = 0;
            }
        }
        appended.extend(files.into_iter().zip(self.core.store.packs.append(&some)?));
        Ok(appended)
    }

    fn read_small(&self, object: ObjectId, bytes_max: u64) -> io::Result<Option<Small>> {
        let file = match self.core.store.open_object(object, Access::Read) {
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

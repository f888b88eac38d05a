//! A commit notes beside the bytes of each object what the file is ([`Description`]).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};

use crate::core::Core;
use crate::core::state::State;
use kvfs_os::side_by_side;
use kvfs_storage::store::Store;
use kvfs_storage::store::database::decode;
use kvfs_storage::store::description::Description;
use kvfs_storage::store::keys;
use kvfs_storage::store::layer::Layer;
use kvfs_storage::store::record::{self, Inode, InodeId, Kind, ObjectId, ObjectRecord};

/// A file that a commit changes, and the names that it gets.
struct Changed {
    id: InodeId,
    inode: Inode,
    names: Vec<Vec<u8>>,
}

/// Files whose notes are written at a time.
const NOTED_AT_ONCE: usize = 4;

/// Notes that are written to a pack at a time, some 200 bytes each.
const NOTED_TOGETHER: usize = 4096;

impl Core {
    /// Notes what a frozen layer changes; its bytes are durable, its records are not. Whatever
    /// cannot be noted would be without a name after a rebuild, and nothing else depends on it.
    pub(crate) fn describe(&self, layer: &Layer) {
        let mut directories = DirectoryPaths::default();
        let changed_names = changed_names(self, layer, &mut directories);
        let changed: Vec<Changed> =
            changed_files(self, layer, &mut directories).into_values().collect();
        let threads = self.store.disk.syncs_at_once().min(NOTED_AT_ONCE);
        for some in changed.chunks(NOTED_TOGETHER) {
            let packed = side_by_side(threads, some, |changed| {
                describe_one(self, layer, changed, &changed_names)
            });
            let packed: Vec<(ObjectId, Description)> = packed.into_iter().flatten().collect();
            if let Err(error) = self.store.describe_packed(&packed) {
                log::debug!("new objects in packs do not say where they belong: {error}");
            }
        }
    }
}

/// Notes what a file is, or returns what is to be noted of one that is new and in a pack.
fn describe_one(
    core: &Core, layer: &Layer, changed: &Changed, changed_names: &HashSet<Vec<u8>>,
) -> Option<(ObjectId, Description)> {
    let object = changed.inode.file().and_then(|file| file.object)?;
    // The layer first: the file may have got another object since.
    let frozen = layer.records.get(&keys::object(object)).and_then(Option::as_deref);
    let frozen = frozen.and_then(|value| decode::<ObjectRecord>(value).ok());
    let (current, before) = {
        let state = core.state();
        let before = state.metadata.committed_inode(changed.id).ok().flatten();
        (state.metadata.object(object).ok().flatten(), before)
    };
    let record = frozen.or(current)?;
    let before = before.as_ref().and_then(Inode::file).and_then(|file| file.object);
    // Many small files are told here, and what is looked at for nothing takes longer than the note.
    let is_new = before.is_none() && record.references == 1 && layer.publish.contains(&object);
    let old = if is_new { None } else { core.store.description(object) };
    let old = old.or_else(|| core.store.description(before?));
    let mut paths = old.map_or_else(Vec::new, |old| old.paths);
    paths.retain(|path| !changed_names.contains(path));
    paths.extend(changed.names.iter().cloned());
    // Which names are gone is not always told here: that of a directory that went in the same commit, or that was
    // moved since its files were noted, is no longer the one that was noted. The note keeps the last ones.
    if paths.len() > changed.inode.links as usize {
        paths.sort_by_cached_key(|path| leads_to(&core.state(), path, changed.id));
    }
    let description = Description::new(paths, changed.inode.clone(), record);
    if is_new && core.store.packs.holds(object) {
        return Some((object, description));
    }
    let describe = if is_new { Store::describe_new } else { Store::describe };
    if let Err(error) = describe(&core.store, object, &description) {
        log::debug!("object {object} does not say where it belongs: {error}");
    }
    None
}

fn changed_files(
    core: &Core, layer: &Layer, directories: &mut DirectoryPaths,
) -> BTreeMap<InodeId, Changed> {
    let mut files: BTreeMap<InodeId, Changed> = BTreeMap::new();
    for (key, value) in layer.range(b"I", b"I") {
        let inode = value.and_then(|value| decode::<Inode>(value).ok());
        let file = inode.filter(|inode| inode.file().is_some());
        if let (Some(id), Some(inode)) = (keys::number(key).map(InodeId), file) {
            files.insert(id, Changed { id, inode, names: Vec::new() });
        }
    }
    for (key, value) in layer.range(b"E", b"E") {
        let Some(entry) = value.and_then(|value| decode::<record::Entry>(value).ok()) else {
            continue;
        };
        if entry.file_type != libc::S_IFREG {
            continue;
        }
        let state = core.state();
        let known = || state.metadata.inode(entry.inode).ok().flatten();
        if let Entry::Vacant(place) = files.entry(entry.inode)
            && let Some(inode) = known()
        {
            place.insert(Changed { id: entry.inode, inode, names: Vec::new() });
        }
        if let Some(changed) = files.get_mut(&entry.inode) {
            changed.names.extend(directories.path(&state, key));
        }
    }
    files
}

/// Names that are other files' now, or nobody's, or that are told of their file anew.
fn changed_names(core: &Core, layer: &Layer, directories: &mut DirectoryPaths) -> HashSet<Vec<u8>> {
    let changed = layer.range(b"E", b"E");
    changed.filter_map(|(key, _)| directories.path(&core.state(), key)).collect()
}

/// Whether a path from the root leads to a file now.
fn leads_to(state: &State, path: &[u8], file: InodeId) -> bool {
    let mut at = InodeId::ROOT;
    for name in path.split(|byte| *byte == b'/') {
        match state.entry(at, name) {
            Ok(Some(entry)) => at = entry.inode,
            _ => return false,
        }
    }
    at == file
}

/// Longest path that is noted, as for every system call (`PATH_MAX`). Clients choose how deep directories
/// are, and each name in them would cost as much.
const PATH_BYTES_MAX: usize = 4096;
/// Bytes of paths that a commit remembers while it works.
const REMEMBERED_BYTES_MAX: usize = 16 << 20;
/// Directories on the way to the root: more than a store has, unless forged ones form a ring.
const STEPS_MAX: usize = 1 << 20;

/// The paths of directories, each found once. `None` for one that is not noted: it is too long, or has no
/// way to the root.
#[derive(Default)]
struct DirectoryPaths {
    known: HashMap<InodeId, Option<Vec<u8>>>,
    bytes: usize,
}

impl DirectoryPaths {
    /// The path of a name by its key.
    fn path(&mut self, state: &State, key: &[u8]) -> Option<Vec<u8>> {
        let (_, name) = keys::split_entry(key)?;
        joined(self.of_directory(state, InodeId(keys::number(key)?))?, name)
    }

    fn of_directory(&mut self, state: &State, directory: InodeId) -> Option<&[u8]> {
        if self.bytes > REMEMBERED_BYTES_MAX {
            *self = DirectoryPaths::default();
        }
        let mut way = Vec::new();
        let mut at = directory;
        while at != InodeId::ROOT && !self.known.contains_key(&at) && way.len() < STEPS_MAX {
            let inode = state.metadata.inode(at).ok().flatten();
            let Some(Kind::Directory { parent, name, .. }) = inode.map(|inode| inode.kind) else {
                self.known.insert(at, None);
                break;
            };
            way.push((at, name));
            at = parent;
        }
        let root = Some(Vec::new());
        let above = if at == InodeId::ROOT { root } else { self.known.get(&at).cloned().flatten() };
        let mut path = above;
        for (id, name) in way.into_iter().rev() {
            path = path.and_then(|above| joined(&above, &name));
            self.bytes += path.as_ref().map_or(0, Vec::len);
            self.known.insert(id, path.clone());
        }
        if directory == InodeId::ROOT {
            return Some(&[]);
        }
        self.known.get(&directory)?.as_deref()
    }
}

fn joined(directory: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let separator: &[u8] = if directory.is_empty() { b"" } else { b"/" };
    let path = [directory, separator, name].concat();
    (path.len() <= PATH_BYTES_MAX).then_some(path)
}

//! A commit notes beside the bytes of each object what the file is ([`Description`]).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};

use super::FileSystem;
use super::state::State;
use crate::store::database::decode;
use crate::store::description::Description;
use crate::store::keys;
use crate::store::layer::Layer;
use crate::store::record::{self, DEPTH_MAX, Inode, InodeId, Kind, ObjectRecord};

/// A file that a commit changes, and the names that it gets.
struct Changed {
    inode: Inode,
    names: Vec<Vec<u8>>,
}

impl FileSystem {
    /// Notes what a frozen layer changes; its bytes are durable, its records are not. Whatever
    /// cannot be noted would be without a name after a rebuild, and nothing else depends on it.
    pub(super) fn describe(&self, layer: &Layer) {
        let changed_names = self.changed_names(layer);
        for (id, changed) in self.changed_files(layer) {
            let Some(object) = changed.inode.file().and_then(|file| file.object) else {
                continue;
            };
            // The layer first: the file may have got another object since.
            let frozen = layer.records.get(&keys::object(object)).and_then(Option::as_deref);
            let frozen = frozen.and_then(|value| decode::<ObjectRecord>(value).ok());
            let (current, before) = {
                let state = self.state();
                let before = state.metadata.committed_inode(id).ok().flatten();
                (state.metadata.object(object).ok().flatten(), before)
            };
            let Some(record) = frozen.or(current) else {
                continue;
            };
            let before = before.as_ref().and_then(Inode::file).and_then(|file| file.object);
            let old = self.store.description(object);
            let old = old.or_else(|| self.store.description(before?));
            let mut paths = old.map_or_else(Vec::new, |old| old.paths);
            paths.retain(|path| !changed_names.contains(path));
            paths.extend(changed.names);
            let description = Description::new(paths, changed.inode, record);
            if let Err(error) = self.store.describe(object, &description) {
                log::debug!("object {object} does not say where it belongs: {error}");
            }
        }
    }

    fn changed_files(&self, layer: &Layer) -> BTreeMap<InodeId, Changed> {
        let mut files: BTreeMap<InodeId, Changed> = BTreeMap::new();
        for (key, value) in layer.range(b"I", b"I") {
            let inode = value.and_then(|value| decode::<Inode>(value).ok());
            let file = inode.filter(|inode| inode.file().is_some());
            if let (Some(id), Some(inode)) = (keys::number(key).map(InodeId), file) {
                files.insert(id, Changed { inode, names: Vec::new() });
            }
        }
        for (key, value) in layer.range(b"E", b"E") {
            let Some(entry) = value.and_then(|value| decode::<record::Entry>(value).ok()) else {
                continue;
            };
            if entry.file_type != libc::S_IFREG {
                continue;
            }
            let state = self.state();
            let known = || state.metadata.inode(entry.inode).ok().flatten();
            if let Entry::Vacant(place) = files.entry(entry.inode)
                && let Some(inode) = known()
            {
                place.insert(Changed { inode, names: Vec::new() });
            }
            if let Some(changed) = files.get_mut(&entry.inode) {
                changed.names.extend(path(&state, key));
            }
        }
        files
    }

    /// Names that are other files' now, or nobody's, or that are told of their file anew.
    fn changed_names(&self, layer: &Layer) -> HashSet<Vec<u8>> {
        layer.range(b"E", b"E").filter_map(|(key, _)| path(&self.state(), key)).collect()
    }
}

/// The path of a name by its key, as bytes.
fn path(state: &State, key: &[u8]) -> Option<Vec<u8>> {
    let mut at = InodeId(keys::number(key)?);
    let mut parts = vec![keys::split_entry(key)?.1.to_vec()];
    while at != InodeId::ROOT && parts.len() < DEPTH_MAX {
        match state.metadata.inode(at).ok()??.kind {
            Kind::Directory { parent, name, .. } => {
                parts.push(name);
                at = parent;
            }
            _ => return None,
        }
    }
    parts.reverse();
    Some(parts.join(b"/".as_slice()))
}

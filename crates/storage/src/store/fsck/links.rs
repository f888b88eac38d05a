//! Reference counts; inodes without a name.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::image::Image;
use super::names::{FILES, new_directory};
use crate::store::disk::DiskPath;
use crate::store::quarantine::Take;
use crate::store::record::{DirectoryClass, Inode, InodeId, Kind, ObjectId, ObjectRecord, Role};

/// Where bytes come to whose names are lost.
pub(super) const LOST_AND_FOUND: &[u8] = b"lost+found";

pub(super) fn check(image: &mut Image<'_>) {
    check_nameless(image);
    check_links(image);
    check_references(image);
}

/// Gives an inode a name in `files/lost+found`; returns its path.
pub(super) fn link_lost(image: &mut Image<'_>, id: InodeId) -> String {
    let directory = lost_and_found(image);
    let name = format!("#{:016x}", id.0).into_bytes();
    if let Some(mut inode) = image.inodes.get(&id).cloned() {
        match &mut inode.kind {
            Kind::Directory { parent, name: own_name, .. } => {
                (*parent, *own_name) = (directory, name.clone());
            }
            // Rows outside of their layer are an ordinary file.
            Kind::File(file) if file.role.is_append_only() => file.role = Role::Plain,
            _ => {}
        }
        image.put_inode(id, inode);
    }
    image.add_name(directory, &name, id);
    image.path(directory, &name)
}

fn lost_and_found(image: &mut Image<'_>) -> InodeId {
    let taken: BTreeMap<&[u8], InodeId> = image
        .names
        .iter()
        .filter(|name| name.kept && name.parent == FILES && name.name.starts_with(LOST_AND_FOUND))
        .map(|name| (name.name.as_slice(), name.inode))
        .collect();
    let mut name = LOST_AND_FOUND.to_vec();
    while let Some(&inode) = taken.get(name.as_slice()) {
        if image.class(inode).is_some() {
            return inode;
        }
        name.push(b'+');
    }
    let id = InodeId(image.new_number());
    image.put_inode(id, new_directory(DirectoryClass::Plain, FILES, &name));
    image.add_name(FILES, &name, id);
    id
}

/// An inode without a name keeps its bytes, if it has any.
fn check_nameless(image: &mut Image<'_>) {
    let named: HashSet<InodeId> =
        image.names.iter().filter(|name| name.kept).map(|name| name.inode).collect();
    let nameless: BTreeSet<InodeId> = image
        .inodes
        .iter()
        .filter(|(id, inode)| !inode.is_directory() && !named.contains(*id))
        .map(|(id, _)| *id)
        .collect();
    for id in nameless {
        let has_data =
            image.inodes.get(&id).and_then(Inode::file).is_some_and(|file| file.object.is_some());
        let end = if has_data {
            format!("now {}", link_lost(image, id))
        } else {
            image.remove_inode(id);
            "and no bytes, removed".to_owned()
        };
        image.find(&format!("inode {:016x}: has no name, {end}", id.0), true);
    }
}

/// Files: names. Directories: 2 and the directories in them.
fn check_links(image: &mut Image<'_>) {
    let mut names: HashMap<InodeId, u32> = HashMap::new();
    let mut subdirectories: HashMap<InodeId, u32> = HashMap::new();
    for name in image.names.iter().filter(|name| name.kept) {
        *names.entry(name.inode).or_default() += 1;
        if image.class(name.inode).is_some() {
            *subdirectories.entry(name.parent).or_default() += 1;
        }
    }
    let mut wrong = BTreeMap::new();
    for (id, inode) in &image.inodes {
        let expected = if inode.is_directory() {
            2 + subdirectories.get(id).copied().unwrap_or(0)
        } else {
            names.get(id).copied().unwrap_or(0)
        };
        if inode.links != expected {
            wrong.insert(*id, expected);
        }
    }
    let mut places: HashMap<InodeId, usize> = HashMap::new();
    for (index, name) in image.names.iter().enumerate() {
        if name.kept && wrong.contains_key(&name.inode) {
            places.insert(name.inode, index);
        }
    }
    for (id, expected) in wrong {
        let Some(inode) = image.inodes.get(&id).cloned() else {
            continue;
        };
        // A change of names above has been told already; only a wrong record is news.
        if !image.touched.contains(&id) {
            let path = places.get(&id).map(|index| image.path_of(*index));
            let path = path.unwrap_or_else(|| format!("inode {:016x}", id.0));
            let what = format!("{path}: link count {} instead of {expected}", inode.links);
            image.find(&what, true);
        }
        image.put_inode(id, Inode { links: expected, ..inode });
    }
}

/// Inodes that refer to an object.
fn check_references(image: &mut Image<'_>) {
    let mut references: HashMap<ObjectId, u32> = HashMap::new();
    for inode in image.inodes.values() {
        if let Some(object) = inode.file().and_then(|file| file.object) {
            *references.entry(object).or_default() += 1;
        }
    }
    let ids: Vec<ObjectId> = image.objects.keys().copied().collect();
    for id in ids {
        let record = image.objects[&id];
        let expected = references.get(&id).copied().unwrap_or(0);
        if expected == record.references {
            continue;
        }
        if expected == 0 {
            drop_unreferenced(image, id);
            continue;
        }
        let what = format!("object {id}: {} references instead of {expected}", record.references);
        image.find(&what, true);
        let references = expected;
        image.put_object(id, ObjectRecord { references, ..record });
    }
}

/// An object without a file. After a crash that is a file that was unlinked while it was open;
/// otherwise the file's record was lost, and its bytes are kept aside.
fn drop_unreferenced(image: &mut Image<'_>, id: ObjectId) {
    let crash = !image.was_clean && !image.has_lost_records;
    if crash {
        image.report.leftovers.unreferenced += 1;
    } else {
        let what = format!("object {id}: no file refers to it");
        let kept = image.store.disk.stat(&DiskPath::Object(id)).is_ok();
        let end = if kept { "its bytes are kept in quarantine" } else { "its record is removed" };
        if kept && let Err(hindrance) = image.set_aside(id, Take::Move, &what) {
            image.find(&format!("{what}; {hindrance}"), false);
            return;
        }
        image.find(&format!("{what}; {end}"), true);
    }
    image.remove_object(id);
}

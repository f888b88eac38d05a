//! Names lead to inodes; every directory has one name, and a way up to the root.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::image::Image;
use crate::page::classify;
use crate::store::record::{DirectoryClass, Inode, InodeId, Kind, Time};

/// The directories that every mount has: number, class, name.
pub(super) const FIXED: [(InodeId, DirectoryClass, &str); 3] = [
    (InodeId::ROOT, DirectoryClass::Root, ""),
    (InodeId(2), DirectoryClass::Models, "models"),
    (FILES, DirectoryClass::Plain, "files"),
];
/// `files/`
pub(super) const FILES: InodeId = InodeId(3);

pub(super) fn check(image: &mut Image<'_>) {
    check_fixed(image);
    check_entries(image);
    check_directory_names(image);
    connect(image);
    check_classes(image);
}

/// A directory without names in it.
pub(super) fn new_directory(class: DirectoryClass, parent: InodeId, name: &[u8]) -> Inode {
    let now = Time::now();
    Inode {
        kind: Kind::Directory { class, parent, name: name.to_vec() },
        mode: 0o755,
        uid: nix::unistd::geteuid().as_raw(),
        gid: nix::unistd::getegid().as_raw(),
        links: 2,
        atime: now,
        mtime: now,
        ctime: now,
    }
}

fn check_fixed(image: &mut Image<'_>) {
    if image.inodes.contains_key(&InodeId(0)) {
        image.find("inode 0: nothing that has this number can be shown", false);
    }
    for (id, class, name) in FIXED {
        let expected = new_directory(class, InodeId::ROOT, name.as_bytes());
        let found = image.inodes.get(&id).map(|inode| &inode.kind);
        if found != Some(&expected.kind) {
            image.find(&format!("/{name}: its directory is missing, made"), true);
            image.put_inode(id, expected);
        }
        let place = |other: &super::image::Named| {
            other.parent == InodeId::ROOT && other.name == name.as_bytes()
        };
        let index = image.names.iter().position(place);
        let right = index.is_some_and(|index| image.names[index].inode == id);
        if id != InodeId::ROOT && !right {
            image.find(&format!("/{name}: its name is missing, made"), true);
            if let Some(index) = index {
                image.remove_name(index);
            }
            image.add_name(InodeId::ROOT, name.as_bytes(), id);
        }
    }
}

fn check_entries(image: &mut Image<'_>) {
    for index in 0..image.names.len() {
        let name = &image.names[index];
        if !name.kept {
            continue;
        }
        let problem = if image.class(name.parent).is_none() {
            Some("stands in a directory that does not exist".to_owned())
        } else if !image.inodes.contains_key(&name.inode) {
            Some(format!("leads to inode {:016x}, which does not exist", name.inode.0))
        } else if name.inode == InodeId::ROOT {
            Some("leads to the root".to_owned())
        } else {
            None
        };
        if let Some(problem) = problem {
            let what = format!("{}: {problem}; the name is removed", image.path_of(index));
            image.find(&what, true);
            image.remove_name(index);
            continue;
        }
        let actual = image.inodes[&image.names[index].inode].file_type();
        if image.names[index].file_type != actual {
            let what =
                format!("{}: listed as another type of file than it is", image.path_of(index));
            image.find(&what, true);
            let (parent, inode) = (image.names[index].parent, image.names[index].inode);
            let name = std::mem::take(&mut image.names[index].name);
            image.names[index].kept = false;
            image.add_name(parent, &name, inode);
        }
    }
}

/// A directory has one name, and knows it.
fn check_directory_names(image: &mut Image<'_>) {
    let mut candidates: BTreeMap<InodeId, Vec<usize>> = BTreeMap::new();
    for (index, name) in image.names.iter().enumerate() {
        if name.kept && image.class(name.inode).is_some() {
            candidates.entry(name.inode).or_default().push(index);
        }
    }
    for (id, indexes) in candidates {
        let Some(inode) = image.inodes.get(&id).cloned() else {
            continue;
        };
        let Kind::Directory { class, parent, name } = &inode.kind else {
            continue;
        };
        let is_own = |&&index: &&usize| {
            image.names[index].parent == *parent && image.names[index].name == *name
        };
        let own = indexes.iter().find(is_own).copied();
        let chosen = own.unwrap_or(indexes[0]);
        for &index in indexes.iter().filter(|index| **index != chosen) {
            let what = format!("{}: second name of a directory, removed", image.path_of(index));
            image.find(&what, true);
            image.remove_name(index);
        }
        if own.is_none() {
            let what = format!("{}: the directory thinks to be elsewhere", image.path_of(chosen));
            image.find(&what, true);
            let kind = Kind::Directory {
                class: *class,
                parent: image.names[chosen].parent,
                name: image.names[chosen].name.clone(),
            };
            image.put_inode(id, Inode { kind, ..inode });
        }
    }
}

/// Directories in which others stand.
type Children = HashMap<InodeId, Vec<InodeId>>;

fn children(image: &Image<'_>) -> Children {
    let mut children = Children::new();
    for name in image.names.iter().filter(|name| name.kept) {
        if image.class(name.inode).is_some() {
            children.entry(name.parent).or_default().push(name.inode);
        }
    }
    children
}

/// `top` and every directory below it, parents first.
fn below(children: &Children, top: InodeId) -> Vec<InodeId> {
    let mut seen = HashSet::from([top]);
    let mut found = vec![top];
    let mut next = 0;
    while next < found.len() {
        for &child in children.get(&found[next]).into_iter().flatten() {
            if seen.insert(child) {
                found.push(child);
            }
        }
        next += 1;
    }
    found
}

/// Directories without a way up to the root: with files in them they come to `files/lost+found`,
/// otherwise they go.
fn connect(image: &mut Image<'_>) {
    let children = children(image);
    let reached: HashSet<InodeId> = below(&children, InodeId::ROOT).into_iter().collect();
    let mut lost: BTreeSet<InodeId> = image
        .inodes
        .iter()
        .filter(|(id, inode)| inode.is_directory() && !reached.contains(*id))
        .map(|(id, _)| *id)
        .collect();
    // Tops have no name; what is left after them are cycles, which are cut at any place.
    let named: HashMap<InodeId, usize> = image
        .names
        .iter()
        .enumerate()
        .filter(|(_, name)| name.kept && lost.contains(&name.inode))
        .map(|(index, name)| (name.inode, index))
        .collect();
    while let Some(first) = lost.first().copied() {
        let top = lost.iter().find(|id| !named.contains_key(*id)).copied();
        let top = top.unwrap_or(first);
        let tree = below(&children, top);
        for id in &tree {
            lost.remove(id);
        }
        if let Some(&index) = named.get(&top) {
            image.remove_name(index);
        }
        keep_or_remove(image, top, &tree);
    }
}

fn keep_or_remove(image: &mut Image<'_>, top: InodeId, tree: &[InodeId]) {
    let members: HashSet<InodeId> = tree.iter().copied().collect();
    let inside: Vec<usize> = (0..image.names.len())
        .filter(|index| image.names[*index].kept && members.contains(&image.names[*index].parent))
        .collect();
    let has_data = inside.iter().any(|index| {
        let inode = image.inodes.get(&image.names[*index].inode);
        inode.is_some_and(|inode| inode.file().is_some_and(|file| file.object.is_some()))
    });
    if has_data {
        let path = super::links::link_lost(image, top);
        let what = format!("directory {:016x}: has no name, now {path}", top.0);
        image.find(&what, true);
        return;
    }
    let what = format!("directory {:016x}: has no name and no file in it, removed", top.0);
    image.find(&what, true);
    for index in inside {
        image.remove_name(index);
    }
    for id in tree {
        image.remove_inode(*id);
    }
}

/// What a directory is for follows from its place.
fn check_classes(image: &mut Image<'_>) {
    for id in below(&children(image), InodeId::ROOT).into_iter().skip(1) {
        let Some(inode) = image.inodes.get(&id).cloned() else {
            continue;
        };
        let Kind::Directory { class, parent, name } = &inode.kind else {
            continue;
        };
        let fixed = FIXED.iter().find(|(fixed, _, _)| *fixed == id);
        let by_place = || classify::directory(image.class(*parent)?, name);
        let expected = fixed.map_or_else(by_place, |(_, class, _)| Some(*class));
        let expected = expected.unwrap_or(DirectoryClass::Plain);
        if expected == *class {
            continue;
        }
        let what = format!(
            "{}: marked as {class:?}, stands where {expected:?} belongs",
            image.path(*parent, name)
        );
        let kind = Kind::Directory { class: expected, parent: *parent, name: name.clone() };
        image.find(&what, true);
        image.put_inode(id, Inode { kind, ..inode });
    }
}

//! The tree of names that a rebuild makes.

use std::collections::{BTreeMap, HashMap};

use super::names::{FILES, FIXED, new_directory};
use super::salvage::{Place, Salvaged};
use crate::page::classify::{self, FileClass};
use crate::page::names;
use crate::store::record::{DirectoryClass, Inode, InodeId, Kind, ObjectId, Role};

/// Ends the name of a sequence of which there are two.
const REBUILT_SUFFIX: &[u8] = b".rebuilt";

/// Inodes and names that are being made.
pub(super) struct Tree {
    /// Of the numbers that are given to inodes: no mount had it.
    pub(super) epoch: u32,
    pub(super) inodes: BTreeMap<InodeId, Inode>,
    pub(super) names: HashMap<Place, InodeId>,
}

impl Tree {
    /// The directories that every mount has, and those of the old records that stand in them.
    pub(super) fn new(epoch: u32, salvaged: &Salvaged) -> Tree {
        let mut tree = Tree { epoch, inodes: BTreeMap::new(), names: HashMap::new() };
        for (index, (_, _, name)) in FIXED.iter().enumerate() {
            let (id, directory) = salvaged.fixed(index);
            tree.inodes.insert(id, directory);
            if id != InodeId::ROOT {
                tree.name(InodeId::ROOT, name.as_bytes(), id);
            }
        }
        tree.take_directories(salvaged);
        tree
    }

    /// Each is looked at once, below the one in which it says that it stands: one that is below itself never is.
    fn take_directories(&mut self, salvaged: &Salvaged) {
        let directories = salvaged.directories();
        let mut waiting: Vec<InodeId> = FIXED.iter().map(|(id, _, _)| *id).collect();
        while let Some(parent) = waiting.pop() {
            let Some(class) = self.class(parent) else { continue };
            for &(name, id) in directories.get(&parent).into_iter().flatten() {
                let place = (parent, name.to_vec());
                let is_new = !self.inodes.contains_key(&id) && !self.names.contains_key(&place);
                let class = classify::directory(class, name).filter(|_| is_new && is_name(name));
                let (Some(class), Some(old)) = (class, salvaged.inodes.get(&id)) else { continue };
                let kind = Kind::Directory { class, parent, name: name.to_vec() };
                self.inodes.insert(id, Inode { kind, ..old.clone() });
                self.names.insert(place, id);
                waiting.push(id);
            }
        }
    }

    pub(super) fn new_inode(&self) -> InodeId {
        InodeId(u64::from(self.epoch) << 32 | self.inodes.len() as u64)
    }

    /// Adds a file where it is said to stand, as far as it can; whether it can anywhere.
    pub(super) fn add(
        &mut self, id: InodeId, inode: Inode, places: &[Place], paths: &[Vec<u8>],
    ) -> bool {
        let links = inode.links;
        self.inodes.insert(id, inode);
        let mut names = 0;
        for (parent, name) in places {
            names += u32::from(self.place_in(id, *parent, name));
        }
        // Its note knows of no directory that was renamed since: it only makes up for names that are missing.
        for path in paths {
            if names == 0 || names < links {
                names += u32::from(self.place(id, path));
            }
        }
        names > 0
    }

    /// Gives a file a name, if it can stand there and nothing newer does.
    fn place(&mut self, id: InodeId, path: &[u8]) -> bool {
        let mut parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        let Some(name) = parts.pop().filter(|name| is_name(name)) else {
            return false;
        };
        let parent = self.directory(&parts, id);
        parent.is_some_and(|parent| self.place_in(id, parent, name))
    }

    /// The same of a name in a directory.
    fn place_in(&mut self, id: InodeId, parent: InodeId, name: &[u8]) -> bool {
        let class = self.class(parent).map(|class| (class, classify::file(class, name)));
        let mut plain = Role::Plain;
        let role = match self.inodes.get_mut(&id).map(|inode| &mut inode.kind) {
            Some(Kind::File(file)) => &mut file.role,
            Some(Kind::Symlink { .. } | Kind::Special { .. }) => &mut plain,
            _ => return false,
        };
        let fits = match (class, *role) {
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
                *role = Role::Tail { start, directory: parent };
                true
            }
            _ => false,
        };
        if !fits || !is_name(name) || self.names.contains_key(&(parent, name.to_vec())) {
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
    pub(super) fn lose(&mut self, id: InodeId, object: ObjectId) {
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
    /// the rest of a crash, and removed. Where another one has the name, both stay. A directory that the old records
    /// tell of has the name that it had.
    pub(super) fn name_finished_sequences(&mut self) {
        let suffix = names::WORK_SUFFIX.as_bytes();
        let sequences = DirectoryClass::Sequences;
        let is_work = |(parent, name): &(InodeId, Vec<u8>)| {
            name.ends_with(suffix) && self.class(*parent) == Some(sequences)
        };
        let is_made = |id: &InodeId| id.0 >> 32 == u64::from(self.epoch);
        let found = self.names.iter().filter(|(key, id)| is_work(key) && is_made(id));
        let mut found: Vec<_> = found.map(|(key, _)| key.clone()).collect();
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
    pub(super) fn count_links(&mut self) {
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

fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && name.len() <= 255 && name != b"." && name != b".." && !name.contains(&0)
}

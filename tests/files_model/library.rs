//! The model against [`FileSystem`] itself, in the mode in which the daemon moves the bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use kvfs::fs::{
    Caller, FileSystem, FsError, IoMode, Listing, Lookup, NewNode, NewTime, Place, SetAttributes,
};
use kvfs::observe::Observer;
use kvfs::store::Store;
use kvfs::store::disk::Allocation;
use kvfs::store::record::{InodeId, Time};

use crate::common::Model;
use crate::common::forks::no_forks;
use crate::common::random::Random;
use crate::model::{File, Id, Kind, ROOT, Seen, Tree, View, What, difference, page_path};

const FILES: InodeId = InodeId(3);
const OPERATIONS: usize = 1500;
const HANDLES_MAX: usize = 6;
const FILE_BYTES_MAX: usize = 20_000;
const NAMES: [&str; 7] = ["a", "b", "c", "d", "e", ".tmp", "f.tmp"];
const ATTRIBUTES: [&[u8]; 2] = [b"user.x", b"user.y"];

struct Handle {
    number: u64,
    node: Id,
    reads: bool,
    writes: bool,
}

struct Driver {
    directory: tempfile::TempDir,
    fs: Option<FileSystem>,
    tree: Tree,
    inodes: BTreeMap<Id, InodeId>,
    handles: Vec<Handle>,
    /// References that a kernel would hold.
    held: Vec<InodeId>,
    /// What a commit would have made durable, at each moment since the last one.
    views: Vec<View>,
    random: Random,
    model: Model,
    layer: InodeId,
}

/// Does what the choices say, until they are spent or it is enough; in a directory that is empty.
pub(crate) fn follow(choices: Random, directory: tempfile::TempDir) {
    // A program that another test starts would for a moment hold copies of this test's
    // descriptors, and the file system would take it for a writer.
    let _quiet = no_forks();
    Driver::new(choices, directory).run();
}

fn open(directory: &Path) -> FileSystem {
    let (sender, _) = crossbeam_channel::bounded(1);
    let store = Store::open_or_create(&directory.join("store")).unwrap();
    let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
    fs.io_mode(|| IoMode::Served("no kernel".to_owned()));
    fs.sweep_after_crash().unwrap();
    fs
}

fn errno<T>(outcome: Result<T, FsError>) -> Result<T, i32> {
    outcome.map_err(|error| error.errno())
}

impl Driver {
    fn new(random: Random, directory: tempfile::TempDir) -> Driver {
        let fs = open(directory.path());
        let mut driver = Driver {
            directory,
            fs: Some(fs),
            tree: Tree::new(),
            inodes: BTreeMap::from([(ROOT, FILES)]),
            handles: Vec::new(),
            held: Vec::new(),
            views: Vec::new(),
            random,
            model: Model::small(),
            layer: InodeId::ROOT,
        };
        driver.install_model();
        driver.commit();
        driver
    }

    fn fs(&self) -> &FileSystem {
        self.fs.as_ref().unwrap()
    }

    fn run(mut self) {
        for _ in 0..OPERATIONS {
            if self.random.is_spent() {
                break;
            }
            self.step();
            self.views.push(self.tree.durable());
        }
        self.remove_everything();
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..12 => self.create(),
            12..24 => self.open(),
            24..40 => self.write(),
            40..48 => self.read(),
            48..60 => self.close(),
            60..63 => self.truncate(),
            63..65 => self.allocate(),
            65..67 => self.copy(),
            67..74 => self.rename(),
            74..78 => self.link(),
            78..83 => self.unlink(),
            83..86 => self.make_directory(),
            86..88 => self.remove_directory(),
            88..89 => self.make_symlink(),
            89..92 => self.attribute(),
            92..94 => self.set_attributes(),
            94 => self.sync_file(),
            95 => self.seal(),
            96..97 => self.forget(),
            97 => self.commit(),
            98 => self.check(),
            _ if self.random.one_in(3) => self.crash(),
            _ if self.random.one_in(3) => self.close_and_open(),
            _ => self.check(),
        }
    }

    fn any_directory(&mut self) -> Id {
        let directories = self.tree.directories();
        self.random.pick(&directories).1
    }

    /// A place, and what stands there.
    fn any_place(&mut self) -> (Id, String, Option<Id>) {
        let directory = self.any_directory();
        let name = (*self.random.pick(&NAMES)).to_owned();
        let found = self.tree.names(directory).get(&name).copied();
        (directory, name, found)
    }

    fn place(&self, directory: Id, name: &str) -> Place {
        Place { parent: self.inodes[&directory], name: name.as_bytes().to_vec() }
    }

    /// A node somewhere that fits.
    fn any_node(&mut self, fits: impl Fn(&Tree, Id) -> bool) -> Option<(Id, String, Id)> {
        let mut found = Vec::new();
        for (_, directory) in self.tree.directories() {
            for (name, &id) in &self.tree.names(directory).clone() {
                if fits(&self.tree, id) {
                    found.push((directory, name.clone(), id));
                }
            }
        }
        (!found.is_empty()).then(|| self.random.pick(&found).clone())
    }

    fn caller() -> Caller {
        Caller { uid: 7, gid: 8 }
    }

    fn create(&mut self) {
        let (directory, name, found) = self.any_place();
        if self.handles.len() >= HANDLES_MAX {
            return self.close();
        }
        let writes = !self.random.one_in(8);
        let place = self.place(directory, &name);
        let outcome = errno(self.fs().create(&place, 0o640, Self::caller(), writes));
        if found.is_some() {
            assert_eq!(outcome.err(), Some(libc::EEXIST));
            return;
        }
        let created = outcome.unwrap();
        let object = self.tree.new_object(Vec::new());
        let file = File {
            object,
            replacement: None,
            fresh: true,
            readers: u32::from(!writes),
            writers: u32::from(writes),
        };
        let id = self.tree.add(Kind::File(file), 0o640, 1);
        self.tree.names(directory).insert(name, id);
        let inode = created.found.attributes.inode;
        self.inodes.insert(id, inode);
        self.held.push(inode);
        self.handles.push(Handle { number: created.opened.handle, node: id, reads: true, writes });
        if !writes {
            // The daemon's own descriptor of a new file writes: it comes to rest at close.
            self.close_at(self.handles.len() - 1);
        }
    }

    fn open(&mut self) {
        let Some((.., id)) = self.any_node(Tree::is_file) else {
            return;
        };
        if self.handles.len() >= HANDLES_MAX {
            return self.close();
        }
        let access = *self.random.pick(&[libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR]);
        let truncates = access != libc::O_RDONLY && self.random.one_in(3);
        let flags = access | if truncates { libc::O_TRUNC } else { 0 };
        let opened = self.fs().open_file(self.inodes[&id], flags).unwrap();
        if truncates {
            let object = self.tree.new_object(Vec::new());
            let file = self.tree.file(id);
            if file.readers + file.writers == 0 {
                file.replacement = Some(object);
            } else {
                self.tree.bytes(id).clear();
            }
            self.tree.node(id).mtime = None;
        }
        let writes = access != libc::O_RDONLY;
        let file = self.tree.file(id);
        if writes {
            file.writers += 1;
        } else {
            file.readers += 1;
        }
        self.handles.push(Handle {
            number: opened.handle,
            node: id,
            reads: access != libc::O_WRONLY,
            writes,
        });
    }

    fn any_handle(&mut self, fits: impl Fn(&Handle) -> bool) -> Option<(u64, Id)> {
        let fitting: Vec<_> = self.handles.iter().filter(|handle| fits(handle)).collect();
        if fitting.is_empty() {
            return None;
        }
        let handle = fitting[self.random.below(fitting.len())];
        Some((handle.number, handle.node))
    }

    fn write(&mut self) {
        let Some((handle, id)) = self.any_handle(|handle| handle.writes) else {
            return;
        };
        let offset = self.random.below(FILE_BYTES_MAX);
        let length = self.random.below(FILE_BYTES_MAX - offset) + 1;
        let bytes = self.random.bytes(length);
        self.fs().write(handle, offset as u64, &bytes, false).unwrap();
        overwrite(self.tree.bytes(id), offset, &bytes);
        self.tree.node(id).mtime = None;
    }

    fn read(&mut self) {
        let Some((handle, id)) = self.any_handle(|handle| handle.reads) else {
            return;
        };
        let offset = self.random.below(FILE_BYTES_MAX);
        let mut buffer = vec![0; self.random.below(FILE_BYTES_MAX)];
        let count = self.fs().read(handle, offset as u64, &mut buffer).unwrap();
        let bytes = self.tree.bytes(id);
        let start = offset.min(bytes.len());
        let end = bytes.len().min(start + buffer.len());
        assert!(bytes[start..end] == buffer[..count], "read at {offset}");
    }

    fn close(&mut self) {
        if self.handles.is_empty() {
            return;
        }
        let index = self.random.below(self.handles.len());
        self.close_at(index);
    }

    fn close_at(&mut self, index: usize) {
        let handle = self.handles.swap_remove(index);
        self.fs().flush(handle.number).unwrap();
        self.fs().release(handle.number).unwrap();
        let file = self.tree.file(handle.node);
        if handle.writes {
            file.writers -= 1;
        } else {
            file.readers -= 1;
        }
        let (writers, open) = (file.writers, file.readers + file.writers);
        if writers == 0 {
            self.tree.settle(handle.node);
        }
        if open == 0 && self.tree.node(handle.node).links == 0 {
            self.tree.nodes.remove(&handle.node);
        }
    }

    /// By name, or by a handle of a file that may have no name any more.
    fn truncate(&mut self) {
        let named = self.any_node(Tree::is_file).map(|(.., id)| id);
        let opened = self.any_handle(|handle| handle.writes).map(|(_, id)| id);
        let (first, second) = if self.random.one_in(2) { (named, opened) } else { (opened, named) };
        let Some(id) = first.or(second) else { return };
        let size = self.random.below(FILE_BYTES_MAX);
        let set = SetAttributes { size: Some(size as u64), ..SetAttributes::default() };
        let shown = self.fs().set_attributes(self.inodes[&id], &set).unwrap();
        assert_eq!(shown.size, size as u64);
        self.tree.bytes(id).resize(size, 0);
        self.tree.node(id).mtime = None;
        if self.tree.file(id).writers == 0 {
            self.tree.settle(id);
        }
    }

    fn allocate(&mut self) {
        let Some((handle, id)) = self.any_handle(|handle| handle.writes) else {
            return;
        };
        let offset = self.random.below(FILE_BYTES_MAX);
        let length = self.random.below(FILE_BYTES_MAX) + 1;
        let punches = self.random.one_in(2);
        let mode = if punches { libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE } else { 0 };
        let allocation = Allocation { offset: offset as u64, length: length as u64, mode };
        self.fs().allocate(handle, allocation).unwrap();
        let bytes = self.tree.bytes(id);
        let end = offset + length;
        if punches {
            let end = end.min(bytes.len());
            bytes[offset.min(end)..end].fill(0);
        } else if end > bytes.len() {
            bytes.resize(end, 0);
        }
        self.tree.node(id).mtime = None;
    }

    fn copy(&mut self) {
        let from = self.any_handle(|handle| handle.reads);
        let to = self.any_handle(|handle| handle.writes);
        let (Some((from, source)), Some((to, target))) = (from, to) else {
            return;
        };
        if source == target {
            return;
        }
        let (from_offset, to_offset) = (self.random.below(5000), self.random.below(5000));
        let length = self.random.below(5000) as u64 + 1;
        let fs = self.fs.as_ref().unwrap();
        let copied =
            fs.copy_range((from, from_offset as u64), (to, to_offset as u64), length).unwrap();
        let copied = usize::try_from(copied).unwrap();
        let bytes = self.tree.bytes(source);
        let left = bytes.len().saturating_sub(from_offset) as u64;
        assert_eq!(copied as u64, left.min(length));
        if copied > 0 {
            let bytes = bytes[from_offset..from_offset + copied].to_vec();
            overwrite(self.tree.bytes(target), to_offset, &bytes);
            self.tree.node(target).mtime = None;
        }
    }

    /// A later commit knows of it, finished or not.
    fn expose(&mut self, id: Id) {
        if self.tree.is_file(id) {
            self.tree.settle(id);
        }
    }

    fn rename(&mut self) {
        let Some((from, name, id)) = self.any_node(|_, _| true) else {
            return;
        };
        let (to, new_name, found) = self.any_place();
        if self.tree.is_directory(id) && self.is_below(to, id) {
            return; // The kernel refuses that itself.
        }
        let keeps = self.random.one_in(6);
        let flags = if keeps { libc::RENAME_NOREPLACE } else { 0 };
        let places = (self.place(from, &name), self.place(to, &new_name));
        let outcome = errno(self.fs().rename(&places.0, &places.1, flags)).map(|_| ());
        let directory = self.tree.is_directory(id);
        let expected = match found {
            None => Ok(()),
            Some(_) if keeps => Err(libc::EEXIST),
            Some(found) if found == id => Ok(()),
            Some(found) => match (directory, self.tree.is_directory(found)) {
                (true, false) => Err(libc::ENOTDIR),
                (false, true) => Err(libc::EISDIR),
                (true, true) if !self.tree.is_empty(found) => Err(libc::ENOTEMPTY),
                _ => Ok(()),
            },
        };
        assert_eq!(outcome, expected, "rename");
        if outcome.is_err() || found == Some(id) {
            return;
        }
        self.tree.names(from).remove(&name);
        if let Some(found) = found {
            self.expose(id);
            if directory {
                self.tree.nodes.remove(&found);
                self.tree.node(to).links -= 1;
            } else {
                self.tree.drop_link(found);
            }
        }
        self.tree.names(to).insert(new_name, id);
        if directory {
            self.tree.node(from).links -= 1;
            self.tree.node(to).links += 1;
        }
    }

    fn is_below(&self, mut directory: Id, top: Id) -> bool {
        loop {
            if directory == top {
                return true;
            }
            let mut parents = self.tree.nodes.iter().filter_map(|(id, node)| {
                let Kind::Directory(names) = &node.kind else {
                    return None;
                };
                names.values().any(|child| *child == directory).then_some(*id)
            });
            match parents.next() {
                Some(parent) => directory = parent,
                None => return false,
            }
        }
    }

    fn link(&mut self) {
        let Some((.., id)) = self.any_node(|tree, id| !tree.is_directory(id)) else {
            return;
        };
        let (to, name, found) = self.any_place();
        let place = self.place(to, &name);
        let outcome = errno(self.fs().link(self.inodes[&id], &place));
        if found.is_some() {
            assert_eq!(outcome.err(), Some(libc::EEXIST));
            return;
        }
        let found = outcome.unwrap();
        self.held.push(found.attributes.inode);
        assert_eq!(found.attributes.inode, self.inodes[&id]);
        self.expose(id);
        self.tree.node(id).links += 1;
        self.tree.names(to).insert(name, id);
    }

    fn unlink(&mut self) {
        let (directory, name, found) = self.any_place();
        let place = self.place(directory, &name);
        let outcome = errno(self.fs().unlink(&place));
        match found {
            None => assert_eq!(outcome, Err(libc::ENOENT)),
            Some(id) if self.tree.is_directory(id) => assert_eq!(outcome, Err(libc::EISDIR)),
            Some(id) => {
                outcome.unwrap();
                self.tree.names(directory).remove(&name);
                self.tree.drop_link(id);
            }
        }
    }

    fn make_directory(&mut self) {
        let (directory, name, found) = self.any_place();
        if self.tree.directories().len() > 6 {
            return;
        }
        let place = self.place(directory, &name);
        let fs = self.fs.as_ref().unwrap();
        let made = errno(fs.make(&place, &NewNode::Directory, 0o751, Self::caller()));
        if found.is_some() {
            assert_eq!(made.err(), Some(libc::EEXIST));
            return;
        }
        let inode = made.unwrap().attributes.inode;
        let id = self.tree.add(Kind::Directory(BTreeMap::new()), 0o751, 2);
        self.held.push(inode);
        self.inodes.insert(id, inode);
        self.tree.names(directory).insert(name, id);
        self.tree.node(directory).links += 1;
    }

    fn remove_directory(&mut self) {
        let Some((directory, name, id)) = self.any_node(Tree::is_directory) else {
            return;
        };
        let place = self.place(directory, &name);
        let outcome = errno(self.fs().remove_directory(&place));
        if !self.tree.is_empty(id) {
            assert_eq!(outcome, Err(libc::ENOTEMPTY));
            return;
        }
        outcome.unwrap();
        self.tree.names(directory).remove(&name);
        self.tree.nodes.remove(&id);
        self.tree.node(directory).links -= 1;
    }

    fn make_symlink(&mut self) {
        let (directory, name, found) = self.any_place();
        if found.is_some() {
            return;
        }
        let place = self.place(directory, &name);
        let target = format!("to {}", self.random.below(1000));
        let node = NewNode::Symlink(target.clone().into_bytes());
        let fs = self.fs.as_ref().unwrap();
        let made = fs.make(&place, &node, 0o777, Self::caller()).unwrap();
        let id = self.tree.add(Kind::Symlink(target), 0o777, 1);
        self.held.push(made.attributes.inode);
        self.inodes.insert(id, made.attributes.inode);
        self.tree.names(directory).insert(name, id);
    }

    fn attribute(&mut self) {
        let Some((.., id)) = self.any_node(|_, _| true) else {
            return;
        };
        let name: &[u8] = self.random.pick::<&[u8]>(&ATTRIBUTES);
        let inode = self.inodes[&id];
        let exists = self.tree.nodes[&id].attributes.contains_key(name);
        if self.random.one_in(3) {
            let outcome = errno(self.fs().remove_extended_attribute(inode, name));
            let expected = if exists { Ok(()) } else { Err(libc::ENODATA) };
            assert_eq!(outcome, expected);
            self.tree.node(id).attributes.remove(name);
            return;
        }
        let value = self.random.bytes(20);
        let flags = *self.random.pick(&[0, libc::XATTR_CREATE, libc::XATTR_REPLACE]);
        let fs = self.fs.as_ref().unwrap();
        let outcome = errno(fs.set_extended_attribute(inode, name, &value, flags));
        let expected = match flags {
            libc::XATTR_CREATE if exists => Err(libc::EEXIST),
            libc::XATTR_REPLACE if !exists => Err(libc::ENODATA),
            _ => Ok(()),
        };
        assert_eq!(outcome, expected);
        if outcome.is_ok() {
            self.tree.node(id).attributes.insert(name.to_vec(), value);
        }
    }

    fn set_attributes(&mut self) {
        let Some((.., id)) = self.any_node(|_, _| true) else {
            return;
        };
        let mode = u16::try_from(self.random.below(0o1000)).unwrap();
        let seconds = i64::try_from(self.random.below(4_000_000_000)).unwrap();
        let time = Time { seconds, nanoseconds: 5 };
        let set = SetAttributes {
            mode: Some(mode),
            mtime: Some(NewTime::At(time)),
            ..SetAttributes::default()
        };
        let shown = self.fs().set_attributes(self.inodes[&id], &set).unwrap();
        assert_eq!((shown.mode, shown.mtime), (mode, time));
        let is_file = self.tree.is_file(id);
        let node = self.tree.node(id);
        node.mode = mode;
        node.mtime = is_file.then_some(seconds);
    }

    fn sync_file(&mut self) {
        let Some((handle, id)) = self.any_handle(|_| true) else {
            return;
        };
        self.fs().sync_file(handle).unwrap();
        if self.tree.node(id).links > 0 {
            self.expose(id);
            self.views.clear();
        }
    }

    fn forget(&mut self) {
        for _ in 0..self.held.len() / 2 {
            let index = self.random.below(self.held.len());
            let inode = self.held.swap_remove(index);
            self.fs().forget(inode, 1);
        }
    }

    fn commit(&mut self) {
        self.fs().commit().unwrap();
        self.views = vec![self.tree.durable()];
    }

    /// The directory of a layer, and the manifest above it.
    fn install_model(&mut self) {
        let Lookup::Found(models) = self.fs().lookup(InodeId::ROOT, b"models").unwrap() else {
            panic!("no models");
        };
        let mut at = models.attributes.inode;
        let manifest = self.model.manifest.to_json();
        for (depth, name) in ["small", "sequences", "chat", "000"].iter().enumerate() {
            let place = |name: &str| Place { parent: at, name: name.as_bytes().to_vec() };
            let fs = self.fs.as_ref().unwrap();
            let directory = NewNode::Directory;
            let made = fs.make(&place(name), &directory, 0o755, Self::caller());
            at = made.unwrap().attributes.inode;
            if depth == 0 {
                let place = Place { parent: at, name: b"manifest.json".to_vec() };
                let made = fs.create(&place, 0o644, Self::caller(), true).unwrap();
                let handle = made.opened.handle;
                fs.write(handle, 0, manifest.as_ref(), false).unwrap();
                fs.release(handle).unwrap();
                fs.forget(made.found.attributes.inode, 1);
            }
            fs.forget(at, 1);
        }
        self.layer = at;
        self.fs().forget(models.attributes.inode, 1);
    }

    /// Writes a page under some name and renames it onto that of a page. A damaged one is refused
    /// and stays the ordinary file that it was.
    fn seal(&mut self) {
        let (directory, name, found) = self.any_place();
        if found.is_some() {
            return;
        }
        let start = 32 * self.random.below(2) as u64;
        let mut bytes = self.model.page(0, start, self.random.next());
        let damaged = self.random.one_in(3);
        if damaged {
            bytes[5000] ^= 1;
        }
        let from = self.place(directory, &name);
        let fs = self.fs.as_ref().unwrap();
        let created = fs.create(&from, 0o640, Self::caller(), true).unwrap();
        let (handle, inode) = (created.opened.handle, created.found.attributes.inode);
        fs.write(handle, 0, &bytes, false).unwrap();
        fs.flush(handle).unwrap();
        fs.release(handle).unwrap();
        let to = Place { parent: self.layer, name: page_name(start) };
        let outcome = errno(fs.rename(&from, &to, 0));
        fs.forget(inode, 1);
        let object = self.tree.new_object(bytes);
        if damaged {
            assert_eq!(outcome, Err(libc::EINVAL));
            let file = File { object, replacement: None, fresh: false, readers: 0, writers: 0 };
            let id = self.tree.add(Kind::File(file), 0o640, 1);
            self.tree.names(directory).insert(name, id);
            self.inodes.insert(id, inode);
            return;
        }
        outcome.unwrap();
        let page =
            Seen { what: What::Object(object), mode: 0o640, links: 1, attributes: BTreeMap::new() };
        self.tree.pages.insert(start, page);
    }

    /// Walks everything and compares it with the model, file handles included.
    fn check(&mut self) {
        let seen = self.walk();
        self.assert_expected(&seen);
    }

    #[track_caller]
    fn assert_expected(&self, seen: &View) {
        let difference = difference(seen, &self.expected());
        assert!(difference.is_empty(), "seen and expected:\n{difference}");
    }

    fn expected(&self) -> View {
        let mut tree = self.tree.clone();
        let files: Vec<Id> = tree.nodes.keys().copied().collect();
        for id in files {
            if tree.is_file(id) {
                tree.settle(id);
            }
        }
        tree.resolve(&tree.durable())
    }

    /// Everything that there is, found through lookups, listings and reads.
    fn walk(&mut self) -> View {
        let mut view = View::new();
        for start in [0, 32] {
            let found = self.fs().lookup(self.layer, &page_name(start)).unwrap();
            if let Lookup::Found(found) = found {
                view.insert(page_path(start), self.see(&found.attributes));
                self.fs().forget(found.attributes.inode, 1);
            }
        }
        let mut directories = vec![(String::new(), FILES)];
        while let Some((path, directory)) = directories.pop() {
            let mut names = BTreeSet::new();
            let (mut offset, mut more) = (0, true);
            while more {
                more = false;
                let (from, mut left) = (offset, 3);
                let list = |line: &kvfs::fs::Listed<'_>| {
                    if left == 0 {
                        more = true;
                        return false;
                    }
                    left -= 1;
                    offset = line.next_offset;
                    let name = String::from_utf8(line.name.to_vec()).unwrap();
                    assert!(names.insert(name), "a name is listed twice");
                    true
                };
                self.fs().list(directory, from, Listing::Names, list).unwrap();
            }
            assert!(names.remove(".") && names.remove(".."));
            for name in names {
                let Lookup::Found(found) = self.fs().lookup(directory, name.as_bytes()).unwrap()
                else {
                    panic!("{name} is listed but not there");
                };
                let path = format!("{path}/{name}");
                view.insert(path.clone(), self.see(&found.attributes));
                if found.attributes.file_type == libc::S_IFDIR {
                    directories.push((path, found.attributes.inode));
                }
                self.fs().forget(found.attributes.inode, 1);
            }
        }
        view
    }

    fn see(&self, shown: &kvfs::fs::Attributes) -> Seen {
        let fs = self.fs();
        let what = match shown.file_type {
            libc::S_IFDIR => What::Directory,
            libc::S_IFLNK => {
                What::Symlink(String::from_utf8(fs.read_link(shown.inode).unwrap()).unwrap())
            }
            _ => {
                let opened = fs.open_file(shown.inode, libc::O_RDONLY).unwrap();
                let mut bytes = vec![0; FILE_BYTES_MAX * 3];
                let count = fs.read(opened.handle, 0, &mut bytes).unwrap();
                bytes.truncate(count);
                fs.release(opened.handle).unwrap();
                assert_eq!(shown.size, count as u64, "size");
                What::Bytes(bytes)
            }
        };
        let names = fs.list_extended_attributes(shown.inode).unwrap();
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let attributes = names.map(|name| {
            let value = fs.extended_attribute(shown.inode, name).unwrap();
            (name.to_vec(), value)
        });
        Seen { what, mode: shown.mode, links: shown.links, attributes: attributes.collect() }
    }

    /// The daemon ends without a word; what comes back is some moment since the last commit.
    fn crash(&mut self) {
        self.fs = None;
        self.reopen();
        let seen = self.walk();
        let views: Vec<View> = self.views.iter().map(|view| self.tree.resolve(view)).collect();
        let differences = views.iter().map(|view| difference(&seen, view));
        let closest = differences.min_by_key(String::len).unwrap();
        assert!(closest.is_empty(), "seen after a crash, and closest:\n{closest}");
        self.adopt(&seen);
    }

    fn close_and_open(&mut self) {
        while !self.handles.is_empty() {
            self.close();
        }
        self.fs().commit_and_close().unwrap();
        self.fs = None;
        self.reopen();
        let seen = self.walk();
        self.assert_expected(&seen);
        self.adopt(&seen);
    }

    fn reopen(&mut self) {
        self.handles.clear();
        self.held.clear();
        self.fs = Some(open(self.directory.path()));
    }

    /// The model becomes what was seen, and the store holds just that.
    fn adopt(&mut self, seen: &View) {
        let mut tree = Tree::new();
        let mut inodes = BTreeMap::from([(ROOT, FILES)]);
        let mut by_inode: BTreeMap<InodeId, Id> = BTreeMap::new();
        let mut directories = BTreeMap::from([(String::new(), ROOT)]);
        for start in [0, 32] {
            if let Some(page) = seen.get(&page_path(start)) {
                let What::Bytes(bytes) = &page.what else {
                    panic!("a page is a file");
                };
                let what = What::Object(tree.new_object(bytes.clone()));
                let page = Seen { what, ..page.clone() };
                tree.pages.insert(start, page);
            }
        }
        for (path, seen) in seen.iter().filter(|(path, _)| path.starts_with('/')) {
            let (above, name) = path.rsplit_once('/').unwrap();
            let parent = directories[above];
            let Lookup::Found(found) = self.fs().lookup(inodes[&parent], name.as_bytes()).unwrap()
            else {
                panic!("{path}");
            };
            let inode = found.attributes.inode;
            self.fs().forget(inode, 1);
            if let Some(&id) = by_inode.get(&inode) {
                tree.names(parent).insert(name.to_owned(), id);
                continue;
            }
            let kind = match &seen.what {
                What::Directory => Kind::Directory(BTreeMap::new()),
                What::Symlink(target) => Kind::Symlink(target.clone()),
                What::Bytes(bytes) => Kind::File(File {
                    object: tree.new_object(bytes.clone()),
                    replacement: None,
                    fresh: false,
                    readers: 0,
                    writers: 0,
                }),
                What::Object(_) => unreachable!("a walk sees bytes"),
            };
            let id = tree.add(kind, seen.mode, seen.links);
            tree.node(id).attributes.clone_from(&seen.attributes);
            tree.names(parent).insert(name.to_owned(), id);
            if tree.is_directory(id) {
                if parent == ROOT {
                    tree.node(ROOT).links += 1;
                }
                directories.insert(path.clone(), id);
            }
            by_inode.insert(inode, id);
            inodes.insert(id, inode);
        }
        (self.tree, self.inodes) = (tree, inodes);
        self.views = vec![self.tree.durable()];
        self.check_store();
        let bytes: usize = self.tree.objects.values().map(Vec::len).sum();
        let manifest = self.model.manifest.to_json().len();
        assert_eq!(self.status("stored_bytes"), (bytes + manifest) as u64);
    }

    /// As many object files as files, and totals that agree.
    fn check_store(&self) {
        let files = self.tree.nodes.keys().filter(|&&id| self.tree.is_file(id));
        let files = files.count() + self.tree.pages.len() + 1;
        assert_eq!(self.count("objects"), files, "object files");
        assert_eq!(self.count("staging"), 0, "staged files");
        assert_eq!(self.status("objects"), files as u64);
    }

    fn count(&self, directory: &str) -> usize {
        let mut count = 0;
        let mut directories = vec![self.directory.path().join("store").join(directory)];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_dir() {
                    directories.push(entry.path());
                } else {
                    count += 1;
                }
            }
        }
        count
    }

    fn status(&self, key: &str) -> u64 {
        let fs = self.fs();
        let mut at = InodeId::ROOT;
        for name in [".kvfs", "status"] {
            let Lookup::Found(found) = fs.lookup(at, name.as_bytes()).unwrap() else {
                panic!("no {name}");
            };
            at = found.attributes.inode;
        }
        let opened = fs.open_file(at, libc::O_RDONLY).unwrap();
        let mut text = vec![0; 4096];
        let count = fs.read(opened.handle, 0, &mut text).unwrap();
        fs.release(opened.handle).unwrap();
        let text = String::from_utf8_lossy(&text[..count]).into_owned();
        let mut lines = text.lines().filter_map(|line| line.split_once(": "));
        let (_, value) = lines.find(|(name, _)| *name == key).unwrap();
        value.parse().unwrap()
    }

    /// With the last name and the last handle the last byte goes.
    fn remove_everything(mut self) {
        self.check();
        for (start, _) in std::mem::take(&mut self.tree.pages) {
            let page = Place { parent: self.layer, name: page_name(start) };
            self.fs().unlink(&page).unwrap();
        }
        while let Some((directory, name, id)) =
            self.any_node(|tree, id| !tree.is_directory(id) || tree.is_empty(id))
        {
            let place = self.place(directory, &name);
            self.tree.names(directory).remove(&name);
            if self.tree.is_directory(id) {
                self.fs().remove_directory(&place).unwrap();
                self.tree.nodes.remove(&id);
            } else {
                self.fs().unlink(&place).unwrap();
                self.tree.drop_link(id);
            }
        }
        while !self.handles.is_empty() {
            self.close();
        }
        while let Some(inode) = self.held.pop() {
            self.fs().forget(inode, 1);
        }
        self.fs().commit().unwrap();
        self.check_store();
        let manifest = self.model.manifest.to_json().len();
        assert_eq!(self.status("stored_bytes"), manifest as u64);
        assert_eq!(self.status("open_files"), 0);
        assert_eq!(self.status("inodes_held"), 0);
    }
}

fn page_name(start: u64) -> Vec<u8> {
    kvfs::page::names::format_page(kvfs::page::TokenStart(start)).into_bytes()
}

fn overwrite(bytes: &mut Vec<u8>, offset: usize, with: &[u8]) {
    let end = offset + with.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset..end].copy_from_slice(with);
}

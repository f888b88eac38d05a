//! What is there compared with the model, at any time, after a crash and at the end.

use super::*;
use crate::common::mount::files_below;

impl Driver {
    /// Walks everything and compares it with the model, file handles included.
    pub(super) fn check(&mut self) {
        let seen = self.walk();
        self.assert_expected(&seen);
    }

    #[track_caller]
    pub(super) fn assert_expected(&self, seen: &View) {
        let difference = difference(seen, &self.expected());
        assert!(difference.is_empty(), "seen and expected:\n{difference}");
    }

    pub(super) fn expected(&self) -> View {
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
    pub(super) fn walk(&mut self) -> View {
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

    pub(super) fn see(&self, shown: &kvfs::fs::Attributes) -> Seen {
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
        let names = fs.list_extended_attributes(shown.inode, Self::caller()).unwrap();
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let attributes = names.map(|name| {
            let value = fs.extended_attribute(shown.inode, name).unwrap();
            (name.to_vec(), value)
        });
        Seen { what, mode: shown.mode, links: shown.links, attributes: attributes.collect() }
    }

    /// The daemon ends without a word; what comes back is some moment since the last commit.
    pub(super) fn crash(&mut self) {
        self.fs = None;
        self.reopen();
        let seen = self.walk();
        let views: Vec<View> = self.views.iter().map(|view| self.tree.resolve(view)).collect();
        let differences = views.iter().map(|view| difference(&seen, view));
        let closest = differences.min_by_key(String::len).unwrap();
        assert!(closest.is_empty(), "seen after a crash, and closest:\n{closest}");
        self.adopt(&seen);
    }

    pub(super) fn close_and_open(&mut self) {
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

    pub(super) fn reopen(&mut self) {
        self.handles.clear();
        self.held.clear();
        self.fs = Some(open(self.directory.path()));
    }

    /// The model becomes what was seen, and the store holds just that.
    pub(super) fn adopt(&mut self, seen: &View) {
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
    pub(super) fn check_store(&self) {
        let files = self.tree.nodes.keys().filter(|&&id| self.tree.is_file(id));
        let files = files.count() + self.tree.pages.len() + 1;
        assert_eq!(self.count("objects"), files, "object files");
        assert_eq!(self.count("staging"), 0, "staged files");
        assert_eq!(self.status("objects"), files as u64);
    }

    pub(super) fn count(&self, directory: &str) -> usize {
        files_below(&self.directory.path().join("store").join(directory)).len()
    }

    pub(super) fn status(&self, key: &str) -> u64 {
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
    pub(super) fn remove_everything(mut self) {
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

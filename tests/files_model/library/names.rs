//! Operations on names, directories and attributes.

use super::*;

impl Driver {
    pub(super) fn rename(&mut self) {
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

    pub(super) fn is_below(&self, mut directory: Id, top: Id) -> bool {
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

    pub(super) fn link(&mut self) {
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

    pub(super) fn unlink(&mut self) {
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

    pub(super) fn make_directory(&mut self) {
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

    pub(super) fn remove_directory(&mut self) {
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

    pub(super) fn make_symlink(&mut self) {
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

    pub(super) fn attribute(&mut self) {
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

    pub(super) fn set_attributes(&mut self) {
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
}

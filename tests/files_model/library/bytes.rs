//! Operations on the bytes of files.

use super::*;

impl Driver {
    pub(super) fn create(&mut self) {
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

    pub(super) fn open(&mut self) {
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

    pub(super) fn any_handle(&mut self, fits: impl Fn(&Handle) -> bool) -> Option<(u64, Id)> {
        let fitting: Vec<_> = self.handles.iter().filter(|handle| fits(handle)).collect();
        if fitting.is_empty() {
            return None;
        }
        let handle = fitting[self.random.below(fitting.len())];
        Some((handle.number, handle.node))
    }

    pub(super) fn write(&mut self) {
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

    pub(super) fn read(&mut self) {
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

    pub(super) fn close(&mut self) {
        if self.handles.is_empty() {
            return;
        }
        let index = self.random.below(self.handles.len());
        self.close_at(index);
    }

    pub(super) fn close_at(&mut self, index: usize) {
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
        } else if handle.writes {
            self.tree.note_closed(handle.node);
        }
        if open == 0 && self.tree.node(handle.node).links == 0 {
            self.tree.nodes.remove(&handle.node);
        }
    }

    /// By name, or by a handle of a file that may have no name any more.
    pub(super) fn truncate(&mut self) {
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

    pub(super) fn allocate(&mut self) {
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

    pub(super) fn copy(&mut self) {
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
    pub(super) fn expose(&mut self, id: Id) {
        if self.tree.is_file(id) {
            self.tree.settle(id);
        }
    }

    pub(super) fn sync_file(&mut self) {
        let Some((handle, id)) = self.any_handle(|_| true) else {
            return;
        };
        self.fs().sync_file(handle).unwrap();
        if self.tree.node(id).links > 0 {
            self.expose(id);
            self.views.clear();
        }
    }
}

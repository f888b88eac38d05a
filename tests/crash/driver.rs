//! Does one step after the other to a mount, and keeps the model in step with it.

use std::sync::Arc;

use kvfs::fs::{CollectionRequest, FsError, NewNode, make_all_durable};

use crate::cut::Image;
use crate::disk::SimulatedDisk;
use crate::fault::Fault;
use crate::lie::Lie;
use crate::log::{Name, Step};
use crate::model::{Changes, History, Named, ObjectKey, Tree, What};
use crate::mounted::{Berth, Mounted, Setup};
use crate::remote::Blobs;

/// Rounds in which everything has moved that can.
const ROUNDS_MAX: usize = 200;

/// What went before a cut.
#[derive(Debug)]
pub(crate) struct Recording {
    pub(crate) base: Image,
    pub(crate) steps: Vec<Step>,
    pub(crate) history: History,
    pub(crate) setup: Setup,
}

/// A mount and its model.
#[derive(Debug)]
pub(crate) struct Driver<'a> {
    berth: &'a Berth,
    setup: Setup,
    pub(crate) disk: SimulatedDisk,
    mounted: Option<Mounted>,
    blobs: Arc<Blobs>,
    pub(crate) history: History,
    base: Image,
    /// The disk may fail, so operations may.
    may_fail: bool,
}

impl<'a> Driver<'a> {
    /// Of a store that was made and never mounted.
    pub(crate) fn new(berth: &'a Berth, setup: Setup, went_wrong: &WentWrong) -> Driver<'a> {
        let disk = SimulatedDisk::holding(&Image::default());
        kvfs::store::format::create(&disk).unwrap();
        let base = disk.image();
        let disk = SimulatedDisk::holding(&base);
        disk.set_available_bytes(setup.available_bytes);
        if let Some(lie) = went_wrong.lie {
            disk.lie(lie);
        }
        let may_fail = went_wrong.fault.is_some();
        disk.fail(went_wrong.fault.clone());
        let (history, blobs) = (History::new(), Arc::default());
        let mut driver =
            Driver { berth, setup, disk, mounted: None, blobs, history, base, may_fail };
        driver.mount();
        driver
    }

    fn mount(&mut self) {
        match Mounted::open(self.berth, &self.disk, &self.blobs, self.setup) {
            Ok(mounted) => {
                let surveyed = kvfs::fs::survey(&mounted.fs);
                assert!(surveyed.is_ok() || self.has_failed(), "survey: {surveyed:?}");
                self.mounted = Some(mounted);
            }
            Err(error) => assert!(self.has_failed(), "mounting: {error}"),
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.may_fail && self.disk.has_failed()
    }

    /// Ends without a word, as a crash does.
    pub(crate) fn into_recording(mut self) -> Recording {
        let mounted = self.mounted.take();
        let steps = self.disk.take_log();
        drop(mounted);
        Recording { base: self.base, steps, history: self.history, setup: self.setup }
    }

    /// The mount, and the disk that it is on.
    pub(crate) fn into_mounted(mut self) -> (SimulatedDisk, Mounted) {
        (self.disk.clone(), self.mounted.take().expect("it is mounted"))
    }

    pub(crate) fn has_remote(&self) -> bool {
        self.setup.has_remote
    }

    /// One step: the model is as `tree` says afterwards.
    fn step(
        &mut self, paths: &[&str], tree: Tree, act: impl FnOnce(&Mounted) -> Result<(), FsError>,
    ) {
        let before = self.history.tree().clone();
        self.history.begin(tree);
        self.history.follow_uncertain(paths, &before);
        self.disk.note(Step::Begin(self.history.newest()));
        let outcome = self.mounted.as_ref().map_or(Err(FsError::ReadOnly), act);
        if let Err(error) = outcome {
            assert!(self.has_failed(), "{paths:?}: {error}");
            self.history.is_uncertain(paths, &before);
        }
    }

    fn key(&self, path: &str) -> Option<ObjectKey> {
        match self.history.tree().get(path)?.what {
            What::File(key) => Some(key),
            _ => None,
        }
    }

    pub(crate) fn directory(&mut self, path: &str) {
        let mut tree = self.history.tree().clone();
        tree.insert(path.to_owned(), named(What::Directory, 0o755));
        self.step(&[path], tree, |mounted| mounted.make_directory(path));
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) {
        let mut tree = self.history.tree().clone();
        tree.insert(path.to_owned(), named(What::Symlink(target.to_owned()), 0o644));
        let node = NewNode::Symlink(target.as_bytes().to_vec());
        self.step(&[path], tree, |mounted| mounted.make(path, &node));
    }

    /// Makes a file, or truncates it and writes it anew.
    pub(crate) fn write(&mut self, path: &str, bytes: &[u8]) {
        let key = self.history.add_object(Changes::InPlace, bytes.to_vec());
        let mut tree = self.history.tree().clone();
        // All hard links of a file that is truncated get the new bytes.
        match self.key(path) {
            Some(old) => {
                for named in tree.values_mut().filter(|named| named.what == What::File(old)) {
                    named.what = What::File(key);
                }
            }
            None => drop(tree.insert(path.to_owned(), named(What::File(key), 0o644))),
        }
        self.step(&[path], tree, |mounted| mounted.write(path, bytes));
    }

    pub(crate) fn overwrite(&mut self, path: &str, offset: usize, bytes: &[u8]) {
        if let Some(key) = self.key(path) {
            let mut all = self.history.bytes(key).to_vec();
            all.resize(all.len().max(offset + bytes.len()), 0);
            all[offset..offset + bytes.len()].copy_from_slice(bytes);
            self.history.change_object(key, all);
        }
        let tree = self.history.tree().clone();
        self.step(&[path], tree, |mounted| mounted.overwrite(path, offset as u64, bytes));
    }

    /// Rows or token ids. `becomes` is what the append makes of a full tail: the page's path and
    /// bytes, and the path of the next tail. A recovery may make the page of rows of which a cut left
    /// less than what was written; the first bytes are what it left at least.
    pub(crate) fn append(
        &mut self, path: &str, bytes: &[u8], becomes: Option<(&str, [Vec<u8>; 2], &str)>,
    ) {
        if let Some(key) = self.key(path) {
            let all = [self.history.bytes(key).as_slice(), bytes].concat();
            self.history.change_object(key, all);
        } else {
            // A new one is there, empty, before the first append.
            let key = self.history.add_object(Changes::InPlace, Vec::new());
            let mut tree = self.history.tree().clone();
            tree.insert(path.to_owned(), named(What::File(key), 0o644));
            self.step(&[path], tree, |mounted| {
                let handle = mounted.create(path)?;
                mounted.close(handle)
            });
            self.history.change_object(key, bytes.to_vec());
        }
        let mut tree = self.history.tree().clone();
        let mut paths = vec![path];
        if let Some((page, [least, bytes], next)) = becomes {
            let key = self.history.add_object(Changes::OfRows, least);
            self.history.change_object(key, bytes);
            let rows = self.history.add_object(Changes::InPlace, Vec::new());
            tree.remove(path);
            tree.insert(page.to_owned(), named(What::File(key), 0o644));
            tree.insert(next.to_owned(), named(What::File(rows), 0o644));
            paths.extend([page, next]);
        }
        let before = self.read_now(path);
        self.step(&paths, tree, |mounted| mounted.append(path, bytes));
        let after = self.read_now(path);
        if let (Some(before), Some(after)) = (before, after) {
            let grown = after.len() - before.len();
            assert!(grown == 0 || grown == bytes.len(), "{path}: {grown} of {}", bytes.len());
        }
    }

    /// What a file holds, if it is there and can be read.
    fn read_now(&self, path: &str) -> Option<Vec<u8>> {
        self.mounted.as_ref()?.read(path).ok()
    }

    pub(crate) fn rename(&mut self, from: &str, to: &str) {
        let mut tree = self.history.tree().clone();
        let below = format!("{from}/");
        let inside: Vec<String> =
            tree.keys().filter(|path| path.starts_with(&below)).cloned().collect();
        for path in inside {
            let named = tree.remove(&path).unwrap();
            tree.insert(format!("{to}/{}", &path[below.len()..]), named);
        }
        // Two names of one file: POSIX leaves both.
        let is_same = self.names_of(from).iter().any(|name| name == to);
        if !is_same && let Some(named) = tree.remove(from) {
            tree.insert(to.to_owned(), named);
        }
        self.step(&[from, to], tree, |mounted| mounted.rename(from, to));
    }

    /// A page or manifest under a temporary name, and its rename.
    pub(crate) fn seal(&mut self, path: &str, bytes: &[u8]) {
        let (above, name) = path.rsplit_once('/').unwrap();
        let staged = format!("{above}/.{name}.tmp");
        self.write(&staged, bytes);
        self.rename(&staged, path);
        // The bytes under the new name are another object now, which never changes.
        self.is_sealed(path);
    }

    /// A page or manifest under its own name.
    pub(crate) fn seal_in_place(&mut self, path: &str, bytes: &[u8]) {
        self.write(path, bytes);
        self.is_sealed(path);
    }

    fn is_sealed(&mut self, path: &str) {
        if let Some(key) = self.key(path) {
            self.history.set_changes(key, Changes::AsAWhole);
        }
    }

    pub(crate) fn link(&mut self, from: &str, to: &str) {
        let mut tree = self.history.tree().clone();
        if let Some(named) = tree.get(from).cloned() {
            tree.insert(to.to_owned(), named);
        }
        self.step(&[from, to], tree, |mounted| mounted.link(from, to));
    }

    pub(crate) fn unlink(&mut self, path: &str) {
        let mut tree = self.history.tree().clone();
        tree.remove(path);
        self.step(&[path], tree, |mounted| mounted.unlink(path));
    }

    pub(crate) fn remove_directory(&mut self, path: &str) {
        let mut tree = self.history.tree().clone();
        tree.remove(path);
        self.step(&[path], tree, |mounted| mounted.remove_directory(path));
    }

    /// A path, and the other names of the file behind it.
    fn names_of(&self, path: &str) -> Vec<String> {
        let tree = self.history.tree();
        let file = tree.get(path).map(|named| &named.what);
        let is_name = |name: &str, what: &What<ObjectKey>| {
            name == path || matches!(what, What::File(_)) && file == Some(what)
        };
        let names = tree.iter().filter(|(name, named)| is_name(name, &named.what));
        names.map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn set_attribute(&mut self, path: &str, name: &str, value: &[u8]) {
        let mut tree = self.history.tree().clone();
        // They belong to the file: its other names show them too.
        for other in self.names_of(path) {
            let Some(entry) = tree.get_mut(&other) else { continue };
            entry.attributes.insert(name.as_bytes().to_vec(), value.to_vec());
        }
        self.step(&[path], tree, |mounted| {
            let inode = mounted.inode(path)?;
            mounted.fs.set_extended_attribute(inode, name.as_bytes(), value, 0)
        });
    }

    /// Asks for a tier: nothing that can be seen changes.
    pub(crate) fn ask_for_tier(&mut self, path: &str, tier: &str) {
        let tree = self.history.tree().clone();
        self.step(&[path], tree, |mounted| {
            let inode = mounted.inode(path)?;
            mounted.fs.set_extended_attribute(inode, b"user.kvfs.tier", tier.as_bytes(), 0)
        });
    }

    /// A file that is synced while it is open; it stays so until it is closed.
    pub(crate) fn write_and_sync(&mut self, path: &str, bytes: &[u8]) -> Option<u64> {
        let handle = match self.mounted.as_ref()?.create(path) {
            Ok(handle) => handle,
            Err(error) => {
                assert!(self.has_failed(), "{path}: {error}");
                self.history.is_uncertain(&[path], &Tree::new());
                return None;
            }
        };
        let key = self.history.add_object(Changes::InPlace, bytes.to_vec());
        let mut tree = self.history.tree().clone();
        tree.insert(path.to_owned(), named(What::File(key), 0o644));
        let mut is_durable = false;
        self.step(&[path], tree, |mounted| {
            mounted.fs.write(handle, 0, bytes, false)?;
            mounted.fs.sync_file(handle)?;
            is_durable = true;
            Ok(())
        });
        if is_durable {
            self.disk.note(Step::Acknowledge(self.history.newest()));
        }
        Some(handle)
    }

    pub(crate) fn close(&mut self, path: &str, handle: Option<u64>) {
        let tree = self.history.tree().clone();
        if let Some(handle) = handle {
            self.step(&[path], tree, |mounted| mounted.close(handle));
        }
    }

    /// Everything so far is durable, and nothing else is done.
    pub(crate) fn commit_alone(&mut self) {
        let commit = |mounted: &Mounted| make_all_durable(&mounted.fs);
        let outcome = self.mounted.as_ref().map_or(Err(FsError::ReadOnly), commit);
        match outcome {
            Ok(()) => self.disk.note(Step::Acknowledge(self.history.newest())),
            Err(error) => assert!(self.has_failed(), "commit: {error}"),
        }
    }

    /// Everything so far is durable.
    pub(crate) fn commit(&mut self) {
        self.commit_alone();
        if let Some(mounted) = &self.mounted {
            mounted.compact();
        }
    }

    /// Ends the mount in good order and begins another.
    pub(crate) fn remount(&mut self) {
        if self.unmount() {
            self.mount();
        }
    }

    /// What the remote held when the mount ended.
    pub(crate) fn blobs(&self) -> Arc<Blobs> {
        Arc::clone(&self.blobs)
    }

    /// Whether it ended in good order. If not, what was not durable is gone, and nothing goes on.
    pub(crate) fn unmount(&mut self) -> bool {
        let Some(mut mounted) = self.mounted.take() else { return false };
        let outcome = mounted.commit_and_close();
        self.blobs = mounted.blobs();
        drop(mounted);
        if let Err(error) = &outcome {
            assert!(self.has_failed(), "unmounting: {error}");
            return false;
        }
        self.disk.note(Step::Acknowledge(self.history.newest()));
        true
    }

    /// Lets objects move until the disk holds no more than it should.
    pub(crate) fn move_until_it_fits(&mut self) {
        let budget = self.setup.budget_bytes.unwrap();
        let tree = self.history.tree().clone();
        self.history.begin(tree);
        self.disk.note(Step::Begin(self.history.newest()));
        let mut rounded = Vec::new();
        for _ in 0..ROUNDS_MAX {
            if self.disk.used_bytes() <= budget {
                break;
            }
            let Some(mounted) = &mut self.mounted else { return };
            mounted.move_objects();
            self.find_rounded(&mut rounded);
            // What is not durable yet does not move, and what was removed goes with a commit.
            self.commit();
            let tree = self.history.tree().clone();
            self.history.begin(tree);
            self.disk.note(Step::Begin(self.history.newest()));
        }
        let fits = self.disk.used_bytes() <= budget;
        let names = || self.disk.image().files.into_iter().map(|(name, _)| name);
        let files = || names().filter(|name| matches!(name, Name::File(_))).collect::<Vec<_>>();
        assert!(fits || self.has_failed(), "it does not fit: {:?}", files());
        self.note_new_versions(rounded);
    }

    /// Lets objects go to the remote, until it has all of them and their names, as far as nobody asked for anything
    /// to be durable.
    pub(crate) fn move_to_remote(&mut self) {
        let tree = self.history.tree().clone();
        self.history.begin(tree);
        self.disk.note(Step::Begin(self.history.newest()));
        let mut idle_rounds = 0;
        // What is not durable before a round moves in the next.
        while idle_rounds < 2 {
            let Some(mounted) = &mut self.mounted else { return };
            idle_rounds = if mounted.move_objects() { idle_rounds + 1 } else { 0 };
            let outcome = mounted.fs.commit();
            assert!(outcome.is_ok() || self.has_failed(), "commit: {outcome:?}");
        }
    }

    /// Notes pages that became others by going cold, and since which version of the tree.
    fn find_rounded(&self, rounded: &mut Vec<(String, ObjectKey, usize)>) {
        let Some(mounted) = &self.mounted else { return };
        for (path, named) in self.history.tree() {
            let What::File(key) = named.what else { continue };
            let is_known = rounded.iter().any(|(_, known, _)| *known == key);
            if is_known || !self.history.is_as_a_whole(key) || self.history.has_changed(key) {
                continue;
            }
            let lossy = mounted
                .inode(path)
                .and_then(|inode| mounted.fs.extended_attribute(inode, b"user.kvfs.lossy"));
            if lossy.is_ok() {
                rounded.push((path.clone(), key, self.history.newest()));
            }
        }
    }

    fn note_new_versions(&mut self, rounded: Vec<(String, ObjectKey, usize)>) {
        let Some(mounted) = &self.mounted else { return };
        for (path, key, version) in rounded {
            match mounted.read(&path) {
                Ok(bytes) => self.history.became(key, bytes, version),
                Err(error) => {
                    assert!(self.may_fail && self.disk.has_failed(), "{path}: {error}");
                    self.history.set_changes(key, Changes::Unknown);
                }
            }
        }
    }

    /// Reads a file: it comes back to where it can be read.
    pub(crate) fn read(&mut self, path: &str) {
        let (Some(mounted), Some(key)) = (&self.mounted, self.key(path)) else { return };
        match mounted.read(path) {
            Ok(bytes) if bytes == *self.history.bytes(key) => {}
            outcome => assert!(self.has_failed(), "{path}: {:?}", outcome.map(|bytes| bytes.len())),
        }
    }

    pub(crate) fn collect_garbage(&mut self) {
        let Some(mounted) = &self.mounted else { return };
        mounted.fs.collection.begin().unwrap();
        let asked = CollectionRequest::of_attribute(
            kvfs::store::record::InodeId::ROOT,
            b"user.kvfs.gc",
            b"collect",
        );
        kvfs::fs::collect_garbage(&mounted.fs, &asked.unwrap().expect("this starts one"));
    }
}

/// What goes wrong while a workload runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct WentWrong {
    pub(crate) fault: Option<Fault>,
    pub(crate) lie: Option<Lie>,
}

fn named(what: What<ObjectKey>, mode: u16) -> Named<ObjectKey> {
    Named { what, mode, attributes: std::collections::BTreeMap::new() }
}

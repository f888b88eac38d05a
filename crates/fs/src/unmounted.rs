//! What unit tests share: a file system over a store of its own, without a mount, and what they make in it.

use std::sync::Arc;

use crate::lookup::Lookup;
use crate::retention::USED;
use crate::{Caller, FileSystem, Invalidation, NewNode, NewTime, Place, SetAttributes};
use crossbeam_channel::Receiver;
use kvfs_observe::Observer;
use kvfs_page::{Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page};
use kvfs_storage::store::Store;
use kvfs_storage::store::event::Event;
use kvfs_storage::store::events::EventCursor;
use kvfs_storage::store::record::{InodeId, Time};

/// `models/` and `files/`.
pub(crate) const MODELS: InodeId = InodeId(2);
pub(crate) const FILES: InodeId = InodeId(3);

/// Tokens of a page of the models that tests make.
pub(crate) const PAGE_TOKENS: u32 = 16;

/// A name.
pub(crate) fn place(parent: InodeId, name: &str) -> Place {
    Place { parent, name: name.as_bytes().to_vec() }
}

/// A time so many seconds after 1970.
pub(crate) fn at(seconds: i64) -> Time {
    Time { seconds, nanoseconds: 0 }
}

/// A file system without a mount.
pub(crate) struct Unmounted {
    pub(crate) fs: FileSystem,
    /// What the kernel would be told.
    pub(crate) told: Receiver<Invalidation>,
    directory: tempfile::TempDir,
}

impl Unmounted {
    pub(crate) fn new() -> Self {
        Self::over(tempfile::tempdir().unwrap())
    }

    /// The same store, mounted once more.
    pub(crate) fn again(self) -> Self {
        let Self { fs, directory, .. } = self;
        fs.commit_and_close().unwrap();
        drop(fs);
        Self::over(directory)
    }

    /// The same store, mounted once more after its daemon was killed.
    pub(crate) fn after_crash(self) -> Self {
        let Self { fs, directory, .. } = self;
        drop(fs);
        Self::over(directory)
    }

    fn over(directory: tempfile::TempDir) -> Self {
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        let (sender, told) = crossbeam_channel::unbounded();
        let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
        Self { fs, told, directory }
    }

    pub(crate) fn make_directory(
        &self, parent: InodeId, name: &str, (mode, uid): (u16, u32),
    ) -> InodeId {
        let caller = Caller { uid, gid: uid };
        let found = self.fs.make(&place(parent, name), &NewNode::Directory, mode, caller).unwrap();
        found.attributes.inode
    }

    /// A new file in `files/` that its writer has open, and the handle.
    pub(crate) fn open_new(&self, name: &str) -> (InodeId, u64) {
        let created = self.fs.create(&place(FILES, name), 0o644, Caller::DAEMON, true).unwrap();
        (created.found.attributes.inode, created.opened.handle)
    }

    /// The length of a file in `files/`, if it is there.
    pub(crate) fn size_of(&self, name: &str) -> Option<u64> {
        match self.fs.lookup(FILES, name.as_bytes()).unwrap() {
            Lookup::Found(found) => Some(found.attributes.size),
            Lookup::Absent { .. } => None,
        }
    }

    /// A file of this user that was written and closed.
    pub(crate) fn write_as(&self, uid: u32, parent: InodeId, name: &str, bytes: &[u8]) -> InodeId {
        let (fs, caller) = (&self.fs, Caller { uid, gid: uid });
        let created = fs.create(&place(parent, name), 0o644, caller, true).unwrap();
        fs.write(created.opened.handle, 0, bytes, false).unwrap();
        fs.flush(created.opened.handle).unwrap();
        fs.release(created.opened.handle).unwrap();
        created.found.attributes.inode
    }

    /// The same of the daemon's own user.
    pub(crate) fn write(&self, parent: InodeId, name: &str, bytes: &[u8]) -> InodeId {
        self.write_as(0, parent, name, bytes)
    }

    /// A file was made, written and read for the last time then.
    pub(crate) fn date(&self, id: InodeId, time: Time) {
        let time = Some(NewTime::At(time));
        let set = SetAttributes { mtime: time, atime: time, ..SetAttributes::default() };
        self.fs.set_attributes(id, &set).unwrap();
        let mut state = self.fs.core.state();
        let mut inode = state.inode(id).unwrap();
        inode.ctime = inode.mtime;
        state.put_inode(id, &inode);
        let life = state.metadata.life(id);
        state.metadata.remove_attribute(life, id, USED);
    }

    pub(crate) fn id_of(&self, parent: InodeId, name: &str) -> Option<InodeId> {
        let entry = self.fs.core.state().entry(parent, name.as_bytes()).unwrap();
        entry.map(|entry| entry.inode)
    }

    /// The names in a directory, in order.
    pub(crate) fn names(&self, directory: InodeId) -> Vec<String> {
        let mut names = Vec::new();
        let state = self.fs.core.state();
        let read = state.metadata.entries(directory, 0, |_, name, _| {
            names.push(String::from_utf8(name.to_vec()).unwrap());
            true
        });
        read.unwrap();
        names.sort();
        names
    }

    /// Everything that was told in `.kvfs/events`.
    pub(crate) fn events(&self) -> Vec<Event> {
        let state = self.fs.core.state();
        let events = &self.fs.core.store.events;
        events.read(&state.metadata, &mut EventCursor::default(), usize::MAX).unwrap()
    }

    /// A model with so many layers of attention.
    pub(crate) fn make_model(&self, layers: u32) -> Model<'_> {
        self.make_model_of(layers, |_| {})
    }

    /// The same of which more is said; its directory has its name.
    pub(crate) fn make_model_of(
        &self, layers: u32, change: impl FnOnce(&mut ManifestFields),
    ) -> Model<'_> {
        let mut fields = ManifestFields::new("m", Dtype::F16, layers, 1, 16);
        fields.page_tokens = PAGE_TOKENS;
        change(&mut fields);
        let manifest = Manifest::new(fields).unwrap();
        let directory = self.make_directory(MODELS, &manifest.fields().model_id, (0o755, 0));
        self.write(directory, names::MANIFEST, manifest.to_json().as_bytes());
        let sequences = self.make_directory(directory, names::SEQUENCES, (0o755, 0));
        Model { unmounted: self, manifest, directory, sequences }
    }
}

/// A model, in which sequences are made.
pub(crate) struct Model<'a> {
    unmounted: &'a Unmounted,
    pub(crate) manifest: Manifest,
    pub(crate) directory: InodeId,
    pub(crate) sequences: InodeId,
}

impl Model<'_> {
    /// A sequence of so many pages in these layers, with the tokens that they are about.
    pub(crate) fn make_sequence(&self, name: &str, layers: &[u32], pages: u32) -> InodeId {
        self.make_sequence_like(name, layers, pages, 0)
    }

    /// The same with pages that no sequence with another seed has.
    pub(crate) fn make_sequence_like(
        &self, name: &str, layers: &[u32], pages: u32, seed: u64,
    ) -> InodeId {
        let unmounted = self.unmounted;
        let sequence = unmounted.make_directory(self.sequences, name, (0o755, 0));
        let tokens: Vec<u8> = (0..pages * PAGE_TOKENS).flat_map(u32::to_le_bytes).collect();
        unmounted.write(sequence, names::TOKENS, &tokens);
        for layer in layers {
            let directory = self.make_layer(sequence, *layer);
            for page in 0..pages {
                self.write_page_like(directory, *layer, u64::from(page * PAGE_TOKENS), seed);
            }
        }
        sequence
    }

    pub(crate) fn make_layer(&self, sequence: InodeId, layer: u32) -> InodeId {
        let name = names::format_layer(Layer(layer));
        self.unmounted.make_directory(sequence, &name, (0o755, 0))
    }

    pub(crate) fn write_page(&self, directory: InodeId, layer: u32, start: u64) -> InodeId {
        self.write_page_like(directory, layer, start, 0)
    }

    fn write_page_like(&self, directory: InodeId, layer: u32, start: u64, seed: u64) -> InodeId {
        let name = names::format_page(TokenStart(start));
        self.unmounted.write(directory, &name, &self.page_like(layer, start, seed));
        self.unmounted.id_of(directory, &name).expect("the page was refused")
    }

    /// A full page, unlike all others of its sequence.
    pub(crate) fn page(&self, layer: u32, start: u64) -> Vec<u8> {
        self.page_like(layer, start, 0)
    }

    fn page_like(&self, layer: u32, start: u64, seed: u64) -> Vec<u8> {
        let stands = PagePlace::new(&self.manifest, Layer(layer), TokenStart(start)).unwrap();
        let row_bytes = usize::try_from(stands.geometry().row_bytes()).unwrap();
        let mut rows = vec![0; row_bytes * PAGE_TOKENS as usize];
        for (at, number) in [start, u64::from(layer), seed].into_iter().enumerate() {
            rows[8 * at..8 * (at + 1)].copy_from_slice(&number.to_le_bytes());
        }
        pack_page(&stands, &rows, PAGE_TOKENS).unwrap()
    }
}

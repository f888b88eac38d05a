//! The model against [`FileSystem`] itself, in the mode in which the daemon moves the bytes.

mod bytes;
mod compare;
mod late_release;
mod names;

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
    kvfs::fs::sweep_after_crash(&fs).unwrap();
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

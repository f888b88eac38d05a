//! A small store with something of everything, and somebody who touches all of it.

use std::path::Path;
use std::sync::Arc;

use kvfs::fs::{
    Caller, FileSystem, FsError, IoMode, Listing, Lookup, NewNode, Place, SetAttributes,
};
use kvfs::observe::Observer;
use kvfs::page::{PageView, names};
use kvfs::store::Store;
use kvfs::store::record::InodeId;

use crate::common::Model;

pub(crate) const MODELS: InodeId = InodeId(2);
pub(crate) const FILES: InodeId = InodeId(3);
const CALLER: Caller = Caller { uid: 7, gid: 8 };
/// Directory entries that one walk visits: forged ones may form a ring.
const VISITS_MAX: usize = 200;

pub(crate) fn open(directory: &Path) -> Result<FileSystem, String> {
    let (sender, _) = crossbeam_channel::bounded(1);
    let store = Store::open_or_create(directory).map_err(|error| error.to_string())?;
    let opened = FileSystem::open(store, Arc::new(Observer::new()), sender);
    let (fs, _) = opened.map_err(|error| error.to_string())?;
    fs.io_mode(|| IoMode::Served("no kernel".to_owned()));
    Ok(fs)
}

pub(crate) fn make_directory(fs: &FileSystem, parent: InodeId, name: &str) -> InodeId {
    let place = Place { parent, name: name.as_bytes().to_vec() };
    fs.make(&place, &NewNode::Directory, 0o755, CALLER).unwrap().attributes.inode
}

pub(crate) fn write(fs: &FileSystem, parent: InodeId, name: &str, bytes: &[u8]) -> InodeId {
    let place = Place { parent, name: name.as_bytes().to_vec() };
    let made = fs.create(&place, 0o644, CALLER, true).unwrap();
    fs.write(made.opened.handle, 0, bytes, true).unwrap();
    fs.flush(made.opened.handle).unwrap();
    fs.release(made.opened.handle).unwrap();
    made.found.attributes.inode
}

/// A model with a sequence, and the directory of its first layer.
pub(crate) fn make_sequence(fs: &FileSystem, model: &Model) -> (InodeId, InodeId) {
    let directory = make_directory(fs, MODELS, "small");
    write(fs, directory, "manifest.json", model.manifest.to_json().as_bytes());
    let sequences = make_directory(fs, directory, "sequences");
    let chat = make_directory(fs, sequences, "chat");
    (sequences, make_directory(fs, chat, "000"))
}

/// Files of every kind, committed.
pub(crate) fn populate(fs: &FileSystem) {
    let model = Model::small();
    let (_, layer) = make_sequence(fs, &model);
    for start in [0, 32] {
        let name = names::format_page(kvfs::page::TokenStart(start));
        write(fs, layer, &name, &model.page(0, start, start + 1));
    }
    write(fs, layer, "0000064.tail", &model.rows(5, 3));
    let inside = make_directory(fs, FILES, "d");
    let file = write(fs, inside, "file", b"some bytes");
    fs.link(file, &Place { parent: FILES, name: b"link".to_vec() }).unwrap();
    fs.set_extended_attribute(file, b"user.x", b"value", 0).unwrap();
    fs.set_extended_attribute(inside, b"user.kvfs.quota", b"100000", 0).unwrap();
    let symlink = Place { parent: inside, name: b"s".to_vec() };
    fs.make(&symlink, &NewNode::Symlink(b"../../..".to_vec()), 0o777, CALLER).unwrap();
    fs.commit().unwrap();
}

/// Looks up, lists, opens and reads everything, then changes some of it; returns how much there was.
/// A page that can be read is one.
pub(crate) fn touch_everything(fs: &FileSystem) -> usize {
    let mut directories = vec![InodeId::ROOT];
    let mut visits = 0;
    while let Some(directory) = directories.pop() {
        let mut found = Vec::new();
        let _ = fs.list(directory, 0, Listing::Attributes, |line| {
            found.push(line.name.to_vec());
            found.len() < VISITS_MAX
        });
        for name in found.iter().filter(|name| ![b".".as_slice(), b".."].contains(&name.as_slice()))
        {
            visits += 1;
            if visits > VISITS_MAX {
                return visits;
            }
            if let Ok(Lookup::Found(found)) = fs.lookup(directory, name) {
                let shown = found.attributes;
                match shown.file_type {
                    libc::S_IFDIR => directories.push(shown.inode),
                    libc::S_IFLNK => drop(fs.read_link(shown.inode)),
                    _ => read(fs, shown.inode, name),
                }
                touch_attributes(fs, shown.inode);
                fs.forget(shown.inode, 1);
            }
        }
        change(fs, directory, &found);
    }
    visits
}

fn read(fs: &FileSystem, inode: InodeId, name: &[u8]) {
    for flags in [libc::O_RDONLY, libc::O_RDWR] {
        let Ok(opened) = fs.open_file(inode, flags) else { continue };
        let mut bytes = vec![0; 64 << 10];
        let count = fs.read(opened.handle, 0, &mut bytes);
        if flags == libc::O_RDWR {
            let _ = fs.write(opened.handle, 5, b"changed", false);
            let _ = fs.sync_file(opened.handle);
        } else if let (Ok(count), Some(_)) = (count, names::parse_page(name)) {
            // Its header may say what it likes, within bounds.
            let _ = PageView::parse(&bytes[..count], Model::small().manifest.geometry());
        }
        let _ = fs.flush(opened.handle);
        let _ = fs.release(opened.handle);
    }
}

fn touch_attributes(fs: &FileSystem, inode: InodeId) {
    let _ = fs.attributes(inode);
    let names = fs.list_extended_attributes(inode, CALLER).unwrap_or_default();
    let kvfs: [&[u8]; 4] =
        [b"user.kvfs.tier", b"user.kvfs.checksum", b"user.kvfs.stored_bytes", b"user.kvfs.quota"];
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()).chain(kvfs) {
        let _ = fs.extended_attribute(inode, name);
    }
    let _ = fs.set_extended_attribute(inode, b"user.y", b"new", 0);
    let set = SetAttributes { mode: Some(0o600), size: Some(9), ..SetAttributes::default() };
    let _ = fs.set_attributes(inode, &set);
}

/// Makes, renames and removes names in a directory.
fn change(fs: &FileSystem, parent: InodeId, names: &[Vec<u8>]) {
    let place = |name: &[u8]| Place { parent, name: name.to_vec() };
    if let Ok(made) = fs.create(&place(b"new"), 0o644, CALLER, true) {
        let _ = fs.write(made.opened.handle, 0, b"new bytes", false);
        let _ = fs.flush(made.opened.handle);
        let _ = fs.release(made.opened.handle);
        fs.forget(made.found.attributes.inode, 1);
    }
    let Some(first) = names.get(2) else { return };
    let _ = fs.rename(&place(first), &place(b"renamed"), 0);
    let _ = fs.unlink(&place(b"renamed"));
    let _ = fs.remove_directory(&place(b"renamed"));
}

/// A commit may fail where the store is damaged, but then says so.
pub(crate) fn settle(fs: &FileSystem) -> Result<(), FsError> {
    fs.indexer().update()?;
    fs.commit_and_close()
}

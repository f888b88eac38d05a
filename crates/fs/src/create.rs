//! Making files, directories, links and special files.

use std::sync::Arc;

use super::attributes::{Attributes, Caller, Found, Place};
use super::classify::{self, FileClass};
use super::opened::{Caching, Opened, OpenedBy};
use super::{FileSystem, FsError, check_new, descriptors};
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::core::pack::gets_small_files;
use crate::core::settle::awaits_rename;
use crate::core::spare::{NewFile, discard};
use crate::core::state::State;
use kvfs_storage::store::disk::{Access, DiskFile};
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{
    DirectoryClass, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind, Role, Time,
};

/// What is made besides directories and open files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewNode {
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(Vec<u8>),
    /// An empty regular file, a FIFO, a socket or a device node.
    Special {
        /// `S_IFMT` bits.
        file_type: u32,
        /// Device number.
        device: u32,
    },
}

/// A file made and opened.
#[derive(Debug)]
pub struct Created {
    /// The name and inode.
    pub found: Found,
    /// The handle.
    pub opened: Opened,
}

impl FileSystem {
    /// Makes a directory, symbolic link or special file.
    pub fn make(
        &self, place: &Place, node: &NewNode, mode: u16, caller: Caller,
    ) -> Result<Found, FsError> {
        check_new(place)?;
        if let NewNode::Special { file_type: libc::S_IFREG, .. } = node {
            let created = self.create(place, mode, caller, false)?;
            self.release(created.opened.handle)?;
            return Ok(created.found);
        }
        self.pacing().throttle()?;
        let mut state = self.core.state_to_change()?;
        let (parent, class) = state.directory(place.parent)?;
        if state.entry(place.parent, &place.name)?.is_some() {
            return Err(FsError::Exists);
        }
        let kind = new_kind(node, class, place)?;
        let is_directory = *node == NewNode::Directory;
        let mut inode = new_inode(&parent, kind, mode, caller);
        if is_directory {
            inode.links = 2;
            inode.mode |= parent.mode & 0o2000;
        }
        let id = state.metadata.new_inode();
        state.metadata.put_inode(Life::Durable, id, &inode);
        let entry = Entry { inode: id, file_type: inode.file_type() };
        state.metadata.put_entry(Life::Durable, place.parent, &place.name, entry);
        state.touch_directory(place.parent, i32::from(is_directory))?;
        state.nodes.entry(id).or_default().lookups += 1;
        let attributes = Attributes::of_record(id, &inode);
        let name_is_stable = super::lookup::name_is_stable(class, &attributes, &place.name);
        Ok(Found { attributes, name_is_stable })
    }

    /// Makes a file and opens it for writing. With `writes` false the handle is only a reader.
    pub fn create(
        &self, place: &Place, mode: u16, caller: Caller, writes: bool,
    ) -> Result<Created, FsError> {
        create_as(self, place, mode, caller, (writes, false))
    }

    /// The same for a writer whose writes are synced: not in memory, and its name is durable soon.
    pub fn create_synchronous(
        &self, place: &Place, mode: u16, caller: Caller,
    ) -> Result<Created, FsError> {
        create_as(self, place, mode, caller, (true, true))
    }
}

fn create_as(
    fs: &FileSystem, place: &Place, mode: u16, caller: Caller,
    (writes, is_synchronous): (bool, bool),
) -> Result<Created, FsError> {
    if let Some(created) = fs.virtual_directories().create_block(place, caller, writes)? {
        return Ok(created);
    }
    if let Some(created) = fs.virtual_directories().create_slot(place, mode, caller, writes)? {
        return Ok(created);
    }
    check_new(place)?;
    if !fs.core.is_passthrough() {
        descriptors::check(&fs.core)?;
    }
    fs.pacing().throttle()?;
    fs.publishing().publish_before(place)?;
    let (id, mut inode, class) = reserve(&fs.core, place, mode, caller)?;
    let append = inode.file().is_some_and(|file| file.role.is_append_only());
    if append && fs.core.is_passthrough() {
        descriptors::check(&fs.core)?;
    }
    let access = if append { Access::ReadWrite } else { fs.core.writer_access() };
    let in_memory = !is_synchronous && !append;
    let directory = in_memory.then_some(place.parent);
    let NewFile { object, file, made, made_ahead } = new_file(&fs.core, directory, access, append)?;
    // The times that whoever asks later is told, too.
    (inode.mtime, inode.ctime) = (made, inode.ctime.max(made));
    if let Some(file) = inode.file_mut() {
        file.object = Some(object);
    }
    let mut state = fs.core.state_to_change()?;
    // While the file was made, a limit or a slot may have taken the directory.
    if let Err(error) = check_free(&state, place) {
        drop((state, file));
        discard(&fs.core, object);
        return Err(error);
    }
    add_file(&mut state, place, id, &inode, class)?;
    if append {
        state.publish(object, ObjectKind::Rows, 0)?;
    } else {
        state.unsettled.insert(id, object);
        state.unsettled.note_made(object, made, made_ahead);
    }
    let (served, by) = if append {
        (Served::Append(file), OpenedBy::Daemon)
    } else if fs.core.is_passthrough() && file.descriptor().is_some() {
        (Served::Passthrough, OpenedBy::Kernel { file })
    } else {
        (Served::File(file), OpenedBy::Daemon)
    };
    // A rename proves that such a file is at rest by its release; the round trip is saved.
    let closes_quietly =
        !is_synchronous && matches!(served, Served::Passthrough) && awaits_rename(&state, id);
    // Who has it open when a daemon dies is to hear of that.
    let closes_quietly = closes_quietly && !fs.core.before.is_kept();
    let handle = state.add_handle(Handle::new(id, writes, served));
    let node = state.nodes.entry(id).or_default();
    node.lookups += 1;
    node.found_in = Some(place.parent);
    let attributes = Attributes { is_at_rest: false, ..Attributes::of_record(id, &inode) };
    let stable = class == FileClass::Plain
        && super::lookup::name_is_stable(state.directory(place.parent)?.1, &attributes, b"");
    Ok(Created {
        found: Found { attributes, name_is_stable: stable },
        opened: Opened {
            handle,
            by,
            is_sealed: false,
            caching: if append { Caching::Never } else { Caching::Kept },
            closes_quietly,
        },
    })
}

/// The file of a new object: in memory if it may be there first, in a directory that tells how large it most
/// likely becomes, and there is room; else on the disk. Rows are appended to a file that has its date from the
/// disk from the beginning.
fn new_file(
    core: &Core, directory: Option<InodeId>, access: Access, append: bool,
) -> std::io::Result<NewFile> {
    if let Some(directory) = directory {
        let object = core.state().metadata.new_object();
        if let Some(file) = new_file_in_memory(core, directory, object, access)? {
            let made = file.stat()?.mtime;
            return Ok(NewFile { object, file: Arc::from(file), made, made_ahead: None });
        }
        core.state().metadata.staged.remove(&object);
    }
    if !append && let Some(spare) = core.spares.take(access) {
        return Ok(spare);
    }
    let object = core.state().metadata.new_object();
    core.make_file(object, access).inspect_err(|_| {
        core.state().metadata.staged.remove(&object);
    })
}

fn new_file_in_memory(
    core: &Core, directory: InodeId, object: ObjectId, access: Access,
) -> std::io::Result<Option<Box<dyn DiskFile>>> {
    let store = &core.store;
    if let Some(bytes) = page_bytes(core, directory)
        && let Some(file) = store.create_in_ram(object, bytes, access)?
    {
        return Ok(Some(file));
    }
    // One on the disk is the kernel's, where that serves files.
    if !gets_small_files(core, directory) || !descriptors::leaves_some(core)? {
        return Ok(None);
    }
    // The daemon serves it: the descriptor is that of its writer.
    store.create_small(object, Access::ReadWrite)
}

/// Length of a full page of a layer's directory, or of its states, if they are written to memory first.
fn page_bytes(core: &Core, directory: InodeId) -> Option<u64> {
    core.store.ram.as_ref()?;
    let mut state = core.state();
    let DirectoryClass::Layer(layer) = state.directory(directory).ok()?.1 else {
        return None;
    };
    let model = core.model_of(&mut state, directory).ok()?;
    Some(model.file_bytes_max(layer))
}

/// Number and record of a file to be made, still without an object.
fn reserve(
    core: &Core, place: &Place, mode: u16, caller: Caller,
) -> Result<(InodeId, Inode, FileClass), FsError> {
    let mut state = core.state_to_change()?;
    check_free(&state, place)?;
    let (parent, parent_class) = state.directory(place.parent)?;
    let class = core.class_in(&mut state, parent_class, place);
    let role = match class {
        FileClass::Reserved => return Err(FsError::NotPermitted),
        FileClass::Plain | FileClass::Page(_) | FileClass::State(_) | FileClass::Manifest => {
            Role::Plain
        }
        FileClass::Tail(start) => {
            core.check_tail(&mut state, place, start)?;
            Role::Tail { start, directory: place.parent }
        }
        FileClass::Tokens => Role::Tokens,
    };
    let record =
        FileRecord { role, object: None, size: 0, blocks: 0, unsettled: role.is_append_only() };
    let inode = new_inode(&parent, Kind::File(record), mode, caller);
    Ok((state.metadata.new_inode(), inode, class))
}

/// Whether a directory is there, and has no such name.
fn check_free(state: &State, place: &Place) -> Result<(), FsError> {
    state.directory(place.parent)?;
    match state.entry(place.parent, &place.name)? {
        Some(_) => Err(FsError::Exists),
        None => Ok(()),
    }
}

/// Gives a new file its name, or, for a page, the promise of one.
fn add_file(
    state: &mut State, place: &Place, id: InodeId, inode: &Inode, class: FileClass,
) -> Result<(), FsError> {
    if class.is_sealed() {
        state.metadata.put_inode(Life::Volatile, id, inode);
        state.nodes.entry(id).or_default().pending = Some(Box::new(place.clone()));
        state.pending.entry(place.clone()).or_default().push(id);
        state.metadata.touched.note_at_risk(place.parent);
        return Ok(());
    }
    let append = inode.file().is_some_and(|file| file.role.is_append_only());
    let life = if append { Life::Durable } else { Life::Volatile };
    state.metadata.put_inode(life, id, inode);
    let entry = Entry { inode: id, file_type: libc::S_IFREG };
    state.metadata.put_entry(life, place.parent, &place.name, entry);
    if !append {
        state.fresh.insert(id, place.clone());
    }
    state.touch_directory(place.parent, 0)
}

fn new_kind(node: &NewNode, parent: DirectoryClass, place: &Place) -> Result<Kind, FsError> {
    if *node == NewNode::Directory {
        let class = classify::directory(parent, &place.name).ok_or(FsError::NotPermitted)?;
        return Ok(Kind::Directory { class, parent: place.parent, name: place.name.clone() });
    }
    if classify::file(parent, &place.name) != FileClass::Plain
        || classify::is_regular_only(parent, &place.name)
    {
        return Err(FsError::NotPermitted);
    }
    Ok(match node {
        NewNode::Symlink(target) => Kind::Symlink { target: target.clone() },
        NewNode::Special { file_type, device } => {
            Kind::Special { file_type: *file_type, device: *device }
        }
        NewNode::Directory => return Err(FsError::Invalid),
    })
}

/// An inode of the caller; in a directory with the set-group-ID bit, of the directory's group.
pub(super) fn new_inode(parent: &Inode, kind: Kind, mode: u16, caller: Caller) -> Inode {
    let now = Time::now();
    let gid = if parent.mode & 0o2000 == 0 { caller.gid } else { parent.gid };
    Inode {
        kind,
        mode: mode & 0o7777,
        uid: caller.uid,
        gid,
        links: 1,
        atime: now,
        mtime: now,
        ctime: now,
    }
}

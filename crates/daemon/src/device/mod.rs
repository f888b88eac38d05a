//! Requests that come through `/dev/fuse`: fuser reads, decodes and answers them.

mod replies;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::answer::Reply;
use super::convert::{inode, new_time, permissions};
use super::dispatch::Operations;
use super::operations::CopyRange;
use super::ring::Running;
use kvfs_fs::{Caller, Listing, NewNode, Place, SetAttributes};
use kvfs_storage::store::disk::Allocation;

/// Largest request without passthrough: beyond 1 MiB copying costs more than round trips.
pub(super) const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Requests that the kernel may have under way in the background (readahead, releases).
const BACKGROUND_MAX: u16 = 64;

/// What fuser calls.
pub(super) struct Callbacks {
    operations: Arc<Operations>,
    /// Rings, if they are wanted: they end with this.
    rings: Option<Running>,
    /// Whether the kernel will wait for rings.
    agreed: Arc<AtomicBool>,
}

impl Callbacks {
    pub(super) fn new(
        operations: Arc<Operations>, rings: Option<Running>, agreed: Arc<AtomicBool>,
    ) -> Callbacks {
        Callbacks { operations, rings, agreed }
    }
}

impl std::ops::Deref for Callbacks {
    type Target = Operations;

    fn deref(&self) -> &Operations {
        &self.operations
    }
}

#[allow(clippy::too_many_arguments, reason = "the signatures are fuser's")]
impl Filesystem for Callbacks {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let wanted = InitFlags::FUSE_PASSTHROUGH
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_ATOMIC_O_TRUNC
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_AUTO_INVAL_DATA
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT
            | InitFlags::FUSE_ASYNC_DIO;
        let offered = config.capabilities();
        // What the kernel does not offer only costs speed.
        let _ = config.add_capabilities(wanted & offered);
        let rings = InitFlags::FUSE_OVER_IO_URING;
        if self.rings.is_some() && offered.contains(rings) {
            self.agreed.store(config.add_capabilities(rings).is_ok(), Ordering::Relaxed);
        }
        let depth = self.fs.store().disk.stack_depth()? + 1;
        let _ = config.set_max_stack_depth(depth);
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _awake = self.linger.after_reply(request.pid());
        self.operations.lookup(place(parent, name), caller(request), reply);
    }

    fn forget(&self, _request: &Request, number: INodeNo, count: u64) {
        self.operations.forget(inode(number), count);
    }

    fn getattr(
        &self, request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        reply.send(self.attributes(inode(number)));
    }

    fn setattr(
        &self, _request: &Request, number: INodeNo, mode: Option<u32>, uid: Option<u32>,
        gid: Option<u32>, size: Option<u64>, atime: Option<TimeOrNow>, mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>, _handle: Option<FileHandle>, _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>, _bkuptime: Option<SystemTime>, _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = SetAttributes {
            mode: mode.map(permissions),
            uid,
            gid,
            size,
            atime: atime.map(new_time),
            mtime: mtime.map(new_time),
        };
        self.set_attributes(inode(number), set, reply);
    }

    fn readlink(&self, _request: &Request, number: INodeNo, reply: ReplyData) {
        reply.send(self.read_link(inode(number)));
    }

    fn mknod(
        &self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32,
        device: u32, reply: ReplyEntry,
    ) {
        let node = NewNode::Special { file_type: mode & libc::S_IFMT, device };
        let place = place(parent, name);
        self.make(place, node, permissions(mode), caller(request), reply);
    }

    fn mkdir(
        &self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32,
        reply: ReplyEntry,
    ) {
        let (place, node) = (place(parent, name), NewNode::Directory);
        self.make(place, node, permissions(mode), caller(request), reply);
    }

    fn symlink(
        &self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry,
    ) {
        let node = NewNode::Symlink(target.as_os_str().as_bytes().to_vec());
        self.make(place(parent, name), node, 0o777, caller(request), reply);
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.operations.unlink(place(parent, name), reply);
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.remove_directory(place(parent, name), reply);
    }

    fn rename(
        &self, request: &Request, parent: INodeNo, name: &OsStr, new_parent: INodeNo,
        new_name: &OsStr, flags: RenameFlags, reply: ReplyEmpty,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        let (from, to) = (place(parent, name), place(new_parent, new_name));
        self.operations.rename(from, to, flags.bits(), reply);
    }

    fn link(
        &self, _request: &Request, number: INodeNo, parent: INodeNo, name: &OsStr,
        reply: ReplyEntry,
    ) {
        self.operations.link(inode(number), place(parent, name), reply);
    }

    fn create(
        &self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32,
        flags: i32, reply: ReplyCreate,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        let place = place(parent, name);
        self.operations.create(place, permissions(mode), caller(request), flags, reply);
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _awake = self.linger.after_reply(request.pid());
        self.operations.open(inode(number), flags.0, caller(request), reply);
    }

    fn read(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: u64, size: u32,
        _flags: OpenFlags, _lock_owner: Option<LockOwner>, reply: ReplyData,
    ) {
        self.operations.read(handle.0, offset, size, reply);
    }

    fn write(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: u64, data: &[u8],
        write_flags: WriteFlags, flags: OpenFlags, _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if write_flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
            self.operations.fs.core.waits().note_written_back(handle.0);
        }
        let writing = self.operations.write(handle.0, offset, data, flags.0);
        self.operations.written(handle.0, flags.0, writing, reply);
    }

    fn flush(
        &self, request: &Request, _number: INodeNo, handle: FileHandle, _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        self.operations.flush(handle.0, reply);
    }

    fn release(
        &self, request: &Request, number: INodeNo, handle: FileHandle, _flags: OpenFlags,
        _lock_owner: Option<LockOwner>, _flush: bool, reply: ReplyEmpty,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        self.operations.release(inode(number), handle.0, reply);
    }

    fn fsync(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.sync_file(handle.0, reply);
    }

    fn fsyncdir(
        &self, _request: &Request, _number: INodeNo, _handle: FileHandle, _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.sync_directory(reply);
    }

    fn opendir(&self, _request: &Request, _number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Operations::NO_HANDLE_OF_DIRECTORIES);
    }

    fn readdir(
        &self, _request: &Request, number: INodeNo, _handle: FileHandle, offset: u64,
        reply: ReplyDirectory,
    ) {
        self.list(inode(number), offset, Listing::Names, reply);
    }

    fn readdirplus(
        &self, _request: &Request, number: INodeNo, _handle: FileHandle, offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.list(inode(number), offset, Listing::Attributes, reply);
    }

    fn statfs(&self, _request: &Request, number: INodeNo, reply: ReplyStatfs) {
        reply.send(self.space(inode(number)));
    }

    fn setxattr(
        &self, request: &Request, number: INodeNo, name: &OsStr, value: &[u8], flags: i32,
        _position: u32, reply: ReplyEmpty,
    ) {
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        let target = (inode(number), caller(request));
        self.set_extended_attribute(target, name, value, flags, reply);
    }

    fn getxattr(
        &self, request: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr,
    ) {
        let target = (inode(number), caller(request));
        reply.send(self.extended_attribute(target, name.as_bytes(), size));
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let target = (inode(number), caller(request));
        reply.send(self.list_extended_attributes(target, size));
    }

    fn removexattr(&self, request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let target = (inode(number), caller(request));
        reply.send(self.remove_extended_attribute(target, name.as_bytes()));
    }

    fn fallocate(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: u64, length: u64,
        mode: i32, reply: ReplyEmpty,
    ) {
        self.operations.allocate(handle.0, Allocation { mode, offset, length }, reply);
    }

    fn lseek(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: i64, whence: i32,
        reply: ReplyLseek,
    ) {
        reply.send(self.seek(handle.0, offset, whence));
    }

    fn ioctl(
        &self, _request: &Request, _number: INodeNo, _handle: FileHandle, _flags: IoctlFlags,
        _command: u32, _data: &[u8], _answer_bytes_max: u32, reply: ReplyIoctl,
    ) {
        reply.error(Operations::NO_COMMANDS);
    }

    fn copy_file_range(
        &self, _request: &Request, _from: INodeNo, from_handle: FileHandle, from_offset: u64,
        _to: INodeNo, to_handle: FileHandle, to_offset: u64, length: u64,
        _flags: CopyFileRangeFlags, reply: ReplyWrite,
    ) {
        let (from, to) = ((from_handle.0, from_offset), (to_handle.0, to_offset));
        self.operations.copy(CopyRange { from, to, length }, reply);
    }
}

fn place(parent: INodeNo, name: &OsStr) -> Place {
    Place { parent: inode(parent), name: name.as_bytes().to_vec() }
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

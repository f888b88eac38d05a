//! The callbacks: decode, one call, reply.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::convert::{absent, attributes, file_type, inode, new_time, ttl, ttl_of_new};
use super::dispatch::Callbacks;
use super::shared::{Shared, caller, is_reader, permissions, place, quiet, reply_attribute};
use crate::fs::{FileSystem, Listing, NAME_BYTES_MAX, NewNode, OpenedBy, SetAttributes};
use crate::observe::Operation;
use crate::store::disk::{Allocation, Seek};

/// Largest request without passthrough: beyond 1 MiB copying costs more than round trips.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Requests that the kernel may have under way in the background (readahead, releases).
const BACKGROUND_MAX: u16 = 64;

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
        let depth = self.fs.store().disk.stack_depth()? + 1;
        let _ = config.set_max_stack_depth(depth);
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _awake = self.linger.after_reply(request.pid());
        let Some(awaited) = self.fs.look_up_waits(inode(parent)) else {
            return self.answer_lookup(parent, name, reply);
        };
        let name = name.to_owned();
        self.beside(awaited, move |shared| shared.answer_lookup(parent, &name, reply));
    }

    fn forget(&self, _request: &Request, number: INodeNo, count: u64) {
        self.backings.let_go(inode(number));
        self.fs.forget(inode(number), count);
    }

    fn getattr(
        &self, request: &Request, number: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        match self.call(Operation::GetAttr, |fs| fs.attributes(inode(number))) {
            Ok(found) => reply.attr(&ttl(found.is_at_rest), &attributes(&found)),
            Err(error) => reply.error(error),
        }
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
        let answer = move |shared: &Shared| match shared
            .call(Operation::SetAttr, |fs| fs.set_attributes(inode(number), &set))
        {
            Ok(found) => reply.attr(&ttl(found.is_at_rest), &attributes(&found)),
            Err(error) => reply.error(error),
        };
        match set.size {
            Some(_) if self.fs.waits_for_remote(inode(number)) => self.fetch(answer),
            Some(_) => self.later(answer),
            None => answer(self),
        }
    }

    fn readlink(&self, _request: &Request, number: INodeNo, reply: ReplyData) {
        match self.call(Operation::ReadLink, |fs| fs.read_link(inode(number))) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(error),
        }
    }

    fn mknod(
        &self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32,
        device: u32, reply: ReplyEntry,
    ) {
        let node = NewNode::Special { file_type: mode & libc::S_IFMT, device };
        let outcome = self.call(Operation::Make, |fs| {
            fs.make(&place(parent, name), &node, permissions(mode), caller(request))
        });
        Shared::reply_entry(reply, outcome);
    }

    fn mkdir(
        &self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32,
        reply: ReplyEntry,
    ) {
        let outcome = self.call(Operation::Make, |fs| {
            let place = place(parent, name);
            fs.make(&place, &NewNode::Directory, permissions(mode), caller(request))
        });
        Shared::reply_entry(reply, outcome);
    }

    fn symlink(
        &self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry,
    ) {
        let node = NewNode::Symlink(target.as_os_str().as_bytes().to_vec());
        let outcome = self.call(Operation::Make, |fs| {
            fs.make(&place(parent, name), &node, 0o777, caller(request))
        });
        Shared::reply_entry(reply, outcome);
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self.call(Operation::Unlink, |fs| fs.unlink(&place(parent, name)));
        Shared::reply_empty(reply, outcome);
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self.call(Operation::Rmdir, |fs| fs.remove_directory(&place(parent, name)));
        Shared::reply_empty(reply, outcome);
    }

    fn rename(
        &self, request: &Request, parent: INodeNo, name: &OsStr, new_parent: INodeNo,
        new_name: &OsStr, flags: RenameFlags, reply: ReplyEmpty,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        let (from, to) = (place(parent, name), place(new_parent, new_name));
        let waits = self.fs.rename_waits(&from, &to);
        let answer = move |shared: &Shared| {
            let outcome = shared.call(Operation::Rename, |fs| fs.rename(&from, &to, flags.bits()));
            if let (Ok(Some(old)), Some(notifier)) = (&outcome, shared.notifier.get()) {
                // A negative offset spares the cached bytes, and with them every lock that the
                // kernel holds while it waits for this answer. An inode that it has forgotten is
                // no error.
                let _ = notifier.inval_inode(INodeNo(old.0), -1, 0);
            }
            Shared::reply_empty(reply, outcome.map(drop));
        };
        match waits {
            Some(awaited) => self.beside(awaited, answer),
            None => answer(self),
        }
    }

    fn link(
        &self, _request: &Request, number: INodeNo, parent: INodeNo, name: &OsStr,
        reply: ReplyEntry,
    ) {
        let outcome = self.call(Operation::Link, |fs| fs.link(inode(number), &place(parent, name)));
        Shared::reply_entry(reply, outcome);
    }

    fn create(
        &self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32,
        flags: i32, reply: ReplyCreate,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        self.mode(|descriptor| reply.open_backing(descriptor));
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let created = self.call(Operation::Create, |fs| {
            fs.create(&place(parent, name), permissions(mode), caller(request), writes)
        });
        let created = match created {
            Ok(created) => created,
            Err(error) => return reply.error(error),
        };
        let (found, opened) = (created.found, created.opened);
        let handle = FileHandle(opened.handle);
        let (ttl, shown) = (ttl_of_new(found.name_is_stable), attributes(&found.attributes));
        match &opened.by {
            OpenedBy::Daemon => {
                reply.created(&ttl, &shown, Generation(0), handle, Shared::served_flags(&opened));
            }
            OpenedBy::Kernel { file } => {
                let register = || match file.descriptor() {
                    Some(descriptor) => reply.open_backing(descriptor),
                    None => Err(std::io::ErrorKind::Unsupported.into()),
                };
                match self.backings.attach(found.attributes.inode, false, register) {
                    Ok(id) => reply.created_passthrough(
                        &ttl,
                        &shown,
                        Generation(0),
                        handle,
                        quiet(&opened),
                        &id,
                    ),
                    Err(error) => reply.error(self.undo_open(opened.handle, &error)),
                }
            }
        }
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _awake = self.linger.after_reply(request.pid());
        self.mode(|descriptor| reply.open_backing(descriptor));
        let reads_only = is_reader(flags);
        if reads_only {
            self.fs.note_use(inode(number), flags.0);
        }
        self.fs.expect_more(inode(number), self.backings.is_held(inode(number)));
        if reads_only && let Some((handle, id)) = self.open_held(inode(number)) {
            let handle = FileHandle(handle);
            return reply.opened_passthrough(handle, FopenFlags::FOPEN_NOFLUSH, &id);
        }
        if self.fs.waits_for_remote(inode(number)) {
            self.fetch(move |shared| shared.answer_open(number, flags, reply));
        } else if reads_only && !self.fs.must_read_to_open(inode(number)) {
            self.answer_open(number, flags, reply);
        } else {
            self.later(move |shared| shared.answer_open(number, flags, reply));
        }
    }

    fn read(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: u64, size: u32,
        _flags: OpenFlags, _lock_owner: Option<LockOwner>, reply: ReplyData,
    ) {
        let answer = move |shared: &Shared| shared.answer_read(handle, (offset, size), reply);
        if self.fs.read_waits(handle.0, offset, size) { self.aside(answer) } else { answer(self) }
    }

    fn write(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: u64, data: &[u8],
        _write_flags: WriteFlags, flags: OpenFlags, _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let appends = flags.0 & libc::O_APPEND != 0;
        match self.call(Operation::Write, |fs| fs.write(handle.0, offset, data, appends)) {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            Err(error) => reply.error(error),
        }
    }

    fn flush(
        &self, request: &Request, _number: INodeNo, handle: FileHandle, _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        let answer = move |shared: &Shared| {
            Shared::reply_empty(reply, shared.call(Operation::Flush, |fs| fs.flush(handle.0)));
        };
        if self.fs.flush_waits(handle.0) { self.later(answer) } else { answer(self) }
    }

    fn release(
        &self, request: &Request, number: INodeNo, handle: FileHandle, _flags: OpenFlags,
        _lock_owner: Option<LockOwner>, _flush: bool, reply: ReplyEmpty,
    ) {
        let _awake = self.linger.after_reply(request.pid());
        if self.fs.is_backed(handle.0) {
            self.backings.detach(inode(number));
        }
        Shared::reply_empty(reply, self.call(Operation::Release, |fs| fs.release(handle.0)));
    }

    fn fsync(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.later(move |shared| {
            let outcome = shared.call(Operation::Fsync, |fs| fs.sync_file(handle.0));
            Shared::reply_empty(reply, outcome);
        });
    }

    fn fsyncdir(
        &self, _request: &Request, _number: INodeNo, _handle: FileHandle, _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.later(move |shared| {
            Shared::reply_empty(reply, shared.call(Operation::Fsync, FileSystem::commit));
        });
    }

    fn opendir(&self, _request: &Request, _number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // A listing needs no handle: its offsets are hashes of names. ENOSYS makes the kernel
        // skip opendir and releasedir from now on, and cache listings until they change.
        reply.error(Errno::ENOSYS);
    }

    fn readdir(
        &self, _request: &Request, number: INodeNo, _handle: FileHandle, offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let answer = move |shared: &Shared| {
            let outcome = shared.call(Operation::List, |fs| {
                fs.list(inode(number), offset, Listing::Names, |line| {
                    let kind = file_type(line.file_type);
                    let name = OsStr::from_bytes(line.name);
                    !reply.add(INodeNo(line.inode.0), line.next_offset, kind, name)
                })
            });
            match outcome {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            }
        };
        self.once_looked_up(inode(number), answer);
    }

    fn readdirplus(
        &self, _request: &Request, number: INodeNo, _handle: FileHandle, offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let answer = move |shared: &Shared| {
            let outcome = shared.call(Operation::List, |fs| {
                fs.list(inode(number), offset, Listing::Attributes, |line| {
                    // `.` and `..` come without attributes: the kernel takes no reference to them.
                    let mut shown = absent();
                    let mut stable = false;
                    if let Some(found) = &line.attributes {
                        shown = attributes(found);
                        stable = line.name_is_stable && found.is_at_rest;
                    } else {
                        shown.ino = INodeNo(line.inode.0);
                        shown.kind = file_type(line.file_type);
                    }
                    let name = OsStr::from_bytes(line.name);
                    let number = INodeNo(line.inode.0);
                    !reply.add(number, line.next_offset, name, &ttl(stable), &shown, Generation(0))
                })
            });
            match outcome {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            }
        };
        self.once_looked_up(inode(number), answer);
    }

    fn statfs(&self, _request: &Request, number: INodeNo, reply: ReplyStatfs) {
        // Engines test the block size for O_DIRECT and watch the free space for eviction.
        const BLOCK: u64 = 4096;
        match self.call(Operation::StatFs, |fs| fs.space_at(inode(number))) {
            Ok(space) => reply.statfs(
                space.total_bytes / BLOCK,
                space.free_bytes / BLOCK,
                space.available_bytes / BLOCK,
                space.inodes_total,
                space.inodes_free,
                4096,
                u32::try_from(NAME_BYTES_MAX).unwrap_or(255),
                4096,
            ),
            Err(error) => reply.error(error),
        }
    }

    fn setxattr(
        &self, _request: &Request, number: INodeNo, name: &OsStr, value: &[u8], flags: i32,
        _position: u32, reply: ReplyEmpty,
    ) {
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        match self.call(Operation::SetXattr, |fs| {
            let dry_run = fs.asks_for_collection(inode(number), &name, &value)?;
            dry_run.map(|dry_run| fs.begin_collection().map(|()| dry_run)).transpose()
        }) {
            Ok(None) => {}
            Ok(Some(dry_run)) => {
                reply.ok();
                return self.aside(move |shared| shared.fs.collect_garbage(dry_run));
            }
            Err(error) => return reply.error(error),
        }
        let waits = self.fs.attribute_waits(&name);
        let answer = move |shared: &Shared| {
            let outcome = shared.call(Operation::SetXattr, |fs| {
                fs.set_extended_attribute(inode(number), &name, &value, flags)
            });
            Shared::reply_empty(reply, outcome);
        };
        if waits { self.aside(answer) } else { answer(self) }
    }

    fn getxattr(&self, _r: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let outcome = self
            .call(Operation::GetXattr, |fs| fs.extended_attribute(inode(number), name.as_bytes()));
        reply_attribute(reply, size, outcome);
    }

    fn listxattr(&self, _request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let outcome =
            self.call(Operation::ListXattr, |fs| fs.list_extended_attributes(inode(number)));
        reply_attribute(reply, size, outcome);
    }

    fn removexattr(&self, _request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self.call(Operation::RemoveXattr, |fs| {
            fs.remove_extended_attribute(inode(number), name.as_bytes())
        });
        Shared::reply_empty(reply, outcome);
    }

    fn fallocate(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: u64, length: u64,
        mode: i32, reply: ReplyEmpty,
    ) {
        let allocation = Allocation { mode, offset, length };
        let outcome = self.call(Operation::Fallocate, |fs| fs.allocate(handle.0, allocation));
        Shared::reply_empty(reply, outcome);
    }

    fn lseek(
        &self, _request: &Request, _number: INodeNo, handle: FileHandle, offset: i64, whence: i32,
        reply: ReplyLseek,
    ) {
        let seek = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        match self.call(Operation::Seek, |fs| fs.seek(handle.0, offset, seek)) {
            Ok(position) => reply.offset(i64::try_from(position).unwrap_or(i64::MAX)),
            Err(error) => reply.error(error),
        }
    }

    fn ioctl(
        &self, _request: &Request, _number: INodeNo, _handle: FileHandle, _flags: IoctlFlags,
        _command: u32, _data: &[u8], _answer_bytes_max: u32, reply: ReplyIoctl,
    ) {
        // Python asks each file that it opens whether it is a terminal.
        reply.error(Errno::ENOTTY);
    }

    fn copy_file_range(
        &self, _request: &Request, _from: INodeNo, from_handle: FileHandle, from_offset: u64,
        _to: INodeNo, to_handle: FileHandle, to_offset: u64, length: u64,
        _flags: CopyFileRangeFlags, reply: ReplyWrite,
    ) {
        // The reply counts in 32 bits.
        let length = length.min(1 << 30);
        let outcome = self.call(Operation::CopyRange, |fs| {
            fs.copy_range((from_handle.0, from_offset), (to_handle.0, to_offset), length)
        });
        match outcome {
            Ok(copied) => reply.written(u32::try_from(copied).unwrap_or(u32::MAX)),
            Err(error) => reply.error(error),
        }
    }
}

//! Takes a request apart and calls what answers it.

use fuser::Errno;
use zerocopy::FromBytes;

use super::again::{Again, may_be_done};
use super::answer::{Lines, Ticket, Way};
use super::wire::{
    BatchForgetIn, CopyFileRangeIn, CreateIn, FallocateIn, ForgetIn, ForgetOne, GetXattrIn,
    HandleIn, InHeader, LinkIn, LseekIn, MkdirIn, MknodIn, OpenIn, Rename2In, RenameIn, SetAttrIn,
    SetXattrIn, TransferIn, WRITE_CACHE, opcode, set,
};
use crate::answer::Reply;
use crate::convert::permissions;
use crate::dispatch::Operations;
use crate::operations::{CopyRange, Writing};
use kvfs_fs::{Caller, Core, Listing, NewNode, NewTime, Place, SetAttributes, recalled};
use kvfs_storage::store::disk::Allocation;
use kvfs_storage::store::record::{InodeId, Time};

/// A request as it came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) header: InHeader,
    /// The structure of the operation; more may follow.
    pub(crate) structure: &'a [u8],
    /// What comes after the structure: names, or bytes that are written.
    pub(crate) payload: &'a [u8],
}

impl<'a> Request<'a> {
    /// A request whose parts follow each other. `None` if it is shorter than it should be.
    pub(crate) fn of_message(message: &'a [u8]) -> Option<Request<'a>> {
        let (header, _) = InHeader::read_from_prefix(message).ok()?;
        let rest = message.get(size_of::<InHeader>()..header.len as usize)?;
        let length = structure_bytes(header.opcode).unwrap_or(rest.len());
        let (structure, payload) = rest.split_at_checked(length)?;
        Some(Request { header, structure, payload })
    }

    fn structure<T: FromBytes>(&self) -> Option<T> {
        Some(T::read_from_prefix(self.structure).ok()?.0)
    }

    fn inode(&self) -> InodeId {
        InodeId(self.header.nodeid)
    }

    fn handle(&self) -> Option<u64> {
        Some(self.structure::<HandleIn>()?.fh)
    }
}

/// How long the structure of an operation is, where something follows it.
fn structure_bytes(operation: u32) -> Option<usize> {
    Some(match operation {
        opcode::LOOKUP | opcode::UNLINK | opcode::RMDIR | opcode::SYMLINK | opcode::REMOVEXATTR => {
            0
        }
        opcode::RENAME => size_of::<RenameIn>(),
        opcode::RENAME2 => size_of::<Rename2In>(),
        opcode::LINK => size_of::<LinkIn>(),
        opcode::MKNOD => size_of::<MknodIn>(),
        opcode::MKDIR => size_of::<MkdirIn>(),
        opcode::CREATE => size_of::<CreateIn>(),
        opcode::SETXATTR => size_of::<SetXattrIn>(),
        opcode::GETXATTR => size_of::<GetXattrIn>(),
        opcode::WRITE => size_of::<TransferIn>(),
        opcode::BATCH_FORGET => size_of::<BatchForgetIn>(),
        _ => return None,
    })
}

/// What a request asks for. It owns what it needs: the memory of the request is free for the next one, or for
/// the answer.
#[derive(Debug)]
pub(crate) enum Call {
    Lookup(Place),
    Unlink(Place),
    RemoveDirectory(Place),
    Rename(Place, Place, u32),
    Link(Place, InodeId),
    Make(Place, NewNode, u16),
    Create(Place, u16, i32),
    /// Name, value, flags.
    SetExtendedAttribute(Vec<u8>, Vec<u8>, i32),
    ExtendedAttribute(Vec<u8>, u32),
    RemoveExtendedAttribute(Vec<u8>),
    ListExtendedAttributes(u32),
    Attributes,
    SetAttributes(SetAttributes),
    ReadLink,
    Open(i32),
    Read(TransferIn),
    /// The first half of it is done.
    Write(TransferIn, Writing),
    List(TransferIn, Listing),
    Space,
    Release(u64),
    Flush(u64),
    Sync(u64),
    SyncDirectory,
    Allocate(u64, Allocation),
    Seek(LseekIn),
    Copy(CopyRange),
    /// There is nothing to do.
    Nothing,
    Refuse(Errno),
}

/// Takes out of a request what is needed to answer it; bytes of a write are written from where they are. `None`
/// if it is not whole.
pub(crate) fn take(operations: &Operations, request: &Request<'_>) -> Option<Call> {
    if operations.fs.core.before.deaths() > 0 {
        recall(operations, request);
        let core = &operations.fs.core;
        let leads_there = |inodes: &[InodeId]| recalled::is_misled(core, inodes);
        if is_misled(core, request, leads_there) || is_made_again(core, request) {
            return Some(Call::Refuse(Errno::ESTALE));
        }
        if is_too_late(core, request) {
            return Some(Call::Refuse(Errno::EIO));
        }
    }
    Some(match request.header.opcode {
        opcode::GETATTR => Call::Attributes,
        opcode::SETATTR => Call::SetAttributes(attributes_to_set(&request.structure()?)),
        opcode::READLINK => Call::ReadLink,
        opcode::OPEN => Call::Open(request.structure::<OpenIn>()?.flags.cast_signed()),
        opcode::READ => Call::Read(request.structure()?),
        opcode::WRITE => {
            let input: TransferIn = request.structure()?;
            let data = request.payload.get(..input.size as usize)?;
            if input.transfer_flags & WRITE_CACHE != 0 {
                operations.fs.core.waits().note_written_back(input.fh);
            }
            let flags = input.flags.cast_signed();
            Call::Write(input, operations.write(input.fh, input.offset, data, flags))
        }
        opcode::READDIR => Call::List(request.structure()?, Listing::Names),
        opcode::READDIRPLUS => Call::List(request.structure()?, Listing::Attributes),
        opcode::STATFS => Call::Space,
        opcode::RELEASE => Call::Release(request.handle()?),
        opcode::FLUSH => Call::Flush(request.handle()?),
        opcode::FSYNC => Call::Sync(request.handle()?),
        opcode::FSYNCDIR => Call::SyncDirectory,
        opcode::LISTXATTR => Call::ListExtendedAttributes(request.structure::<GetXattrIn>()?.size),
        opcode::FALLOCATE => {
            let input: FallocateIn = request.structure()?;
            let (mode, offset, length) = (input.mode.cast_signed(), input.offset, input.length);
            Call::Allocate(input.fh, Allocation { mode, offset, length })
        }
        opcode::LSEEK => Call::Seek(request.structure()?),
        opcode::COPY_FILE_RANGE => {
            let input: CopyFileRangeIn = request.structure()?;
            let (from, to) = ((input.fh_in, input.off_in), (input.fh_out, input.off_out));
            Call::Copy(CopyRange { from, to, length: input.len })
        }
        // What was retrieved is nothing: it only filled a slot of a ring.
        opcode::DESTROY | opcode::NOTIFY_REPLY => Call::Nothing,
        opcode::OPENDIR => Call::Refuse(Operations::NO_HANDLE_OF_DIRECTORIES),
        opcode::IOCTL => Call::Refuse(Operations::NO_COMMANDS),
        _ => return take_named(request),
    })
}

/// Whether a request that comes by a path is for something that had one of its names only in a tree that is lost; `leads_there`
/// says that of inodes.
pub(crate) fn is_misled(
    core: &Core, request: &Request<'_>, leads_there: impl Fn(&[InodeId]) -> bool,
) -> bool {
    if request.header.opcode != opcode::LOOKUP {
        return acts_on(request).is_some_and(|inodes| leads_there(&inodes));
    }
    // Of a name that is absent nothing is given out, and whoever wants to make it is refused then. He is asked anew, but
    // not if this were refused (`filename_create` in the kernel).
    leads_there(&[request.inode()]) && is_there(core, request)
}

/// Whether a file is to be made, or opened if it is there, that the kernel has found absent and that is there again: its
/// removal was lost. Asked anew, it opens that.
fn is_made_again(core: &Core, request: &Request<'_>) -> bool {
    let input = (request.header.opcode == opcode::CREATE).then(|| request.structure::<CreateIn>());
    let may_exist = |input: CreateIn| input.flags.cast_signed() & libc::O_EXCL == 0;
    input.flatten().is_some_and(may_exist) && is_there(core, request)
}

/// Whether somebody must hear that what he has written may be lost: he changes the length of a file through a handle of a
/// daemon that died, or that one was about to tell him.
fn is_too_late(core: &Core, request: &Request<'_>) -> bool {
    match request.header.opcode {
        opcode::SETATTR => request.structure::<SetAttrIn>().is_some_and(|input| {
            input.valid & set::HANDLE != 0 && recalled::is_dead_writer(core, input.fh)
        }),
        opcode::FSYNC | opcode::FSYNCDIR => {
            may_be_done(&request.header) && core.before.deaths() > 1
        }
        _ => false,
    }
}

/// Whether the name of a request is there.
fn is_there(core: &Core, request: &Request<'_>) -> bool {
    let name = split_name(request.payload).map(|(name, _)| name.to_vec());
    name.is_some_and(|name| recalled::has_name(core, &Place { parent: request.inode(), name }))
}

/// What a request opens or changes, or makes something in, which the kernel has come to by a path. What only tells of something
/// may tell what was so when it was asked.
fn acts_on(request: &Request<'_>) -> Option<[InodeId; 2]> {
    let other = match request.header.opcode {
        opcode::OPEN
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::SYMLINK
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::CREATE
        | opcode::SETXATTR
        | opcode::REMOVEXATTR => request.inode(),
        opcode::SETATTR => {
            let input: SetAttrIn = request.structure()?;
            (input.valid & set::HANDLE == 0).then(|| request.inode())?
        }
        opcode::RENAME => InodeId(request.structure::<RenameIn>()?.newdir),
        opcode::RENAME2 => InodeId(request.structure::<Rename2In>()?.newdir),
        opcode::LINK => InodeId(request.structure::<LinkIn>()?.oldnodeid),
        _ => return None,
    };
    Some([request.inode(), other])
}

/// Takes up handles of a daemon that has died.
fn recall(operations: &Operations, request: &Request<'_>) {
    match request.header.opcode {
        opcode::READ
        | opcode::WRITE
        | opcode::RELEASE
        | opcode::FLUSH
        | opcode::FSYNC
        | opcode::FALLOCATE
        | opcode::LSEEK => {
            if let Some(handle) = request.handle() {
                recalled::recall(&operations.fs.core, handle, request.inode());
            }
        }
        opcode::COPY_FILE_RANGE => {
            if let Some(input) = request.structure::<CopyFileRangeIn>() {
                recalled::recall(&operations.fs.core, input.fh_in, request.inode());
                recalled::recall(&operations.fs.core, input.fh_out, InodeId(input.nodeid_out));
            }
        }
        _ => {}
    }
}

/// The same for what has a name.
fn take_named(request: &Request<'_>) -> Option<Call> {
    let has_name = matches!(
        request.header.opcode,
        opcode::LOOKUP
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::LINK
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::CREATE
            | opcode::SETXATTR
            | opcode::GETXATTR
            | opcode::REMOVEXATTR
    );
    if !has_name {
        // The kernel does without (that a call was interrupted, say), or does it another way.
        return Some(Call::Refuse(Errno::ENOSYS));
    }
    let (name, rest) = split_name(request.payload)?;
    let name = name.to_vec();
    match request.header.opcode {
        opcode::SETXATTR => {
            let input: SetXattrIn = request.structure()?;
            let value = rest.get(..input.size as usize)?.to_vec();
            return Some(Call::SetExtendedAttribute(name, value, input.flags.cast_signed()));
        }
        opcode::GETXATTR => {
            let size = request.structure::<GetXattrIn>()?.size;
            return Some(Call::ExtendedAttribute(name, size));
        }
        opcode::REMOVEXATTR => return Some(Call::RemoveExtendedAttribute(name)),
        _ => {}
    }
    let place = Place { parent: request.inode(), name };
    Some(match request.header.opcode {
        opcode::LOOKUP => Call::Lookup(place),
        opcode::UNLINK => Call::Unlink(place),
        opcode::RMDIR => Call::RemoveDirectory(place),
        opcode::RENAME => {
            Call::Rename(place, target(request.structure::<RenameIn>()?.newdir, rest)?, 0)
        }
        opcode::RENAME2 => {
            let input: Rename2In = request.structure()?;
            Call::Rename(place, target(input.newdir, rest)?, input.flags)
        }
        opcode::LINK => Call::Link(place, InodeId(request.structure::<LinkIn>()?.oldnodeid)),
        opcode::SYMLINK => Call::Make(place, NewNode::Symlink(split_name(rest)?.0.to_vec()), 0o777),
        opcode::MKNOD => {
            let input: MknodIn = request.structure()?;
            let file_type = input.mode & libc::S_IFMT;
            let node = NewNode::Special { file_type, device: input.rdev };
            Call::Make(place, node, permissions(input.mode))
        }
        opcode::MKDIR => {
            let mode = permissions(request.structure::<MkdirIn>()?.mode);
            Call::Make(place, NewNode::Directory, mode)
        }
        _ => {
            let input: CreateIn = request.structure()?;
            Call::Create(place, permissions(input.mode), input.flags.cast_signed())
        }
    })
}

/// Answers a request, now or later.
pub(crate) fn answer<W: Way>(
    operations: &Operations, header: &InHeader, call: Option<Call>, ticket: Ticket<W>,
) {
    let inode = InodeId(header.nodeid);
    let caller = Caller { uid: header.uid, gid: header.gid };
    let Some(call) = call else {
        // Dropping the ticket answers EIO.
        return log::error!("a request of operation {} is not whole", header.opcode);
    };
    match call {
        Call::Lookup(place) => operations.lookup(place, caller, ticket),
        Call::Unlink(place) => operations.unlink(place, Again::new(header, Errno::ENOENT, ticket)),
        Call::RemoveDirectory(place) => {
            operations.remove_directory(place, Again::new(header, Errno::ENOENT, ticket));
        }
        Call::Rename(from, to, flags) => {
            operations.rename(from, to, flags, Again::new(header, Errno::ENOENT, ticket));
        }
        Call::Link(place, _) | Call::Make(place, ..)
            if may_be_done(header) && recalled::has_name(&operations.fs.core, &place) =>
        {
            operations.lookup(place, caller, ticket);
        }
        Call::Link(place, linked) => operations.link(linked, place, ticket),
        Call::Make(place, node, mode) => operations.make(place, node, mode, caller, ticket),
        Call::Create(place, mode, flags) => operations.create(place, mode, caller, flags, ticket),
        Call::SetExtendedAttribute(name, value, flags) => {
            let ticket = Again::new(header, Errno::EEXIST, ticket);
            operations.set_extended_attribute((inode, caller), name, value, flags, ticket);
        }
        Call::ExtendedAttribute(name, size) => {
            ticket.send(operations.extended_attribute((inode, caller), &name, size));
        }
        Call::RemoveExtendedAttribute(name) => {
            let ticket = Again::new(header, Errno::ENODATA, ticket);
            ticket.send(operations.remove_extended_attribute((inode, caller), &name));
        }
        Call::ListExtendedAttributes(size) => {
            ticket.send(operations.list_extended_attributes((inode, caller), size));
        }
        Call::Attributes => ticket.send(operations.attributes(inode)),
        Call::SetAttributes(set) => operations.set_attributes(inode, set, ticket),
        Call::ReadLink => ticket.send(operations.read_link(inode)),
        Call::Open(flags) => operations.open(inode, flags, (caller, header.pid), ticket),
        Call::Read(input) => operations.read(input.fh, input.offset, input.size, ticket),
        Call::Write(input, writing) => {
            operations.written(input.fh, input.flags.cast_signed(), writing, ticket);
        }
        Call::List(input, listing) => {
            let lines = Lines::new(ticket, listing, input.size);
            operations.list(inode, input.offset, listing, lines);
        }
        Call::Space => ticket.send(operations.space(inode)),
        Call::Release(handle) => operations.release(inode, handle, ticket),
        Call::Flush(handle) => operations.flush(handle, ticket),
        Call::Sync(handle) => operations.sync_file(handle, ticket),
        Call::SyncDirectory => operations.sync_directory(inode, ticket),
        Call::Allocate(handle, allocation) => operations.allocate(handle, allocation, ticket),
        Call::Seek(input) => {
            let (offset, whence) = (input.offset.cast_signed(), input.whence.cast_signed());
            ticket.send(operations.seek(input.fh, offset, whence));
        }
        Call::Copy(range) => operations.copy(range, ticket),
        Call::Nothing => ticket.send(Ok(())),
        Call::Refuse(error) => Reply::<()>::send(ticket, Err(error)),
    }
}

/// Takes note of what the kernel has forgotten, which is not answered; false if the request asks for something
/// else.
pub(crate) fn forget(operations: &Operations, request: &Request<'_>) -> bool {
    match request.header.opcode {
        opcode::FORGET => {
            if let Some(input) = request.structure::<ForgetIn>() {
                operations.forget(request.inode(), input.nlookup);
            }
        }
        opcode::BATCH_FORGET => {
            let count = request.structure::<BatchForgetIn>().map_or(0, |input| input.count);
            let all = request.payload.chunks_exact(size_of::<ForgetOne>()).take(count as usize);
            for one in all.filter_map(|bytes| ForgetOne::read_from_bytes(bytes).ok()) {
                operations.forget(InodeId(one.nodeid), one.nlookup);
            }
        }
        _ => return false,
    }
    true
}

/// A name that ends with a zero, and what follows it.
fn split_name(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

/// Where a name moves to.
fn target(directory: u64, bytes: &[u8]) -> Option<Place> {
    let (name, _) = split_name(bytes)?;
    Some(Place { parent: InodeId(directory), name: name.to_vec() })
}

fn attributes_to_set(input: &SetAttrIn) -> SetAttributes {
    let has = |bit: u32| input.valid & bit != 0;
    let time = |bit: u32, now: u32, seconds: u64, nanoseconds: u32| {
        let at = Time { seconds: seconds.cast_signed(), nanoseconds };
        has(bit).then_some(if has(now) { NewTime::Now } else { NewTime::At(at) })
    };
    SetAttributes {
        mode: has(set::MODE).then(|| permissions(input.mode)),
        uid: has(set::UID).then_some(input.uid),
        gid: has(set::GID).then_some(input.gid),
        size: has(set::SIZE).then_some(input.size),
        atime: time(set::ATIME, set::ATIME_NOW, input.atime, input.atimensec),
        mtime: time(set::MTIME, set::MTIME_NOW, input.mtime, input.mtimensec),
    }
}

#[cfg(test)]
mod tests;

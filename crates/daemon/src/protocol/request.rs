//! Takes a request apart and calls what answers it.

use fuser::Errno;
use zerocopy::FromBytes;

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
use kvfs_fs::{Caller, Listing, NewNode, NewTime, Place, SetAttributes};
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
        Call::Unlink(place) => operations.unlink(place, ticket),
        Call::RemoveDirectory(place) => operations.remove_directory(place, ticket),
        Call::Rename(from, to, flags) => operations.rename(from, to, flags, ticket),
        Call::Link(place, linked) => operations.link(linked, place, ticket),
        Call::Make(place, node, mode) => operations.make(place, node, mode, caller, ticket),
        Call::Create(place, mode, flags) => operations.create(place, mode, caller, flags, ticket),
        Call::SetExtendedAttribute(name, value, flags) => {
            operations.set_extended_attribute((inode, caller), name, value, flags, ticket);
        }
        Call::ExtendedAttribute(name, size) => {
            ticket.send(operations.extended_attribute((inode, caller), &name, size));
        }
        Call::RemoveExtendedAttribute(name) => {
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
        Call::SyncDirectory => operations.sync_directory(ticket),
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

//! Decodes a request and calls what answers it.

use fuser::Errno;

use super::answer::{Lines, Ticket};
use super::slot::Slot;
use super::wire::{
    CopyFileRangeIn, CreateIn, FallocateIn, GetXattrIn, HandleIn, InHeader, LinkIn, LseekIn,
    MkdirIn, MknodIn, OpenIn, Rename2In, RenameIn, SetAttrIn, SetXattrIn, TransferIn, WRITE_CACHE,
    opcode, set,
};
use crate::answer::Reply;
use crate::convert::permissions;
use crate::dispatch::Operations;
use crate::operations::CopyRange;
use kvfs_fs::{Caller, Listing, NewNode, NewTime, Place, SetAttributes};
use kvfs_storage::store::disk::Allocation;
use kvfs_storage::store::record::{InodeId, Time};

/// Answers a request, now or later.
pub(super) fn serve(operations: &Operations, ticket: Ticket) {
    let Some(slot) = ticket.request() else { return };
    let header = slot.header();
    let inode = InodeId(header.nodeid);
    match header.opcode {
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
        | opcode::REMOVEXATTR => {
            if serve_named(operations, &header, ticket).is_none() {
                log::error!("a name of operation {} does not end", header.opcode);
            }
        }
        opcode::READ | opcode::WRITE | opcode::READDIR | opcode::READDIRPLUS => {
            serve_transfer(operations, &header, ticket);
        }
        opcode::GETATTR => ticket.send(operations.attributes(inode)),
        opcode::SETATTR => {
            let set = attributes_to_set(&slot.operation());
            operations.set_attributes(inode, set, ticket);
        }
        opcode::READLINK => ticket.send(operations.read_link(inode)),
        opcode::OPEN => {
            let flags = slot.operation::<OpenIn>().flags.cast_signed();
            let caller = Caller { uid: header.uid, gid: header.gid };
            operations.open(inode, flags, caller, ticket);
        }
        opcode::STATFS => ticket.send(operations.space(inode)),
        opcode::RELEASE => {
            let handle = handle(slot);
            operations.release(inode, handle, ticket);
        }
        opcode::FLUSH => operations.flush(handle(slot), ticket),
        opcode::FSYNC => operations.sync_file(handle(slot), ticket),
        opcode::FSYNCDIR => operations.sync_directory(ticket),
        opcode::LISTXATTR => {
            let size = slot.operation::<GetXattrIn>().size;
            let caller = Caller { uid: header.uid, gid: header.gid };
            ticket.send(operations.list_extended_attributes((inode, caller), size));
        }
        opcode::FALLOCATE => {
            let input: FallocateIn = slot.operation();
            let (mode, offset, length) = (input.mode.cast_signed(), input.offset, input.length);
            operations.allocate(input.fh, Allocation { mode, offset, length }, ticket);
        }
        opcode::LSEEK => {
            let input: LseekIn = slot.operation();
            let (offset, whence) = (input.offset.cast_signed(), input.whence.cast_signed());
            ticket.send(operations.seek(input.fh, offset, whence));
        }
        opcode::COPY_FILE_RANGE => {
            let input: CopyFileRangeIn = slot.operation();
            let (from, to) = ((input.fh_in, input.off_in), (input.fh_out, input.off_out));
            operations.copy(CopyRange { from, to, length: input.len }, ticket);
        }
        opcode::DESTROY => ticket.send(Ok(())),
        opcode::OPENDIR => refuse(ticket, Operations::NO_HANDLE_OF_DIRECTORIES),
        opcode::IOCTL => refuse(ticket, Operations::NO_COMMANDS),
        // The kernel does without, or does it another way.
        _ => refuse(ticket, Errno::ENOSYS),
    }
}

/// What moves bytes of files and listings.
fn serve_transfer(operations: &Operations, header: &InHeader, ticket: Ticket) {
    let Some(slot) = ticket.request() else { return };
    let input: TransferIn = slot.operation();
    let inode = InodeId(header.nodeid);
    match header.opcode {
        opcode::READ => operations.read(input.fh, input.offset, input.size, ticket),
        opcode::WRITE => {
            let flags = input.flags.cast_signed();
            if input.transfer_flags & WRITE_CACHE != 0 {
                operations.fs.core.waits().note_written_back(input.fh);
            }
            let writing = operations.write(input.fh, input.offset, slot.payload(), flags);
            operations.written(input.fh, flags, writing, ticket);
        }
        opcode::READDIRPLUS => {
            let lines = Lines::new(ticket, Listing::Attributes, input.size);
            operations.list(inode, input.offset, Listing::Attributes, lines);
        }
        _ => {
            let lines = Lines::new(ticket, Listing::Names, input.size);
            operations.list(inode, input.offset, Listing::Names, lines);
        }
    }
}

/// What has a name. `None` if the name does not end, which answers EIO.
fn serve_named(operations: &Operations, header: &InHeader, ticket: Ticket) -> Option<()> {
    let slot = ticket.request()?;
    let parent = InodeId(header.nodeid);
    let caller = Caller { uid: header.uid, gid: header.gid };
    let (name, rest) = split_name(slot.payload())?;
    let name = name.to_vec();
    match header.opcode {
        opcode::SETXATTR => {
            let input: SetXattrIn = slot.operation();
            let value = rest.get(..input.size as usize)?.to_vec();
            let flags = input.flags.cast_signed();
            operations.set_extended_attribute((parent, caller), name, value, flags, ticket);
            return Some(());
        }
        opcode::GETXATTR => {
            let size = slot.operation::<GetXattrIn>().size;
            ticket.send(operations.extended_attribute((parent, caller), &name, size));
            return Some(());
        }
        opcode::REMOVEXATTR => {
            ticket.send(operations.remove_extended_attribute((parent, caller), &name));
            return Some(());
        }
        _ => {}
    }
    let place = Place { parent, name };
    match header.opcode {
        opcode::LOOKUP => operations.lookup(place, caller, ticket),
        opcode::UNLINK => operations.unlink(place, ticket),
        opcode::RMDIR => operations.remove_directory(place, ticket),
        opcode::RENAME | opcode::RENAME2 => {
            let (directory, flags) = if header.opcode == opcode::RENAME {
                (slot.operation::<RenameIn>().newdir, 0)
            } else {
                let input: Rename2In = slot.operation();
                (input.newdir, input.flags)
            };
            let (name, _) = split_name(rest)?;
            let to = Place { parent: InodeId(directory), name: name.to_vec() };
            operations.rename(place, to, flags, ticket);
        }
        opcode::LINK => {
            let inode = InodeId(slot.operation::<LinkIn>().oldnodeid);
            operations.link(inode, place, ticket);
        }
        opcode::SYMLINK => {
            let (target, _) = split_name(rest)?;
            let node = NewNode::Symlink(target.to_vec());
            operations.make(place, node, 0o777, caller, ticket);
        }
        opcode::MKNOD => {
            let input: MknodIn = slot.operation();
            let file_type = input.mode & libc::S_IFMT;
            let node = NewNode::Special { file_type, device: input.rdev };
            operations.make(place, node, permissions(input.mode), caller, ticket);
        }
        opcode::MKDIR => {
            let mode = permissions(slot.operation::<MkdirIn>().mode);
            operations.make(place, NewNode::Directory, mode, caller, ticket);
        }
        _ => {
            let input: CreateIn = slot.operation();
            let (mode, flags) = (permissions(input.mode), input.flags.cast_signed());
            operations.create(place, mode, caller, flags, ticket);
        }
    }
    Some(())
}

fn refuse(ticket: Ticket, error: Errno) {
    Reply::<()>::send(ticket, Err(error));
}

fn handle(slot: &Slot) -> u64 {
    slot.operation::<HandleIn>().fh
}

/// A name that ends with a zero, and what follows it.
fn split_name(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some((&bytes[..end], &bytes[end + 1..]))
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

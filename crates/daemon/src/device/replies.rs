//! Answers in fuser's types.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use fuser::{
    Errno, FileAttr, FileHandle, Generation, INodeNo, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr,
};

use crate::answer::{
    Entry, ExtendedAttribute, Handle, Made, Position, Reply, ReplyBytes, ReplyListing, Shown,
    Written, time_to_live,
};
use crate::convert::{BLOCK_BYTES, absent, attributes, file_type};
use kvfs_fs::{Listed, NAME_BYTES_MAX};
use kvfs_storage::store::disk::Space;

/// Most replies differ only in what they are called.
macro_rules! reply {
    ($reply:ty, $answer:ty, |$this:ident, $value:ident| $send:expr) => {
        impl Reply<$answer> for $reply {
            fn send(self, outcome: Result<$answer, Errno>) {
                let $this = self;
                match outcome {
                    Ok($value) => $send,
                    Err(error) => $this.error(error),
                }
            }
        }
    };
}

reply!(ReplyEmpty, (), |reply, _nothing| reply.ok());
reply!(ReplyWrite, Written, |reply, written| reply.written(written.0));
reply!(ReplyData, Vec<u8>, |reply, bytes| reply.data(&bytes));
reply!(ReplyLseek, Position, |reply, position| {
    reply.offset(i64::try_from(position.0).unwrap_or(i64::MAX));
});
reply!(ReplyAttr, Shown, |reply, shown| {
    reply.attr(&shown.holds, &attributes(&shown.attributes));
});
reply!(ReplyXattr, ExtendedAttribute, |reply, attribute| match attribute {
    ExtendedAttribute::Length(length) => reply.size(length),
    ExtendedAttribute::Value(value) => reply.data(&value),
});
reply!(ReplyEntry, Entry, |reply, entry| {
    let (name_holds, holds, shown) = shown_entry(&entry);
    reply.entry_with_ttls(&holds, &name_holds, &shown, Generation(0));
});
reply!(ReplyStatfs, Space, |reply, space| {
    reply.statfs(
        space.total_bytes / BLOCK_BYTES,
        space.free_bytes / BLOCK_BYTES,
        space.available_bytes / BLOCK_BYTES,
        space.inodes_total,
        space.inodes_free,
        4096,
        u32::try_from(NAME_BYTES_MAX).unwrap_or(255),
        4096,
    );
});

reply!(ReplyOpen, Handle, |reply, handle| {
    let number = FileHandle(handle.number);
    match &handle.backing {
        None => reply.opened(number, handle.flags),
        Some(backing) => {
            // SAFETY: the number is that of a registered file, and goes back to its owner below.
            let lent = unsafe { reply.wrap_backing(backing.id()) };
            reply.opened_passthrough(number, handle.flags, &lent);
            let _ = lent.into_raw();
        }
    }
});
reply!(ReplyCreate, Made, |reply, made| {
    let (_, holds, shown) = shown_entry(&made.entry);
    let (handle, generation) = (FileHandle(made.handle.number), Generation(0));
    let flags = made.handle.flags;
    match &made.handle.backing {
        None => reply.created(&holds, &shown, generation, handle, flags),
        Some(backing) => {
            // SAFETY: the same.
            let lent = unsafe { reply.wrap_backing(backing.id()) };
            reply.created_passthrough(&holds, &shown, generation, handle, flags, &lent);
            let _ = lent.into_raw();
        }
    }
});

/// How long the name and the attributes hold, and the attributes.
fn shown_entry(entry: &Entry) -> (Duration, Duration, FileAttr) {
    match entry {
        Entry::Present { shown, name_holds } => {
            (*name_holds, shown.holds, attributes(&shown.attributes))
        }
        Entry::Absent => (time_to_live(true), time_to_live(true), absent()),
    }
}

impl ReplyBytes for ReplyData {
    /// The buffer is used again: memory from the system would cost more than what is put into it.
    fn fill(self, length: usize, read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) {
        thread_local! {
            static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < length {
                buffer.resize(length, 0);
            }
            let buffer = &mut buffer[..length];
            match read(buffer) {
                Ok(count) => self.data(&buffer[..count]),
                Err(error) => self.error(error),
            }
        });
    }
}

impl ReplyListing for ReplyDirectory {
    fn add(&mut self, line: &Listed<'_>) -> bool {
        let (number, name) = (INodeNo(line.inode.0), OsStr::from_bytes(line.name));
        !ReplyDirectory::add(self, number, line.next_offset, file_type(line.file_type), name)
    }

    fn send(self, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => self.ok(),
            Err(error) => self.error(error),
        }
    }
}

impl ReplyListing for ReplyDirectoryPlus {
    fn add(&mut self, line: &Listed<'_>) -> bool {
        // `.` and `..` come without attributes: the kernel takes no reference to them.
        let mut shown = absent();
        if let Some(found) = &line.attributes {
            shown = attributes(found);
        } else {
            shown.ino = INodeNo(line.inode.0);
            shown.kind = file_type(line.file_type);
        }
        let holds = time_to_live(line.is_stable());
        let (number, name) = (INodeNo(line.inode.0), OsStr::from_bytes(line.name));
        let generation = Generation(0);
        !ReplyDirectoryPlus::add(self, number, line.next_offset, name, &holds, &shown, generation)
    }

    fn send(self, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => self.ok(),
            Err(error) => self.error(error),
        }
    }
}

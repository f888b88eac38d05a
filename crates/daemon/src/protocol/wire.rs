//! The structures of `include/uapi/linux/fuse.h`, FUSE 7.42 and later, as far as they are needed here. Each has the
//! name and the fields of the header; unused ones are padding.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use kvfs_fs::Attributes;

/// Commands of a ring.
pub(crate) const REGISTER: u32 = 1;
pub(crate) const COMMIT_AND_FETCH: u32 = 2;

/// `FUSE_WRITE_CACHE`, of the flags of a write: it comes from the page cache.
pub(crate) const WRITE_CACHE: u32 = 1;

/// Where the parts of `fuse_uring_req_header` begin, in bytes, and how long it is.
pub(crate) const IN_OUT_OFFSET: usize = 0;
pub(crate) const OPERATION_OFFSET: usize = 128;
pub(crate) const RING_OFFSET: usize = 256;
pub(crate) const HEADER_BYTES: usize = RING_OFFSET + size_of::<RingInOut>();

macro_rules! structures {
    ($($(#[$attribute:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }
    )* };
}

structures! {
    InHeader {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32,
        total_extlen: u16, padding: u16,
    }
    OutHeader { len: u32, error: i32, unique: u64 }
    /// `fuse_uring_ent_in_out`.
    RingInOut { flags: u64, commit_id: u64, payload_sz: u32, padding: u32, reserved: u64 }
    /// `fuse_uring_cmd_req`, in the command area of a submission.
    RingCommand { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6] }

    SetAttrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64,
        ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32,
        uid: u32, gid: u32, unused5: u32,
    }
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn { mode: u32, umask: u32 }
    RenameIn { newdir: u64 }
    Rename2In { newdir: u64, flags: u32, padding: u32 }
    LinkIn { oldnodeid: u64 }
    ForgetIn { nlookup: u64 }
    /// Before as many of the next.
    BatchForgetIn { count: u32, dummy: u32 }
    ForgetOne { nodeid: u64, nlookup: u64 }
    OpenIn { flags: u32, open_flags: u32 }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    /// `fuse_read_in` and `fuse_write_in`.
    TransferIn {
        fh: u64, offset: u64, size: u32, transfer_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    }
    /// What `fuse_release_in`, `fuse_flush_in` and `fuse_fsync_in` begin with.
    HandleIn { fh: u64 }
    /// What both versions of `fuse_setxattr_in` begin with.
    SetXattrIn { size: u32, flags: u32 }
    GetXattrIn { size: u32, padding: u32 }
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32 }
    CopyFileRangeIn {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }

    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32,
        mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32,
        blksize: u32, flags: u32,
    }
    AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    EntryOut {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32,
        attr_valid_nsec: u32, attr: Attr,
    }
    OpenOut { fh: u64, open_flags: u32, backing_id: u32 }
    CreateOut { entry: EntryOut, open: OpenOut }
    WriteOut { size: u32, padding: u32 }
    StatfsOut {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32,
        frsize: u32, padding: u32, spare: [u32; 6],
    }
    GetXattrOut { size: u32, padding: u32 }
    LseekOut { offset: u64 }
    /// Without the name.
    Dirent { ino: u64, off: u64, namelen: u32, kind: u32 }
}

/// `FATTR_*`.
pub(crate) mod set {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    /// By a handle.
    pub(crate) const HANDLE: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
}

/// `enum fuse_opcode`.
pub(crate) mod opcode {
    macro_rules! opcodes {
        ($($name:ident = $value:literal),* $(,)?) => {
            $(pub(crate) const $name: u32 = $value;)*
        };
    }
    opcodes! {
        LOOKUP = 1, FORGET = 2, GETATTR = 3, SETATTR = 4, READLINK = 5, SYMLINK = 6, MKNOD = 8, MKDIR = 9,
        UNLINK = 10, RMDIR = 11, RENAME = 12, LINK = 13, OPEN = 14, READ = 15, WRITE = 16,
        STATFS = 17, RELEASE = 18, FSYNC = 20, SETXATTR = 21, GETXATTR = 22, LISTXATTR = 23,
        REMOVEXATTR = 24, FLUSH = 25, OPENDIR = 27, READDIR = 28, FSYNCDIR = 30, CREATE = 35,
        DESTROY = 38, IOCTL = 39, NOTIFY_REPLY = 41, BATCH_FORGET = 42, FALLOCATE = 43, READDIRPLUS = 44, RENAME2 = 45, LSEEK = 46,
        COPY_FILE_RANGE = 47,
    }
}

impl From<&Attributes> for Attr {
    fn from(from: &Attributes) -> Attr {
        Attr {
            ino: from.inode.0,
            size: from.size,
            blocks: from.blocks,
            atime: from.atime.seconds.cast_unsigned(),
            mtime: from.mtime.seconds.cast_unsigned(),
            ctime: from.ctime.seconds.cast_unsigned(),
            atimensec: from.atime.nanoseconds,
            mtimensec: from.mtime.nanoseconds,
            ctimensec: from.ctime.nanoseconds,
            mode: from.file_type | u32::from(from.mode),
            nlink: from.links,
            uid: from.uid,
            gid: from.gid,
            rdev: from.device,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// The sizes that the kernel copies (`include/uapi/linux/fuse.h`).
const _: () = {
    assert!(HEADER_BYTES == 288);
    assert!(size_of::<InHeader>() == 40 && size_of::<OutHeader>() == 16);
    assert!(size_of::<RingCommand>() == 24 && size_of::<SetAttrIn>() == 88);
    assert!(size_of::<TransferIn>() == 40 && size_of::<CopyFileRangeIn>() == 56);
    assert!(size_of::<Attr>() == 88 && size_of::<AttrOut>() == 104);
    assert!(size_of::<EntryOut>() == 128 && size_of::<CreateOut>() == 144);
    assert!(size_of::<StatfsOut>() == 80 && size_of::<Dirent>() == 24);
};

//! What the callbacks share: counting, errors, replies, and opens that the kernel serves.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use fuser::{
    Errno, FileHandle, FopenFlags, Generation, INodeNo, Notifier, OpenFlags, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyXattr, Request,
};

use super::convert::{absent, attributes, errno, inode, ttl};
use super::linger::Linger;
use super::mount::Passthrough;
use super::passthrough::{Backings, trial};
use crate::fs::{
    Caching, Caller, FileSystem, Found, FsError, IoMode, Lookup, Opened, OpenedBy, Place,
};
use crate::observe::Operation;
use crate::store::record::InodeId;

/// What the callbacks share with the threads that run their slow operations.
pub(super) struct Shared {
    pub(super) fs: Arc<FileSystem>,
    pub(super) backings: Backings,
    passthrough: Passthrough,
    /// Set as soon as there is a session.
    pub(super) notifier: OnceLock<Notifier>,
    pub(super) linger: Linger,
}

impl Shared {
    pub(super) fn new(fs: Arc<FileSystem>, passthrough: Passthrough) -> Shared {
        let (backings, linger) = (Backings::default(), Linger::new(Arc::clone(&fs)));
        Shared { fs, backings, passthrough, notifier: OnceLock::new(), linger }
    }

    /// Runs an operation, counts it, and logs what the caller cannot mend.
    pub(super) fn call<T>(
        &self, operation: Operation, act: impl FnOnce(&FileSystem) -> Result<T, FsError>,
    ) -> Result<T, Errno> {
        let start = Instant::now();
        let outcome = act(&self.fs);
        self.fs.observer().request(operation, outcome.is_ok(), start.elapsed());
        outcome.map_err(|error| {
            if error.is_internal() {
                log::error!("{operation:?}: {error}");
            }
            errno(&error)
        })
    }

    pub(super) fn answer_lookup(&self, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.call(Operation::Lookup, |fs| fs.lookup(inode(parent), name.as_bytes())) {
            Ok(Lookup::Found(found)) => Shared::reply_entry(reply, Ok(found)),
            Ok(Lookup::Absent { stable: true }) => {
                reply.entry(&ttl(true), &absent(), Generation(0));
            }
            Ok(Lookup::Absent { stable: false }) => reply.error(Errno::ENOENT),
            Err(error) => reply.error(error),
        }
    }

    pub(super) fn reply_entry(reply: ReplyEntry, outcome: Result<Found, Errno>) {
        match outcome {
            Ok(found) => reply.entry_with_ttls(
                &ttl(found.attributes.is_at_rest),
                &ttl(found.name_is_stable),
                &attributes(&found.attributes),
                Generation(0),
            ),
            Err(error) => reply.error(error),
        }
    }

    pub(super) fn reply_empty(reply: ReplyEmpty, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    /// Flags of an open that the daemon serves: rows and views are never cached.
    pub(super) fn served_flags(opened: &Opened) -> FopenFlags {
        match opened.caching {
            Caching::Never => FopenFlags::FOPEN_DIRECT_IO,
            Caching::Kept => FopenFlags::FOPEN_KEEP_CACHE,
            Caching::Anew => FopenFlags::empty(),
        }
    }

    pub(super) fn mode(
        &self,
        register: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> std::io::Result<fuser::BackingId>,
    ) {
        self.fs.io_mode(|| match self.passthrough {
            Passthrough::Auto => trial(self.fs.store(), register),
            Passthrough::Off => IoMode::Served("turned off by option".to_owned()),
        });
    }

    /// Reads and answers. The buffer is used again: memory from the system would cost more than what
    /// is put into it.
    pub(super) fn answer_read(
        &self, handle: FileHandle, (offset, length): (u64, u32), reply: ReplyData,
    ) {
        thread_local! {
            static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        BUFFER.with_borrow_mut(|buffer| {
            let length = length as usize;
            if buffer.len() < length {
                buffer.resize(length, 0);
            }
            let buffer = &mut buffer[..length];
            match self.call(Operation::Read, |fs| fs.read(handle.0, offset, buffer)) {
                Ok(count) => reply.data(&buffer[..count]),
                Err(error) => reply.error(error),
            }
        });
    }

    /// Opens a page whose backing file is still registered.
    pub(super) fn open_held(&self, number: InodeId) -> Option<(u64, Arc<fuser::BackingId>)> {
        let id = self.backings.attach_held(number)?;
        let start = Instant::now();
        if let Ok(Some(handle)) = self.fs.open_held(number) {
            let observer = self.fs.observer();
            observer.request(Operation::Open, true, start.elapsed());
            return Some((handle, id));
        }
        self.backings.detach(number);
        self.backings.let_go(number);
        None
    }

    /// Opens a file and answers.
    pub(super) fn answer_open(&self, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = match self.call(Operation::Open, |fs| fs.open_file(inode(number), flags.0)) {
            Ok(opened) => opened,
            Err(error) => return reply.error(error),
        };
        let handle = FileHandle(opened.handle);
        let quiet = quiet(&opened);
        match &opened.by {
            OpenedBy::Daemon => reply.opened(handle, Self::served_flags(&opened) | quiet),
            OpenedBy::Kernel { file } => {
                let register = || match file.descriptor() {
                    Some(descriptor) => reply.open_backing(descriptor),
                    None => Err(std::io::ErrorKind::Unsupported.into()),
                };
                match self.backings.attach(inode(number), opened.is_sealed, register) {
                    Ok(id) => reply.opened_passthrough(handle, quiet, &id),
                    Err(error) => reply.error(self.undo_open(opened.handle, &error)),
                }
            }
        }
    }

    pub(super) fn undo_open(&self, handle: u64, error: &std::io::Error) -> Errno {
        log::error!("the kernel did not take a backing file: {error}");
        if let Err(error) = self.fs.release(handle) {
            log::error!("undoing an open: {error}");
        }
        Errno::EIO
    }
}

pub(super) fn place(parent: INodeNo, name: &OsStr) -> Place {
    Place { parent: inode(parent), name: name.as_bytes().to_vec() }
}

pub(super) fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

pub(super) fn permissions(mode: u32) -> u16 {
    u16::try_from(mode & 0o7777).unwrap_or(0)
}

/// The flag that spares the FLUSH.
pub(super) fn quiet(opened: &Opened) -> FopenFlags {
    if opened.closes_quietly { FopenFlags::FOPEN_NOFLUSH } else { FopenFlags::empty() }
}

/// Opened for reading, and nothing is cut off.
pub(super) fn is_reader(flags: OpenFlags) -> bool {
    flags.0 & (libc::O_ACCMODE | libc::O_TRUNC) == libc::O_RDONLY
}

/// getxattr and listxattr answer the size when asked with a buffer of none.
pub(super) fn reply_attribute(reply: ReplyXattr, size: u32, outcome: Result<Vec<u8>, Errno>) {
    match outcome {
        Err(error) => reply.error(error),
        Ok(value) if size == 0 => reply.size(u32::try_from(value.len()).unwrap_or(u32::MAX)),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
    }
}

/// The kernel fixes the root's number.
const _: () = assert!(InodeId::ROOT.0 == 1);

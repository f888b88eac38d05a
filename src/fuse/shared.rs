//! What the callbacks share: counting, errors, replies, and opens that the kernel serves.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam_channel::Sender;
use fuser::{
    Errno, FopenFlags, Generation, INodeNo, Notifier, ReplyEmpty, ReplyEntry, ReplyXattr, Request,
};

use super::convert::{attributes, errno, inode, ttl};
use super::linger::Linger;
use super::mount::Passthrough;
use super::passthrough::{Backings, trial};
use crate::fs::{Caller, FileSystem, Found, FsError, IoMode, Opened, Place};
use crate::observe::Operation;
use crate::store::record::InodeId;

/// What the callbacks share.
pub(super) struct Callbacks {
    pub(super) fs: Arc<FileSystem>,
    pub(super) backings: Backings,
    passthrough: Passthrough,
    /// Set as soon as there is a session.
    pub(super) notifier: Arc<OnceLock<Notifier>>,
    pub(super) linger: Arc<Linger>,
    /// Dropped with the callbacks, which tells that the mount is gone.
    _served: Sender<()>,
}

impl Callbacks {
    pub(super) fn new(
        fs: Arc<FileSystem>, passthrough: Passthrough, notifier: Arc<OnceLock<Notifier>>,
        linger: Arc<Linger>, served: Sender<()>,
    ) -> Callbacks {
        Callbacks {
            fs,
            backings: Backings::default(),
            passthrough,
            notifier,
            linger,
            _served: served,
        }
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

    pub(super) fn reply_entry(reply: ReplyEntry, outcome: Result<Found, Errno>) {
        match outcome {
            Ok(found) => reply.entry_with_ttls(
                &ttl(found.name_is_stable),
                &ttl(found.attributes.is_at_rest),
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
        if opened.is_append { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::FOPEN_KEEP_CACHE }
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

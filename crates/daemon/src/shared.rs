//! What operations share: counting, errors, and files that the kernel reads and writes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use fuser::{Errno, FopenFlags};

use super::convert::errno;
use super::held::Held;
use super::late::{Late, take_queued};
use super::linger::Linger;
use super::mount::{MountOptions, Passthrough};
use super::notify::Notifier;
use super::passthrough::{Backing, Backings, trial};
use kvfs_fs::{Caching, FileSystem, FsError, IoMode, Opened, Subject};
use kvfs_observe::Operation;
use kvfs_storage::store::disk::DiskFile;
use kvfs_storage::store::record::InodeId;

/// What operations share with the threads that run the slow ones.
pub(super) struct Shared {
    pub(super) fs: Arc<FileSystem>,
    pub(super) backings: Backings,
    passthrough: Passthrough,
    /// Clients may change nothing.
    pub(super) is_read_only: bool,
    /// The connection to the kernel; set before the first request.
    device: OnceLock<Arc<OwnedFd>>,
    /// Set before the first request.
    pub(super) notifier: OnceLock<Notifier>,
    pub(super) linger: Linger,
    late: Late,
}

impl Shared {
    pub(super) fn new(fs: Arc<FileSystem>, options: &MountOptions) -> Shared {
        let (passthrough, is_read_only) = (options.passthrough, options.read_only);
        let (backings, linger) = (Backings::default(), Linger::new(Arc::clone(&fs)));
        let (device, notifier) = (OnceLock::new(), OnceLock::new());
        let late = Late::default();
        Shared { fs, backings, passthrough, is_read_only, device, notifier, linger, late }
    }

    /// Takes the connection to the kernel.
    pub(super) fn connect(&self, device: &Arc<OwnedFd>) {
        let _ = self.device.set(Arc::clone(device));
        let _ = self.notifier.set(Notifier::new(Arc::clone(device)));
        self.linger.watch(Arc::clone(device));
    }

    /// Runs an operation, counts it, and logs what the caller cannot mend.
    pub(super) fn call<T>(
        &self, operation: Operation, subject: Subject<'_>,
        act: impl FnOnce(&FileSystem) -> Result<T, FsError>,
    ) -> Result<T, Errno> {
        let (queued, start) = (take_queued(), Instant::now());
        let outcome = act(&self.fs);
        let served = start.elapsed();
        self.fs.observer().request(operation, outcome.is_ok(), queued + served);
        self.late.note(&self.fs, operation, subject, (queued, served));
        outcome.map_err(|error| {
            if error.is_internal() {
                log::error!("{}: {error}", operation.name());
            }
            errno(&error)
        })
    }

    /// To be held while a request is served on the thread that took it.
    pub(super) fn held(&self, operation: Operation) -> Held<'_> {
        Held::begin(self.fs.observer(), operation)
    }

    /// Flags of an open that the daemon serves: rows and views are never cached.
    pub(super) fn served_flags(opened: &Opened) -> FopenFlags {
        match opened.caching {
            Caching::Never => FopenFlags::FOPEN_DIRECT_IO,
            Caching::Kept => FopenFlags::FOPEN_KEEP_CACHE,
            Caching::Anew => FopenFlags::empty(),
        }
    }

    /// Finds out, once, who moves the bytes of files.
    pub(super) fn decide_io_mode(&self) {
        self.fs.io_mode(|| match self.passthrough {
            Passthrough::Auto => trial(self.fs.store(), |file| self.register(file)),
            Passthrough::Off => IoMode::Served("turned off by option".to_owned()),
        });
    }

    /// Hands a file to the kernel.
    pub(super) fn register(&self, file: &dyn DiskFile) -> io::Result<Backing> {
        let device = self.device.get().ok_or(io::ErrorKind::NotConnected)?;
        let descriptor = file.descriptor().ok_or(io::ErrorKind::Unsupported)?;
        Backing::register(device, descriptor)
    }

    pub(super) fn undo_open(&self, handle: u64, error: &io::Error) -> Errno {
        log::error!("the kernel did not take a backing file: {error}");
        self.take_back(None, handle);
        Errno::EIO
    }

    /// Closes what was opened and cannot be handed out, and lets go of the backing file of an inode.
    pub(super) fn take_back(&self, backed: Option<InodeId>, handle: u64) {
        if let Some(inode) = backed.filter(|_| self.fs.core.is_backed(handle)) {
            self.backings.detach(inode);
        }
        if let Err(error) = self.fs.release(handle) {
            log::error!("undoing an open: {error}");
        }
    }
}

/// The flag that spares the FLUSH.
pub(super) fn quiet(opened: &Opened) -> FopenFlags {
    if opened.closes_quietly { FopenFlags::FOPEN_NOFLUSH } else { FopenFlags::empty() }
}

/// Opened for reading, and nothing is cut off.
pub(super) fn is_reader(flags: i32) -> bool {
    flags & (libc::O_ACCMODE | libc::O_TRUNC) == libc::O_RDONLY
}

/// The kernel fixes the root's number.
const _: () = assert!(InodeId::ROOT.0 == 1);

//! What the kernel is to forget.
//!
//! It is told from a thread of its own, since the kernel may hold the very directory locked until a running
//! request is answered; and nothing is told that waits for such a lock (`FUSE_NOTIFY_INVAL_ENTRY` does): a daemon
//! that is killed meanwhile would never end.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Receiver, Select, TryRecvError};
use nix::errno::Errno;
use zerocopy::{Immutable, IntoBytes};

use kvfs_fs::Invalidation;
use kvfs_storage::store::record::InodeId;

/// Kinds of notifications, of include/uapi/linux/fuse.h.
const INVALIDATE_INODE: u32 = 2;
const RETRIEVE: u32 = 5;
const RESEND: u32 = 7;
const BEGIN_EPOCH: u32 = 8;
const PRUNE: u32 = 9;

/// `struct fuse_out_header`, with the kind of a notification in place of an error.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Header {
    length: u32,
    kind: u32,
    request: u64,
}

/// `struct fuse_notify_inval_inode_out`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct InvalidateInode {
    header: Header,
    inode: u64,
    offset: i64,
    length: i64,
}

/// `struct fuse_notify_prune_out`, and the numbers of as many inodes as that says.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct PruneOne {
    header: Header,
    count: u32,
    padding: u32,
    spare: u64,
    inode: u64,
}

/// `struct fuse_notify_retrieve_out`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Retrieve {
    header: Header,
    unique: u64,
    inode: u64,
    offset: u64,
    size: u32,
    padding: u32,
}

impl Header {
    /// The header of a message of type `T`.
    fn new<T>(kind: u32) -> Header {
        Header { length: u32::try_from(size_of::<T>()).unwrap_or(u32::MAX), kind, request: 0 }
    }
}

const _: () = assert!(
    size_of::<InvalidateInode>() == 40
        && size_of::<PruneOne>() == 40
        && size_of::<Retrieve>() == 48
);

/// Asks the kernel for none of the cached bytes of a regular file that it knows, which it gives in a request of this number.
pub(super) fn retrieve_nothing(device: &OwnedFd, inode: InodeId, unique: u64) -> nix::Result<()> {
    let header = Header::new::<Retrieve>(RETRIEVE);
    let message = Retrieve { header, unique, inode: inode.0, offset: 0, size: 0, padding: 0 };
    nix::unistd::write(device, message.as_bytes()).map(drop)
}

/// Tells the kernel of a mount what to forget.
#[derive(Clone, Debug)]
pub(super) struct Notifier {
    device: Arc<OwnedFd>,
    /// Held from the moment at which something is taken that the kernel is to forget until it is told.
    telling: Arc<Mutex<()>>,
}

impl Notifier {
    /// Of the mount that `device` is the connection of.
    pub(super) fn new(device: Arc<OwnedFd>) -> Notifier {
        Notifier { device, telling: Arc::default() }
    }

    /// What waits to be told waits until this is dropped.
    pub(super) fn hold(&self) -> MutexGuard<'_, ()> {
        self.telling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the kernel ask for the attributes of an inode anew. Its cached bytes stay (the negative offset), and so no
    /// lock is taken that the kernel holds while it waits for an answer. ENOENT: it does not know the inode.
    pub(super) fn forget_attributes(&self, inode: InodeId) -> nix::Result<()> {
        let header = Header::new::<InvalidateInode>(INVALIDATE_INODE);
        self.tell(&InvalidateInode { header, inode: inode.0, offset: -1, length: 0 })
    }

    /// The same for a directory, whose cached listing goes as well: the time of its last change may be that of a name which is
    /// lost, and then the listing would count as the one of now. The kernel locks pages of listings for no request.
    pub(super) fn forget_listing(&self, directory: InodeId) -> nix::Result<()> {
        let header = Header::new::<InvalidateInode>(INVALIDATE_INODE);
        self.tell(&InvalidateInode { header, inode: directory.0, offset: 0, length: 0 })
    }

    /// Has the kernel drop the names of an inode that nobody uses at the moment, and with them the inode. Linux knows
    /// that since 6.18 (EINVAL before), and it takes no lock of an inode.
    fn prune(&self, inode: InodeId) -> nix::Result<()> {
        let header = Header::new::<PruneOne>(PRUNE);
        self.tell(&PruneOne { header, count: 1, padding: 0, spare: 0, inode: inode.0 })
    }

    /// Has the kernel look up anew each name that it knows (`FUSE_NOTIFY_INC_EPOCH`, since Linux 6.16; EINVAL before).
    pub(super) fn forget_all_names(&self) -> nix::Result<()> {
        self.tell(&Header::new::<Header>(BEGIN_EPOCH))
    }

    /// Has the kernel send all requests again that were read and not answered (since Linux 6.9). What is being worked on is
    /// done twice, so nobody may have one in hand.
    pub(super) fn resend(&self) -> nix::Result<()> {
        self.tell(&Header::new::<Header>(RESEND))
    }

    fn tell(&self, message: &(impl IntoBytes + Immutable)) -> nix::Result<()> {
        nix::unistd::write(&self.device, message.as_bytes()).map(drop)
    }
}

/// Tells the kernel, until `stopped` is closed.
pub(super) fn notify(
    notifier: &Notifier, invalidations: &Receiver<Invalidation>, stopped: &Receiver<()>,
) {
    let mut can_prune = true;
    let mut either = Select::new();
    let end = either.recv(stopped);
    either.recv(invalidations);
    loop {
        if either.ready() == end {
            return;
        }
        let _telling = notifier.hold();
        let what = match invalidations.try_recv() {
            Ok(what) => what,
            Err(TryRecvError::Empty) => continue,
            Err(TryRecvError::Disconnected) => return,
        };
        let (Invalidation::Inode(inode) | Invalidation::Names(inode)) = what;
        match notifier.forget_attributes(inode) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => log::debug!("the kernel did not take an invalidation: {error}"),
        }
        if can_prune && matches!(what, Invalidation::Names(_)) {
            can_prune = notifier.prune(inode) != Err(Errno::EINVAL);
        }
    }
}

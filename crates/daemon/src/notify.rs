//! What the kernel is to forget.
//!
//! It is told from a thread of its own, since the kernel may hold the very directory locked until a running
//! request is answered; and nothing is told that waits for such a lock (`FUSE_NOTIFY_INVAL_ENTRY` does): a daemon
//! that is killed meanwhile would never end.

use std::os::fd::OwnedFd;

use crossbeam_channel::{Receiver, select};
use fuser::{INodeNo, Notifier};
use nix::errno::Errno;
use zerocopy::{Immutable, IntoBytes};

use kvfs_fs::Invalidation;
use kvfs_storage::store::record::InodeId;

/// `FUSE_NOTIFY_PRUNE` of include/uapi/linux/fuse.h.
const PRUNE: u32 = 9;

/// `struct fuse_out_header`, with the kind of a notification in place of an error; `struct fuse_notify_prune_out`;
/// the numbers of as many inodes as that says.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct PruneOne {
    length: u32,
    kind: u32,
    request: u64,
    count: u32,
    padding: u32,
    spare: u64,
    inode: u64,
}

impl PruneOne {
    const BYTES: u32 = 40;
}

const _: () = assert!(size_of::<PruneOne>() == PruneOne::BYTES as usize);

/// Tells the kernel, until `stopped` is closed.
pub(super) fn notify(
    (notifier, device): (&Notifier, &OwnedFd), invalidations: &Receiver<Invalidation>,
    stopped: &Receiver<()>,
) {
    let mut can_prune = true;
    loop {
        let what = select! {
            recv(stopped) -> _ => return,
            recv(invalidations) -> what => what,
        };
        let Ok(what) = what else { return };
        let (Invalidation::Inode(inode) | Invalidation::Names(inode)) = what;
        // Attributes, and not cached bytes (offset -1).
        if let Err(error) = notifier.inval_inode(INodeNo(inode.0), -1, 0) {
            log::debug!("the kernel did not take an invalidation: {error}");
        }
        if can_prune && matches!(what, Invalidation::Names(_)) {
            can_prune = prune(device, inode) != Err(Errno::EINVAL);
        }
    }
}

/// Has the kernel drop the names of an inode that nobody uses at the moment, and with them the inode. Linux knows
/// that since 6.18 (EINVAL before), and it takes no lock of an inode.
fn prune(device: &OwnedFd, inode: InodeId) -> nix::Result<()> {
    let message = PruneOne {
        length: PruneOne::BYTES,
        kind: PRUNE,
        request: 0,
        count: 1,
        padding: 0,
        spare: 0,
        inode: inode.0,
    };
    nix::unistd::write(device, message.as_bytes()).map(drop)
}

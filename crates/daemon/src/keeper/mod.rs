//! A mount that stays when its daemon dies.
//!
//! A *keeper* is a process of one thread that has what a mount lives by: the connection to the kernel, which ends with its last
//! descriptor, the lock of the store, and memory in which the daemon tells what nobody else would know when it is
//! gone. It is the parent of the daemon. When that is killed, the keeper starts its program once more, as
//! `kvfs take-over`, and requests that the dead one had in hand are sent again by the kernel (`FUSE_NOTIFY_RESEND`). So
//! requests wait instead of failing. What no commit had written is lost, as it is whenever a daemon dies:
//! [`kvfs_fs`] tells those who want it to be durable.
//!
//! The daemon's half is [`Kept`], the keeper's [`Keeping`]. A message of the daemon has all that the keeper needs, which
//! understands none of it: so it goes on whatever version the daemon is exchanged for.

mod arming;
mod keeping;
mod kept;

pub(crate) use arming::Arming;
pub use keeping::{Keeping, Side, split};
pub use kept::Kept;

use std::os::fd::RawFd;

/// A daemon says with what another one would go on.
const ARM: u8 = b'A';
/// The mount answers.
const READY: u8 = b'R';
/// The mount has ended, and nothing of it is to be kept; answered with the same.
const END: u8 = b'E';

/// The number of the first descriptor that a daemon finds which the keeper has started. There they stand in the order of
/// the message.
const FIRST: RawFd = 600;

/// What a message brings. A keeper starts the program at its place, and knows nothing of the others.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// What the daemon has left, which names the others.
    Left,
    Program,
    Device,
    Lock,
    Touched,
    Backings,
}

impl Place {
    const COUNT: usize = Place::Backings as usize + 1;
    /// The number that the connection to the keeper has in the next daemon.
    const CONNECTION: RawFd = FIRST + Place::Backings as RawFd + 1;

    /// The number that it has in the next daemon.
    fn number(self) -> RawFd {
        FIRST + self as RawFd
    }
}

//! How a daemon was started, and the descriptors that it leaves behind.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use kvfs_storage::store::record::InodeId;

/// What the next daemon must be told to be the same mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The program, where whoever installs a newer one puts it.
    pub program: PathBuf,
    /// With what it was called, its name first.
    pub arguments: Vec<std::ffi::OsString>,
    /// Where it was called.
    pub directory: PathBuf,
    /// The store, as it was found then.
    pub store: PathBuf,
    /// The mountpoint, in the same way: nobody may look for it while requests wait.
    pub mountpoint: PathBuf,
    /// Settings that were changed since, `KEY=VALUE` on a line each.
    pub settings: String,
    /// All settings, as `.kvfs/config` tells them: the next daemon must come to the same.
    pub configuration: String,
    /// What the daemon may do, a bit for each capability; the next one needs them all.
    pub capabilities: u64,
}

/// Numbers of descriptors that stay open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptors {
    /// The connection to the kernel.
    pub device: i32,
    /// The file that locks the store.
    pub lock: i32,
    /// How long a request may be, as was settled with the kernel.
    pub request_bytes_max: u32,
    /// Where requests come from if not from the device.
    pub rings: Option<LiveRings>,
    /// Why they come from the device otherwise.
    pub no_rings: String,
    /// The connection to the keeper, if the mount has one.
    pub keeper: Option<i32>,
}

/// What a daemon has told in memory that outlived it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Death {
    /// Daemons of the mount that have died, this one included.
    pub deaths: u64,
    /// The descriptor of what was not durable.
    pub touched: i32,
    /// That of the backing files that the kernel had.
    pub backings: i32,
}

/// Slots of rings. The kernel knows where each lies, so there they must lie again before one is given back to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRings {
    /// The descriptor of the file in memory that is mapped.
    pub memory: i32,
    /// Where its first byte lies.
    pub address: u64,
    /// All of them, in their order in memory.
    pub slots: Vec<LiveSlot>,
    /// Requests that the kernel was asked for so far, whose numbers may not come again.
    pub retrieved: u64,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveSlot {
    /// The queue of the kernel that it serves.
    pub queue: u16,
    /// It holds a request, which nobody has begun. Otherwise the kernel has given it back, or does so with the program.
    pub is_holding: bool,
}

/// A backing file that the kernel has registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveBacking {
    /// Whose.
    pub inode: InodeId,
    /// The kernel's number for it.
    pub id: u32,
    /// Opens that use it.
    pub count: u32,
    /// Its bytes do not change.
    pub is_sealed: bool,
    /// When the last open ended, counted in closes.
    pub idle_since: Option<u64>,
    /// The file itself: its device, and its number there.
    pub file: (u64, u64),
    /// What stands for opens that a daemon has left which died.
    pub left: Option<LeftOpen>,
}

/// Opens of which nothing is known but that there were some. They last until the kernel forgets the inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeftOpen {
    /// This handle stands for them.
    Held(u64),
    /// The file is none that the inode has: it cannot be opened as long as they last.
    Lost,
}

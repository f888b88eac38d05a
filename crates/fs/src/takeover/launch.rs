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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptors {
    /// The connection to the kernel.
    pub device: i32,
    /// The file that locks the store.
    pub lock: i32,
    /// How long a request may be, as was settled with the kernel.
    pub request_bytes_max: u32,
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
}

//! The kernel's side: decodes FUSE requests, makes one call into [`crate::fs`], replies.
//!
//! fuser is pinned and stays behind this module.

mod background;
mod callbacks;
mod convert;
mod dispatch;
mod linger;
mod mount;
mod passthrough;
mod shared;
mod slow;

pub use mount::{MountError, MountOptions, Passthrough, RemoteOptions, default_threads, serve};

//! The kernel's side: decodes FUSE requests, makes one call into [`kvfs_fs`], replies.
//!
//! Requests come through the device or through rings; `protocol` takes them apart and writes answers for both, and
//! `operations` does not know which. fuser mounts and shakes hands; it is pinned and stays behind this module.

mod answer;
mod background;
mod complaint;
mod connection;
mod convert;
mod device;
mod dispatch;
mod exchange;
mod gate;
mod held;
mod hosts;
pub mod keeper;
mod late;
mod linger;
mod metrics_address;
mod metrics_connections;
mod metrics_endpoint;
mod metrics_response;
mod mount;
mod notify;
mod operations;
mod pace;
mod page;
mod passthrough;
mod protocol;
mod remote;
mod ring;
mod shared;
mod slow;
mod token;
mod told_backings;
mod turns;

pub use exchange::Ending;
pub use metrics_address::MetricsAddress;
pub use mount::{
    MountError, MountOptions, Passthrough, RemoteOptions, default_threads, go_on, serve,
};
pub use page::{Access, Look, Page};
pub use remote::NeedError;
pub use ring::{OPEN_FILES_MIN, is_enabled as rings_are_enabled};

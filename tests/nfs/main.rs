//! The remote on a real NFS mount whose server stops, is killed and comes back while files are moved:
//! nothing acknowledged is lost, nothing is there by halves, what is here does not notice, and what only
//! the remote has is an error in time.
//!
//! [`outages`] needs a kernel with an NFS client. Where this one has none, [`machine`] boots another in a
//! virtual machine and runs `outages` in there.
//!
//! | variable | |
//! |---|---|
//! | `KVFS_NFS_OUTAGES` | outages of any kind and length, besides one of each kind (0) |
//! | `KVFS_SEED` | which (1) |

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "what was done is part of the result")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
#[path = "../soak/content.rs"]
mod content;

mod guest;
mod load;
mod machine;
mod outages;

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

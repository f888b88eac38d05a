//! Objects and names on the local disk, and the tiers that their bytes move between.
//!
//! [`ingest`] proves that bytes are a page, [`store`] keeps it through a crash, [`tier`] knows in which of memory,
//! disk and remote its copies are. Nothing here knows what an operation of POSIX means.

#![forbid(unsafe_code)]

pub mod ingest;
pub mod store;
pub mod sync;
pub mod tier;

use kvfs_os as sys;
use kvfs_page as page;

//! Where the bytes behind the files are: memory, the local disk, a remote store.

pub mod copies;
pub mod counters;
pub mod encoded;
pub mod exchange;
pub mod ram;
pub mod rate;
pub mod replacement;
pub mod scan;
pub mod ssd;
pub mod stay;
pub mod what_if;
pub mod writes;

#[doc(inline)]
pub use kvfs_encoding as encoding;
#[doc(inline)]
pub use kvfs_encoding::content;
#[doc(inline)]
pub use kvfs_remote as remote;

// Not in `ram` itself: that is compiled once more, with other locks, by `tests/models`.
#[cfg(test)]
#[path = "ram/tests.rs"]
mod ram_tests;

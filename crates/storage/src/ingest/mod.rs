//! How bytes become pages: the manifest that says what a page is, and the proof that one is.
//!
//! Nothing here knows names or inodes; `kvfs-fs` decides when a page is sealed and under which
//! name it appears.

pub mod model;
pub mod seal;

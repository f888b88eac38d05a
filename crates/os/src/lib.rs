//! System calls that neither std nor nix wraps, the kernel's list of mounts, and work on several threads.
//!
//! The daemon's only `unsafe` code for the operating system stands here; what a page, a tier or a name is,
//! nothing here knows.

mod extended_attribute;
mod fuse;
mod inherit;
mod lease;
mod mapped_files;
mod mapping;
mod memory;
mod messages;
pub mod mountinfo;
mod open;
mod pieces;
mod privilege;
mod process;
mod side_by_side;
mod wake;
mod words;
mod writeback;

pub use extended_attribute::{
    copy_access_lists, copy_extended_attributes, extended_attribute, long_extended_attribute,
    remove_extended_attribute, set_extended_attribute,
};
pub use fuse::{close_backing, is_daemon_gone};
pub use inherit::{inherited, to_be_inherited};
pub use lease::{is_at_rest, is_unused};
pub use mapped_files::MappedFiles;
pub use mapping::{map_populated, map_private, populate};
pub use memory::{group_memory_bytes, memory_bytes};
pub use messages::{DESCRIPTORS_MAX, Message, connection, inherited_as, receive, send};
pub use open::{
    metadata_no_follow, open_beneath, open_directory_no_follow, open_no_follow,
    open_regular_no_follow, read_no_follow,
};
pub use pieces::{Piece, PieceFile};
pub use privilege::{effective_capabilities, is_as_privileged, own_capabilities};
pub use process::{Share, fork, open_files_max, refuse_large_files};
pub use side_by_side::{in_background, side_by_side, side_by_side_with};
pub use wake::Wakeable;
pub use words::SharedWords;
pub use writeback::begin_writeback;

//! The page: the unit that everything else stores, moves and reads.
//!
//! A page is a fixed number of tokens of one layer, K and V, in one safetensors file that never
//! changes once it is sealed. Every other module trusts what this one accepts, so each byte of a
//! page file is decided here: the geometry that a manifest allows, the header, the place in the
//! tree, and the checksum that binds the bytes to that place.
//!
//! Data flows through the files in this order:
//!
//! | file | question it answers |
//! |---|---|
//! | `limits` | how large may anything be, and why |
//! | `dtype`, `geometry` | how many bytes, in which shape |
//! | `manifest`, `layer_kind`, `identity` | which cache is this, what does each layer keep, and are two caches interchangeable |
//! | `names`, `classify` | which name is a page, a tail, a layer, and what a name means where it stands |
//! | `header`, `metadata` | is this file a page of that geometry |
//! | `checksum` | what are the bytes worth |
//! | `check`, `state` | may this file appear at this place |
//! | `view`, `decode`, `transpose` | read rows out, put rows in |
//! | `calendar` | which day is it, for people |
//!
//! Nothing here touches a file, a clock or a thread: bytes come in as slices or through a closure.

#![forbid(unsafe_code)]

pub mod batch;
pub mod block_map;
pub mod calendar;
mod check;
mod checksum;
pub mod classify;
mod decode;
mod dtype;
mod error;
mod geometry;
mod header;
mod identity;
mod layer_kind;
pub mod limits;
mod manifest;
mod metadata;
pub mod names;
mod positions;
mod prefix;
pub mod reader_report;
mod state;
mod transpose;
mod view;

pub use check::{PagePlace, VerifiedPage, VerifyError};
pub use checksum::{
    Checksum, ContentHasher, PageDigest, PageHasher, PageIdentity, ParseChecksumError,
    content_checksum,
};
pub use decode::row_f32;
pub use dtype::Dtype;
pub use error::PageError;
pub use error::{escaped, escaped_bytes, printable};
pub use geometry::{Geometry, GeometrySpec, Layout};
pub use header::{PageHeader, build_header};
pub use identity::ModelIdentity;
pub use layer_kind::{LayerKind, Needed, SideRows, StateShape, StateTensor};
pub use manifest::{KvRotation, Manifest, ManifestFields, Rope, Shard};
pub use metadata::{Declared, Metadata};
pub use positions::{MAX_POSITIONS_BYTES, Positions, Run};
pub use prefix::PrefixHash;
pub use state::{StateHeader, StatePlace, VerifiedState, pack_state};
pub use transpose::{pack_page, pack_rows, unpack_rows};
pub use view::{PageView, Strides};

use std::fmt;

/// Index of a layer, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layer(pub u32);

/// Position in the sequence of the first token of a page or tail, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenStart(pub u64);

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for TokenStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

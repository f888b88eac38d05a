//! The C interface, `include/kvfs.h`: attention over pages from any language.
//!
//! The header is made from this module (`cbindgen.toml`), so its documentation is written for
//! readers of C. What crosses the border is checked here and nowhere else: structures start with
//! their size and may grow (`memory`), a panic becomes a status (`status`), and numbers that
//! stand for choices are compared before they become one. Behind the border is
//! [`attention`](crate::attention), [`cuda`](crate::cuda), [`page`](crate::page),
//! [`reader`](crate::reader) and [`sequence`](crate::sequence), nothing of its own.
//!
//! | file | question it answers |
//! |---|---|
//! | `status`, `memory` | how a call fails, what callers may point to |
//! | `attention`, `block`, `options`, `partials` | attend to memory, merge results |
//! | `cuda`, `scan` | the same on a GPU, in the order of a stream; over sequences of a mount |
//! | `summaries` | which pages are worth reading there |
//! | `write_back` | how new K and V get from there to a mount |
//! | `rotation` | tokens that moved |
//! | `manifest`, `page` | attend to the files of a mount |
//! | `sequence` | remove, copy and move tokens of a mount |
//! | `batch` | many names of a directory at once |
//! | `hint` | what will not be needed any more |
//!
//! Cargo builds the library for Rust alone; `mount-scripts/build-c-library.sh` builds `libkvfs.so`
//! and `libkvfs.a`. As a crate type of every build the shared library would cost a second
//! compilation each time `cargo build` and `cargo test` take turns, since cargo gives it a name
//! without a hash.

#![allow(
    clippy::missing_safety_doc,
    reason = "the head of the header says once what callers promise for all functions"
)]

mod attention;
mod batch;
mod block;
mod cuda;
mod hint;
mod manifest;
mod memory;
mod options;
mod page;
mod partials;
mod rotation;
mod scan;
mod sequence;
mod status;
mod summaries;
mod write_back;

#[cfg(test)]
mod tests;

pub use attention::{
    Attention, AttentionConfig, Instructions, kvfs_attention_create, kvfs_attention_free,
    kvfs_attention_run,
};
pub use batch::{Named, kvfs_have_many, kvfs_read_many};
pub use block::{Block, DataType, Tensor, Values};
pub use cuda::{Cuda, CudaCall, CudaConfig, kvfs_cuda_create, kvfs_cuda_free, kvfs_cuda_run};
pub use hint::{Hint, kvfs_give_hint};
pub use manifest::{
    Geometry, Layer, LayerKind, Layout, Manifest, kvfs_manifest_create, kvfs_manifest_free,
    kvfs_manifest_geometry, kvfs_manifest_layer,
};
pub use options::{Causality, Options, Queries, TokenRange};
pub use page::{
    Side, kvfs_layer_tail_block, kvfs_page_block, kvfs_page_side, kvfs_page_verify,
    kvfs_tail_block, kvfs_tail_side,
};
pub use partials::{Partials, kvfs_partials_clear, kvfs_partials_finish, kvfs_partials_merge};
pub use rotation::{
    Pairing, Rotation, kvfs_rotation_free, kvfs_rotation_from_json, kvfs_rotation_from_manifest,
};
pub use scan::{
    CudaScan, Sequence, kvfs_cuda_scan_attend, kvfs_cuda_scan_begin, kvfs_cuda_scan_free,
    kvfs_cuda_scan_layer, kvfs_sequence_free, kvfs_sequence_open, kvfs_sequence_refresh,
    kvfs_sequence_tokens,
};
pub use sequence::{
    Run, SequenceEnds, Sequences, kvfs_seq_add, kvfs_seq_clear, kvfs_seq_cp, kvfs_seq_div,
    kvfs_seq_ends, kvfs_seq_keep, kvfs_seq_rm, kvfs_seq_runs, kvfs_seq_shift, kvfs_sequences_free,
    kvfs_sequences_open,
};
pub use status::{
    KVFS_ABI_VERSION, Status, kvfs_abi_version, kvfs_last_error, kvfs_last_error_block,
    kvfs_version,
};
pub use summaries::{
    CudaSummaries, PageBudget, PageSelection, kvfs_cuda_select_pages, kvfs_cuda_summaries_create,
    kvfs_cuda_summaries_free, kvfs_cuda_summarise,
};
pub use write_back::{
    WriteBack, kvfs_write_back_create, kvfs_write_back_flush, kvfs_write_back_free,
    kvfs_write_back_hold, kvfs_write_back_rows, kvfs_write_back_sync, kvfs_write_back_tokens,
};

//! The pages of a sequence, in memory when they are wanted.
//!
//! [`Sequence`] opens a directory `MOUNT/models/NAME/sequences/SEQUENCE`. A [`Stream`] goes through
//! its layers in order and hands out [`Run`]s of pages as blocks for
//! [`attention`](crate::attention), while threads load what comes next:
//!
//! ```no_run
//! use kvfs_runtime::attention::{Attention, Options, Queries, Shape};
//! use kvfs_runtime::reader::Sequence;
//!
//! let sequence = Sequence::open("/mnt/kv/models/llama/sequences/chat".as_ref())?;
//! let attention = Attention::new(Shape::new(40, 8, 128, 128)?, 2)?;
//! let end = sequence.valid_tokens()?;
//! let mut stream = sequence.stream(0..end)?;
//! while stream.layer().is_some() {
//!     let q = vec![0.0; 40 * 128]; // of this layer
//!     let queries = Queries { q: &q, positions: &[end - 1] };
//!     let _partials = stream.attend(&attention, &queries, &Options::default())?;
//! }
//! # Ok::<(), kvfs_runtime::reader::ReadError>(())
//! ```
//!
//! | file | question it answers |
//! |---|---|
//! | `listing` | which pages are there |
//! | `page`, `buffer` | how does one come into memory, and when is it mapped |
//! | `residents`, `memory` | which ones stay there |
//! | `layer_scan`, `loader`, `stream` | what is loaded next |
//! | `run`, `attend` | what is handed out, and how it is attended to |
//! | `tail` | the rows behind the pages |
//! | `follow` | what has another process written by now |
//! | `block` | what has an engine put into a file that it lays out itself |
//! | `prefix` | which sequence has the beginning of a prompt |
//! | `plan` | what will be read from where, and how long does it take |
//! | `counters` | what was read, and how the mount hears of it |
//!
//! What a sequence held when it was listed is what scans read. Appending rows to a tail is seen by
//! the next scan; for pages that were sealed, written or replaced since, [`Sequence::refresh`] it.
//! After the daemon's death the pages that are loaded stay as they are, and everything else is
//! [`ReadError::Disconnected`].

pub(crate) mod attend;
mod block;
mod buffer;
mod counters;
mod error;
mod follow;
pub(crate) mod layer_scan;
pub(crate) mod listing;
mod loader;
pub(crate) mod memory;
pub(crate) mod page;
mod plan;
mod prefix;
mod residents;
mod run;
mod sequence;
mod side;
mod stream;
mod tail;

#[cfg(test)]
mod tests;

pub use block::{Block, register_block, unregister_block};
pub use error::ReadError;
pub use kvfs_page::reader_report::{ATTRIBUTE, Counts, REPORT_BYTES_MAX};
pub use memory::limit_bytes;
pub use page::{LoadedPage, Mapping, Tier};
pub use plan::{Backend, Plan, Rates, TierBytes};
pub use prefix::{PrefixMatch, longest_prefix};
pub use residents::{Limits, Residents};
pub use run::Run;
pub use sequence::{Sequence, Settings};
pub use side::SideBlock;
pub use stream::Stream;
pub use tail::TailRows;

//! kvfs exposes the key-value cache of language models as files.
//!
//! The modules stand in the order in which the data flows: a [`page`] is the unit, [`ingest`]
//! proves that bytes are one, [`store`] keeps it, [`tier`] moves it, [`fs`] gives it a name,
//! [`fuse`] shows it to the kernel. `ARCHITECTURE.md` tells the way of a byte.
//!
//! An engine that writes page files itself needs only [`page`]:
//!
//! ```
//! use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, PagePlace, PageView, TokenStart, pack_page};
//!
//! // One layer, two key-value heads of 64, in f16.
//! let manifest = Manifest::new(ManifestFields::new("tiny", Dtype::F16, 1, 2, 64))?;
//! let place = PagePlace::new(&manifest, Layer(0), TokenStart(0))?;
//! // Four tokens: rows K[2, 64] then V[2, 64], two bytes each.
//! let rows = vec![0; 4 * (2 * 64 + 2 * 64) * 2];
//! let file = pack_page(&place, &rows, 4)?;
//! let page = PageView::parse(&file, place.geometry())?;
//! assert_eq!(page.tokens(), 4);
//! assert_eq!(page.k_row(1, 3).len(), 64 * 2);
//! # Ok::<(), kvfs::page::PageError>(())
//! ```

#[doc(inline)]
pub use kvfs_daemon as fuse;

#[doc(inline)]
pub use kvfs_fs as fs;

#[doc(inline)]
pub use kvfs_observe as observe;

#[doc(inline)]
pub use kvfs_page as page;

#[doc(inline)]
pub use kvfs_runtime::{attention, batch, cuda, hint, reader, sequence};

#[doc(inline)]
pub use kvfs_storage::{ingest, store, tier};

pub mod cli;

use kvfs_os as sys;

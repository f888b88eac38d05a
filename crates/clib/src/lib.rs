//! `libkvfs.so` and `libkvfs.a`: kvfs in the process of an engine that is not written in Rust.
//!
//! [`c`] is the interface of `include/kvfs.h`; [`ggml`] is a backend that an unmodified llama.cpp loads. Both call
//! [`kvfs_runtime`] and know nothing of the daemon. `mount-scripts/build-c-library.sh` builds the two files.

pub mod c;
pub mod ggml;

use kvfs_os as sys;
use kvfs_page as page;
use kvfs_runtime::{attention, batch, cuda, hint, reader, sequence};

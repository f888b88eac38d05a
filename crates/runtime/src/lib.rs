//! Attention over the pages of a mount, in the process that attends.
//!
//! A [`reader`] brings the pages of a sequence into memory, [`attention`] attends to them where they lie, [`cuda`]
//! does so on an NVIDIA GPU, and [`sequence`] copies, cuts and moves whole sequences. Nothing here knows the
//! daemon: all of it works on files below a directory, of a mount or of a copy of one.

pub mod attention;
pub mod batch;
pub mod cuda;
pub mod hint;
pub mod reader;
pub mod sequence;

use kvfs_os as sys;
use kvfs_page as page;

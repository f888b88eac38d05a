//! Attention on an NVIDIA GPU over pages that are far more than its memory.
//!
//! [`CudaAttention`] takes what [`Attention`](crate::attention::Attention) takes and gives the same
//! [`Partials`](crate::attention::Partials). Pages go from where they are mapped through pinned
//! buffers to the device while kernels attend to those before them.
//!
//! Without a driver or a GPU, or with options that the kernels do not know, the answer is a
//! [`CudaError`] that says so, and the caller attends on the CPU, as [`Runtime`] does. Nothing of CUDA is needed to build
//! or to run the program: the driver is looked for by name, and has the kernels compiled in
//! (`kernels/kernels.ptx.zst`).
//!
//! ```no_run
//! use kvfs_runtime::attention::{Options, Queries, Shape};
//! use kvfs_runtime::cuda::{CudaAttention, Settings};
//! use kvfs_runtime::reader::Sequence;
//!
//! let sequence = Sequence::open("/mnt/kv/models/llama/sequences/chat".as_ref())?;
//! // 8 GiB of the GPU's memory keep the last pages of each layer, the others pass through.
//! let settings = Settings { hot_bytes: 8 << 30, ..Settings::default() };
//! let mut cuda = CudaAttention::new(Shape::new(40, 8, 128, 128)?, settings)?;
//! let end = sequence.valid_tokens()?;
//! let mut scan = cuda.scan(&sequence, 0..end)?;
//! while scan.layer().is_some() {
//!     let q = vec![0.0; 40 * 128]; // of this layer
//!     let queries = Queries { q: &q, positions: &[end - 1] };
//!     let _partials = scan.attend(&queries, &Options::default())?;
//! }
//! # Ok::<(), kvfs_runtime::cuda::CudaError>(())
//! ```
//!
//! | file | question it answers |
//! |---|---|
//! | `driver` | how is the GPU spoken to |
//! | `arguments`, `kernels`, `launches` | which kernel, with what |
//! | `queries`, `rules`, `table` | what is attended to, and in which blocks |
//! | `layout`, `ring`, `registry` | how do K and V get to the device |
//! | `partials`, `on_stream` | how do the results come back, or stay on the device |
//! | `write_back` | how do new K and V get to the mount |
//! | `mass`, `selection` | which tokens are worth reading |
//! | `ceilings` | how fast could it be |
//! | `runtime` | what if there is no GPU |
//! | `scan`, `hot` | what of a sequence is on the device, and what comes next |

mod arguments;
mod attention;
mod ceilings;
mod driver;
mod error;
mod hot;
mod kernels;
mod launches;
mod layout;
mod mass;
mod on_stream;
mod partials;
mod queries;
mod registry;
mod ring;
mod rules;
mod runtime;
mod scan;
mod selection;
mod table;
mod write_back;

pub use attention::{CudaAttention, Settings};
pub use ceilings::{Ceilings, filling};
pub use driver::{CurrentContext, Properties};
pub use error::CudaError;
pub use on_stream::{DeviceQueries, DeviceResult};
pub use runtime::Runtime;
pub use scan::Scan;
pub use selection::DeviceSummaries;
pub use write_back::{DeviceRows, WriteBack};

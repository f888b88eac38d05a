//! Why something is not done on a GPU.

use std::fmt;
use std::path::PathBuf;

use crate::attention::AttentionError;
use crate::reader::ReadError;

/// One variant for each decision of the caller. Whatever happens, what is in a sequence on the mount
/// stays as it is.
#[derive(Debug)]
pub enum CudaError {
    /// There is no driver, no GPU, or one that is too old: attend on the CPU.
    Unavailable(String),
    /// The GPU is there, but not for this shape or these options: attend on the CPU.
    Unsupported(String),
    /// Less memory than asked for, even with the smallest buffers: free some, or attend on the CPU.
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much of it.
        bytes: usize,
    },
    /// The driver refused a call, or reports that a kernel failed. What was computed with this
    /// runtime is void and it stays unusable: drop it, and attend on the CPU.
    Device {
        /// The driver's function.
        call: &'static str,
        /// What it says.
        why: String,
    },
    /// Attention refused the arguments.
    Attention(AttentionError),
    /// A page could not be read.
    Read(ReadError),
    /// Rows could not be written to the mount. What is there stays as it is, and attention goes on;
    /// of the rows that were given since, none will be written: open the sequence anew.
    WriteBack {
        /// What they were to be written to.
        path: PathBuf,
        /// What went wrong.
        why: String,
    },
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(why) => write!(f, "cuda: {why}"),
            Self::Unsupported(what) => write!(f, "cuda: {what} is not supported"),
            Self::OutOfMemory { what, bytes } => {
                write!(f, "cuda: no {bytes} bytes of memory for {what}")
            }
            Self::Device { call, why } => write!(f, "cuda: {call}: {why}"),
            Self::Attention(error) => error.fmt(f),
            Self::Read(error) => error.fmt(f),
            Self::WriteBack { path, why } => {
                write!(f, "cuda: rows are not written to {}: {why}", path.display())
            }
        }
    }
}

impl std::error::Error for CudaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Attention(error) => Some(error),
            Self::Read(error) => Some(error),
            _ => None,
        }
    }
}

impl From<AttentionError> for CudaError {
    fn from(error: AttentionError) -> Self {
        match error {
            AttentionError::Unsupported(what) => Self::Unsupported(what),
            error => Self::Attention(error),
        }
    }
}

impl From<ReadError> for CudaError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

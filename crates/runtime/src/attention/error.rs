//! Why a call is refused.

use std::fmt;

/// Nothing was computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionError {
    /// Arguments that contradict each other or the shape: correct the call.
    Arguments(String),
    /// A block whose bytes do not hold what it says: leave it out, or read it again.
    Block {
        /// Index in the list.
        index: usize,
        /// What is wrong.
        why: String,
    },
    /// Right, but not something that this processor or program can do: use another backend.
    Unsupported(String),
}

impl fmt::Display for AttentionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arguments(why) => write!(f, "attention: {why}"),
            Self::Block { index, why } => write!(f, "attention: block {index}: {why}"),
            Self::Unsupported(what) => write!(f, "attention: {what} is not supported"),
        }
    }
}

impl std::error::Error for AttentionError {}

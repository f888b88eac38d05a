//! Why a file was not made of a sequence.

use std::io;
use std::path::Path;

use super::explain;
use crate::cli::output::Failure;

/// Which of the two is to blame.
pub(super) enum Unwritten {
    /// The sequence: a line about it.
    Source(String),
    /// The file, or what it lies on.
    Target(io::Error),
}

impl Unwritten {
    pub(super) fn explain(self, from: &Path, to: &Path) -> Failure {
        match self {
            Self::Source(why) => Failure::Failed(format!("{}: {why}", from.display())),
            Self::Target(error) => explain(to)(error),
        }
    }
}

impl From<String> for Unwritten {
    fn from(why: String) -> Self {
        Self::Source(why)
    }
}

impl From<io::Error> for Unwritten {
    fn from(error: io::Error) -> Self {
        Self::Target(error)
    }
}

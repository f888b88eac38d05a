//! `kvfs hint`: says what will become of a file, a sequence, a directory or a prefix, for the mount to choose what stays.

use std::ffi::CStr;
use std::io;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvfs_os::mountinfo;

use super::output::{Failure, Outcome, Report};
use crate::sys;

const HINT: &CStr = c"user.kvfs.hint";

const HINT_HELP: &str = "\
finished: nobody will go on with it. What only this path has leaves memory, and for the remote the disk, before everything \
else, until somebody opens it. Nothing is deleted. waiting takes that back, as an open does; more is not needed, since what nobody \
calls finished is kept by its uses anyway.

A hint holds for the files that are there when it is given, in no other mount, and not behind the end of this one.

Example: kvfs hint /mnt/kv/models/llama/sequences/chat-42 finished";

/// `kvfs hint`.
#[derive(Debug, Args)]
#[command(after_help = HINT_HELP)]
pub(crate) struct HintArguments {
    /// A file, a sequence, a directory, or a prefix (MODEL/prefixes/HH/HASH)
    pub path: PathBuf,
    /// What will become of it
    #[arg(value_enum)]
    pub hint: Hint,
}

/// What a client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Hint {
    /// Its user waits for something else, and will go on
    Waiting,
    /// Nobody will go on with it
    Finished,
}

/// Gives the hint.
pub(crate) fn run(arguments: &HintArguments) -> Outcome {
    let (_, path) = mountinfo::kvfs_above(&arguments.path).map_err(Failure::Failed)?;
    let word: &[u8] = match arguments.hint {
        Hint::Waiting => b"waiting",
        Hint::Finished => b"finished",
    };
    let told = sys::set_extended_attribute(&path, HINT, word);
    told.map_err(|error| Failure::Failed(format!("{}: {}", path.display(), explain(&error))))?;
    Ok(Report::default())
}

fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "only its owner and root may give hints, of a prefix those who own a sequence that begins with it".to_owned()
        }
        Some(libc::EAGAIN) => {
            "too many hints for directories are being carried out: try again in a moment".to_owned()
        }
        Some(libc::EOPNOTSUPP) => {
            "hints are for files, sequences, directories and prefixes (of this version of kvfs)".to_owned()
        }
        _ => error.to_string(),
    }
}

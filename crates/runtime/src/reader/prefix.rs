//! Which sequence of a model already has the beginning of a prompt.
//!
//! Programs in other languages do the same by hand: open `MODEL/prefixes/match` for reading and
//! writing, write the token ids (u32, little endian), read one line of JSON.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::ReadError;
use crate::page::names;

/// The longest prefix of a prompt that a sequence has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Tokens from the first that are the same and whose K and V are there in every layer. They
    /// may end in the middle of a page: its first rows do not depend on those behind them.
    pub tokens: u64,
    /// The directory of the sequence; `None` if no sequence begins like the prompt.
    pub sequence: Option<PathBuf>,
}

/// The mount's answer.
#[derive(Deserialize)]
struct Answer {
    tokens: u64,
    sequence: Option<String>,
}

/// Finds the sequence of the model in directory `MOUNT/models/NAME` that shares most with a prompt.
///
/// # Errors
/// [`ReadError::Manifest`] if it is no model of a mount, [`ReadError::Arguments`] for a prompt of
/// more than 4 million tokens, [`ReadError::Io`] and [`ReadError::Disconnected`].
pub fn longest_prefix(model: &Path, prompt: &[u32]) -> Result<PrefixMatch, ReadError> {
    let path = model.join(names::PREFIXES).join("match");
    let failed = |error: std::io::Error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => ReadError::Manifest {
            path: model.to_owned(),
            why: "no model of a mount: name MOUNT/models/NAME".to_owned(),
        },
        Some(libc::EFBIG) => {
            ReadError::Arguments(format!("{} tokens are more than a mount takes", prompt.len()))
        }
        _ => ReadError::io(&path)(error),
    };
    let mut file = File::options().read(true).write(true).open(&path).map_err(failed)?;
    let bytes: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
    file.write_all(&bytes).map_err(failed)?;
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    let answer: Answer = serde_json::from_str(&text).map_err(|error| failed(error.into()))?;
    let sequence = answer.sequence.map(|name| model.join(names::SEQUENCES).join(name));
    Ok(PrefixMatch { tokens: answer.tokens, sequence })
}

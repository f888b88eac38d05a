//! `kvfs match`: which sequence of a model has the longest prefix of a prompt.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde_json::json;

use super::arguments::MatchArguments;
use super::output::{Failure, Outcome, Report};
use super::summary::Summary;
use crate::page::limits::MAX_PROMPT_TOKENS;
use crate::reader::longest_prefix;

const PROMPT_BYTES_MAX: u64 = MAX_PROMPT_TOKENS as u64 * 4;

/// Asks the mount.
pub(crate) fn run(arguments: &MatchArguments) -> Outcome {
    let prompt = read_tokens(&arguments.tokens)?;
    let found = longest_prefix(&arguments.model, &prompt).map_err(Failure::failed)?;
    let sequence = found.sequence.as_deref().map(|path| path.display().to_string());
    if arguments.json {
        let tokens = found.tokens;
        let prompt = prompt.len();
        return Ok(Report::json(
            &json!({ "tokens": tokens, "prompt_tokens": prompt, "sequence": sequence }),
        ));
    }
    let mut summary = Summary::new(&arguments.model);
    summary.add("tokens", found.tokens);
    summary.add("prompt_tokens", prompt.len());
    summary.add("sequence", sequence.as_deref().unwrap_or("none begins like it"));
    Ok(Report::text(summary.to_text()))
}

/// The bytes of a file with a prompt, or of standard input for `-`.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let refuse = |why: &dyn Display| Failure::Failed(format!("{}: {why}", path.display()));
    let mut bytes = Vec::new();
    // One byte more than allowed is read, so that a longer one is refused and not cut.
    let limit = PROMPT_BYTES_MAX + 1;
    let read = if path == Path::new("-") {
        io::stdin().take(limit).read_to_end(&mut bytes)
    } else {
        File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes))
    };
    match read.map_err(|error| refuse(&error))? {
        count if count as u64 > PROMPT_BYTES_MAX => Err(refuse(&format!(
            "has more than {PROMPT_BYTES_MAX} bytes: a prompt is at most {MAX_PROMPT_TOKENS} tokens, 4 bytes each"
        ))),
        _ => Ok(bytes),
    }
}

pub(super) fn read_tokens(path: &Path) -> Result<Vec<u32>, Failure> {
    let bytes = read(path)?;
    match bytes.as_chunks::<4>() {
        (tokens, []) => Ok(tokens.iter().map(|token| u32::from_le_bytes(*token)).collect()),
        _ => Err(Failure::Failed(format!(
            "{}: {} bytes are no whole token ids: write each as 4 bytes, little endian",
            path.display(),
            bytes.len()
        ))),
    }
}

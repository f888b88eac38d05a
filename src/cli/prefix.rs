//! `kvfs match`: which sequence of a model has the longest beginning of a prompt.

use std::io::{self, Read};
use std::path::Path;

use serde_json::json;

use super::arguments::MatchArguments;
use super::output::{Failure, Outcome, Report};
use super::summary::Summary;
use crate::reader::longest_prefix;

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

/// The bytes of a file, or of standard input for `-`.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    read.map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))
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

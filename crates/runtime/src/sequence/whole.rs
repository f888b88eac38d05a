//! Whether a state that was read is one of a sequence of this model, as a whole.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{SequenceError, beside};
use crate::page::{Layer, Manifest, names};
use crate::reader::ReadError;
use crate::reader::layer_scan::{LayerScan, Rules};
use crate::reader::listing;

/// Fields that tell one cache from another.
const IDENTITY: [&str; 16] = [
    "model_id",
    "model_revision",
    "dtype",
    "num_layers",
    "layers",
    "num_kv_heads",
    "head_dim",
    "v_head_dim",
    "page_tokens",
    "layout",
    "kv_rotation",
    "rope",
    "tenant",
    "salt",
    "lora",
    "shard",
];

/// Bytes of a value that are shown.
const SHOWN: usize = 60;

/// Bytes of an id in `tokens`.
const ID_BYTES: u64 = size_of::<u32>() as u64;

/// Fails unless all rows are there that `tokens` names.
pub(super) fn check(sequence: &Path, manifest: &Manifest) -> Result<(), SequenceError> {
    let listing = match listing::list(sequence, manifest) {
        Err(ReadError::Refused { error, .. }) => return not_whole(&error.to_string()),
        outcome => outcome?,
    };
    let path = sequence.join(names::TOKENS);
    let tokens = ids(fs::metadata(&path).map_err(SequenceError::io(&path))?.len())?;
    let positions = &listing.positions;
    if positions.closed_rows() > tokens {
        let rows = positions.closed_rows();
        return not_whole(&format!(
            "positions.json is about {rows} tokens, and there are {tokens}"
        ));
    }
    for (layer, listed) in (0..).map(Layer).zip(&listing.layers) {
        if !listing::keeps_pages(manifest, layer) {
            continue;
        }
        let rules = Rules::new(layer, manifest, positions, tokens);
        let first = beside::first_in_pages(sequence, manifest, layer, tokens)?;
        match LayerScan::new(layer, listed, &(first..tokens), &rules) {
            Err(ReadError::Missing { start, .. }) => {
                return not_whole(&format!("layer {layer} lacks the rows from token {start} on"));
            }
            outcome => drop(outcome?),
        }
        if listed.end < tokens {
            return not_whole(&format!(
                "layer {layer} has rows of {} of {tokens} tokens",
                listed.end
            ));
        }
    }
    Ok(())
}

/// How many ids `tokens` has with so many bytes.
pub(super) fn ids(bytes: u64) -> Result<u64, SequenceError> {
    if bytes.is_multiple_of(ID_BYTES) {
        return Ok(bytes / ID_BYTES);
    }
    not_whole(&format!("tokens has {bytes} bytes, which are no ids"))
}

fn not_whole<T>(why: &str) -> Result<T, SequenceError> {
    Err(SequenceError::State(format!("is not whole: {why}")))
}

/// What tells one manifest's cache from another's, for people.
pub(super) fn differences(found: &Manifest, here: &Manifest) -> String {
    let fields = |manifest: &Manifest| serde_json::to_value(manifest.fields()).unwrap_or_default();
    let (found, here) = (fields(found), fields(here));
    let differs = |name: &&str| found.get(name) != here.get(name);
    let each = IDENTITY.into_iter().filter(differs).map(|name| match name {
        // It may be a secret.
        "salt" => "salt differs".to_owned(),
        _ => format!("{name} is {}, here it is {}", shown(found.get(name)), shown(here.get(name))),
    });
    each.collect::<Vec<_>>().join("; ")
}

fn shown(value: Option<&Value>) -> String {
    let text = value.filter(|value| !value.is_null()).map_or("absent".to_owned(), Value::to_string);
    if text.chars().count() <= SHOWN {
        return text;
    }
    let first: String = text.chars().take(SHOWN).collect();
    format!("{first}...")
}

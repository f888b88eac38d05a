//! What a sequence has beside pages, tails and states, and which tokens it is about: rows of a window that fill no page,
//! and the checkpoints of an engine.
//!
//! Neither tells of which tokens it is but by their number. So what is about tokens that go has to go with them: others
//! may come in their place, and be as many.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{SequenceError, files};
use crate::page::names;
use crate::page::{Layer, LayerKind, Manifest, TokenStart};
use crate::reader::listing::layer_directory;

/// How many of the `rows` tokens of a sequence stay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Staying {
    pub(super) end: u64,
    pub(super) rows: u64,
}

impl Staying {
    /// Whether a file of a sequence's directory is not about tokens that go.
    pub(super) fn keeps(self, name: &[u8]) -> bool {
        names::parse_checkpoints(name).is_none_or(|tokens| tokens.0 <= self.end)
    }

    /// The same of a file of a layer.
    pub(super) fn keeps_in_layer(self, name: &[u8], manifest: &Manifest, layer: Layer) -> bool {
        let window_rows = window(manifest, layer).and_then(|_| names::parse_window_rows(name));
        window_rows.is_none_or(|first| rows_end(first, manifest, self.rows) <= self.end)
    }
}

/// The checkpoints of a sequence that are about its first `end` tokens.
pub(super) fn checkpoints(sequence: &Path, end: u64) -> Result<Vec<OsString>, SequenceError> {
    wanted(sequence, |name| names::parse_checkpoints(name).is_some_and(|tokens| tokens.0 <= end))
}

/// The files with rows of a layer's window in its directory, of a sequence of `end` tokens.
pub(super) fn window_rows(
    directory: &Path, manifest: &Manifest, layer: Layer, end: u64,
) -> Result<Vec<OsString>, SequenceError> {
    if window(manifest, layer).is_none() {
        return Ok(Vec::new());
    }
    let is_wanted = |name: &[u8]| names::parse_window_rows(name).is_some_and(|first| first.0 < end);
    wanted(directory, is_wanted)
}

/// From which token on a layer has to have pages, where a file has the rows of its window before that.
pub(super) fn first_in_pages(
    sequence: &Path, manifest: &Manifest, layer: Layer, tokens: u64,
) -> Result<u64, SequenceError> {
    let Some(window) = window(manifest, layer) else { return Ok(0) };
    let first = TokenStart(tokens.saturating_sub(window));
    if first.0.is_multiple_of(u64::from(manifest.geometry().page_tokens())) {
        return Ok(0);
    }
    let path = layer_directory(sequence, layer).join(names::format_window_rows(first));
    let Ok(found) = fs::symlink_metadata(&path) else { return Ok(0) };
    let end = rows_end(first, manifest, tokens);
    let bytes = (end - first.0) * manifest.layer_geometry(layer).row_bytes();
    if found.len() == bytes {
        return Ok(end);
    }
    let (name, found) = (names::format_window_rows(first), found.len());
    let why = format!(
        "is not whole: {name} of layer {layer} has {found} bytes, and its rows have {bytes}"
    );
    Err(SequenceError::State(why))
}

/// Behind the last row of a file that begins with row `first`, in a sequence of so many.
fn rows_end(first: TokenStart, manifest: &Manifest, rows: u64) -> u64 {
    let page_tokens = u64::from(manifest.geometry().page_tokens());
    (first.0 - first.0 % page_tokens).saturating_add(page_tokens).min(rows)
}

/// Tokens that a layer with a window looks at.
fn window(manifest: &Manifest, layer: Layer) -> Option<u64> {
    match manifest.layer_kind(layer) {
        Some(LayerKind::Sliding { window }) => Some(u64::from(window)),
        _ => None,
    }
}

/// Names in a directory, in order.
pub(super) fn wanted(
    directory: &Path, is_wanted: impl Fn(&[u8]) -> bool,
) -> Result<Vec<OsString>, SequenceError> {
    let names = files::entries(directory)?.into_iter().map(|entry| entry.file_name());
    let mut names: Vec<_> = names.filter(|name| is_wanted(name.as_bytes())).collect();
    names.sort_unstable();
    Ok(names)
}

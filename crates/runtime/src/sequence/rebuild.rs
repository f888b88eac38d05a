//! A sequence made of another one's rows: pages are shared, tails and token ids are copied.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Listed, SequenceError, Sequences, files};
use crate::page::names::{self, LayerEntry};
use crate::page::{Geometry, Layer, LayerKind, PageView, Positions, TokenStart, unpack_rows};
use crate::reader::ReadError;
use crate::reader::listing::{ListedLayer, layer_directory};
use crate::reader::page::Home;

/// Bytes of an id in `tokens`.
const ID_BYTES: u64 = size_of::<u32>() as u64;

/// What is made.
pub(super) struct Rebuild<'a> {
    pub(super) from: &'a Listed,
    /// Of the new one.
    pub(super) positions: &'a Positions,
    /// Rows that stay; those behind go.
    pub(super) end: u64,
    /// Nothing of the layers stays otherwise.
    pub(super) keeps_layers: bool,
}

impl Rebuild<'_> {
    /// Makes directory `to`; it is durable then.
    pub(super) fn run(&self, sequences: &Sequences, to: &Path) -> Result<(), SequenceError> {
        // In a mount one sync at the end is enough.
        let durable = sequences.home == Home::Directory;
        let from = &self.from.path;
        files::make_like(from, to)?;
        // Before `tokens`, or somebody might find by its prefix what does not follow from it.
        if let Some(json) = self.positions.to_json() {
            files::write(&to.join(names::POSITIONS), json.as_bytes(), durable)?;
        }
        let layers = sequences.manifest.geometry().num_layers();
        let mut has_ids = false;
        for entry in files::entries(from)? {
            let name = entry.file_name();
            let layer = names::parse_layer(name.as_bytes()).filter(|layer| layer.0 < layers);
            if let Some(layer) = layer {
                if self.keeps_layers {
                    self.layer(sequences, to, layer, durable)?;
                }
            } else if name == names::TOKENS {
                has_ids = true;
            } else if name != names::POSITIONS {
                files::link(&entry, to)?;
            }
        }
        if has_ids {
            let path = from.join(names::TOKENS);
            let mut ids = fs::read(&path).map_err(SequenceError::io(&path))?;
            ids.truncate(usize::try_from(self.end * ID_BYTES).unwrap_or(usize::MAX));
            files::write(&to.join(names::TOKENS), &ids, durable)?;
        }
        files::sync(to)
    }

    fn layer(
        &self, sequences: &Sequences, to: &Path, layer: Layer, durable: bool,
    ) -> Result<(), SequenceError> {
        let from = layer_directory(&self.from.path, layer);
        let to = layer_directory(to, layer);
        files::make_like(&from, &to)?;
        let kind = sequences.manifest.layer_kind(layer);
        let is_recurrent = kind.as_ref().is_some_and(LayerKind::is_recurrent);
        let mut has_snapshot = false;
        for entry in files::entries(&from)? {
            match names::layer_entry(entry.file_name().as_bytes()) {
                LayerEntry::Page(_) | LayerEntry::Tail(_) => {}
                LayerEntry::State(tokens) if is_recurrent => {
                    has_snapshot |= tokens.0 == self.end;
                    if tokens.0 <= self.end {
                        files::link(&entry, &to)?;
                    }
                }
                _ => files::link(&entry, &to)?,
            }
        }
        if is_recurrent {
            let is_cut = self.end < self.from.rows && self.end > 0;
            return if is_cut && !has_snapshot {
                Err(SequenceError::NoSnapshot { layer, tokens: self.end })
            } else {
                Ok(())
            };
        }
        let listed = &self.from.listing.layers[layer.0 as usize];
        let geometry = sequences.manifest.geometry();
        let rows = if kind == Some(LayerKind::Cross) {
            // No operation on tokens is about what the encoder made.
            let all = Rebuild { positions: &Positions::default(), end: listed.end, ..*self };
            all.pages(geometry, listed, (&from, &to))?
        } else {
            self.pages(geometry, listed, (&from, &to))?
        };
        if let Some((start, rows)) = rows {
            files::write(&to.join(names::format_tail(start)), &rows, durable)?;
        }
        if durable { files::sync(&to) } else { Ok(()) }
    }

    /// Links the pages that stay as they are; returns the rows of one that becomes a tail.
    fn pages(
        &self, geometry: &Geometry, listed: &ListedLayer, (from, to): (&Path, &Path),
    ) -> Result<Option<(TokenStart, Vec<u8>)>, SequenceError> {
        let page_tokens = u64::from(geometry.page_tokens());
        for page in listed.pages.iter().take_while(|page| page.start.0 < self.end) {
            let rows = page.start.0..self.end.min(page.start.0 + page_tokens);
            if !self.positions.has_any(rows.clone()) {
                continue;
            }
            let name = names::format_page(page.start);
            let path = from.join(&name);
            if rows.end < page.start.0 + page_tokens {
                let bytes = fs::read(&path).map_err(SequenceError::io(&path))?;
                let view = PageView::parse(&bytes, geometry);
                let view =
                    view.map_err(|error| ReadError::Refused { path: path.clone(), error })?;
                if u64::from(view.tokens()) > rows.end - rows.start {
                    let rows = first_rows(unpack_rows(&view), rows.end - rows.start, geometry);
                    return Ok(Some((page.start, rows)));
                }
            }
            fs::hard_link(&path, to.join(&name)).map_err(SequenceError::io(&path))?;
        }
        let Some(start) = listed.tail.filter(|start| start.0 < self.end) else { return Ok(None) };
        let path = from.join(names::format_tail(start));
        let rows = fs::read(&path).map_err(SequenceError::io(&path))?;
        Ok(Some((start, first_rows(rows, self.end - start.0, geometry))))
    }
}

fn first_rows(mut rows: Vec<u8>, count: u64, geometry: &Geometry) -> Vec<u8> {
    rows.truncate(usize::try_from(count * geometry.row_bytes()).unwrap_or(usize::MAX));
    rows
}

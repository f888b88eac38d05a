//! A sequence made of another one's rows: pages are shared, tails and token ids are copied.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Listed, SequenceError, Sequences, files};
use crate::page::names::{self, LayerEntry};
use crate::page::{
    Geometry, Layer, LayerKind, Manifest, PageView, Positions, PrefixHash, StatePlace, TokenStart,
    unpack_rows,
};
use crate::reader::ReadError;
use crate::reader::listing::{ListedLayer, layer_directory};
use crate::reader::page::Home;

/// Bytes of a state's header.
const HEADER_BYTES: u64 = 4096;

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
        if self.keeps_layers && self.end > 0 && self.end < self.from.rows {
            self.check_states(&sequences.manifest)?;
        }
        files::make_like(from, to)?;
        // Before `tokens`, or somebody might find by its prefix what does not follow from it.
        if let Some(json) = self.positions.to_json() {
            files::write(&to.join(names::POSITIONS), json.as_bytes(), durable)?;
        }
        // Before the layers: a limit goes by the newest file of a sequence, and pages are as old as they were.
        if let Some(ids) = self.token_ids()? {
            files::write(&to.join(names::TOKENS), &ids, durable)?;
        }
        let layers = sequences.manifest.geometry().num_layers();
        for entry in files::entries(from)? {
            let name = entry.file_name();
            let layer = names::parse_layer(name.as_bytes()).filter(|layer| layer.0 < layers);
            if let Some(layer) = layer {
                if self.keeps_layers {
                    self.layer(sequences, to, layer, durable)?;
                }
            } else if name != names::TOKENS && name != names::POSITIONS {
                files::link(&entry, to)?;
            }
        }
        files::sync(to)
    }

    /// Opens the pages that [`run`](Self::run) divides: all else that it reads never leaves the disk.
    pub(super) fn fetch(&self, sequences: &Sequences) {
        let page_tokens = u64::from(sequences.manifest.geometry().page_tokens());
        for (layer, listed) in (0..).map(Layer).zip(&self.from.listing.layers) {
            let rows = |start: u64| start..start + page_tokens;
            let divided = listed
                .pages
                .iter()
                .find(|page| page.start.0 < self.end && rows(page.start.0).contains(&self.end));
            if let Some(page) = divided {
                let directory = layer_directory(&self.from.path, layer);
                // An open brings a page back as a whole; an error is told by the one that reads.
                drop(File::open(directory.join(names::format_page(page.start))));
            }
        }
    }

    /// The ids of the tokens that stay, if the sequence tells them.
    fn token_ids(&self) -> Result<Option<Vec<u8>>, SequenceError> {
        let path = self.from.path.join(names::TOKENS);
        let mut ids = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            outcome => outcome.map_err(SequenceError::io(&path))?,
        };
        ids.truncate(usize::try_from(self.end * ID_BYTES).unwrap_or(usize::MAX));
        Ok(Some(ids))
    }

    /// Each recurrent layer has what it was after the last row that stays: an engine goes on from there.
    fn check_states(&self, manifest: &Manifest) -> Result<(), SequenceError> {
        let prefix = self.prefix(manifest)?;
        for layer in (0..manifest.geometry().num_layers()).map(Layer) {
            let kind = manifest.layer_kind(layer);
            if kind.as_ref().is_some_and(LayerKind::is_recurrent)
                && !self.has_state(manifest, layer, prefix)?
            {
                return Err(SequenceError::NoSnapshot { layer, tokens: self.end });
            }
        }
        Ok(())
    }

    /// The hash of the tokens that stay, where those tell what a state has seen.
    fn prefix(&self, manifest: &Manifest) -> Result<Option<PrefixHash>, SequenceError> {
        if self.from.listing.positions.prefix_rows() < self.end {
            return Ok(None);
        }
        Ok(self.token_ids()?.and_then(|ids| manifest.prefix_of(&ids)))
    }

    /// Whether a layer has a state after the last row that stays, and of these tokens where it says so.
    fn has_state(
        &self, manifest: &Manifest, layer: Layer, prefix: Option<PrefixHash>,
    ) -> Result<bool, SequenceError> {
        let row = TokenStart(self.end);
        let path = layer_directory(&self.from.path, layer).join(names::format_state(row));
        let failed = SequenceError::io(&path);
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            outcome => outcome.map_err(&failed)?,
        };
        let Some(prefix) = prefix.filter(|_| manifest.state_shape(layer).is_some()) else {
            return Ok(true);
        };
        let length = file.metadata().map_err(&failed)?.len();
        let mut first = Vec::new();
        file.take(HEADER_BYTES).read_to_end(&mut first).map_err(&failed)?;
        let header =
            StatePlace::new(manifest, layer, row).and_then(|at| at.check_header(&first, length));
        Ok(header.is_ok_and(|header| header.prefix == prefix))
    }

    fn layer(
        &self, sequences: &Sequences, to: &Path, layer: Layer, durable: bool,
    ) -> Result<(), SequenceError> {
        let from = layer_directory(&self.from.path, layer);
        let to = layer_directory(to, layer);
        files::make_like(&from, &to)?;
        let kind = sequences.manifest.layer_kind(layer);
        let is_recurrent = kind.as_ref().is_some_and(LayerKind::is_recurrent);
        for entry in files::entries(&from)? {
            match names::layer_entry(entry.file_name().as_bytes()) {
                LayerEntry::Page(_) | LayerEntry::Tail(_) => {}
                LayerEntry::State(tokens) if is_recurrent && tokens.0 > self.end => {}
                _ => files::link(&entry, &to)?,
            }
        }
        if is_recurrent {
            return Ok(());
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

impl Sequences {
    /// Whether two sequences have the same tokens in the same places, and share their pages.
    pub(super) fn is_copy(&self, copy: &str, of: &str) -> Result<bool, SequenceError> {
        let (one, other) = (self.list(copy)?, self.list(of)?);
        let is_alike = one.rows == other.rows && one.listing.positions == other.listing.positions;
        Ok(is_alike && files::are_shared(&one.path, &other.path)?)
    }
}

fn first_rows(mut rows: Vec<u8>, count: u64, geometry: &Geometry) -> Vec<u8> {
    rows.truncate(usize::try_from(count * geometry.row_bytes()).unwrap_or(usize::MAX));
    rows
}

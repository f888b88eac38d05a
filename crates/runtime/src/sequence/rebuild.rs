//! A sequence made of another one's rows: pages are shared, tails and token ids are copied.

use std::fs;
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::beside::Staying;
use super::opened::Turn;
use super::source::Listed;
use super::work::Work;
use super::{SequenceError, Sequences, files};
use crate::page::limits::MAX_FILE_BYTES;
use crate::page::names::{self, LayerEntry};
use crate::page::{
    Geometry, Layer, LayerKind, Manifest, PageError, PageView, Positions, PrefixHash, StatePlace,
    TokenStart, unpack_rows,
};
use crate::reader::ReadError;
use crate::reader::layer_scan::Rules;
use crate::reader::listing::{ListedLayer, layer_directory};
use crate::sys;

/// Bytes of a state's header.
const HEADER_BYTES: u64 = 4096;

/// Bytes of an id in `tokens`.
const ID_BYTES: u64 = size_of::<u32>() as u64;

/// What is made.
pub(super) struct Rebuild<'a> {
    pub(super) from: &'a Listed<'a>,
    /// Of the new one.
    pub(super) positions: &'a Positions,
    /// Rows that stay; those behind go.
    pub(super) end: u64,
    /// Nothing of the layers stays otherwise.
    pub(super) keeps_layers: bool,
}

impl Rebuild<'_> {
    /// Makes what is to be called so; what is in it is durable then.
    pub(super) fn run<'t>(
        &'t self, turn: &'t Turn<'_>, name: &str,
    ) -> Result<Work<'t>, SequenceError> {
        let sequences = turn.all;
        if self.keeps_layers && self.end > 0 && self.end < self.from.rows {
            self.check_states(&sequences.manifest)?;
            self.check_windows(&sequences.manifest)?;
        }
        Work::make(&turn.directory, name, Some(self.from.directory()))?
            .fill(|to| self.fill(sequences, to))
    }

    fn fill(&self, sequences: &Sequences, to: &Path) -> Result<(), SequenceError> {
        let durable = sequences.durable();
        let from = &self.from.held();
        // Before `tokens`, or somebody might find by its prefix what does not follow from it.
        if let Some(json) = self.positions.to_json() {
            let models = files::models_of_positions(from);
            files::write_like(&models, &to.join(names::POSITIONS), json.as_bytes(), durable)?;
        }
        // Before the layers: a limit goes by the newest file of a sequence, and pages are as old as they were.
        if let Some(ids) = self.token_ids()? {
            let models = [from.join(names::TOKENS), from.clone()];
            files::write_like(&models, &to.join(names::TOKENS), &ids, durable)?;
        }
        let layers = sequences.manifest.geometry().num_layers();
        for entry in files::entries(from)? {
            let name = entry.file_name();
            let layer = names::parse_layer(name.as_bytes()).filter(|layer| layer.0 < layers);
            if let Some(layer) = layer {
                if self.keeps_layers {
                    self.layer(sequences, to, layer, durable)?;
                }
            } else if name != names::TOKENS
                && name != names::POSITIONS
                && self.staying().keeps(name.as_bytes())
            {
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
                let path = layer_directory(&self.from.held(), layer);
                // An open brings a page back as a whole; an error is told by the one that reads.
                drop(sys::open_regular_no_follow(&path.join(names::format_page(page.start))));
            }
        }
    }

    fn staying(&self) -> Staying {
        Staying { end: self.end, rows: self.from.rows }
    }

    /// The ids of the tokens that stay, if the sequence tells them.
    pub(super) fn token_ids(&self) -> Result<Option<Vec<u8>>, SequenceError> {
        let path = self.from.held().join(names::TOKENS);
        let bytes = self.end * ID_BYTES;
        let ids = match sys::read_no_follow(&path, bytes) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            outcome => outcome.map_err(SequenceError::io(&path))?,
        };
        if (ids.len() as u64) < bytes {
            return Err(self.from.changed("its tokens became fewer"));
        }
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

    /// Layers with a window have what the last token that stays looks at.
    fn check_windows(&self, manifest: &Manifest) -> Result<(), SequenceError> {
        let missing = |end: u64| {
            let mut stands = self.positions.clone();
            if end > self.end {
                // As the sequence is, cut there.
                stands = self.from.listing.positions.clone();
                stands.truncate(end);
            }
            missing_in_windows(manifest, &self.from.listing.layers, &stands, end)
        };
        let Some((layer, rows)) = missing(self.end) else { return Ok(()) };
        // What a longer one looks at came later.
        let (mut gone, mut least) = (self.end, self.from.rows);
        while least - gone > 1 {
            let middle = gone.midpoint(least);
            if missing(middle).is_some() { gone = middle } else { least = middle }
        }
        Err(SequenceError::NoWindow { layer, rows, tokens: self.end, least })
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
        let path = layer_directory(&self.from.held(), layer).join(names::format_state(row));
        let failed = SequenceError::io(&path);
        let file = match sys::open_regular_no_follow(&path) {
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
        let Some(from) = self.from.layer(layer)? else {
            return Err(self.from.changed("a layer of it was removed"));
        };
        from.within(|from| {
            files::make_like(from, &layer_directory(to, layer))?
                .within(|to| self.fill_layer(sequences, (from, to), layer, durable))
        })
    }

    fn fill_layer(
        &self, sequences: &Sequences, (from, to): (&Path, &Path), layer: Layer, durable: bool,
    ) -> Result<(), SequenceError> {
        let (manifest, is_recurrent) =
            (&sequences.manifest, is_recurrent(&sequences.manifest, layer));
        for entry in files::entries(from)? {
            let name = entry.file_name();
            match names::layer_entry(name.as_bytes()) {
                LayerEntry::Page(_) | LayerEntry::Tail(_) => {}
                LayerEntry::State(tokens) if is_recurrent && tokens.0 > self.end => {}
                LayerEntry::Other
                    if !self.staying().keeps_in_layer(name.as_bytes(), manifest, layer) => {}
                _ => files::link(&entry, to)?,
            }
        }
        if is_recurrent {
            return Ok(());
        }
        let (pages, tail) = self.rows(&sequences.manifest, layer, from)?;
        for page in pages {
            let name = names::format_page(page);
            let path = from.join(&name);
            fs::hard_link(&path, to.join(&name)).map_err(SequenceError::io(&path))?;
        }
        if let Some((start, rows)) = tail {
            let name = names::format_tail(start);
            let page = from.join(names::format_page(start));
            files::write_like(
                &[from.join(&name), page, from.to_owned()],
                &to.join(&name),
                &rows,
                durable,
            )?;
        }
        if durable { files::sync(to) } else { Ok(()) }
    }

    /// Pages of a layer, of that directory, that stay as they are, and the rows behind them.
    pub(super) fn rows(
        &self, manifest: &Manifest, layer: Layer, directory: &Path,
    ) -> Result<Rows, SequenceError> {
        let listed = &self.from.listing.layers[layer.0 as usize];
        if manifest.layer_kind(layer) == Some(LayerKind::Cross) {
            // No operation on tokens is about what the encoder made.
            let all = Rebuild { positions: &Positions::default(), end: listed.end, ..*self };
            return all.pages(&manifest.layer_geometry(layer), listed, directory);
        }
        self.pages(&manifest.layer_geometry(layer), listed, directory)
    }

    fn pages(
        &self, geometry: &Geometry, listed: &ListedLayer, from: &Path,
    ) -> Result<Rows, SequenceError> {
        let page_tokens = u64::from(geometry.page_tokens());
        let mut stay = Vec::new();
        for page in listed.pages.iter().take_while(|page| page.start.0 < self.end) {
            let rows = page.start.0..self.end.min(page.start.0 + page_tokens);
            if !self.positions.has_any(rows.clone()) {
                continue;
            }
            if rows.end < page.start.0 + page_tokens {
                let path = from.join(names::format_page(page.start));
                let (first, tokens) = rows_of_page(&path, geometry)?;
                if tokens > rows.end - rows.start {
                    let first = first_rows(first, rows.end - rows.start, geometry);
                    return Ok((stay, Some((page.start, first))));
                }
            }
            stay.push(page.start);
        }
        let Some(start) = listed.tail.filter(|start| start.0 < self.end) else {
            return Ok((stay, None));
        };
        let path = from.join(names::format_tail(start));
        let count = self.end - start.0;
        if count > page_tokens {
            let error = PageError::Rows(format!("has rows of more than {page_tokens} tokens"));
            return Err(ReadError::Refused { path, error }.into());
        }
        let rows = match sys::read_no_follow(&path, count * geometry.row_bytes()) {
            // It became a page since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                rows_of_page(&from.join(names::format_page(start)), geometry)?.0
            }
            outcome => outcome.map_err(SequenceError::io(&path))?,
        };
        if (rows.len() as u64) < count * geometry.row_bytes() {
            return Err(self.from.changed("a tail of it was emptied"));
        }
        Ok((stay, Some((start, first_rows(rows, count, geometry)))))
    }
}

/// Pages that stay as they are, and a tail: where it starts, and its rows.
type Rows = (Vec<TokenStart>, Option<(TokenStart, Vec<u8>)>);

/// Whether a layer keeps states.
pub(super) fn is_recurrent(manifest: &Manifest, layer: Layer) -> bool {
    manifest.layer_kind(layer).as_ref().is_some_and(LayerKind::is_recurrent)
}

/// The rows of a page as a tail has them, and how many there are.
fn rows_of_page(path: &Path, geometry: &Geometry) -> Result<(Vec<u8>, u64), SequenceError> {
    let bytes = sys::read_no_follow(path, MAX_FILE_BYTES).map_err(SequenceError::io(path))?;
    let view = PageView::parse(&bytes, geometry)
        .map_err(|error| ReadError::Refused { path: path.to_owned(), error })?;
    Ok((unpack_rows(&view), u64::from(view.tokens())))
}

/// Rows that the last of `end` tokens looks at, and that are gone: of the first such layer with a window.
fn missing_in_windows(
    manifest: &Manifest, layers: &[ListedLayer], positions: &Positions, end: u64,
) -> Option<(Layer, Range<u64>)> {
    let page_tokens = u64::from(manifest.geometry().page_tokens());
    for (layer, listed) in (0..).map(Layer).zip(layers) {
        if !matches!(manifest.layer_kind(layer), Some(LayerKind::Sliding { .. })) {
            continue;
        }
        let rules = Rules::new(layer, manifest, positions, end);
        let is_gone = |start: u64| {
            let rows = start..end.min(start + page_tokens);
            positions.has_any(rows.clone())
                && !rules.has_passed(rows)
                && listed.tail != Some(TokenStart(start))
                && listed.pages.binary_search_by_key(&start, |page| page.start.0).is_err()
        };
        let pages = (0..end.div_ceil(page_tokens)).map(|page| page * page_tokens);
        let mut gone = pages.filter(|start| is_gone(*start)).peekable();
        if let Some(first) = gone.peek().copied() {
            let last = gone.last().unwrap_or(first);
            return Some((layer, first..end.min(last + page_tokens)));
        }
    }
    None
}

impl Sequences {
    /// Whether two sequences have the same tokens in the same places, and share their pages.
    pub(super) fn is_copy(&self, copy: &str, of: &str) -> Result<bool, SequenceError> {
        let none = || SequenceError::NoSuchSequence(self.path(copy));
        let opened = self.enter()?.ok_or_else(none)?;
        let (one, other) = (opened.list(copy)?, opened.list(of)?);
        let is_alike = one.rows == other.rows && one.listing.positions == other.listing.positions;
        Ok(is_alike && files::are_shared(&one.held(), &other.held())?)
    }
}

fn first_rows(mut rows: Vec<u8>, count: u64, geometry: &Geometry) -> Vec<u8> {
    rows.truncate(usize::try_from(count * geometry.row_bytes()).unwrap_or(usize::MAX));
    rows
}

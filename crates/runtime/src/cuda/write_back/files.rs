//! The tails of a sequence and its file of token ids, as one program appends to them.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::Failure;
use crate::page::{Layer, Manifest, TokenStart, names};

/// A file that is open for appending.
#[derive(Debug)]
struct Tail {
    start: u64,
    path: PathBuf,
    file: File,
}

#[derive(Debug)]
pub(super) struct Files {
    sequence: PathBuf,
    page_tokens: u64,
    /// Of each layer, bytes of a row.
    row_bytes: Vec<u64>,
    /// Of each layer, as far as rows came.
    tails: Vec<Option<Tail>>,
    /// Files that were filled since the last sync: pages now.
    filled: Vec<(PathBuf, File)>,
    tokens: Option<(PathBuf, File)>,
    /// Ids in the file.
    held: u64,
}

impl Files {
    pub(super) fn new(sequence: &Path, manifest: &Manifest, tokens: u64) -> Self {
        let geometry = manifest.geometry();
        Self {
            sequence: sequence.to_owned(),
            page_tokens: u64::from(geometry.page_tokens()),
            row_bytes: row_bytes(manifest).collect(),
            tails: (0..geometry.num_layers()).map(|_| None).collect(),
            filled: Vec::new(),
            tokens: None,
            held: tokens,
        }
    }

    /// The tail that begins with a token.
    pub(super) fn tail(&self, layer: Layer, start: TokenStart) -> PathBuf {
        self.sequence.join(names::format_layer(layer)).join(names::format_tail(start))
    }

    /// Appends the rows of consecutive tokens. A page's last row ends a file: the mount makes a page
    /// of it, and the next row begins another one.
    pub(super) fn append(
        &mut self, layer: Layer, mut token: u64, mut rows: &[u8],
    ) -> Result<(), Failure> {
        while !rows.is_empty() {
            let row_bytes = self.row_bytes[layer.0 as usize];
            let in_page = token % self.page_tokens;
            let room = (self.page_tokens - in_page) * row_bytes;
            let room = usize::try_from(room).unwrap_or(usize::MAX).min(rows.len());
            let (of_page, rest) = rows.split_at(room);
            let tail = self.open(layer, token - in_page, in_page * row_bytes)?;
            // In one piece: what a crash or a full disk leaves of it, `tokens` does not count.
            (&tail.file).write_all(of_page).map_err(about(&tail.path))?;
            token += room as u64 / row_bytes;
            rows = rest;
            if token.is_multiple_of(self.page_tokens)
                && let Some(tail) = self.tails[layer.0 as usize].take()
            {
                self.filled.push((tail.path, tail.file));
            }
        }
        Ok(())
    }

    /// The tail of a layer, which must have so many bytes.
    fn open(&mut self, layer: Layer, start: u64, bytes: u64) -> Result<&Tail, Failure> {
        let path = self.tail(layer, TokenStart(start));
        let known = &mut self.tails[layer.0 as usize];
        if known.as_ref().is_none_or(|tail| tail.start != start) {
            let file = open(&path)?;
            *known = Some(Tail { start, path: path.clone(), file });
        }
        let Some(tail) = known else { unreachable!("it was opened") };
        let found = tail.file.metadata().map_err(about(&tail.path))?.len();
        if found != bytes {
            let why = format!(
                "{found} bytes, not {bytes}: another program writes to it, or a write broke off"
            );
            return Err(Failure { path, why });
        }
        Ok(tail)
    }

    /// Appends ids of tokens whose rows are there.
    pub(super) fn append_tokens(&mut self, ids: &[u32]) -> Result<(), Failure> {
        let path = self.sequence.join(names::TOKENS);
        if self.tokens.is_none() {
            let file = open(&path)?;
            self.tokens = Some((path.clone(), file));
        }
        let Some((path, file)) = &mut self.tokens else { unreachable!("it was opened") };
        let (found, expected) = (file.metadata().map_err(about(path))?.len(), self.held * 4);
        if found != expected {
            let why = format!("{found} bytes, not {expected}: another program writes to it");
            return Err(Failure { path: path.clone(), why });
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        file.write_all(&bytes).map_err(about(path))?;
        self.held += ids.len() as u64;
        Ok(())
    }

    /// Makes everything so far durable; the ids last, as they say which rows count.
    pub(super) fn sync(&mut self) -> Result<(), Failure> {
        for (path, file) in self.filled.drain(..) {
            file.sync_all().map_err(about(&path))?;
        }
        for tail in self.tails.iter().flatten() {
            tail.file.sync_all().map_err(about(&tail.path))?;
        }
        if let Some((path, file)) = &self.tokens {
            file.sync_all().map_err(about(path))?;
        }
        Ok(())
    }
}

/// Bytes of a row of each layer.
pub(super) fn row_bytes(manifest: &Manifest) -> impl Iterator<Item = u64> + '_ {
    let layers = (0..manifest.geometry().num_layers()).map(Layer);
    layers.map(|layer| manifest.layer_geometry(layer).row_bytes())
}

fn open(path: &Path) -> Result<File, Failure> {
    OpenOptions::new().append(true).create(true).open(path).map_err(about(path))
}

fn about(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| Failure { path: path.to_owned(), why: error.to_string() }
}

//! What is in a sequence's directory: names tell layers, pages and tokens.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::path::{Path, PathBuf};

use super::ReadError;
use super::page::{Home, PAYLOAD_BYTE};
use crate::page::names::{self, LayerEntry};
use crate::page::{Layer, LayerKind, Manifest, PageError, PagePlace, TokenStart};

/// A page by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ListedPage {
    pub(super) start: TokenStart,
    /// As the directory tells it; another one is another file.
    pub(super) inode: u64,
}

/// A layer as it was listed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ListedLayer {
    /// In order.
    pub(super) pages: Vec<ListedPage>,
    /// Where the tail starts.
    pub(super) tail: Option<TokenStart>,
    /// Tokens from the first to the last one that has rows; there may be holes.
    pub(super) end: u64,
}

/// Reads the manifest above a sequence, and tells who serves it.
pub(super) fn manifest(sequence: &Path) -> Result<(Manifest, Home), ReadError> {
    let absolute = std::path::absolute(sequence).map_err(ReadError::io(sequence))?;
    let model = absolute.ancestors().nth(2).ok_or_else(|| ReadError::Manifest {
        path: sequence.to_owned(),
        why: "not in a model: name MOUNT/models/NAME/sequences/SEQUENCE".to_owned(),
    })?;
    let path = model.join(names::MANIFEST);
    let json = match fs::read(&path) {
        Ok(json) => json,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let why = "missing: this is no sequence of a model".to_owned();
            return Err(ReadError::Manifest { path, why });
        }
        Err(error) => return Err(ReadError::io(&path)(error)),
    };
    let home = Home::of(&path)?;
    match Manifest::parse(&json) {
        Ok(manifest) => Ok((manifest, home)),
        Err(error) => Err(ReadError::Manifest { path, why: error.to_string() }),
    }
}

/// Lists the layers of a sequence that keep K and V. One whose directory is missing has nothing.
pub(super) fn layers(sequence: &Path, manifest: &Manifest) -> Result<Vec<ListedLayer>, ReadError> {
    let list = |layer| match manifest.layer_kind(layer) {
        Some(LayerKind::Attention | LayerKind::Sliding { .. }) => {
            list_layer(&layer_directory(sequence, layer), layer, manifest)
        }
        _ => Ok(ListedLayer::default()),
    };
    (0..manifest.geometry().num_layers()).map(|layer| list(Layer(layer))).collect()
}

/// Where the files of a layer are.
pub(super) fn layer_directory(sequence: &Path, layer: Layer) -> PathBuf {
    sequence.join(names::format_layer(layer))
}

fn list_layer(
    directory: &Path, layer: Layer, manifest: &Manifest,
) -> Result<ListedLayer, ReadError> {
    let failed = ReadError::io(directory);
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(ListedLayer::default()),
        outcome => outcome.map_err(&failed)?,
    };
    let (mut pages, mut tails) = (Vec::new(), Vec::new());
    for entry in entries {
        let entry = entry.map_err(&failed)?;
        let name = entry.file_name();
        let kind = names::layer_entry(name.as_bytes());
        // Where no page may start, a name that looks like one is something else.
        let (LayerEntry::Page(start) | LayerEntry::Tail(start)) = kind else { continue };
        if PagePlace::new(manifest, layer, start).is_err() {
            continue;
        }
        if matches!(kind, LayerEntry::Page(_)) {
            pages.push(ListedPage { start, inode: entry.ino() });
        } else {
            tails.push(start);
        }
    }
    pages.sort_unstable_by_key(|page| page.start);
    // A tail that is not behind all pages means nothing.
    let after = |tail: &TokenStart| pages.last().is_none_or(|page| page.start < *tail);
    let tail = tails.into_iter().max().filter(after);
    let mut listed = ListedLayer { pages, tail, end: 0 };
    listed.end = listed.find_end(directory, layer, manifest)?;
    Ok(listed)
}

impl ListedLayer {
    /// Only the last page may be short, so that alone is asked.
    fn find_end(
        &self, directory: &Path, layer: Layer, manifest: &Manifest,
    ) -> Result<u64, ReadError> {
        if let Some(tail) = self.tail {
            let path = directory.join(names::format_tail(tail));
            let bytes = match fs::metadata(&path) {
                Ok(metadata) => metadata.len(),
                // It was sealed a moment ago.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(ReadError::Changed(path));
                }
                Err(error) => return Err(ReadError::io(&path)(error)),
            };
            return Ok(tail.0 + bytes / manifest.geometry().row_bytes());
        }
        let Some(last) = self.pages.last() else { return Ok(0) };
        let path = directory.join(names::format_page(last.start));
        let refused = |error: PageError| ReadError::Refused { path: path.clone(), error };
        let place = PagePlace::new(manifest, layer, last.start).map_err(refused)?;
        let file = File::open(&path).map_err(ReadError::io(&path))?;
        let length = file.metadata().map_err(ReadError::io(&path))?.len();
        let mut first = [0; PAYLOAD_BYTE];
        file.read_exact_at(&mut first, 0).map_err(ReadError::io(&path))?;
        let header = place.check_header(&first, length).map_err(refused)?;
        Ok(last.start.0 + u64::from(header.tokens))
    }
}

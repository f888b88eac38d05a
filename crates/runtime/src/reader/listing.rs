//! What is in a sequence's directory: names tell layers, pages and tokens.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::dir::{Dir, Type};
use nix::fcntl::OFlag;

use super::ReadError;
use super::page::{Home, PAYLOAD_BYTE};
use crate::page::limits::MANIFEST_BYTES_READ;
use crate::page::names::{self, LayerEntry};
use crate::page::{
    Layer, LayerKind, MAX_POSITIONS_BYTES, Manifest, PageError, PagePlace, Positions, TokenStart,
};
use crate::sys;

/// A page by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListedPage {
    pub(crate) start: TokenStart,
    /// As the directory tells it; another one is another file.
    pub(crate) inode: u64,
    /// It came while somebody waited for it, so its bytes are still in the page cache.
    pub(crate) is_fresh: bool,
}

/// A layer as it was listed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ListedLayer {
    /// In order.
    pub(crate) pages: Vec<ListedPage>,
    /// Where the tail starts.
    pub(crate) tail: Option<TokenStart>,
    /// Of the tail; 0 without one. Another one is another file, which may be of another sequence.
    pub(crate) tail_inode: u64,
    /// Tokens from the first to the last one that has rows; there may be holes.
    pub(crate) end: u64,
}

/// Reads the manifest above a sequence, and tells who serves it.
pub(crate) fn manifest(sequence: &Path) -> Result<(Manifest, Home), ReadError> {
    let absolute = std::path::absolute(sequence).map_err(ReadError::io(sequence))?;
    let model = absolute.ancestors().nth(2).ok_or_else(|| ReadError::Manifest {
        path: sequence.to_owned(),
        why: "not in a model: name MOUNT/models/NAME/sequences/SEQUENCE".to_owned(),
    })?;
    manifest_of_model(model)
}

/// The same of the directory of a model.
pub(crate) fn manifest_of_model(model: &Path) -> Result<(Manifest, Home), ReadError> {
    let manifest = read_manifest(model)?;
    Ok((manifest, Home::of(&model.join(names::MANIFEST))?))
}

/// The manifest of a model.
pub(crate) fn read_manifest(model: &Path) -> Result<Manifest, ReadError> {
    let path = model.join(names::MANIFEST);
    let json = match sys::read_no_follow(&path, MANIFEST_BYTES_READ) {
        Ok(json) => json,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let why = "missing: this is no model".to_owned();
            return Err(ReadError::Manifest { path, why });
        }
        Err(error) => return Err(ReadError::io(&path)(error)),
    };
    Manifest::parse(&json).map_err(|error| ReadError::Manifest { path, why: error.to_string() })
}

/// What is there of a sequence.
#[derive(Debug)]
pub(crate) struct Listing {
    /// Of every layer; empty for those that keep no pages.
    pub(crate) layers: Vec<ListedLayer>,
    pub(crate) positions: Positions,
}

/// Bytes of an id in `tokens`.
const ID_BYTES: u64 = size_of::<u32>() as u64;

/// Times that a sequence is listed while others change it.
const ATTEMPTS: usize = 8;

/// Lists a sequence.
pub(crate) fn list(sequence: &Path, manifest: &Manifest) -> Result<Listing, ReadError> {
    let mut json = positions_json(sequence)?;
    for _ in 0..ATTEMPTS {
        let layers = layers(sequence, manifest)?;
        // Of one state: whoever edits a sequence changes this file or the directory.
        let again = positions_json(sequence)?;
        if again == json {
            return Ok(Listing { layers, positions: parse_positions(sequence, json.as_deref())? });
        }
        json = again;
    }
    Err(ReadError::Changed(sequence.join(names::POSITIONS)))
}

fn positions_json(sequence: &Path) -> Result<Option<Vec<u8>>, ReadError> {
    let path = sequence.join(names::POSITIONS);
    match sys::read_no_follow(&path, MAX_POSITIONS_BYTES as u64 + 1) {
        Ok(json) => Ok(Some(json)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ReadError::io(&path)(error)),
    }
}

fn parse_positions(sequence: &Path, json: Option<&[u8]>) -> Result<Positions, ReadError> {
    let Some(json) = json else { return Ok(Positions::default()) };
    let path = || sequence.join(names::POSITIONS);
    Positions::parse(json).map_err(|error| ReadError::Refused { path: path(), error })
}

/// Lists the layers of a sequence that keep K and V. One whose directory is missing has nothing.
fn layers(sequence: &Path, manifest: &Manifest) -> Result<Vec<ListedLayer>, ReadError> {
    let list = |layer| {
        if keeps_pages(manifest, layer) || is_cross(manifest, layer) {
            list_layer(&layer_directory(sequence, layer), layer, manifest)
        } else {
            Ok(ListedLayer::default())
        }
    };
    (0..manifest.geometry().num_layers()).map(|layer| list(Layer(layer))).collect()
}

/// Whether a layer keeps K and V of each token.
pub(crate) fn keeps_pages(manifest: &Manifest, layer: Layer) -> bool {
    manifest.layer_kind(layer).as_ref().is_some_and(LayerKind::has_rows_of_tokens)
}

/// Whether a layer keeps K and V of an encoder's output.
pub(crate) fn is_cross(manifest: &Manifest, layer: Layer) -> bool {
    manifest.layer_kind(layer) == Some(LayerKind::Cross)
}

/// How many ids are in `tokens`; `None` if there is no such file.
pub(crate) fn token_ids(sequence: &Path) -> Result<Option<u64>, ReadError> {
    let path = sequence.join(names::TOKENS);
    match sys::metadata_no_follow(&path) {
        Ok(metadata) => Ok(Some(metadata.len() / ID_BYTES)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ReadError::io(&path)(error)),
    }
}

/// Tokens that every layer has rows of, and that `tokens` has ids of if there is such a file. Where no
/// layer keeps rows of tokens, the ids alone tell.
pub(super) fn valid_tokens(
    sequence: &Path, manifest: &Manifest, layers: &[ListedLayer],
) -> Result<u64, ReadError> {
    let ids = token_ids(sequence)?;
    let keeping = (0..).zip(layers).filter(|(layer, _)| keeps_pages(manifest, Layer(*layer)));
    let rows = keeping.map(|(_, layer)| layer.end).min();
    Ok(rows.into_iter().chain(ids).min().unwrap_or(0))
}

impl Listing {
    /// As [`Sequence::valid_tokens`](super::Sequence::valid_tokens).
    pub(crate) fn valid_tokens(
        &self, sequence: &Path, manifest: &Manifest,
    ) -> Result<u64, ReadError> {
        valid_tokens(sequence, manifest, &self.layers)
    }
}

/// Where the files of a layer are.
pub(crate) fn layer_directory(sequence: &Path, layer: Layer) -> PathBuf {
    sequence.join(names::format_layer(layer))
}

fn list_layer(
    directory: &Path, layer: Layer, manifest: &Manifest,
) -> Result<ListedLayer, ReadError> {
    let failed = ReadError::io(directory);
    let mut opened = match sys::open_directory_no_follow(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(ListedLayer::default()),
        outcome => {
            Dir::from_fd(outcome.map_err(&failed)?.into()).map_err(|errno| failed(errno.into()))?
        }
    };
    let has_window = matches!(manifest.layer_kind(layer), Some(LayerKind::Sliding { .. }));
    let (mut pages, mut tails, mut window_rows) = (Vec::new(), Vec::new(), None);
    for entry in opened.iter() {
        let entry = entry.map_err(|errno| failed(errno.into()))?;
        let name = entry.file_name().to_bytes();
        if has_window && let Some(first) = names::parse_window_rows(name) {
            window_rows = window_rows.max(Some(first));
        }
        let kind = names::layer_entry(name);
        // Where no page may start, a name that looks like one is something else.
        let (LayerEntry::Page(start) | LayerEntry::Tail(start)) = kind else { continue };
        if PagePlace::new(manifest, layer, start).is_err() {
            continue;
        }
        if entry.file_type() == Some(Type::Symlink) {
            let path = directory.join(OsStr::from_bytes(name));
            sys::metadata_no_follow(&path).map_err(ReadError::io(&path))?;
        }
        if matches!(kind, LayerEntry::Page(_)) {
            pages.push(ListedPage { start, inode: entry.ino(), is_fresh: false });
        } else {
            tails.push((start, entry.ino()));
        }
    }
    pages.sort_unstable_by_key(|page| page.start);
    // A tail that is not behind all pages means nothing.
    let after = |tail: &(TokenStart, u64)| pages.last().is_none_or(|page| page.start < tail.0);
    let (tail, tail_inode) = tails.into_iter().max().filter(after).unzip();
    let tail_inode = tail_inode.unwrap_or(0);
    let mut listed = ListedLayer { pages, tail, tail_inode, end: 0 };
    listed.end = match window_rows {
        // All that a short window covers lies in one page, and not from its beginning on.
        Some(first) if listed.pages.is_empty() && listed.tail.is_none() => {
            let path = directory.join(names::format_window_rows(first));
            let bytes = sys::metadata_no_follow(&path).map_err(ReadError::io(&path))?.len();
            first.0 + manifest.layer_geometry(layer).rows_in(bytes)
        }
        _ => listed.find_end(directory, layer, manifest)?,
    };
    Ok(listed)
}

impl ListedLayer {
    /// The page that starts at a token, if it has come by now.
    pub(super) fn page_at(
        directory: &Path, start: TokenStart,
    ) -> Result<Option<ListedPage>, ReadError> {
        let path = directory.join(names::format_page(start));
        match sys::metadata_no_follow(&path) {
            Ok(metadata) => Ok(Some(ListedPage { start, inode: metadata.ino(), is_fresh: true })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ReadError::io(&path)(error)),
        }
    }

    /// Only the last page may be short, so that alone is asked.
    pub(super) fn find_end(
        &self, directory: &Path, layer: Layer, manifest: &Manifest,
    ) -> Result<u64, ReadError> {
        if let Some(tail) = self.tail {
            let path = directory.join(names::format_tail(tail));
            let bytes = match sys::metadata_no_follow(&path) {
                Ok(metadata) => metadata.len(),
                // It was sealed a moment ago.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(ReadError::Changed(path));
                }
                Err(error) => return Err(ReadError::io(&path)(error)),
            };
            return Ok(tail.0 + manifest.layer_geometry(layer).rows_in(bytes));
        }
        let Some(last) = self.pages.last() else { return Ok(0) };
        let path = directory.join(names::format_page(last.start));
        let refused = |error: PageError| ReadError::Refused { path: path.clone(), error };
        let place = PagePlace::new(manifest, layer, last.start).map_err(refused)?;
        let opened = sys::open_no_follow(&path, OFlag::empty());
        let file = opened.map_err(ReadError::io(&path))?;
        let length = file.metadata().map_err(ReadError::io(&path))?.len();
        let mut first = [0; PAYLOAD_BYTE];
        file.read_exact_at(&mut first, 0).map_err(ReadError::io(&path))?;
        let header = place.check_header(&first, length).map_err(refused)?;
        Ok(last.start.0 + u64::from(header.tokens))
    }
}

//! Asks the mount where the pages of a sequence or a model are: one request for each directory, and one
//! for each part of a layer.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::page::Page;
use crate::cli::history::shown;
use crate::cli::output::Failure;
use crate::cli::subject::if_there;
use crate::page::names::{MANIFEST, SEQUENCES, is_staging, parse_layer};
use crate::page::{LayerKind, Manifest};
use crate::sys;

const PAGES: &str = "user.kvfs.pages";
/// A model's manifest is two directories above a sequence.
const LEVELS: usize = 2;

/// What is drawn.
#[derive(Debug)]
pub(super) struct Subject {
    /// As people read it.
    pub(super) path: String,
    pub(super) page_tokens: u64,
    pub(super) content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Sequence(Vec<LayerPages>),
    Model(Vec<(String, Vec<LayerPages>)>),
}

/// What a layer of a sequence has.
#[derive(Debug)]
pub(super) struct LayerPages {
    pub(super) layer: u32,
    /// Whether its tokens are in pages, so that one that is not there is a hole.
    pub(super) keeps_pages: bool,
    pub(super) pages: Vec<Page>,
}

/// Everything that is known of a path without opening what it holds.
pub(super) fn gather(path: &Path) -> Result<Subject, Failure> {
    let failed = |error: io::Error| Failure::Failed(format!("{}: {error}", shown(path)));
    let wrong = || {
        let path = shown(path);
        Failure::Failed(format!(
            "{path} is neither a sequence nor a model: name models/NAME or models/NAME/sequences/SEQUENCE"
        ))
    };
    let is_model = path.join(MANIFEST).is_file();
    let is_sequence =
        path.is_dir() && path.parent().and_then(Path::file_name) == Some(SEQUENCES.as_ref());
    let model = match (is_model, is_sequence) {
        (true, _) => path,
        (false, true) => path.ancestors().nth(LEVELS).ok_or_else(wrong)?,
        (false, false) => return Err(wrong()),
    };
    let manifest = std::fs::read(model.join(MANIFEST))
        .map_err(|error| Failure::Failed(format!("{}: {error}", shown(&model.join(MANIFEST)))))?;
    let manifest = Manifest::parse(&manifest)
        .map_err(|error| Failure::Failed(format!("{}: {error}", shown(&model.join(MANIFEST)))))?;
    let content = if is_model {
        Content::Model(sequences(&path.join(SEQUENCES), &manifest).map_err(failed)?)
    } else {
        Content::Sequence(layers(path, &manifest).map_err(failed)?)
    };
    let page_tokens = u64::from(manifest.geometry().page_tokens()).max(1);
    Ok(Subject { path: shown(path), page_tokens, content })
}

fn sequences(path: &Path, manifest: &Manifest) -> io::Result<Vec<(String, Vec<LayerPages>)>> {
    let mut found = Vec::new();
    for entry in if_there(path.read_dir())?.into_iter().flatten() {
        let entry = entry?;
        if is_staging(entry.file_name().as_bytes()) || !entry.file_type()?.is_dir() {
            continue;
        }
        let name = shown(Path::new(&entry.file_name()));
        found.push((name, layers(&entry.path(), manifest)?));
    }
    Ok(found)
}

fn layers(sequence: &Path, manifest: &Manifest) -> io::Result<Vec<LayerPages>> {
    let kinds = manifest.fields().layers.as_deref().unwrap_or_default();
    let mut found = Vec::new();
    // What goes meanwhile is not there.
    for entry in if_there(sequence.read_dir())?.into_iter().flatten() {
        let entry = entry?;
        let Some(layer) = parse_layer(entry.file_name().as_bytes()) else { continue };
        let kind = usize::try_from(layer.0).ok().and_then(|layer| kinds.get(layer));
        let keeps_pages = !matches!(kind, Some(LayerKind::Recurrent | LayerKind::State(_)));
        if let Some(mut pages) = if_there(pages(&entry.path()))? {
            pages.sort_by_key(|page| page.start);
            found.push(LayerPages { layer: layer.0, keeps_pages, pages });
        }
    }
    found.sort_by_key(|layer| layer.layer);
    Ok(found)
}

fn pages(layer: &Path) -> io::Result<Vec<Page>> {
    let mut found = Vec::new();
    let mut attribute = PAGES.to_owned();
    loop {
        let name = CString::new(attribute)?;
        let Some(text) = sys::long_extended_attribute(layer, &name)? else {
            let why = "does not tell its pages: its daemon is of another version";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        };
        let text = String::from_utf8_lossy(&text);
        let (head, lines) = text.split_once('\n').unwrap_or((&text, ""));
        found.extend(lines.lines().filter_map(Page::parse));
        match head.strip_prefix("next ") {
            Some(offset) => attribute = format!("{PAGES}.{offset}"),
            None => return Ok(found),
        }
    }
}

//! Asks the mount where the pages of a sequence or a model are: one request for each directory, and one
//! for each part of a layer.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::page::Page;
use super::tree::Tree;
use crate::cli::history::shown;
use crate::cli::output::Failure;
use crate::cli::subject::if_there;
use crate::page::names::{SEQUENCES, is_unfinished, parse_layer};
use crate::page::{LayerKind, Manifest};

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
pub(super) fn gather(tree: &impl Tree, path: &Path) -> Result<Subject, Failure> {
    let failed =
        |path: &Path, error: io::Error| Failure::Failed(format!("{}: {error}", shown(path)));
    let wrong = || {
        let path = shown(path);
        Failure::Failed(format!(
            "{path} is neither a sequence nor a model: name models/NAME or models/NAME/sequences/SEQUENCE"
        ))
    };
    let is_sequence = path.parent().and_then(Path::file_name) == Some(SEQUENCES.as_ref());
    let model = if is_sequence { path.ancestors().nth(LEVELS).ok_or_else(wrong)? } else { path };
    let manifest = if_there(tree.manifest(model)).map_err(|error| failed(model, error))?;
    let manifest = manifest.flatten().ok_or_else(wrong)?;
    let content = if is_sequence {
        let names = if_there(tree.directories(path)).map_err(|error| failed(path, error))?;
        let names = names.ok_or_else(wrong)?;
        Content::Sequence(layers(tree, path, names, &manifest).map_err(|e| failed(path, e))?)
    } else {
        let path = path.join(SEQUENCES);
        Content::Model(sequences(tree, &path, &manifest).map_err(|error| failed(&path, error))?)
    };
    let page_tokens = u64::from(manifest.geometry().page_tokens()).max(1);
    Ok(Subject { path: shown(path), page_tokens, content })
}

fn sequences(
    tree: &impl Tree, path: &Path, manifest: &Manifest,
) -> io::Result<Vec<(String, Vec<LayerPages>)>> {
    let mut found = Vec::new();
    for name in if_there(tree.directories(path))?.unwrap_or_default() {
        if is_unfinished(name.as_bytes()) {
            continue;
        }
        let sequence = path.join(&name);
        // What goes meanwhile is not there.
        let names = if_there(tree.directories(&sequence))?.unwrap_or_default();
        found.push((shown(Path::new(&name)), layers(tree, &sequence, names, manifest)?));
    }
    Ok(found)
}

fn layers(
    tree: &impl Tree, sequence: &Path, names: Vec<OsString>, manifest: &Manifest,
) -> io::Result<Vec<LayerPages>> {
    let kinds = manifest.fields().layers.as_deref().unwrap_or_default();
    let mut found = Vec::new();
    for name in names {
        let Some(layer) = parse_layer(name.as_bytes()) else { continue };
        let kind = usize::try_from(layer.0).ok().and_then(|layer| kinds.get(layer));
        let keeps_pages = !matches!(kind, Some(LayerKind::Recurrent | LayerKind::State(_)));
        if let Some(mut pages) = if_there(pages(tree, &sequence.join(&name)))? {
            pages.sort_by_key(|page| page.start);
            found.push(LayerPages { layer: layer.0, keeps_pages, pages });
        }
    }
    found.sort_by_key(|layer| layer.layer);
    Ok(found)
}

/// The pages of a layer, part after part.
pub(super) fn pages(tree: &impl Tree, layer: &Path) -> io::Result<Vec<Page>> {
    let mut found = Vec::new();
    let mut attribute = PAGES.to_owned();
    loop {
        let Some(text) = tree.attribute(layer, &attribute)? else {
            let why = "does not tell its pages: its daemon is of another version";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        };
        let text = String::from_utf8_lossy(&text);
        let (head, lines) = text.split_once('\n').unwrap_or((&text, ""));
        let before = found.len();
        found.extend(lines.lines().filter_map(Page::parse));
        tree.take(found.len() - before)?;
        match head.strip_prefix("next ") {
            Some(offset) => attribute = format!("{PAGES}.{offset}"),
            None => return Ok(found),
        }
    }
}

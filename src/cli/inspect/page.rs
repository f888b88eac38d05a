//! A page file: what its header says, and whether its bytes are what a manifest and its place
//! ask for.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::{Map, Value};

use super::manifest_above;
use crate::cli::summary::Summary;
use crate::page::limits::{HEADER_JSON_BYTES, LENGTH_PREFIX_BYTES};
use crate::page::names::{LayerEntry, POSITIONS, TOKENS, parse_layer};
use crate::page::{
    Layer, MAX_POSITIONS_BYTES, Manifest, PageHeader, PagePlace, Positions, PrefixHash, TokenStart,
    VerifyError,
};
use crate::sys;

/// Explains a file that is or might be a page.
pub(super) fn inspect(
    path: &Path, file_bytes: u64, entry: LayerEntry, summary: &mut Summary,
) -> io::Result<()> {
    let file = File::open(path)?;
    let Some(header) = read_header(&file)? else {
        summary.add("kind", "file");
        return Ok(());
    };
    summary.add("kind", if header.contains_key("k") { "page" } else { "safetensors file" });
    let layer = layer_of(path);
    let start = match entry {
        LayerEntry::Page(start) => Some(start),
        _ => None,
    };
    if let (Some(layer), Some(start)) = (layer, start) {
        summary.add("layer", layer.0);
        summary.add("start", start.0);
    }
    let manifest = manifest_above(path);
    describe_header(header, manifest.as_ref().map(|(_, manifest)| manifest), summary);
    let Some((manifest_path, manifest)) = manifest else {
        summary.add("note", "no manifest.json above: not verified");
        return Ok(());
    };
    summary.add_path("manifest", &manifest_path);
    let place = layer.zip(start).map(|(layer, start)| PagePlace::new(&manifest, layer, start));
    match place {
        Some(Ok(place)) => verify(&file, file_bytes, &place, summary)?,
        Some(Err(error)) => summary.add("refused", error.to_string()),
        None => verify_where_it_says(&file, file_bytes, &manifest, summary)?,
    }
    Ok(())
}

/// The layer that the directory of a page names.
pub(in crate::cli) fn layer_of(path: &Path) -> Option<Layer> {
    parse_layer(path.parent()?.file_name()?.as_bytes())
}

/// The hash of the tokens up to the end of a page, by which it is found in `prefixes/`: nothing where its sequence lacks
/// some of them, or has removed or moved some. No page is opened for it.
pub(super) fn prefix(path: &Path, start: TokenStart) -> Option<PrefixHash> {
    layer_of(path)?;
    let sequence = path.parent()?.parent()?;
    let (_, manifest) = manifest_above(path)?;
    let end = start.0.checked_add(manifest.geometry().page_tokens().into())?;
    let bytes = end.checked_mul(4)?;
    let tokens = sys::read_no_follow(&sequence.join(TOKENS), bytes).ok()?;
    let moved = sequence.join(POSITIONS);
    let positions = match sys::read_no_follow(&moved, MAX_POSITIONS_BYTES as u64 + 1) {
        Ok(json) => Positions::parse(&json).ok()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Positions::default(),
        Err(_) => return None,
    };
    let is_whole = tokens.len() as u64 == bytes && positions.prefix_rows() >= end;
    if is_whole { manifest.prefix_of(&tokens) } else { None }
}

/// The header of a safetensors file, None for any other file.
fn read_header(file: &File) -> io::Result<Option<Map<String, Value>>> {
    let mut head = Vec::new();
    file.take(LENGTH_PREFIX_BYTES + HEADER_JSON_BYTES).read_to_end(&mut head)?;
    let Some((length, json)) = head.split_first_chunk() else {
        return Ok(None);
    };
    let length = usize::try_from(u64::from_le_bytes(*length)).ok();
    let json = length.and_then(|length| json.get(..length));
    Ok(json.and_then(|json| serde_json::from_slice(json).ok()))
}

/// Shapes, element types and metadata as the file has them.
fn describe_header(
    mut header: Map<String, Value>, manifest: Option<&Manifest>, summary: &mut Summary,
) {
    let metadata = header.remove("__metadata__");
    if let Some(Value::Object(k)) = header.get("k") {
        summary.add("dtype", k.get("dtype").cloned().unwrap_or_default());
    }
    for (name, fact) in [("k", "k_shape"), ("v", "v_shape"), ("side", "side_shape")] {
        if let Some(shape) = header.get(name).and_then(|tensor| tensor.get("shape")) {
            summary.add(fact, shape.clone());
        }
    }
    if let Some(manifest) = manifest {
        summary.add("layout", manifest.geometry().layout().name());
    }
    if let Some(Value::Object(metadata)) = metadata
        && !metadata.is_empty()
    {
        summary.add("metadata", Value::Object(metadata));
    }
}

fn verify(
    file: &File, file_bytes: u64, place: &PagePlace, summary: &mut Summary,
) -> io::Result<()> {
    let mut read_at = |offset, buffer: &mut [u8]| file.read_at(buffer, offset);
    match place.verify(&mut read_at, file_bytes) {
        Ok(verified) => {
            summary.add("tokens", verified.header.tokens);
            summary.add("checksum", verified.digest.page.to_string());
            let declared = verified.header.declared.checksum.is_some();
            summary.add("verified", if declared { "declared checksum matches" } else { "shape" });
        }
        Err(VerifyError::Io(error)) => return Err(error),
        Err(VerifyError::Page(error)) => summary.add("refused", error.to_string()),
    }
    Ok(())
}

/// A page that was copied out of its directory may still say where it belongs.
fn verify_where_it_says(
    file: &File, file_bytes: u64, manifest: &Manifest, summary: &mut Summary,
) -> io::Result<()> {
    let mut head = Vec::new();
    let mut read = file.try_clone()?;
    io::Seek::rewind(&mut read)?;
    read.take(LENGTH_PREFIX_BYTES + HEADER_JSON_BYTES).read_to_end(&mut head)?;
    let header = match PageHeader::parse_of_any_layer(&head, file_bytes, manifest) {
        Ok((_, header)) => header,
        Err(error) => {
            summary.add("refused", error.to_string());
            return Ok(());
        }
    };
    let declared = &header.declared;
    let (Some(layer), Some(start)) = (declared.layer, declared.start) else {
        summary.add("tokens", header.tokens);
        summary.add("note", "neither its path nor its header says layer and start: no checksum");
        return Ok(());
    };
    let TokenStart(first) = start;
    summary.add("layer", layer.0);
    summary.add("start", first);
    match PagePlace::new(manifest, layer, start) {
        Ok(place) => verify(file, file_bytes, &place, summary)?,
        Err(error) => summary.add("refused", error.to_string()),
    }
    Ok(())
}

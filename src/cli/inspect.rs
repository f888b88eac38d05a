//! `kvfs inspect`: what a file or directory of a cache is, as far as it can tell.
//!
//! It works on a mount and on a copy of one. What a name and a manifest above it say is used
//! where it is there; a page on its own is still explained by its header.

mod heat;
mod page;
mod places;
mod state;
mod tree;

use std::ffi::CStr;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::arguments::InspectArguments;
use super::output::{Failure, Outcome, Report, bytes};
use super::summary::Summary;
use crate::page::limits::MANIFEST_BYTES_READ;
use crate::page::names::{LayerEntry, MANIFEST, TOKENS, layer_entry};
use crate::page::{Geometry, Layer, LayerKind, Manifest, StateShape};
use crate::sys;

/// A page is four directories below its manifest: sequences, sequence, layer, page.
const LEVELS_MAX: usize = 4;
const TIER: &CStr = c"user.kvfs.tier";
const ENCODING: &CStr = c"user.kvfs.encoding";
/// First and last token ids that are shown.
const TOKENS_SHOWN: u64 = 8;

pub(super) use heat::HeatArguments;
pub(super) use page::layer_of;

/// Explains a path.
pub(crate) fn run(arguments: &InspectArguments) -> Outcome {
    let path = &arguments.path;
    // Refused before anything is read.
    let picture = arguments.heat.begin()?;
    let explain = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
    let metadata = path.metadata().map_err(explain)?;
    let mut summary = Summary::new(path);
    // The name and those above it mean something, so `.` must have one.
    let absolute = std::path::absolute(path).map_err(explain)?;
    inspect(&absolute, &metadata, &mut summary).map_err(explain)?;
    let mut table = String::new();
    if let Some(picture) = picture {
        let drawn = picture.draw(path)?;
        summary.add_with_text("heat", drawn.json, drawn.file);
        table = drawn.table;
    }
    Ok(if arguments.json {
        Report::json(&summary.to_json())
    } else {
        Report::text(summary.to_text() + &table)
    })
}

fn inspect(path: &Path, metadata: &Metadata, summary: &mut Summary) -> io::Result<()> {
    let name = path.file_name().map_or(&b""[..], OsStrExt::as_bytes);
    if metadata.is_dir() {
        return tree::inspect(path, summary);
    }
    if !metadata.is_file() {
        return Err(io::Error::other("is neither a regular file nor a directory"));
    }
    summary.add("bytes", metadata.len());
    if name == MANIFEST.as_bytes() {
        manifest(path, summary)?;
    } else if name == TOKENS.as_bytes() {
        tokens(path, metadata.len(), summary)?;
    } else if is_away(path) {
        away(path, layer_entry(name), summary);
    } else {
        match layer_entry(name) {
            LayerEntry::Tail(start) => {
                summary.add("kind", "tail");
                summary.add("start", start.0);
                tail(path, metadata.len(), summary);
            }
            LayerEntry::State(tokens) => state::inspect(path, metadata.len(), tokens, summary)?,
            entry => page::inspect(path, metadata.len(), entry, summary)?,
        }
    }
    if let LayerEntry::Page(start) = layer_entry(name)
        && let Some(prefix) = page::prefix(path, start)
    {
        summary.add("prefix", prefix.to_string());
    }
    attributes(path, summary);
    Ok(())
}

/// The nearest manifest above a path, if there is one that can be read.
pub(super) fn manifest_above(path: &Path) -> Option<(PathBuf, Manifest)> {
    path.ancestors().skip(1).take(LEVELS_MAX).find_map(|directory| {
        let file = directory.join(MANIFEST);
        let manifest =
            Manifest::parse(&sys::read_no_follow(&file, MANIFEST_BYTES_READ).ok()?).ok()?;
        Some((file, manifest))
    })
}

fn manifest(path: &Path, summary: &mut Summary) -> io::Result<()> {
    summary.add("kind", "manifest");
    let mut json = Vec::new();
    File::open(path)?.take(MANIFEST_BYTES_READ).read_to_end(&mut json)?;
    match Manifest::parse(&json) {
        Ok(manifest) => describe_manifest(&manifest, summary),
        Err(error) => summary.add("refused", error.to_string()),
    }
    Ok(())
}

/// What a manifest says and what follows from it.
fn describe_manifest(manifest: &Manifest, summary: &mut Summary) {
    let fields = manifest.fields();
    summary.add("model_id", fields.model_id.clone());
    for (name, value) in [
        ("model_revision", &fields.model_revision),
        ("engine", &fields.engine),
        ("tenant", &fields.tenant),
        ("salt", &fields.salt),
        ("lora", &fields.lora),
    ] {
        if let Some(value) = value {
            summary.add(name, value.clone());
        }
    }
    summary.add("identity", manifest.identity().to_string());
    let geometry = manifest.geometry();
    describe_geometry(geometry, summary);
    let kinds = fields.layers.iter().flatten();
    let (mut sliding, mut recurrent, mut cross, mut with_side) = (0, 0, 0, 0);
    for kind in kinds {
        match kind {
            LayerKind::Attention => {}
            LayerKind::WithSide(_) => with_side += 1,
            LayerKind::Sliding { .. } => sliding += 1,
            LayerKind::Recurrent | LayerKind::State(_) => recurrent += 1,
            LayerKind::Cross => cross += 1,
        }
    }
    if sliding + recurrent > 0 {
        summary.add("sliding_layers", sliding);
        summary.add("recurrent_layers", recurrent);
    }
    if cross > 0 {
        summary.add("cross_layers", cross);
    }
    let layers = (0..geometry.num_layers()).map(Layer);
    if let Some(side) = layers.clone().find_map(|layer| manifest.side_rows(layer)) {
        summary.add("side_layers", with_side);
        summary.add("side_name", side.name.clone());
        summary.add("side_row_bytes", side.row_bytes);
    }
    if manifest.describes_states() {
        let shapes = layers.clone().filter_map(|layer| manifest.state_shape(layer));
        summary.add_bytes("state_bytes", shapes.map(StateShape::payload_bytes).sum());
    }
    summary.add_bytes("page_bytes", manifest.largest_geometry().file_bytes(geometry.page_tokens()));
    let attending = layers.filter(|layer| {
        manifest.layer_kind(*layer).as_ref().is_some_and(LayerKind::has_rows_of_tokens)
    });
    let row_bytes = attending.map(|layer| manifest.layer_geometry(layer).row_bytes());
    summary.add_bytes("token_bytes", row_bytes.sum());
}

fn describe_geometry(geometry: &Geometry, summary: &mut Summary) {
    summary.add("dtype", geometry.dtype().name());
    summary.add("layout", geometry.layout().name());
    summary.add("num_layers", geometry.num_layers());
    summary.add("num_kv_heads", geometry.num_kv_heads());
    summary.add("head_dim", geometry.head_dim());
    summary.add("v_head_dim", geometry.v_head_dim());
    summary.add("page_tokens", geometry.page_tokens());
}

fn tail(path: &Path, file_bytes: u64, summary: &mut Summary) {
    let Some((_, manifest)) = manifest_above(path) else {
        summary.add("note", "no manifest.json above: the rows cannot be counted");
        return;
    };
    let geometry = match layer_of(path) {
        Some(layer) => manifest.layer_geometry(layer),
        None if manifest.has_side_rows() => {
            summary.add("note", "not in the directory of a layer: the rows cannot be counted");
            return;
        }
        None => *manifest.geometry(),
    };
    let row_bytes = geometry.row_bytes();
    summary.add("rows", geometry.rows_in(file_bytes));
    summary.add("row_bytes", row_bytes);
    if geometry.side_row_bytes() > 0 {
        summary.add("side_row_bytes", geometry.side_row_bytes());
    }
    if !file_bytes.is_multiple_of(row_bytes) {
        summary.add("unfinished_row_bytes", file_bytes % row_bytes);
    }
}

fn tokens(path: &Path, file_bytes: u64, summary: &mut Summary) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    summary.add("kind", "tokens");
    let count = file_bytes / 4;
    summary.add("tokens", count);
    if !file_bytes.is_multiple_of(4) {
        summary.add("unfinished_bytes", file_bytes % 4);
    }
    let file = File::open(path)?;
    let shown = count.min(TOKENS_SHOWN);
    let ids = |from: u64| -> io::Result<Value> {
        let mut ids = Vec::new();
        for at in from..from + shown {
            let mut id = [0; 4];
            file.read_exact_at(&mut id, at * 4)?;
            ids.push(Value::from(u32::from_le_bytes(id)));
        }
        Ok(Value::Array(ids))
    };
    if count > 0 {
        summary.add("first", ids(0)?);
        summary.add("last", ids(count - shown)?);
    }
    Ok(())
}

/// Whether opening a file would fetch or decode its bytes. Who only wants to know what it is must not
/// bring it here.
pub(super) fn is_away(path: &Path) -> bool {
    let read = |name| sys::extended_attribute(path, name).ok().flatten();
    let is_near = matches!(read(TIER).as_deref(), None | Some(b"ram" | b"ssd"));
    !is_near || read(ENCODING).is_some_and(|encoding| encoding != b"raw")
}

/// What is known of a file without its bytes.
fn away(path: &Path, entry: LayerEntry, summary: &mut Summary) {
    match (entry, layer_of(path)) {
        (LayerEntry::Page(start), Some(layer)) => {
            summary.add("kind", "page");
            summary.add("layer", layer.0);
            summary.add("start", start.0);
        }
        _ => summary.add("kind", "file"),
    }
    let note = "its bytes are not here as they are read, so they were not looked at: kvfs promote \
                brings them";
    summary.add("note", note);
}

/// What the mount knows about a file; a copy has none of it.
fn attributes(path: &Path, summary: &mut Summary) {
    const NAMES: [&CStr; 8] = [
        TIER,
        ENCODING,
        c"user.kvfs.damaged",
        c"user.kvfs.checksum",
        c"user.kvfs.stored_bytes",
        c"user.kvfs.pin",
        c"user.kvfs.lossy",
        c"user.kvfs.ttl",
    ];
    let mut found = Map::new();
    for name in NAMES {
        // An attribute that cannot be read is as good as absent here.
        if let Ok(Some(value)) = sys::extended_attribute(path, name) {
            let value = String::from_utf8_lossy(&value).into_owned();
            found.insert(name.to_string_lossy().into_owned(), Value::from(value));
        }
    }
    if !found.is_empty() {
        summary.add("attributes", Value::Object(found));
    }
}

/// `4198400 (4.0 MiB)`, for the text form.
fn with_unit(count: u64) -> String {
    if count < 1024 { count.to_string() } else { format!("{count} ({})", bytes(count)) }
}

impl Summary {
    /// Adds a number of bytes, which the text form also shows with a unit.
    fn add_bytes(&mut self, name: &'static str, count: u64) {
        self.add_with_text(name, Value::from(count), with_unit(count));
    }
}

#[cfg(test)]
mod tests;

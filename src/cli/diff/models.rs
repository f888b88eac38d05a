//! Two models: their manifests, and the sequences that have the same name.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::sequences::Comparison;
use super::{Found, Verdict, add_both, explain};
use crate::cli::history::shown;
use crate::cli::output::Failure;
use crate::cli::page_values::Away;
use crate::cli::subject::if_there;
use crate::cli::summary::Summary;
use crate::page::limits::MANIFEST_BYTES_READ;
use crate::page::names::{MANIFEST, SEQUENCES, is_unfinished};
use crate::page::{Layer, Manifest};
use crate::sys;

type OfManifest = fn(&Manifest) -> Value;

/// What of a manifest is told.
const FIELDS: [(&str, OfManifest); 9] = [
    ("model_id", |manifest| json!(manifest.fields().model_id)),
    ("identity", |manifest| json!(manifest.identity().to_string())),
    ("num_layers", |manifest| json!(manifest.geometry().num_layers())),
    ("num_kv_heads", |manifest| json!(manifest.geometry().num_kv_heads())),
    ("head_dim", |manifest| json!(manifest.geometry().head_dim())),
    ("v_head_dim", |manifest| json!(manifest.geometry().v_head_dim())),
    ("page_tokens", |manifest| json!(manifest.geometry().page_tokens())),
    ("dtype", |manifest| json!(manifest.geometry().dtype().name())),
    ("layout", |manifest| json!(manifest.geometry().layout().name())),
];

pub(super) fn compare(a: &Path, b: &Path, away: Away) -> Result<Found, Failure> {
    let [manifest_a, manifest_b] = [manifest(a)?, manifest(b)?];
    let mut summary = Summary::default();
    let mut verdict = Verdict::Equal;
    for (name, of) in FIELDS {
        let (of_a, of_b) = (of(&manifest_a), of(&manifest_b));
        verdict = verdict.max(Verdict::of(of_a == of_b));
        add_both(&mut summary, name, [of_a, of_b]);
    }
    if manifest_a.has_side_rows() || manifest_b.has_side_rows() {
        add_both(&mut summary, "side_rows", [side_rows(&manifest_a), side_rows(&manifest_b)]);
    }
    let (of_a, of_b) = (sequences(a)?, sequences(b)?);
    let [only_a, only_b] = [of_a.difference(&of_b), of_b.difference(&of_a)]
        .map(|names| names.map(|name| shown(Path::new(name))).collect::<Vec<_>>());
    verdict = verdict.max(Verdict::of(only_a.is_empty() && only_b.is_empty()));
    let (mut table, mut by_name, mut equal) = (String::new(), Map::new(), 0_u64);
    for name in of_a.intersection(&of_b) {
        let [path_a, path_b] = [a, b].map(|model| model.join(SEQUENCES).join(name));
        let comparison = Comparison::of(&path_a, &path_b, away)?;
        let found = comparison.verdict();
        verdict = verdict.max(found);
        let (name, facts) = (shown(Path::new(name)), comparison.to_summary());
        let mut object = facts.to_json();
        object["result"] = json!(found.name());
        by_name.insert(name.clone(), object);
        if found == Verdict::Equal {
            equal += 1;
            continue;
        }
        // Writing to a String cannot fail.
        let _ = writeln!(table, "sequence {name}: {}", found.name());
        for line in facts.to_text().lines() {
            let _ = writeln!(table, "  {line}");
        }
    }
    let compared = by_name.len();
    summary.add_with_text(
        "sequences",
        Value::Object(by_name),
        format!("{compared} in both, of which {equal} are equal"),
    );
    for (name, names) in [("only_a", only_a), ("only_b", only_b)] {
        if !names.is_empty() {
            summary.add_with_text(name, json!(names), names.join(", "));
        }
    }
    Ok(Found { verdict, summary, table })
}

/// What layers keep beside K and V, and which do.
fn side_rows(manifest: &Manifest) -> Value {
    let layers = (0..manifest.geometry().num_layers()).map(Layer);
    let each = layers.filter_map(|layer| {
        let side = manifest.side_rows(layer)?;
        Some(json!([layer.0, side.name, side.row_bytes]))
    });
    each.collect()
}

fn manifest(model: &Path) -> Result<Manifest, Failure> {
    let path = model.join(MANIFEST);
    let bytes =
        sys::read_no_follow(&path, MANIFEST_BYTES_READ).map_err(|error| explain(&path, error))?;
    Manifest::parse(&bytes).map_err(|error| explain(&path, error))
}

/// The names of the sequences of a model.
fn sequences(model: &Path) -> Result<BTreeSet<OsString>, Failure> {
    let path = model.join(SEQUENCES);
    let explained = |error: std::io::Error| explain(&path, error);
    let mut names = BTreeSet::new();
    let Some(entries) = if_there(path.read_dir()).map_err(explained)? else { return Ok(names) };
    for entry in entries {
        let entry = entry.map_err(explained)?;
        let name = entry.file_name();
        if !is_unfinished(name.as_bytes()) && entry.file_type().map_err(explained)?.is_dir() {
            names.insert(name);
        }
    }
    Ok(names)
}

//! `kvfs create`: makes a model's directory, its manifest and the directory of its sequences.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde_json::json;

use super::output::{Failure, Outcome, Report, bytes};
use crate::page::limits::MAX_LAYERS;
use crate::page::names::{MANIFEST, SEQUENCES, WORK_SUFFIX, is_staging};
use crate::page::{
    Dtype, KvRotation, Layer, LayerKind, Layout, Manifest, ManifestFields, PageError, Rope,
    SideRows,
};
use kvfs_formats::model_file::ModelFile;

/// Where the manifest is written before it gets its name.
const MANIFEST_STAGING: &str = "manifest.json.tmp";

/// `kvfs create`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs create /mnt/kv/models/qwen --from qwen3-8b.gguf")]
pub(crate) struct CreateArguments {
    /// MOUNTPOINT/models/NAME
    pub path: PathBuf,
    /// A config.json of Hugging Face, a directory with one, or a GGUF: what follows is read there, as far as it is
    /// not given here
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// Layers of the model
    #[arg(long, value_name = "N", required_unless_present = "from", conflicts_with = "from")]
    pub layers: Option<u32>,
    /// KV heads per layer
    #[arg(long, value_name = "H", required_unless_present = "from")]
    pub kv_heads: Option<u32>,
    /// Elements of one K row
    #[arg(long, value_name = "D", required_unless_present = "from")]
    pub head_dim: Option<u32>,
    /// Elements of one V row, 0 if the model keeps no V [default: head-dim]
    #[arg(long, value_name = "D")]
    pub v_head_dim: Option<u32>,
    /// What is kept of each token beside K and V, such as index keys, and how many bytes of it [default: nothing;
    /// with --from of a model with index keys these, as the model computes them]. A layer that attends to all tokens
    /// keeps it, with --from of such a model one that has index keys of its own
    #[arg(long, value_name = "NAME:BYTES", value_parser = side_rows)]
    pub side: Option<SideRows>,
    /// Tokens of a full page [default: 1024; with --from as many as make a page of 2 to 4 MiB]
    #[arg(long, value_name = "T")]
    pub page_tokens: Option<u32>,
    /// Element type [default: f16; with --from that of the config.json]
    #[arg(long, ignore_case = true, value_parser = dtypes())]
    pub dtype: Option<Dtype>,
    /// Order of heads and tokens in a page [default: hnd; with --from of a GGUF nhd, as llama.cpp has it]
    #[arg(long, value_enum)]
    pub layout: Option<LayoutArgument>,
    /// The model, as its users name it [default: NAME]
    #[arg(long, value_name = "ID")]
    pub model_id: Option<String>,
    /// Commit or version of the weights
    #[arg(long, value_name = "R")]
    pub model_revision: Option<String>,
    /// Who writes the pages
    #[arg(long, value_name = "E")]
    pub engine: Option<String>,
    /// Base frequency of the position encoding in K
    #[arg(long, value_name = "F")]
    pub rope_theta: Option<f64>,
    /// Rotated elements of a row, if not all of them
    #[arg(long, value_name = "N", requires = "rope_theta")]
    pub rope_dims: Option<u32>,
    /// Which two elements of a row turn together: i and i + N/2 (Llama in Hugging Face's order), or 2i and
    /// 2i + 1 (Llama in llama.cpp's)
    #[arg(long, value_name = "P", requires = "rope_theta", value_parser = ["halves", "interleaved"])]
    pub rope_pairing: Option<String>,
    /// Whether the engine rotated K and V before it stored them (true: as it does by itself), or how
    /// [default: it did not]
    #[arg(long, value_name = "true|false|NAME", value_parser = kv_rotation)]
    pub kv_rotation: Option<KvRotation>,
    /// What pages may be rounded to when they go cold [default: never]
    #[arg(long, value_name = "ENCODING", value_parser = ["q8_0", "q4_0"])]
    pub cold_encoding: Option<String>,
    /// Whose cache this is; tenants never share pages
    #[arg(long, value_name = "T")]
    pub tenant: Option<String>,
    /// Seed that keeps caches apart
    #[arg(long, value_name = "S")]
    pub salt: Option<String>,
    /// Adapter that the values are computed with
    #[arg(long, value_name = "L")]
    pub lora: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn dtypes() -> impl TypedValueParser<Value = Dtype> {
    PossibleValuesParser::new(Dtype::ALL.map(Dtype::name)).try_map(|name| name.parse::<Dtype>())
}

fn side_rows(text: &str) -> Result<SideRows, String> {
    let bytes = text.rsplit_once(':').and_then(|(name, bytes)| Some((name, bytes.parse().ok()?)));
    let (name, row_bytes) = bytes.ok_or("a name, a colon and the bytes of a token: index_k:256")?;
    Ok(SideRows { name: name.to_owned(), row_bytes })
}

fn kv_rotation(text: &str) -> Result<KvRotation, String> {
    match text {
        "" => Err("true, false or a name".to_owned()),
        "true" => Ok(KvRotation::Flag(true)),
        "false" => Ok(KvRotation::Flag(false)),
        name => Ok(KvRotation::Named(name.to_owned())),
    }
}

/// Order of heads and tokens.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LayoutArgument {
    /// Heads first: [heads, tokens, dim]
    Hnd,
    /// Tokens first: [tokens, heads, dim]
    Nhd,
}

impl From<LayoutArgument> for Layout {
    fn from(layout: LayoutArgument) -> Layout {
        match layout {
            LayoutArgument::Hnd => Layout::Hnd,
            LayoutArgument::Nhd => Layout::Nhd,
        }
    }
}

/// Makes the cache of one model.
pub(crate) fn run(arguments: &CreateArguments) -> Outcome {
    let path = &arguments.path;
    let name = model_name(path)?;
    let from =
        arguments.from.as_deref().map(ModelFile::read).transpose().map_err(Failure::Usage)?;
    let dtype = match (arguments.dtype, &from) {
        (Some(dtype), _) => dtype,
        (None, Some(from)) => from.dtype.clone().map_err(Failure::Usage)?,
        (None, None) => Dtype::F16,
    };
    let manifest = manifest(arguments, (&name, dtype), from.as_ref())
        .map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))?;
    DirBuilder::new().create(path).map_err(|error| explain(path, &error))?;
    if let Err(error) = fill(path, &manifest) {
        // Best effort: the first error is the one to tell.
        let _ = std::fs::remove_file(path.join(MANIFEST_STAGING));
        let _ = std::fs::remove_file(path.join(MANIFEST));
        let _ = std::fs::remove_dir(path);
        return Err(Failure::Failed(format!("{}: {error}", path.display())));
    }
    Ok(if arguments.json {
        Report::json(&to_json(path, &manifest))
    } else {
        Report::text(describe(path, from.as_ref(), &manifest))
    })
}

/// The name, if the path is that of a model in a mount.
fn model_name(path: &Path) -> Result<String, Failure> {
    let usage = |line: &str| {
        Failure::Usage(format!("{} {line}: name MOUNTPOINT/models/NAME", path.display()))
    };
    let absolute = std::path::absolute(path).map_err(Failure::failed)?;
    let (Some(name), Some(parent)) = (absolute.file_name(), absolute.parent()) else {
        return Err(usage("is no model"));
    };
    if parent.file_name() != Some("models".as_ref()) {
        return Err(usage("is not in a directory called models"));
    }
    let name = name.to_str().ok_or_else(|| usage("is not UTF-8"))?;
    if is_staging(name.as_bytes()) {
        return Err(usage("begins with a dot or ends in .tmp, which means unfinished"));
    }
    if name.ends_with(WORK_SUFFIX) {
        return Err(usage("ends in ~, as what an operation on a model works on"));
    }
    Ok(name.to_owned())
}

fn explain(path: &Path, error: &io::Error) -> Failure {
    Failure::Failed(match error.kind() {
        io::ErrorKind::AlreadyExists => format!("{} exists already", path.display()),
        io::ErrorKind::NotFound => {
            let parent = path.parent().unwrap_or(path).display();
            format!("{parent} does not exist: is the cache mounted?")
        }
        _ => format!("{}: {error}", path.display()),
    })
}

fn manifest(
    arguments: &CreateArguments, (name, dtype): (&str, Dtype), from: Option<&ModelFile>,
) -> Result<Manifest, PageError> {
    // The parser takes care that each is given where there is no file.
    let or_file = |given: Option<u32>, of_file: fn(&ModelFile) -> u32| {
        given.or(from.map(of_file)).unwrap_or_default()
    };
    let layers = arguments.layers.unwrap_or_else(|| count(from.map_or(&[], |from| &from.layers)));
    let kv_heads = or_file(arguments.kv_heads, |from| from.kv_heads);
    let head_dim = or_file(arguments.head_dim, |from| from.head_dim);
    let v_head_dim = from.map(|from| from.v_head_dim).filter(|v_head_dim| *v_head_dim != head_dim);
    let model_id = arguments.model_id.as_deref().unwrap_or(name);
    let layout = arguments.layout.map(Layout::from);
    let mut fields = ManifestFields {
        v_head_dim: arguments.v_head_dim.or(v_head_dim),
        layout: layout.or(from.map(|from| from.layout)).unwrap_or_default(),
        layers: Some(kinds(arguments.side.as_ref(), layers, dtype, from)?)
            .filter(|layers| !is_plain(layers)),
        model_revision: arguments.model_revision.clone(),
        engine: arguments.engine.clone(),
        rope: rope(arguments).or_else(|| from?.rope.clone()),
        kv_rotation: arguments.kv_rotation.clone(),
        tenant: arguments.tenant.clone(),
        salt: arguments.salt.clone(),
        lora: arguments.lora.clone(),
        cold_encoding: arguments.cold_encoding.clone(),
        ..ManifestFields::new(model_id, dtype, layers, kv_heads, head_dim)
    };
    if let Some(tokens) = arguments.page_tokens {
        fields.page_tokens = tokens;
    } else if from.is_some() {
        let row_bytes = Manifest::new(fields.clone())?.largest_geometry().row_bytes();
        fields.page_tokens = page_tokens(row_bytes);
    }
    Manifest::new(fields)
}

/// What each layer keeps.
fn kinds(
    side: Option<&SideRows>, layers: u32, dtype: Dtype, from: Option<&ModelFile>,
) -> Result<Vec<LayerKind>, PageError> {
    let keys = from.and_then(|from| from.index_keys.as_ref());
    let side = match (side, keys) {
        (Some(side), _) => Some(side.clone()),
        (None, Some(keys)) => Some(keys.rows(dtype).map_err(PageError::Manifest)?),
        (None, None) => None,
    };
    let kinds = match (from, &side) {
        (Some(from), Some(side)) => from.layers_with(side),
        (Some(from), None) => from.layers.clone(),
        // More than a manifest may have are refused with it.
        (None, side) => {
            let kind = side.clone().map_or(LayerKind::Attention, LayerKind::WithSide);
            vec![kind; layers.min(MAX_LAYERS + 1) as usize]
        }
    };
    if side.is_some() && !kinds.iter().any(|kind| matches!(kind, LayerKind::WithSide(_))) {
        let why = "no layer attends to all tokens, so none keeps side rows: leave out --side";
        return Err(PageError::Manifest(why.to_owned()));
    }
    Ok(kinds)
}

fn count(layers: &[LayerKind]) -> u32 {
    u32::try_from(layers.len()).unwrap_or(u32::MAX)
}

/// Whether a manifest need not say what each layer keeps.
fn is_plain(layers: &[LayerKind]) -> bool {
    layers.iter().all(|kind| *kind == LayerKind::Attention)
}

fn rope(arguments: &CreateArguments) -> Option<Rope> {
    let pairing = arguments.rope_pairing.as_deref().map(|name| ("pairing".to_owned(), name.into()));
    Some(Rope {
        theta: arguments.rope_theta?,
        scaling: None,
        dims: arguments.rope_dims,
        other: pairing.into_iter().collect(),
    })
}

/// A power of two with which a page has 4 MiB at most. What is read and synced at once is worth its costs then, and a
/// prefix ends nowhere far from a page's border.
fn page_tokens(row_bytes: u64) -> u32 {
    (MIN_PAGE_TOKENS.ilog2()..=MAX_CHOSEN_PAGE_TOKENS.ilog2())
        .map(|exponent| 1 << exponent)
        .take_while(|tokens| u64::from(*tokens) * row_bytes <= PAGE_BYTES)
        .last()
        .unwrap_or(MIN_PAGE_TOKENS)
}

const PAGE_BYTES: u64 = 4 << 20;
const MIN_PAGE_TOKENS: u32 = 16;
const MAX_CHOSEN_PAGE_TOKENS: u32 = 4096;

fn fill(path: &Path, manifest: &Manifest) -> io::Result<()> {
    let staging = path.join(MANIFEST_STAGING);
    let mut file = File::create_new(&staging)?;
    file.write_all(manifest.to_json().as_bytes())?;
    file.sync_all()?;
    // Closed before the rename: a file that somebody may still write is not published.
    drop(file);
    publish(&staging, &path.join(MANIFEST))?;
    DirBuilder::new().create(path.join(SEQUENCES))?;
    File::open(path)?.sync_all()
}

#[expect(
    clippy::disallowed_methods,
    reason = "a client of the mount publishes by rename, as every writer does"
)]
pub(super) fn publish(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(from, to)
}

fn describe(path: &Path, from: Option<&ModelFile>, manifest: &Manifest) -> String {
    let from = from.map(|from| {
        let number =
            |is: fn(&LayerKind) -> bool| from.layers.iter().filter(|kind| is(kind)).count();
        let rows =
            format!("{} KV heads of {} and {}", from.kv_heads, from.head_dim, from.v_head_dim);
        let kinds = [
            (number(|kind| *kind == LayerKind::Attention), "attention"),
            (number(|kind| matches!(kind, LayerKind::Sliding { .. })), "sliding window"),
            (number(LayerKind::is_recurrent), "recurrent"),
        ];
        let kinds = kinds.into_iter().filter(|(number, _)| *number > 0);
        let kinds: Vec<_> = kinds.map(|(number, kind)| format!("{number} {kind}")).collect();
        format!("{}: layers: {}; {rows}\n", from.architecture, kinds.join(", "))
    });
    let from = from.unwrap_or_default();
    let geometry = manifest.largest_geometry();
    let tokens = geometry.page_tokens();
    let page = geometry.file_bytes(tokens);
    let token = token_bytes(manifest);
    let side = side_of(manifest).map(|(layers, side)| {
        format!("side rows: {} of {} bytes in {layers} layers\n", side.name, side.row_bytes)
    });
    let side = side.unwrap_or_default();
    format!(
        "{}\n{from}{side}page: {tokens} tokens of one layer, {page} bytes ({})\ntoken: {token} bytes over {} \
         layers ({})\n",
        path.display(),
        bytes(page),
        geometry.num_layers(),
        bytes(token),
    )
}

/// How many layers keep something beside K and V, and what.
fn side_of(manifest: &Manifest) -> Option<(usize, &SideRows)> {
    let layers = (0..manifest.geometry().num_layers()).map(Layer);
    let mut rows = layers.filter_map(|layer| manifest.side_rows(layer));
    let first = rows.next()?;
    Some((1 + rows.count(), first))
}

/// Bytes of one token over all layers, without what fills pages up.
fn token_bytes(manifest: &Manifest) -> u64 {
    let layers = (0..manifest.geometry().num_layers()).map(Layer);
    layers.map(|layer| manifest.layer_geometry(layer).row_bytes()).sum()
}

fn to_json(path: &Path, manifest: &Manifest) -> serde_json::Value {
    let geometry = manifest.largest_geometry();
    json!({
        "path": path.display().to_string(),
        "identity": manifest.identity().to_string(),
        "page_tokens": geometry.page_tokens(),
        "page_bytes": geometry.file_bytes(geometry.page_tokens()),
        "token_bytes": token_bytes(manifest),
    })
}

#[cfg(test)]
mod tests;

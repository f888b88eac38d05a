//! `kvfs create`: makes a model's directory, its manifest and the directory of its sequences.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde_json::json;

use super::output::{Failure, Outcome, Report, bytes};
use crate::page::names::{MANIFEST, SEQUENCES, is_staging};
use crate::page::{Dtype, Geometry, KvRotation, Layout, Manifest, ManifestFields, Rope};

/// Where the manifest is written before it gets its name.
const MANIFEST_STAGING: &str = "manifest.json.tmp";

/// `kvfs create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArguments {
    /// MOUNTPOINT/models/NAME
    pub path: PathBuf,
    /// Layers of the model
    #[arg(long, value_name = "N")]
    pub layers: u32,
    /// KV heads per layer
    #[arg(long, value_name = "H")]
    pub kv_heads: u32,
    /// Elements of one K row
    #[arg(long, value_name = "D")]
    pub head_dim: u32,
    /// Elements of one V row, 0 if the model keeps no V [default: head-dim]
    #[arg(long, value_name = "D")]
    pub v_head_dim: Option<u32>,
    /// Tokens of a full page
    #[arg(long, value_name = "T", default_value_t = crate::page::limits::DEFAULT_PAGE_TOKENS)]
    pub page_tokens: u32,
    /// Element type
    #[arg(long, default_value = "f16", ignore_case = true, value_parser = dtypes())]
    pub dtype: Dtype,
    /// Order of heads and tokens in a page
    #[arg(long, value_enum, default_value = "hnd")]
    pub layout: LayoutArgument,
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
    let manifest = manifest(arguments, &name)
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
        Report::text(describe(path, manifest.geometry()))
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

fn manifest(arguments: &CreateArguments, name: &str) -> Result<Manifest, crate::page::PageError> {
    let pairing = arguments.rope_pairing.as_deref().map(|name| ("pairing".to_owned(), name.into()));
    let rope = arguments.rope_theta.map(|theta| Rope {
        theta,
        scaling: None,
        dims: arguments.rope_dims,
        other: pairing.into_iter().collect(),
    });
    let model_id = arguments.model_id.as_deref().unwrap_or(name);
    let least = ManifestFields::new(
        model_id,
        arguments.dtype,
        arguments.layers,
        arguments.kv_heads,
        arguments.head_dim,
    );
    Manifest::new(ManifestFields {
        v_head_dim: arguments.v_head_dim,
        page_tokens: arguments.page_tokens,
        layout: arguments.layout.into(),
        model_revision: arguments.model_revision.clone(),
        engine: arguments.engine.clone(),
        rope,
        kv_rotation: arguments.kv_rotation.clone(),
        tenant: arguments.tenant.clone(),
        salt: arguments.salt.clone(),
        lora: arguments.lora.clone(),
        cold_encoding: arguments.cold_encoding.clone(),
        ..least
    })
}

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

fn describe(path: &Path, geometry: &Geometry) -> String {
    let tokens = geometry.page_tokens();
    let page = geometry.file_bytes(tokens);
    let token = token_bytes(geometry);
    format!(
        "{}\npage: {tokens} tokens of one layer, {page} bytes ({})\ntoken: {token} bytes over {} \
         layers ({})\n",
        path.display(),
        bytes(page),
        geometry.num_layers(),
        bytes(token),
    )
}

/// Bytes of one token over all layers, without what fills pages up.
fn token_bytes(geometry: &Geometry) -> u64 {
    geometry.row_bytes() * u64::from(geometry.num_layers())
}

fn to_json(path: &Path, manifest: &Manifest) -> serde_json::Value {
    let geometry = manifest.geometry();
    json!({
        "path": path.display().to_string(),
        "identity": manifest.identity().to_string(),
        "page_tokens": geometry.page_tokens(),
        "page_bytes": geometry.file_bytes(geometry.page_tokens()),
        "token_bytes": token_bytes(geometry),
    })
}

#[cfg(test)]
mod tests {
    use super::super::arguments::{Arguments, Command};
    use super::*;
    use clap::Parser;

    fn create(path: &Path, options: &str) -> Outcome {
        let mut line = vec!["kvfs", "create", path.to_str().unwrap()];
        line.extend(options.split(' ').filter(|word| !word.is_empty()));
        match Arguments::try_parse_from(line).unwrap().command {
            Command::Create(arguments) => run(&arguments),
            other => panic!("{other:?}"),
        }
    }

    const LLAMA: &str = "--layers 32 --kv-heads 8 --head-dim 128";

    #[test]
    fn a_model_is_made_once() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("models/llama");
        let missing = create(&path, LLAMA).unwrap_err();
        assert!(missing.line().ends_with("models does not exist: is the cache mounted?"));
        std::fs::create_dir(base.path().join("models")).unwrap();
        let report = create(&path, LLAMA).unwrap();
        let expected = format!(
            "{}\npage: 1024 tokens of one layer, 4198400 bytes (4.0 MiB)\n\
             token: 131072 bytes over 32 layers (128.0 KiB)\n",
            path.display()
        );
        assert_eq!(report.text, expected);
        let again = create(&path, LLAMA).unwrap_err();
        assert!(again.line().ends_with("llama exists already"), "{}", again.line());
        let manifest = Manifest::parse(&std::fs::read(path.join(MANIFEST)).unwrap()).unwrap();
        assert_eq!(manifest.fields().model_id, "llama");
        let mut names: Vec<_> =
            path.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [MANIFEST, SEQUENCES]);
    }

    #[test]
    fn every_option_reaches_the_manifest() {
        let base = tempfile::tempdir().unwrap();
        std::fs::create_dir(base.path().join("models")).unwrap();
        let path = base.path().join("models/m");
        let options = "--layers 2 --kv-heads 1 --head-dim 64 --v-head-dim 0 --page-tokens 16 \
            --dtype bf16 --layout nhd --model-id org/m --model-revision r1 --engine e \
            --rope-theta 10000 --rope-dims 32 --rope-pairing interleaved --tenant t --salt s --lora l";
        create(&path, options).unwrap();
        let manifest = Manifest::parse(&std::fs::read(path.join(MANIFEST)).unwrap()).unwrap();
        let json = serde_json::to_value(manifest.fields()).unwrap();
        let expected = json!({
            "schema_version": 1, "num_layers": 2, "num_kv_heads": 1, "head_dim": 64,
            "v_head_dim": 0, "page_tokens": 16, "dtype": "bf16", "layout": "nhd",
            "model_id": "org/m", "model_revision": "r1", "engine": "e",
            "rope": { "theta": 10000.0, "dims": 32, "pairing": "interleaved" }, "tenant": "t", "salt": "s", "lora": "l",
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn refused() {
        fn check(path: &str, options: &str, expected: &str) {
            let failure = create(Path::new(path), options).unwrap_err();
            assert!(matches!(failure, Failure::Usage(_)));
            assert!(failure.line().contains(expected), "{}", failure.line());
        }
        check("/mnt/kv/llama", LLAMA, "is not in a directory called models");
        check("/mnt/kv/models/.a", LLAMA, "which means unfinished");
        check("/mnt/kv/models/a.tmp", LLAMA, "which means unfinished");
        check("/m/models/a", "--layers 0 --kv-heads 8 --head-dim 128", "num_layers is 0");
        let rope = "--layers 1 --kv-heads 8 --head-dim 128 --rope-theta 1 --rope-dims 3";
        check("/m/models/a", rope, "rope.dims is 3");
    }
}

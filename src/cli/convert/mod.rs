//! `kvfs import` and `kvfs export`: sequences of pages, and the files in which other programs keep them.

mod parts;
mod slot;
mod tensors;
mod unwritten;

use std::ffi::OsStr;
use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use kvfs_formats::slot::{Caches, Slot};
use kvfs_formats::tensors::{Selection, Tensors, is_safetensors};
use kvfs_formats::{Rows, SequenceFile, copy_checkpoints, sequence_files};
use serde_json::json;

use super::arguments::{ExportArguments, ImportArguments};
use super::create::publish;
use super::new_file::{NewFile, directory_of};
use super::output::{Failure, Outcome, Report, bytes};
use super::prefix::read_tokens;
use super::progress::{self, Scale};
use super::settings::open_regular;
use crate::page::names::{SEQUENCES, TOKENS, format_checkpoints, format_layer};
use crate::page::{Layer, LayerKind, Manifest, TokenStart};
use crate::reader::Sequence;
use crate::sequence::{SequenceError, Sequences};

/// What a file is called that is to hold tensors.
const TENSORS_EXTENSION: &str = "safetensors";

fn explain(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::Failed(format!("{}: {error}", path.display()))
}

/// A file of another program.
enum Foreign {
    Slot(Slot),
    Tensors(Tensors),
}

impl Foreign {
    fn open(
        arguments: &ImportArguments, token_ids: Option<Vec<u32>>, manifest: &Manifest,
    ) -> Result<Self, String> {
        let file = open_regular(&arguments.file)?;
        if is_safetensors(&file) {
            let selection =
                Selection { batch_row: arguments.row, token_ids, num_tokens: arguments.num_tokens };
            return Tensors::of(file, selection).map(Self::Tensors);
        }
        if token_ids.is_some() || arguments.row.is_some() || arguments.num_tokens.is_some() {
            let why = "is no safetensors file, for which --tokens, --num-tokens and --row are";
            return Err(why.to_owned());
        }
        Slot::of(file, manifest).map(Self::Slot)
    }

    fn check(&self, manifest: &Manifest) -> Result<(), String> {
        match self {
            Self::Slot(slot) => slot.check(manifest),
            Self::Tensors(tensors) => tensors.check(manifest),
        }
    }

    fn rows(&self) -> &dyn Rows {
        match self {
            Self::Slot(slot) => slot,
            Self::Tensors(tensors) => tensors,
        }
    }
}

/// What was made of a file.
#[derive(Debug)]
pub(super) struct Imported {
    sequence: PathBuf,
    tokens: u32,
    bytes: u64,
}

impl fmt::Display for Imported {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Imported { sequence, tokens, bytes: count } = self;
        write!(formatter, "{}: {tokens} tokens, {}", sequence.display(), bytes(*count))
    }
}

/// Makes a sequence of a file.
pub(crate) fn import(arguments: &ImportArguments) -> Outcome {
    let bar = progress::bar("importing", Scale::Bytes(0));
    let imported = import_with(arguments, &bar);
    bar.finish_and_clear();
    let imported = imported?;
    let value = json!({
        "sequence": imported.sequence.display().to_string(),
        "tokens": imported.tokens,
        "bytes": imported.bytes,
    });
    Ok(Report::answer(arguments.json, &value, format!("{imported}\n")))
}

/// The same, with a bar for how far it is.
pub(super) fn import_with(
    arguments: &ImportArguments, bar: &ProgressBar,
) -> Result<Imported, Failure> {
    let (from, to) = (&arguments.file, &arguments.sequence);
    let refuse = |why: String| Failure::Failed(format!("{}: {why}", from.display()));
    let token_ids = arguments.tokens.as_deref().map(read_tokens).transpose()?;
    let (sequences, name) = sequences_above(to)?;
    let manifest = sequences.manifest();
    let foreign = Foreign::open(arguments, token_ids, manifest).map_err(refuse)?;
    foreign.check(manifest).map_err(refuse)?;
    let mut written = 0;
    let made = sequences.make(&name, |directory| {
        let path = directory.to_owned();
        written = fill(directory, manifest, foreign.rows(), bar)
            .map_err(|error| SequenceError::Io { path, error })?;
        Ok(())
    });
    made.map_err(Failure::failed)?;
    Ok(Imported { sequence: to.clone(), tokens: foreign.rows().num_tokens(), bytes: written })
}

/// The sequences among which a directory stands or is to stand, and its name.
fn sequences_above(sequence: &Path) -> Result<(Sequences, String), Failure> {
    let name = sequence.file_name();
    let is_of_model = |above: &PathBuf| above.file_name() == Some(OsStr::new(SEQUENCES));
    let above = directory_of(sequence).to_owned();
    // The way to a model may lead through links, but its directory of sequences is none: that is looked at when it is opened.
    let above = if is_of_model(&above) { Some(above) } else { above.canonicalize().ok() };
    let above = above.filter(is_of_model);
    let model = above.as_deref().and_then(Path::parent);
    let (Some(name), Some(model)) = (name, model) else {
        let place = sequence.display();
        return Err(Failure::Failed(format!("{place}: is not in a model's {SEQUENCES}/")));
    };
    let Some(name) = name.to_str() else {
        let line = format!("{}: the name of a sequence must be UTF-8", sequence.display());
        return Err(Failure::Failed(line));
    };
    let sequences = Sequences::open(model).map_err(Failure::failed)?;
    Ok((sequences, name.to_owned()))
}

/// Bytes of the rows.
fn bytes_of(manifest: &Manifest, rows: &dyn Rows) -> u64 {
    let geometry = manifest.geometry();
    let layers = (0..geometry.num_layers()).map(Layer);
    let of_layer = layers.map(|layer| match manifest.state_shape(layer) {
        Some(shape) => shape.payload_bytes(),
        None => u64::from(rows.num_tokens() - rows.first_row(layer)) * geometry.row_bytes(),
    });
    of_layer.sum::<u64>() + rows.checkpoints_bytes()
}

/// Makes the files of the rows; tells the bytes of these.
fn fill(
    sequence: &Path, manifest: &Manifest, rows: &dyn Rows, bar: &ProgressBar,
) -> io::Result<u64> {
    let geometry = manifest.geometry();
    let total = bytes_of(manifest, rows);
    bar.set_length(total);
    for layer in (0..geometry.num_layers()).map(Layer) {
        DirBuilder::new().create(sequence.join(format_layer(layer)))?;
    }
    for file in sequence_files(rows, manifest) {
        let SequenceFile { layer, name, is_sealed, bytes } = file?;
        let directory = sequence.join(format_layer(layer));
        if is_sealed {
            let staging = directory.join(format!("{name}.tmp"));
            File::create_new(&staging)?.write_all(&bytes)?;
            publish(&staging, &directory.join(name))?;
        } else {
            append(&directory.join(name), &bytes)?;
        }
        // Headers come beside the rows.
        bar.set_position((bar.position() + bytes.len() as u64).min(total));
    }
    if rows.checkpoints_bytes() > 0 {
        let name = format_checkpoints(TokenStart(rows.num_tokens().into()));
        let mut file = File::create_new(sequence.join(name))?;
        copy_checkpoints(rows, |_, bytes| file.write_all(bytes))?;
    }
    let tokens: Vec<u8> = rows.token_ids().iter().flat_map(|id| id.to_le_bytes()).collect();
    append(&sequence.join(TOKENS), &tokens)?;
    File::open(sequence)?.sync_all()?;
    Ok(total)
}

fn append(path: &Path, bytes: &[u8]) -> io::Result<()> {
    OpenOptions::new().append(true).create_new(true).open(path)?.write_all(bytes)
}

/// Makes a file of a sequence: tensors if it is called so, else a slot of llama.cpp.
pub(crate) fn export(arguments: &ExportArguments) -> Outcome {
    let (from, to) = (&arguments.sequence, &arguments.file);
    let refuse = |why: &str| Failure::Failed(format!("{}: {why}", from.display()));
    let is_of_tensors = to.extension().is_some_and(|name| name == TENSORS_EXTENSION);
    if is_of_tensors && arguments.is_for_llama() {
        let line = format!("{}: a safetensors file has no form of llama.cpp's", to.display());
        return Err(Failure::Usage(line));
    }
    let sequence = Sequence::open(from).map_err(Failure::failed)?;
    if !sequence.positions().is_plain() {
        return Err(refuse("its tokens were removed or moved, which such a file cannot say"));
    }
    let manifest = sequence.manifest();
    if manifest.has_side_rows() {
        return Err(refuse(
            "layers keep side rows beside K and V, for which such a file has no place",
        ));
    }
    let mut ids = sequence.token_ids().map_err(Failure::failed)?;
    let known = ids.len() as u64;
    let mut layers = (0..manifest.geometry().num_layers()).map(Layer);
    let is_plain = layers.all(|layer| manifest.layer_kind(layer) == Some(LayerKind::Attention));
    let tokens = if is_plain {
        sequence.valid_tokens().map_err(Failure::failed)?
    } else if is_of_tensors {
        return Err(refuse("not all of its layers keep all tokens, as such a file has them"));
    } else {
        let caches = Caches::of(manifest);
        let caches = caches.map_err(|why| refuse(&format!("a slot file of llama.cpp {why}")))?;
        parts::tokens((&sequence, from), &caches, known).map_err(|why| refuse(&why))?
    };
    if !is_plain && tokens == 0 {
        return Err(refuse("has no tokens after which its layers have what a slot needs"));
    }
    let version = arguments.slot_version();
    let count = if is_of_tensors { known.min(tokens) } else { version.ids(known, tokens) };
    ids.truncate(usize::try_from(count).map_err(Failure::failed)?);
    if ids.is_empty() {
        return Err(refuse(&format!("has no {TOKENS}, which such a file needs")));
    }
    let made = NewFile::replacing(to).map_err(explain(to))?;
    let layers = u64::from(manifest.geometry().num_layers());
    let scale = if is_plain {
        Scale::Bytes(tokens * layers * manifest.geometry().row_bytes())
    } else {
        Scale::BytesWithoutEnd
    };
    let bar = progress::bar("exporting", scale);
    let written = if is_of_tensors {
        tensors::write(made.file(), &sequence, (&ids, tokens), &bar)
    } else {
        slot::write(made.file(), &sequence, arguments, (&ids, tokens), &bar)
    };
    bar.finish_and_clear();
    written.map_err(|why| why.explain(from, to))?;
    let length = made.file().metadata().map_err(explain(to))?.len();
    made.publish().map_err(explain(to))?;
    let value = json!({
        "sequence": from.display().to_string(),
        "file": to.display().to_string(),
        "tokens": tokens,
        "bytes": length,
    });
    let text = format!("{}: {tokens} tokens\n", to.display());
    Ok(Report::answer(arguments.json, &value, text))
}

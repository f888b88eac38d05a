//! `kvfs import` and `kvfs export`: conversations of llama.cpp, between its slot files and pages.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::arguments::{ExportArguments, ImportArguments};
use super::create::publish;
use super::output::{Failure, Outcome, Report, bytes};
use crate::attention::{KvBlock, Tensor, Values};
use crate::ggml::slot::{
    Format, Head, SequenceFile, Slot, write_tensor_head, write_transposed_head,
};
use crate::page::names::{TOKENS, format_layer};
use crate::page::{Geometry, Layer, Manifest};
use crate::reader::{Sequence, Stream};

fn explain(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::Failed(format!("{}: {error}", path.display()))
}

/// Makes a sequence of a slot file.
pub(crate) fn import(arguments: &ImportArguments) -> Outcome {
    import_to_text(arguments).map(Report::text)
}

/// The same; a line that says what was made.
pub(super) fn import_to_text(arguments: &ImportArguments) -> Result<String, Failure> {
    let (from, to) = (&arguments.slot, &arguments.sequence);
    let refuse = |why: String| Failure::Failed(format!("{}: {why}", from.display()));
    let slot = Slot::open(from).map_err(refuse)?;
    DirBuilder::new().create(to).map_err(explain(to))?;
    let outcome = Sequence::open(to).map_err(Failure::failed).and_then(|sequence| {
        let manifest = sequence.manifest();
        slot.check(manifest).map_err(refuse)?;
        fill(to, manifest, &slot).map_err(explain(to))
    });
    if outcome.is_err() {
        // Best effort: the first error is the one to tell.
        let _ = std::fs::remove_dir_all(to);
    }
    let written = outcome?;
    Ok(format!("{}: {} tokens, {}\n", to.display(), slot.cells(), bytes(written)))
}

/// Bytes of the rows.
fn fill(sequence: &Path, manifest: &Manifest, slot: &Slot) -> io::Result<u64> {
    let geometry = manifest.geometry();
    for layer in (0..geometry.num_layers()).map(Layer) {
        DirBuilder::new().create(sequence.join(format_layer(layer)))?;
    }
    for file in slot.files(manifest) {
        let SequenceFile { layer, name, is_page, bytes } = file?;
        let directory = sequence.join(format_layer(layer));
        if is_page {
            let staging = directory.join(format!("{name}.tmp"));
            std::fs::write(&staging, bytes)?;
            publish(&staging, &directory.join(name))?;
        } else {
            append(&directory.join(name), &bytes)?;
        }
    }
    let layers = u64::from(geometry.num_layers());
    let written = layers * u64::from(slot.cells()) * geometry.row_bytes();
    let tokens: Vec<u8> = slot.tokens().iter().flat_map(|id| id.to_le_bytes()).collect();
    append(&sequence.join(TOKENS), &tokens)?;
    File::open(sequence)?.sync_all()?;
    Ok(written)
}

fn append(path: &Path, bytes: &[u8]) -> io::Result<()> {
    OpenOptions::new().append(true).create_new(true).open(path)?.write_all(bytes)
}

/// Makes a slot file of a sequence.
pub(crate) fn export(arguments: &ExportArguments) -> Outcome {
    let (from, to) = (&arguments.sequence, &arguments.slot);
    let sequence = Sequence::open(from).map_err(Failure::failed)?;
    if !sequence.positions().is_plain() {
        let line = format!(
            "{}: its tokens were removed or moved, which a slot file cannot say",
            from.display()
        );
        return Err(Failure::Failed(line));
    }
    let tokens = sequence.valid_tokens().map_err(Failure::failed)?;
    let mut ids = sequence.token_ids().map_err(Failure::failed)?;
    let version = arguments.slot_version;
    let count = version.ids(ids.len() as u64, tokens);
    ids.truncate(usize::try_from(count).map_err(Failure::failed)?);
    if ids.is_empty() {
        let line = format!("{} has no {TOKENS}, which a slot file needs", from.display());
        return Err(Failure::Failed(line));
    }
    let mut name = to.clone().into_os_string();
    name.push(".tmp");
    let staging = Path::new(&name);
    let file = File::create_new(staging).map_err(explain(staging))?;
    let outcome = write_slot(file, &sequence, arguments, (&ids, tokens))
        .and_then(|()| publish(staging, to).map_err(explain(to)));
    if outcome.is_err() {
        let _ = std::fs::remove_file(staging);
    }
    outcome?;
    Ok(Report::text(format!("{}: {tokens} tokens\n", to.display())))
}

fn write_slot(
    file: File, sequence: &Sequence, arguments: &ExportArguments, (ids, tokens): (&[u32], u64),
) -> Result<(), Failure> {
    let (manifest, version) = (sequence.manifest(), arguments.slot_version);
    let refuse = |why: String| Failure::Failed(format!("a slot file of llama.cpp {why}"));
    let format = Format::of_version(manifest, version).map_err(refuse)?;
    let is_transposed = arguments.transposed_v;
    if is_transposed && format.element_bytes.is_none() {
        return Err(refuse("with V transposed has no quantised values".to_owned()));
    }
    let cells = u32::try_from(tokens).map_err(Failure::failed)?;
    let head = Head { version, tokens: ids, cells, is_transposed, session: arguments.session() };
    let mut file = BufWriter::new(file);
    head.write(&mut file, &format).map_err(Failure::failed)?;
    let mut rows = Rows { file, format, geometry: *manifest.geometry(), cells };
    for is_v in [false, true] {
        let mut stream = sequence.stream(0..tokens).map_err(Failure::failed)?;
        while stream.layer().is_some() {
            match format.element_bytes.filter(|_| is_v && is_transposed) {
                Some(element_bytes) => rows.write_transposed(&mut stream, element_bytes),
                None => rows.write(&mut stream, is_v),
            }
            .map_err(Failure::failed)?;
        }
    }
    let file = rows.file.into_inner().map_err(|error| Failure::failed(error.into_error()))?;
    file.sync_all().map_err(Failure::failed)
}

/// What is written behind the head.
struct Rows {
    file: BufWriter<File>,
    format: Format,
    geometry: Geometry,
    cells: u32,
}

impl Rows {
    /// K, or V, of a layer, in order of tokens, then heads.
    fn write(&mut self, stream: &mut Stream<'_>, is_v: bool) -> io::Result<()> {
        write_tensor_head(&mut self.file, &self.format, is_v)?;
        while let Some(run) = stream.next_run().map_err(io::Error::other)? {
            for block in run.blocks() {
                self.write_block(&block, is_v)?;
            }
        }
        Ok(())
    }

    fn write_block(&mut self, block: &KvBlock<'_>, is_v: bool) -> io::Result<()> {
        let (tensor, row_bytes) = match block.v {
            Values::Rows(v) if is_v => (v, self.geometry.v_row_bytes()),
            _ => (block.k, self.geometry.k_row_bytes()),
        };
        let Tensor { bytes, strides } = tensor;
        let row_bytes = usize::try_from(row_bytes).map_err(io::Error::other)?;
        for token in 0..block.tokens {
            for head in 0..self.geometry.num_kv_heads() as usize {
                let offset = token * strides.token + head * strides.head;
                self.file.write_all(&bytes[offset..offset + row_bytes])?;
            }
        }
        Ok(())
    }

    /// V of a layer, element after element, of which each page has a piece.
    fn write_transposed(&mut self, stream: &mut Stream<'_>, element_bytes: u32) -> io::Result<()> {
        write_transposed_head(&mut self.file, &self.format, element_bytes)?;
        self.file.flush()?;
        let start = self.file.stream_position()?;
        let mut first = 0;
        while let Some(run) = stream.next_run().map_err(io::Error::other)? {
            for block in run.blocks() {
                if let Values::Rows(v) = block.v {
                    self.write_pieces(start, (v, block.tokens), first, element_bytes as usize)?;
                }
                first += block.tokens as u64;
            }
        }
        let row_bytes = u64::from(self.geometry.num_kv_heads()) * self.geometry.v_row_bytes();
        let end = start + row_bytes * u64::from(self.cells);
        self.file.seek(SeekFrom::Start(end)).map(drop)
    }

    /// Writes what the tokens from `first` on have of each element of a V that begins at `start`.
    fn write_pieces(
        &self, start: u64, (v, tokens): (Tensor<'_>, usize), first: u64, element_bytes: usize,
    ) -> io::Result<()> {
        let row_bytes = usize::try_from(self.geometry.v_row_bytes()).map_err(io::Error::other)?;
        let heads = (0..self.geometry.num_kv_heads() as usize).map(|head| head * v.strides.head);
        let in_row = || (0..row_bytes).step_by(element_bytes);
        let elements = heads.flat_map(|head| in_row().map(move |at| head + at));
        let mut piece = Vec::with_capacity(tokens * element_bytes);
        for (element, at) in (0..).zip(elements) {
            piece.clear();
            for token in 0..tokens {
                piece.extend_from_slice(&v.bytes[token * v.strides.token + at..][..element_bytes]);
            }
            let cell: u64 = element * u64::from(self.cells) + first;
            self.file.get_ref().write_all_at(&piece, start + cell * element_bytes as u64)?;
        }
        Ok(())
    }
}

//! Writing a slot file of llama.cpp, row by row.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use indicatif::ProgressBar;
use kvfs_formats::slot::{
    Format, Head, RowsCache, Version, write_state_head, write_tensor_head, write_transposed_head,
};

use super::parts::Parts;
use super::unwritten::Unwritten;
use crate::attention::{KvBlock, Tensor, Values};
use crate::cli::arguments::ExportArguments;
use crate::page::{Geometry, Layer};
use crate::reader::{Sequence, Stream};

/// Writes `tokens` tokens of a sequence to an empty file.
///
/// # Errors
/// [`Unwritten`].
pub(super) fn write(
    file: &File, sequence: &Sequence, arguments: &ExportArguments, (ids, tokens): (&[u32], u64),
    bar: &ProgressBar,
) -> Result<(), Unwritten> {
    let (manifest, version) = (sequence.manifest(), arguments.slot_version());
    let refuse = |why: String| format!("a slot file of llama.cpp {why}");
    let format = Format::of_version(manifest, version).map_err(refuse)?;
    let is_transposed = arguments.transposed_v;
    if is_transposed && format.element_bytes.is_none() {
        return Err(refuse("with V transposed has no quantised values".to_owned()).into());
    }
    if arguments.session().is_some() && !format.is_plain() {
        let why = "a session of a model with a window or with states is not known";
        return Err(why.to_owned().into());
    }
    let cells = u32::try_from(tokens).map_err(|error| error.to_string())?;
    let head = Head { version, tokens: ids, cells, is_transposed, session: arguments.session() };
    let mut rows = Rows {
        file: BufWriter::new(file),
        geometry: *manifest.geometry(),
        turned: format.element_bytes.filter(|_| is_transposed),
        format: &format,
        cells,
        bar,
    };
    let caches = format.caches();
    let parts = Parts::new(&arguments.sequence, manifest, ids);
    for (number, cache) in caches.rows.iter().enumerate() {
        rows.write_head(&head, number)?;
        for is_v in [false, true] {
            match cache.window {
                None => rows.write_streamed(sequence, &cache.layers, is_v)?,
                Some(_) => rows.write_window(&parts, cache, is_v)?,
            }
        }
    }
    if !caches.states.is_empty() {
        rows.write_head(&head, caches.rows.len())?;
        for tensor in [0, 1] {
            for (layer, shape) in &caches.states {
                let bytes = parts.state(*layer, cells, tensor)?;
                write_state_head(&mut rows.file, shape, tensor)?;
                rows.file.write_all(&bytes)?;
            }
        }
    }
    if version == Version::Four && !format.is_plain() {
        parts.write_checkpoints(cells, &mut rows.file)?;
    }
    Ok(rows.file.flush()?)
}

/// What is written behind the head.
struct Rows<'f> {
    file: BufWriter<&'f File>,
    format: &'f Format,
    geometry: Geometry,
    /// Bytes of an element, where V stands as columns.
    turned: Option<u32>,
    cells: u32,
    bar: &'f ProgressBar,
}

impl Rows<'_> {
    fn write_head(&mut self, head: &Head<'_>, number: usize) -> io::Result<()> {
        head.write_number(&mut self.file, self.format, number)
    }

    /// K, or V, of layers that have all tokens.
    fn write_streamed(
        &mut self, sequence: &Sequence, layers: &[Layer], is_v: bool,
    ) -> Result<(), Unwritten> {
        let stream = sequence.stream_layers(layers, 0..u64::from(self.cells));
        let mut stream = stream.map_err(|error| error.to_string())?;
        while stream.layer().is_some() {
            match self.turned.filter(|_| is_v) {
                Some(element_bytes) => self.write_transposed(&mut stream, element_bytes),
                None => self.write(&mut stream, is_v),
            }?;
        }
        Ok(())
    }

    /// K, or V, of layers with a window.
    fn write_window(
        &mut self, parts: &Parts<'_>, cache: &RowsCache, is_v: bool,
    ) -> Result<(), Unwritten> {
        let wanted = cache.first(self.cells)..self.cells;
        for layer in &cache.layers {
            let rows = parts.rows(*layer, wanted.clone(), is_v)?;
            self.bar.inc(rows.len() as u64);
            match self.turned.filter(|_| is_v) {
                Some(element_bytes) => {
                    let row_bytes = rows.len() / wanted.len();
                    write_transposed_head(&mut self.file, self.format, element_bytes).and_then(
                        |()| {
                            self.file.write_all(&columns(&rows, row_bytes, element_bytes as usize))
                        },
                    )
                }
                None => write_tensor_head(&mut self.file, self.format, is_v)
                    .and_then(|()| self.file.write_all(&rows)),
            }?;
        }
        Ok(())
    }

    /// K, or V, of a layer, in order of tokens, then heads.
    fn write(&mut self, stream: &mut Stream<'_>, is_v: bool) -> Result<(), Unwritten> {
        write_tensor_head(&mut self.file, self.format, is_v)?;
        while let Some(run) = stream.next_run().map_err(|error| error.to_string())? {
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
        let heads = u64::from(self.geometry.num_kv_heads());
        self.bar.inc(block.tokens as u64 * heads * row_bytes);
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
    fn write_transposed(
        &mut self, stream: &mut Stream<'_>, element_bytes: u32,
    ) -> Result<(), Unwritten> {
        write_transposed_head(&mut self.file, self.format, element_bytes)?;
        self.file.flush()?;
        let start = self.file.stream_position()?;
        let row_bytes = u64::from(self.geometry.num_kv_heads()) * self.geometry.v_row_bytes();
        let mut first = 0;
        while let Some(run) = stream.next_run().map_err(|error| error.to_string())? {
            for block in run.blocks() {
                if let Values::Rows(v) = block.v {
                    self.write_pieces(start, (v, block.tokens), first, element_bytes as usize)?;
                }
                first += block.tokens as u64;
                self.bar.inc(block.tokens as u64 * row_bytes);
            }
        }
        let end = start + row_bytes * u64::from(self.cells);
        self.file.seek(SeekFrom::Start(end))?;
        Ok(())
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

/// Rows as columns: the same element of each row, element after element.
fn columns(rows: &[u8], row_bytes: usize, element_bytes: usize) -> Vec<u8> {
    let elements = (0..row_bytes).step_by(element_bytes);
    let of_rows =
        |at: usize| rows.chunks_exact(row_bytes).map(move |row| &row[at..][..element_bytes]);
    elements.flat_map(of_rows).flatten().copied().collect()
}

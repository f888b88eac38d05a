//! Writing a slot file of llama.cpp, row by row.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use kvfs_formats::slot::{Format, Head, write_tensor_head, write_transposed_head};

use crate::attention::{KvBlock, Tensor, Values};
use crate::cli::arguments::ExportArguments;
use crate::page::Geometry;
use crate::reader::{Sequence, Stream};

/// Writes `tokens` tokens of a sequence to an empty file.
///
/// # Errors
/// A line.
pub(super) fn write(
    file: &File, sequence: &Sequence, arguments: &ExportArguments, (ids, tokens): (&[u32], u64),
) -> Result<(), String> {
    let (manifest, version) = (sequence.manifest(), arguments.slot_version());
    let refuse = |why: String| format!("a slot file of llama.cpp {why}");
    let format = Format::of_version(manifest, version).map_err(refuse)?;
    let is_transposed = arguments.transposed_v;
    if is_transposed && format.element_bytes.is_none() {
        return Err(refuse("with V transposed has no quantised values".to_owned()));
    }
    let cells = u32::try_from(tokens).map_err(|error| error.to_string())?;
    let head = Head { version, tokens: ids, cells, is_transposed, session: arguments.session() };
    let mut file = BufWriter::new(file);
    head.write(&mut file, &format).map_err(|error| error.to_string())?;
    let mut rows = Rows { file, format, geometry: *manifest.geometry(), cells };
    for is_v in [false, true] {
        let mut stream = sequence.stream(0..tokens).map_err(|error| error.to_string())?;
        while stream.layer().is_some() {
            match format.element_bytes.filter(|_| is_v && is_transposed) {
                Some(element_bytes) => rows.write_transposed(&mut stream, element_bytes),
                None => rows.write(&mut stream, is_v),
            }
            .map_err(|error| error.to_string())?;
        }
    }
    rows.file.flush().map_err(|error| error.to_string())
}

/// What is written behind the head.
struct Rows<'f> {
    file: BufWriter<&'f File>,
    format: Format,
    geometry: Geometry,
    cells: u32,
}

impl Rows<'_> {
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

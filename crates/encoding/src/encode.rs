//! Logical bytes into a blob, without loss.

use std::io::{self, Read, Write};

use super::blob::{BlobWriter, Header, compress, compressor};
use super::digest::{Digester, Hash};
use super::filter::{Filter, Float, as_index};
use super::limits::{CHUNK_BYTES, COPY_BYTES, SAMPLE_PIECE_BYTES, SAMPLE_STEP_BYTES};
use super::shuffle::shuffle;
use super::{Digest, Encoding, EncodingError, Subject, ZstdLevel};
use kvfs_page::limits::PAYLOAD_OFFSET;

/// An encoding that loses nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lossless {
    /// The logical bytes themselves.
    Raw,
    /// zstd; of pages of floats the bytes are shuffled where a sample shows that it pays.
    Zstd(ZstdLevel),
}

/// A blob that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// How it is encoded.
    pub encoding: Encoding,
    /// Its length.
    pub stored_bytes: u64,
    /// Of the logical bytes that were read.
    pub digest: Digest,
}

/// Reads the `length` bytes of an object from `source` and writes them to `sink` as a blob.
///
/// The caller compares the digest with the object's record before the blob counts for anything,
/// and makes the sink durable.
///
/// # Errors
/// [`EncodingError::Source`], [`EncodingError::Sink`], and [`EncodingError::Length`] if the source
/// ends before or behind `length`.
pub fn encode(
    source: &mut dyn Read, length: u64, lossless: Lossless, subject: &Subject, sink: &mut dyn Write,
) -> Result<Encoded, EncodingError> {
    let mut object = Object { source, length, read_bytes: 0, digester: Digester::new(subject) };
    let (encoding, stored_bytes) = match lossless {
        Lossless::Raw => (Encoding::Raw, copy(&mut object, sink)?),
        Lossless::Zstd(level) => {
            let float = match subject {
                Subject::File => None,
                Subject::Page(identity) => Float::of(identity.dtype),
            };
            compress_all(&mut object, level, float, sink)?
        }
    };
    let digest = object.finish()?;
    Ok(Encoded { encoding, stored_bytes, digest })
}

fn copy(object: &mut Object<'_>, sink: &mut dyn Write) -> Result<u64, EncodingError> {
    let mut buffer = vec![0; COPY_BYTES.min(object.bytes_left(COPY_BYTES))];
    loop {
        let piece = object.next(&mut buffer)?;
        if piece.is_empty() {
            return Ok(object.length);
        }
        sink.write_all(piece).map_err(EncodingError::Sink)?;
    }
}

fn compress_all(
    object: &mut Object<'_>, level: ZstdLevel, float: Option<Float>, sink: &mut dyn Write,
) -> Result<(Encoding, u64), EncodingError> {
    let mut buffer = vec![0; object.bytes_left(CHUNK_BYTES as usize)];
    let first = object.next(&mut buffer)?;
    let filter = float.map_or(Filter::None, |float| choose_filter(float, level, first));
    let header = Header::new(filter, level, object.length);
    let mut shuffled = match filter {
        Filter::Shuffle(_) => vec![0; first.len()],
        Filter::None | Filter::Quantise { .. } => Vec::new(),
    };
    let mut writer = BlobWriter::start(header, sink)?;
    let mut chunk: &[u8] = first;
    let mut start = 0;
    while !chunk.is_empty() {
        match filter {
            Filter::Shuffle(float) => {
                let shuffled = &mut shuffled[..chunk.len()];
                Filter::shuffled(float, start, chunk, shuffled);
                writer.chunk(shuffled)?;
            }
            Filter::None | Filter::Quantise { .. } => writer.chunk(chunk)?,
        }
        start += chunk.len() as u64;
        chunk = object.next(&mut buffer)?;
    }
    Ok((filter.encoding(), writer.stored_bytes()))
}

/// Shuffles if that makes a sample of the first chunk smaller by a hundredth.
///
/// zstd has one table of literals per block of 128 KiB, so planes gain only if they lie in
/// different blocks. In a chunk they do; in a sample they must be compressed one by one.
fn choose_filter(float: Float, level: ZstdLevel, first: &[u8]) -> Filter {
    let sample = sample(first.get(as_index(PAYLOAD_OFFSET)..).unwrap_or_default());
    let mut shuffled = vec![0; sample.len()];
    shuffle(float.bytes(), &sample, &mut shuffled);
    let (mut compressor, mut frame) = (compressor(level, CHUNK_BYTES), Vec::new());
    let mut compressed_bytes = |bytes: &[u8]| {
        compress(&mut compressor, bytes, &mut frame);
        frame.len()
    };
    let plain = compressed_bytes(&sample);
    let planes = shuffled.chunks((sample.len() / float.bytes()).max(1));
    let shuffled: usize = planes.map(compressed_bytes).sum();
    if shuffled < plain - plain / 100 { Filter::Shuffle(float) } else { Filter::None }
}

/// Pieces from all over `values`, since K and V of a small page share a chunk and are different.
fn sample(values: &[u8]) -> Vec<u8> {
    let pieces = values.chunks(SAMPLE_STEP_BYTES);
    pieces.flat_map(|piece| piece.iter().take(SAMPLE_PIECE_BYTES)).copied().collect()
}

/// An object that is read to its end, once.
struct Object<'a> {
    source: &'a mut dyn Read,
    length: u64,
    read_bytes: u64,
    digester: Digester,
}

impl Object<'_> {
    /// Bytes not yet read, but at most `most`.
    fn bytes_left(&self, most: usize) -> usize {
        usize::try_from(self.length - self.read_bytes).unwrap_or(usize::MAX).min(most)
    }

    /// Fills `buffer` as far as the object goes; empty at its end.
    fn next<'b>(&mut self, buffer: &'b mut [u8]) -> Result<&'b [u8], EncodingError> {
        let wanted = self.bytes_left(buffer.len());
        let piece = &mut buffer[..wanted];
        let found = read_until_full(self.source, piece).map_err(EncodingError::Source)?;
        self.read_bytes += found as u64;
        if found < wanted {
            return Err(EncodingError::Length { expected: self.length, found: self.read_bytes });
        }
        self.digester.update(piece);
        Ok(piece)
    }

    fn finish(self) -> Result<Digest, EncodingError> {
        match read_until_full(self.source, &mut [0]).map_err(EncodingError::Source)? {
            0 => Ok(self.digester.finish()),
            _ => Err(EncodingError::Length { expected: self.length, found: self.length + 1 }),
        }
    }
}

/// Reads until `buffer` is full or the source ends; returns how many bytes it got.
pub(super) fn read_until_full(source: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match source.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

//! A blob back into the logical bytes.

use std::io::{Read, Write};
use std::ops::Range;

use zstd::bulk::Decompressor;

use super::blob::{HEADER_BYTES, Header, PREFIX_BYTES, is_chunk_frame, parse_prefix};
use super::digest::{Checksummer, Digester, Hash};
use super::encode::read_until_full;
use super::filter::{Filter, as_index};
use super::limits::COPY_BYTES;
use super::{Digest, Encoding, EncodingError, Subject};
use kvfs_page::Checksum;

/// What a blob is on record as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// How it is encoded.
    pub encoding: Encoding,
    /// Its length.
    pub stored_bytes: u64,
    /// The exact length of the logical bytes.
    pub length: u64,
}

impl Stored {
    /// What a blob of `stored_bytes` says of itself; `None` if that is nothing that can be.
    ///
    /// # Errors
    /// That of the source.
    pub fn recognise(source: &mut dyn Read, stored_bytes: u64) -> std::io::Result<Option<Stored>> {
        let mut header = [0; HEADER_BYTES];
        if read_until_full(source, &mut header)? < HEADER_BYTES {
            return Ok(None);
        }
        let header = Header::parse(&header).ok();
        Ok(header.map(|header| {
            let (encoding, length) = (header.filter.encoding(), header.length);
            Stored { encoding, stored_bytes, length }
        }))
    }
}

/// Reads a blob from `source` and writes exactly `stored.length` logical bytes to `sink`.
///
/// Nothing is allocated on the word of the blob beyond two chunks. The digest is that of what was
/// written: the caller compares it with the object's record before the bytes count for anything.
///
/// # Errors
/// [`EncodingError::Source`], [`EncodingError::Sink`]; [`EncodingError::Corrupt`] if the blob is
/// not what is on record, to the last byte; [`EncodingError::Unsupported`] if its layout is newer.
pub fn decode(
    source: &mut dyn Read, stored: &Stored, subject: &Subject, sink: &mut dyn Write,
) -> Result<Digest, EncodingError> {
    let mut digester = Digester::new(subject);
    decode_into(source, stored, &mut Output { sink, hash: &mut digester })?;
    Ok(digester.finish())
}

/// [`decode`] of a copy that never left this machine: the checksum says whether it is damaged, and
/// nobody could have made another with the same one on purpose. Without BLAKE3 it takes three
/// quarters of the time.
///
/// # Errors
/// As [`decode`].
pub fn decode_local(
    source: &mut dyn Read, stored: &Stored, subject: &Subject, sink: &mut dyn Write,
) -> Result<Checksum, EncodingError> {
    let mut checksummer = Checksummer::new(subject);
    decode_into(source, stored, &mut Output { sink, hash: &mut checksummer })?;
    Ok(checksummer.finish())
}

fn decode_into(
    source: &mut dyn Read, stored: &Stored, output: &mut Output<'_>,
) -> Result<(), EncodingError> {
    let mut blob = Blob { source, stored_bytes: stored.stored_bytes, position: 0 };
    match stored.encoding {
        Encoding::Raw => copy(&mut blob, stored.length, output)?,
        encoding => {
            let mut header = [0; HEADER_BYTES];
            blob.fill(&mut header)?;
            let header = Header::parse(&header)?;
            check_header(&header, encoding, stored.length)?;
            decompress_all(&mut blob, &header, output)?;
        }
    }
    blob.finish()
}

fn check_header(header: &Header, encoding: Encoding, length: u64) -> Result<(), EncodingError> {
    let found = header.filter.encoding();
    if found != encoding {
        let what = format!("encoded as {found:?}, on record as {encoding:?}: another copy");
        return Err(EncodingError::corrupt(13, what));
    }
    if header.length != length {
        let what = format!("holds {} bytes, {length} are on record: another copy", header.length);
        return Err(EncodingError::corrupt(16, what));
    }
    Ok(())
}

fn copy(blob: &mut Blob<'_>, length: u64, output: &mut Output<'_>) -> Result<(), EncodingError> {
    if blob.stored_bytes != length {
        let what = format!("raw copy of {} bytes, the object has {length}", blob.stored_bytes);
        return Err(EncodingError::corrupt(0, what));
    }
    let mut buffer = vec![0; COPY_BYTES];
    while blob.bytes_left() > 0 {
        let count = usize::try_from(blob.bytes_left()).unwrap_or(usize::MAX).min(COPY_BYTES);
        blob.fill(&mut buffer[..count])?;
        output.write(&buffer[..count])?;
    }
    Ok(())
}

fn decompress_all(
    blob: &mut Blob<'_>, header: &Header, output: &mut Output<'_>,
) -> Result<(), EncodingError> {
    let mut decompressor = Decompressor::new().map_err(EncodingError::Source)?;
    let (mut frame, mut filtered, mut logical) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in header.chunks() {
        let filtered_bytes = header.filter.filtered_bytes(&chunk);
        filtered.resize(filtered_bytes, 0);
        let at = blob.position;
        read_frame(blob, filtered_bytes, &mut frame)?;
        decompress(&mut decompressor, &frame, &mut filtered, at)?;
        output.write(logical_bytes(header.filter, &chunk, &filtered, &mut logical))?;
    }
    Ok(())
}

/// The logical bytes of a chunk: `filtered` itself, or made in `buffer`.
fn logical_bytes<'a>(
    filter: Filter, chunk: &Range<u64>, filtered: &'a [u8], buffer: &'a mut Vec<u8>,
) -> &'a [u8] {
    if filter == Filter::None {
        return filtered;
    }
    buffer.resize(as_index(chunk.end - chunk.start), 0);
    filter.undo(chunk, filtered, buffer);
    buffer
}

/// Reads the zstd frame of a chunk of `content_bytes`.
fn read_frame(
    blob: &mut Blob<'_>, content_bytes: usize, frame: &mut Vec<u8>,
) -> Result<(), EncodingError> {
    let at = blob.position;
    let mut prefix = [0; PREFIX_BYTES];
    blob.fill(&mut prefix)?;
    let Some(frame_bytes) = parse_prefix(prefix) else {
        return Err(EncodingError::corrupt(at, "a chunk should begin here"));
    };
    let frame_bytes_max = zstd::zstd_safe::compress_bound(content_bytes);
    let frame_bytes = usize::try_from(frame_bytes).unwrap_or(usize::MAX);
    if frame_bytes > frame_bytes_max {
        let what = format!("frame of {frame_bytes} bytes, a chunk's has {frame_bytes_max} at most");
        return Err(EncodingError::corrupt(at + 8, what));
    }
    frame.resize(frame_bytes, 0);
    blob.fill(frame)
}

/// Decompresses a frame that must fill `content` exactly; `at` is where its chunk begins.
fn decompress(
    decompressor: &mut Decompressor<'_>, frame: &[u8], content: &mut [u8], at: u64,
) -> Result<(), EncodingError> {
    let at = at + PREFIX_BYTES as u64;
    if !is_chunk_frame(frame, content.len()) {
        let what = format!("not a zstd frame of {} bytes", content.len());
        return Err(EncodingError::corrupt(at, what));
    }
    match decompressor.decompress_to_buffer(frame, content) {
        Ok(bytes) if bytes == content.len() => Ok(()),
        Ok(bytes) => {
            let what = format!("zstd frame of {bytes} bytes, {} expected", content.len());
            Err(EncodingError::corrupt(at, what))
        }
        Err(error) => Err(EncodingError::corrupt(at, format!("zstd: {error}"))),
    }
}

/// The stored bytes, of which as many are read as are on record.
struct Blob<'a> {
    source: &'a mut dyn Read,
    stored_bytes: u64,
    position: u64,
}

impl Blob<'_> {
    fn bytes_left(&self) -> u64 {
        self.stored_bytes - self.position
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), EncodingError> {
        if buffer.len() as u64 > self.bytes_left() {
            let what = format!("the copy's {} bytes end too early", self.stored_bytes);
            return Err(EncodingError::corrupt(self.position, what));
        }
        let found = read_until_full(self.source, buffer).map_err(EncodingError::Source)?;
        self.position += found as u64;
        if found < buffer.len() {
            let what = format!("the copy was cut: {} bytes are on record", self.stored_bytes);
            return Err(EncodingError::corrupt(self.position, what));
        }
        Ok(())
    }

    fn finish(self) -> Result<(), EncodingError> {
        let found = read_until_full(self.source, &mut [0]).map_err(EncodingError::Source)?;
        if self.bytes_left() > 0 || found > 0 {
            return Err(EncodingError::corrupt(self.position, "bytes behind the last chunk"));
        }
        Ok(())
    }
}

/// The logical bytes as they leave.
struct Output<'a> {
    sink: &'a mut dyn Write,
    hash: &'a mut dyn Hash,
}

impl Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), EncodingError> {
        self.hash.update(bytes);
        self.sink.write_all(bytes).map_err(EncodingError::Sink)
    }
}

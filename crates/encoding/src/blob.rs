//! The layout of a blob that is not raw.
//!
//! ```text
//! header    a zstd skippable frame, 48 bytes; integers are little endian
//!    0  u32      0x184D2A5B
//!    4  u32      40, the bytes that follow
//!    8  [u8; 4]  "kvfs"
//!   12  u8       version: 1
//!   13  u8       encoding: 1 zstd, 2 shuffled zstd, 3 q8_0, 4 q4_0
//!   14  u8       floats in the logical bytes: 0 unknown, 1 f16, 2 bf16, 3 f32
//!   15  u8       zstd level, 1 to 19 (a note for people)
//!   16  u64      logical bytes
//!   24  u64      logical byte at which quantised values end; 0 where none are
//!   32  u32      logical bytes of a chunk, a multiple of 4096
//!   36  u32      0
//!   40  [u8; 8]  the first bytes of XXH3-128 of bytes 0 to 40
//! chunks    as many as the logical bytes need; only the last one may be short
//!    0  u32      0x184D2A5C: a skippable frame again
//!    4  u32      4, the bytes that follow
//!    8  u32      bytes of the zstd frame
//!   12           one zstd frame of the filtered chunk: content size, XXH64, single segment
//! ```
//!
//! `zstd -d` skips the skippable frames, so of encoding 1 it makes the logical bytes. The frame's
//! length stands before it because a reader must know what to read before zstd can look at it.
//! *Single segment* means that the window is the content: no frame can ask for more memory than
//! its chunk, whatever window it names.

use std::io::Write;
use std::ops::Range;

use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

use super::filter::{Filter, Float};
use super::limits::{CHUNK_ALIGNMENT, CHUNK_BYTES, CHUNK_BYTES_MAX};
use super::quantise::BLOCK_VALUES;
use super::{Encoding, EncodingError, Quantisation, ZstdLevel};
use kvfs_page::content_checksum;
use kvfs_page::limits::PAYLOAD_OFFSET;

pub(super) const HEADER_BYTES: usize = 48;
pub(super) const PREFIX_BYTES: usize = 12;

const HEADER_MAGIC: u32 = 0x184D_2A5B;
const HEADER_PAYLOAD_BYTES: u32 = 40;
const NAME: &[u8; 4] = b"kvfs";
const VERSION: u8 = 1;
const CHECKSUM_AT: usize = 40;

const PREFIX_MAGIC: u32 = 0x184D_2A5C;
const PREFIX_PAYLOAD_BYTES: u32 = 4;

const FRAME_MAGIC: [u8; 4] = 0xFD2F_B528_u32.to_le_bytes();
/// Frame header descriptor: which bits matter, and what they must be: single segment, no unused
/// bits, content checksum, no dictionary.
const DESCRIPTOR_MASK: u8 = 0b0011_1111;
const DESCRIPTOR: u8 = 0b0010_0100;

/// What a blob says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) filter: Filter,
    pub(super) level: ZstdLevel,
    /// Logical bytes.
    pub(super) length: u64,
    /// Logical bytes of a chunk.
    pub(super) chunk_bytes: u32,
}

impl Header {
    /// The header of a blob that is written now.
    pub(super) fn new(filter: Filter, level: ZstdLevel, length: u64) -> Header {
        Header { filter, level, length, chunk_bytes: CHUNK_BYTES }
    }

    /// The logical bytes of each chunk.
    pub(super) fn chunks(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Header { length, chunk_bytes, .. } = *self;
        let chunk_bytes = u64::from(chunk_bytes);
        (0..length.div_ceil(chunk_bytes)).map(move |number| {
            let start = number * chunk_bytes;
            start..length.min(start.saturating_add(chunk_bytes))
        })
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let (float, values_end) = match self.filter {
            Filter::None => (None, 0),
            Filter::Shuffle(float) => (Some(float), 0),
            Filter::Quantise { float, values_end, .. } => (Some(float), values_end),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&HEADER_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&HEADER_PAYLOAD_BYTES.to_le_bytes());
        bytes[8..12].copy_from_slice(NAME);
        bytes[12] = VERSION;
        bytes[13] = encoding_number(self.filter.encoding());
        bytes[14] = float_number(float);
        bytes[15] = self.level.get();
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..32].copy_from_slice(&values_end.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.chunk_bytes.to_le_bytes());
        let checksum = content_checksum(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&checksum.0[..HEADER_BYTES - CHECKSUM_AT]);
        bytes
    }

    /// Reads a header. Nothing in it is believed beyond what the bounds allow.
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, EncodingError> {
        let word = |at: usize| u32::from_le_bytes(field(bytes, at));
        let long = |at: usize| u64::from_le_bytes(field(bytes, at));
        let refused = |at: u64, what: &str| Err(EncodingError::corrupt(at, what));
        if word(0) != HEADER_MAGIC || bytes[8..12] != NAME[..] {
            return refused(0, "not the header of a kvfs copy");
        }
        let checksum = content_checksum(&bytes[..CHECKSUM_AT]);
        let is_whole = bytes[CHECKSUM_AT..] == checksum.0[..HEADER_BYTES - CHECKSUM_AT];
        if bytes[12] > VERSION {
            let found = bytes[12];
            return Err(EncodingError::Unsupported(format!("layout {found}, this is {VERSION}")));
        }
        if !is_whole || word(4) != HEADER_PAYLOAD_BYTES || bytes[12] != VERSION || word(36) != 0 {
            return refused(0, "the header does not match its checksum");
        }
        let Some(level) = ZstdLevel::new(bytes[15]) else {
            return refused(15, "not a zstd level");
        };
        let (length, values_end, chunk_bytes) = (long(16), long(24), word(32));
        let Some(filter) = filter(bytes[13], bytes[14], values_end) else {
            return refused(13, "no such encoding");
        };
        if let Filter::Quantise { float, .. } = filter {
            let block_bytes = (BLOCK_VALUES * float.bytes()) as u64;
            let values_bytes = values_end.checked_sub(PAYLOAD_OFFSET);
            let is_blocks = values_bytes.is_some_and(|bytes| bytes.is_multiple_of(block_bytes));
            if !is_blocks || values_end > length {
                return refused(24, "the values are not whole blocks of the file");
            }
        }
        if !(CHUNK_ALIGNMENT..=CHUNK_BYTES_MAX).contains(&chunk_bytes)
            || !chunk_bytes.is_multiple_of(CHUNK_ALIGNMENT)
        {
            return refused(32, "chunks of a length that is not allowed");
        }
        Ok(Header { filter, level, length, chunk_bytes })
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("all fields lie within the header")
}

fn encoding_number(encoding: Encoding) -> u8 {
    match encoding {
        Encoding::Raw => unreachable!("raw copies have no header"),
        Encoding::Zstd => 1,
        Encoding::ZstdShuffled => 2,
        Encoding::Q8_0 => 3,
        Encoding::Q4_0 => 4,
    }
}

fn float_number(float: Option<Float>) -> u8 {
    match float {
        None => 0,
        Some(Float::F16) => 1,
        Some(Float::Bf16) => 2,
        Some(Float::F32) => 3,
    }
}

fn filter(encoding: u8, float: u8, values_end: u64) -> Option<Filter> {
    let floats = [None, Some(Float::F16), Some(Float::Bf16), Some(Float::F32)];
    let float = *floats.get(usize::from(float))?;
    let quantise =
        |quantisation| float.map(|float| Filter::Quantise { quantisation, float, values_end });
    match encoding {
        1 if float.is_none() && values_end == 0 => Some(Filter::None),
        2 if values_end == 0 => float.map(Filter::Shuffle),
        3 => quantise(Quantisation::Q8_0),
        4 => quantise(Quantisation::Q4_0),
        _ => None,
    }
}

/// The bytes before a zstd frame of `frame_bytes`.
fn prefix(frame_bytes: u32) -> [u8; PREFIX_BYTES] {
    let mut bytes = [0; PREFIX_BYTES];
    bytes[0..4].copy_from_slice(&PREFIX_MAGIC.to_le_bytes());
    bytes[4..8].copy_from_slice(&PREFIX_PAYLOAD_BYTES.to_le_bytes());
    bytes[8..12].copy_from_slice(&frame_bytes.to_le_bytes());
    bytes
}

/// The length of the zstd frame behind a prefix.
pub(super) fn parse_prefix(bytes: [u8; PREFIX_BYTES]) -> Option<u32> {
    let [.., a, b, c, d] = bytes;
    let frame_bytes = u32::from_le_bytes([a, b, c, d]);
    (prefix(frame_bytes) == bytes).then_some(frame_bytes)
}

/// Whether a zstd frame is one that a chunk may be: its head, and nothing behind its end.
pub(super) fn is_chunk_frame(frame: &[u8], content_bytes: usize) -> bool {
    let descriptor = frame.get(4).map(|byte| byte & DESCRIPTOR_MASK);
    let content = zstd::zstd_safe::get_frame_content_size(frame);
    frame.starts_with(&FRAME_MAGIC)
        && descriptor == Some(DESCRIPTOR)
        && matches!(content, Ok(Some(bytes)) if bytes == content_bytes as u64)
        && zstd::zstd_safe::find_frame_compressed_size(frame) == Ok(frame.len())
}

/// Writes a blob, chunk by chunk.
pub(super) struct BlobWriter<'a> {
    sink: &'a mut dyn Write,
    compressor: Compressor<'static>,
    frame: Vec<u8>,
    stored_bytes: u64,
}

impl<'a> BlobWriter<'a> {
    /// Writes the header.
    pub(super) fn start(
        header: Header, sink: &'a mut dyn Write,
    ) -> Result<BlobWriter<'a>, EncodingError> {
        let compressor = compressor(header.level, header.chunk_bytes);
        let mut writer = BlobWriter { sink, compressor, frame: Vec::new(), stored_bytes: 0 };
        writer.put(&header.to_bytes())?;
        Ok(writer)
    }

    /// Writes the next chunk, which was filtered.
    pub(super) fn chunk(&mut self, filtered: &[u8]) -> Result<(), EncodingError> {
        let mut frame = std::mem::take(&mut self.frame);
        compress(&mut self.compressor, filtered, &mut frame);
        let frame_bytes = u32::try_from(frame.len()).expect("a frame of a chunk is a few MiB");
        self.put(&prefix(frame_bytes))?;
        self.put(&frame)?;
        self.frame = frame;
        Ok(())
    }

    /// Bytes written so far.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), EncodingError> {
        self.sink.write_all(bytes).map_err(EncodingError::Sink)?;
        self.stored_bytes += bytes.len() as u64;
        Ok(())
    }
}

/// A compressor whose frames are single segments for up to `chunk_bytes`.
pub(super) fn compressor(level: ZstdLevel, chunk_bytes: u32) -> Compressor<'static> {
    // Nothing but memory can fail here, and the values are constants that zstd knows.
    let mut compressor = Compressor::new(i32::from(level.get())).expect("a valid level");
    let window_log = chunk_bytes.next_power_of_two().ilog2();
    for parameter in [CParameter::WindowLog(window_log), CParameter::ChecksumFlag(true)] {
        compressor.set_parameter(parameter).expect("a valid parameter");
    }
    compressor
}

/// Compresses `bytes` into `frame`, whose content is replaced.
pub(super) fn compress(compressor: &mut Compressor<'_>, bytes: &[u8], frame: &mut Vec<u8>) {
    frame.clear();
    frame.reserve(zstd::zstd_safe::compress_bound(bytes.len()));
    compressor.compress_to_buffer(bytes, frame).expect("the buffer holds the longest frame");
}

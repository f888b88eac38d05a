//! Every bound on a blob, in one place with its reason.

/// Logical bytes of a chunk. Measured on pages of 4 MiB of a model, zstd:3: 256 KiB store up to an
/// eighth more; 4 MiB at most a fortieth less, at 0.6 to 0.8 of the speed.
pub(super) const CHUNK_BYTES: u32 = 1 << 20;

/// Largest chunk that is decoded: what one decoder may be made to allocate, twice over, by bytes
/// that nobody vouches for.
pub(super) const CHUNK_BYTES_MAX: u32 = 4 << 20;

/// Chunks are a multiple of this long, so that their borders never cut a block of quantised
/// values (32 values of 4 bytes) and the header of a page lies in one chunk.
pub(super) const CHUNK_ALIGNMENT: u32 = 4096;

/// Bytes of a raw copy that are read, hashed and written at a time: they stay in the second-level
/// cache, as in [`READ_BYTES`](crate::ingest::seal::READ_BYTES).
pub(super) const COPY_BYTES: usize = 128 << 10;

/// Of every so many bytes of the first chunk, this many are compressed with and without shuffling
/// to see whether it pays: a sixteenth, less than a block of zstd's in all.
pub(super) const SAMPLE_STEP_BYTES: usize = 128 << 10;
pub(super) const SAMPLE_PIECE_BYTES: usize = 8 << 10;

const _: () = assert!(SAMPLE_PIECE_BYTES.is_multiple_of(4), "pieces are whole elements");
const _: () = assert!(CHUNK_BYTES_MAX.is_power_of_two());

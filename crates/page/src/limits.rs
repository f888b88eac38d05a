//! Every bound on a page, in one place with its reason.
//!
//! A number from a header or a manifest is compared with these before anything is allocated or
//! multiplied.

/// Byte of a page file at which the payload starts: one os page, so that the payload can be
/// mapped and read with `O_DIRECT`.
pub const PAYLOAD_OFFSET: u64 = 4096;

/// The safetensors length prefix: a u64, little endian.
pub const LENGTH_PREFIX_BYTES: u64 = 8;

/// The only header length that puts the payload at [`PAYLOAD_OFFSET`].
pub const HEADER_JSON_BYTES: u64 = PAYLOAD_OFFSET - LENGTH_PREFIX_BYTES;

/// Page files are a multiple of this long, so that an `O_DIRECT` reader never needs a bounce
/// buffer for the end of a file.
pub const FILE_ALIGNMENT: u64 = 4096;

/// Largest page file: a page is verified and moved as a whole, so this bounds how long one open
/// waits (0.15 s for an SSD that reads 7 GB/s).
pub const MAX_FILE_BYTES: u64 = 1 << 30;

/// Most layers of a model. The deepest models in use have below 200.
pub const MAX_LAYERS: u32 = 4096;

/// Most KV heads per layer. Multi-head models without grouping have up to 128.
pub const MAX_KV_HEADS: u32 = 1024;

/// Largest row of one head, in elements. Latent attention keeps 576.
pub const MAX_HEAD_DIM: u32 = 4096;

/// Most tokens in a page. Any number up to this is allowed, not only powers of two: hybrid models
/// make engines choose block sizes such as 544.
pub const MAX_PAGE_TOKENS: u32 = 1 << 20;

/// Last position at which a page may start; the `tokens` file (4 bytes each) then stays far below
/// the largest file offset.
pub const MAX_TOKEN_START: u64 = 1 << 40;

/// Most tensors in the state of a recurrent layer, their dimensions and the bytes of their names: what
/// describes them fits into the header with the metadata to spare. Models keep one to three.
pub const MAX_STATE_TENSORS: usize = 8;
/// See above.
pub const MAX_STATE_DIMS: usize = 6;
/// See above.
pub const MAX_STATE_NAME_BYTES: usize = 64;

/// Largest side row of a token. Index keys of sparse attention take 68 to 256 bytes.
pub const MAX_SIDE_ROW_BYTES: u32 = 1 << 16;

/// Most shards of one model.
pub const MAX_SHARDS: u32 = 1 << 16;

/// Most tokens of a prompt that a prefix is looked for with, or that belong to a file of tensors: more than any model takes.
pub const MAX_PROMPT_TOKENS: usize = 4 << 20;

/// Largest `manifest.json`: 4096 layers written as objects take about 250 KiB.
pub const MAX_MANIFEST_BYTES: usize = 1 << 20;

/// So much of one is read: a longer one is refused and not cut.
pub const MANIFEST_BYTES_READ: u64 = MAX_MANIFEST_BYTES as u64 + 1;

/// Tokens per page where a manifest names none: 4 MiB for 8 KV heads x 128 in f16, enough to hide
/// the 25-50 us of an open through FUSE.
pub const DEFAULT_PAGE_TOKENS: u32 = 1024;

// Sizes are computed in u64 without checks: the largest product of allowed numbers (4 bytes per
// element, K and V, a side row, any u32 of tokens) cannot overflow.
const _: () = assert!(
    (MAX_KV_HEADS as u64 * MAX_HEAD_DIM as u64 * 4 * 2 + MAX_SIDE_ROW_BYTES as u64)
        .checked_mul(u32::MAX as u64)
        .is_some()
);
const _: () = assert!(MAX_FILE_BYTES.is_multiple_of(FILE_ALIGNMENT));
const _: () = assert!(MAX_FILE_BYTES <= i32::MAX as u64);

/// A byte count inside one page as an index.
pub fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a page is at most 1 GiB, which every supported usize holds")
}

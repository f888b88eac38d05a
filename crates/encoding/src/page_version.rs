//! A page with fewer bits: a new version of it, never a silent change.

use crate::content::ContentHash;
use kvfs_page::limits::PAYLOAD_OFFSET;
use kvfs_page::{
    Checksum, Declared, PageDigest, PageError, PageHasher, PageHeader, PagePlace, build_header,
};

use super::blob::{BlobWriter, Header};
use super::filter::{Filter, Float};
use super::quantise::{self, BLOCK_VALUES, NotFinite};
use super::{Quantisation, ZstdLevel};

/// zstd's effort on blocks: the least. Where values do not repeat it finds little (4 % in the last
/// layer of the tiny model, half in the first).
const BLOCK_LEVEL: ZstdLevel = ZstdLevel::FASTEST;

/// What became of a page that was to be quantised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quantised {
    /// A version whose values fit the blocks.
    Version(Version),
    /// The page keeps its values; encode it without loss.
    Unsuitable(Unsuitable),
}

/// Why a page is not quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsuitable {
    /// Its elements are 8 bits or blocks already.
    Dtype,
    /// Its rows are no multiple of 32 values.
    RowLength,
    /// It holds NaN, an infinity, or values too large for the scale of a block.
    NotFinite,
}

/// A page whose values fit quantised blocks, as a file and as a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The logical bytes: a page file, as long as the original, in the original's dtype.
    pub page: Vec<u8>,
    /// Whether they differ from the original: a page that was quantised before does not change.
    pub is_changed: bool,
    /// The page's checksums; the public one stands in its header if the original declared one.
    pub digest: PageDigest,
    /// The logical bytes' name in the tiers.
    pub content: ContentHash,
    /// The blob that decodes to the logical bytes, encoded as [`Quantisation::encoding`] says.
    pub blob: Vec<u8>,
}

/// Rounds the values of a page file to blocks along the rows of K and V.
///
/// `file` is the whole page at `place`, whose own checksum the caller has verified. Header (but
/// for `kvfs.checksum`) and `_pad` stay as they are.
///
/// # Errors
/// As [`PagePlace::check_header`].
pub fn quantise_page(
    file: &[u8], place: &PagePlace, quantisation: Quantisation,
) -> Result<Quantised, PageError> {
    let geometry = place.geometry();
    let header = place.check_header(file, file.len() as u64)?;
    let Some(float) = Float::of(geometry.dtype()) else {
        return Ok(Quantised::Unsuitable(Unsuitable::Dtype));
    };
    let rows = [geometry.head_dim(), geometry.v_head_dim()];
    if !rows.iter().all(|values| values.is_multiple_of(quantisation.dtype().block_elements())) {
        return Ok(Quantised::Unsuitable(Unsuitable::RowLength));
    }
    // Rows are whole blocks, so the blocks of a tensor follow each other whatever its layout, and
    // those of `v` follow those of `k`.
    let values_bytes = geometry.k_bytes(header.tokens) + geometry.v_bytes(header.tokens);
    let values_end = PAYLOAD_OFFSET + values_bytes;
    let filter = Filter::Quantise { quantisation, float, values_end };
    let head_bytes = as_page_index(PAYLOAD_OFFSET);

    let mut page = file.to_vec();
    let (head, payload) = page.split_at_mut(head_bytes);
    let (values, pad) = payload.split_at_mut(as_page_index(values_bytes));
    let block_bytes = quantisation.dtype().block_bytes() as usize;
    let mut blocks = vec![0; values.len() / float.bytes() / BLOCK_VALUES * block_bytes];
    if let Err(NotFinite) = quantise::quantise(quantisation, float, values, &mut blocks) {
        return Ok(Quantised::Unsuitable(Unsuitable::NotFinite));
    }

    let mut hasher = PageHasher::new();
    for part in [&*head, values, pad] {
        hasher.update(part);
    }
    let identity = place.identity(header.tokens);
    let mut digest = hasher.finish(&identity);
    if header.declared.checksum.is_some_and(|declared| declared != digest.page) {
        head.copy_from_slice(&redeclared_header(&header, place, digest.page)?);
        let mut hasher = PageHasher::new();
        hasher.update(&page);
        digest = hasher.finish(&identity);
    }

    let filtered = [&page[..head_bytes], &blocks, &page[as_page_index(values_end)..]].concat();
    Ok(Quantised::Version(Version {
        is_changed: page != file,
        digest,
        content: ContentHash::of(&page),
        blob: blob(filter, page.len() as u64, &filtered),
        page,
    }))
}

/// The header of the original with another public checksum.
fn redeclared_header(
    header: &PageHeader, place: &PagePlace, checksum: Checksum,
) -> Result<Vec<u8>, PageError> {
    let mut metadata = header.metadata.clone();
    let declared = Declared { checksum: Some(checksum), ..Declared::default() };
    metadata.extend(declared.to_metadata());
    build_header(place.geometry(), header.tokens, &metadata)
}

/// The blob of a page of `length` bytes, of which `filtered` is what zstd gets to see.
fn blob(filter: Filter, length: u64, filtered: &[u8]) -> Vec<u8> {
    let header = Header::new(filter, BLOCK_LEVEL, length);
    let mut blob = Vec::with_capacity(filtered.len());
    let mut writer = BlobWriter::start(header, &mut blob).expect("a vector takes everything");
    let mut rest = filtered;
    for chunk in header.chunks() {
        let (filtered, after) = rest.split_at(filter.filtered_bytes(&chunk));
        writer.chunk(filtered).expect("a vector takes everything");
        rest = after;
    }
    debug_assert!(rest.is_empty(), "the chunks are the whole page");
    blob
}

fn as_page_index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a page is at most 1 GiB, which every supported usize holds")
}

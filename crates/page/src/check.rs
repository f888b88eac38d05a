//! Whether a file may appear as a page at a place in the tree.
//!
//! Identity comes first, then the checksum: a page for another place is told so after one read
//! of 4096 bytes.

use std::fmt;
use std::io;

use super::checksum::{PageDigest, PageHasher, PageIdentity};
use super::error::PageError;
use super::geometry::Geometry;
use super::header::PageHeader;
use super::identity::ModelIdentity;
use super::layer_kind::LayerKind;
use super::limits::{MAX_TOKEN_START, PAYLOAD_OFFSET, index};
use super::manifest::Manifest;
use super::metadata::Declared;
use super::{Layer, TokenStart};

/// Bytes per read: measured best with pread (26 GB/s), since a buffer stays in the L2 cache
/// between the copy from the kernel and the hash.
const BUFFER_BYTES: usize = 128 << 10;

/// A place where a page may lie: cache, layer and first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PagePlace {
    model: ModelIdentity,
    geometry: Geometry,
    layer: Layer,
    start: TokenStart,
}

/// A page whose header and bytes were checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedPage {
    /// Its header.
    pub header: PageHeader,
    /// Its checksums.
    pub digest: PageDigest,
}

/// Why a page could not be verified.
#[derive(Debug)]
pub enum VerifyError {
    /// The bytes could not be read; nothing is known about the page.
    Io(io::Error),
    /// The page is refused.
    Page(PageError),
}

impl PagePlace {
    /// The place of the page of `layer` that starts at token `start`.
    ///
    /// # Errors
    /// [`PageError::Place`] if the cache has no such page.
    pub fn new(manifest: &Manifest, layer: Layer, start: TokenStart) -> Result<Self, PageError> {
        let geometry = manifest.layer_geometry(layer);
        match manifest.layer_kind(layer) {
            Some(
                LayerKind::Attention
                | LayerKind::WithSide(_)
                | LayerKind::Sliding { .. }
                | LayerKind::Cross,
            ) => {}
            Some(LayerKind::Recurrent | LayerKind::State(_)) => {
                return Err(PageError::Place(format!(
                    "layer {layer} is recurrent: it keeps state snapshots, not pages"
                )));
            }
            None => {
                return Err(PageError::Place(format!(
                    "layer {layer} does not exist: the manifest has num_layers {}",
                    geometry.num_layers()
                )));
            }
        }
        let page_tokens = geometry.page_tokens();
        if !start.0.is_multiple_of(u64::from(page_tokens)) {
            return Err(PageError::Place(format!(
                "no page starts at token {start}: page_tokens is {page_tokens}"
            )));
        }
        if start.0 > MAX_TOKEN_START {
            return Err(PageError::Place(format!(
                "no page starts at token {start}: the limit is {MAX_TOKEN_START}"
            )));
        }
        Ok(Self { model: manifest.identity(), geometry, layer, start })
    }

    /// The shape of pages here.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The layer.
    pub fn layer(&self) -> Layer {
        self.layer
    }

    /// Position of the first token.
    pub fn start(&self) -> TokenStart {
        self.start
    }

    /// What the checksum of a page with `tokens` tokens here is bound to.
    pub fn identity(&self, tokens: u32) -> PageIdentity {
        PageIdentity {
            model: self.model,
            layer: self.layer,
            start: self.start,
            tokens,
            dtype: self.geometry.dtype(),
        }
    }

    /// What a page here says about itself, without a checksum.
    pub fn declared(&self) -> Declared {
        Declared {
            model: Some(self.model),
            layer: Some(self.layer),
            start: Some(self.start),
            ..Declared::default()
        }
    }

    /// Checks the first 4096 bytes of a file of `file_bytes`, without its payload.
    ///
    /// # Errors
    /// As [`PageHeader::parse`], and [`PageError::Place`] if the page says it belongs elsewhere.
    pub fn check_header(
        &self, first_bytes: &[u8], file_bytes: u64,
    ) -> Result<PageHeader, PageError> {
        let header = PageHeader::parse(first_bytes, file_bytes, &self.geometry)?;
        let declared = &header.declared;
        same_or_undeclared("kvfs.model", declared.model, &self.model)?;
        same_or_undeclared("kvfs.layer", declared.layer, &self.layer)?;
        same_or_undeclared("kvfs.start", declared.start, &self.start)?;
        Ok(header)
    }

    /// Reads and checks a whole page file.
    ///
    /// `read_at(offset, buffer)` reads like `pread`: it may give fewer bytes than asked, and 0
    /// only at the end of the file. `file_bytes` is the length that the file claims.
    ///
    /// # Errors
    /// [`VerifyError::Io`] if reading fails. [`VerifyError::Page`] as
    /// [`check_header`](Self::check_header), [`PageError::Size`] if the file ends early and
    /// [`PageError::Checksum`] if the bytes are not those of the declared checksum.
    pub fn verify(
        &self, read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<usize>, file_bytes: u64,
    ) -> Result<VerifiedPage, VerifyError> {
        let (header, hasher) =
            hash_file(read_at, file_bytes, |first| self.check_header(first, file_bytes))?;
        Ok(self.conclude(header, &hasher)?)
    }

    /// [`PagePlace::verify`] of a page file that is in memory.
    ///
    /// # Errors
    /// As [`check_header`](Self::check_header), and [`PageError::Checksum`].
    pub fn verify_bytes(&self, file: &[u8]) -> Result<VerifiedPage, PageError> {
        let (header, hasher) =
            hash_bytes(file, |first| self.check_header(first, file.len() as u64))?;
        self.conclude(header, &hasher)
    }

    fn conclude(&self, header: PageHeader, hasher: &PageHasher) -> Result<VerifiedPage, PageError> {
        let digest = hasher.finish(&self.identity(header.tokens));
        match header.declared.checksum {
            Some(declared) if declared != digest.page => {
                Err(PageError::Checksum { declared, computed: digest.page })
            }
            _ => Ok(VerifiedPage { header, digest }),
        }
    }
}

/// Hashes a file that is read piece by piece, once its first bytes have passed a check.
pub(super) fn hash_file<H>(
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<usize>, file_bytes: u64,
    check_header: impl FnOnce(&[u8]) -> Result<H, PageError>,
) -> Result<(H, PageHasher), VerifyError> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let first = next_piece(&mut buffer, file_bytes);
    read_exact_at(read_at, 0, first, file_bytes)?;
    let header = check_header(first)?;
    let mut hasher = PageHasher::new();
    hasher.update(first);
    let mut offset = first.len() as u64;
    while offset < file_bytes {
        let piece = next_piece(&mut buffer, file_bytes - offset);
        read_exact_at(read_at, offset, piece, file_bytes)?;
        hasher.update(piece);
        offset += piece.len() as u64;
    }
    Ok((header, hasher))
}

/// The same of a file that is in memory.
pub(super) fn hash_bytes<H>(
    file: &[u8], check_header: impl FnOnce(&[u8]) -> Result<H, PageError>,
) -> Result<(H, PageHasher), PageError> {
    let header = check_header(&file[..file.len().min(index(PAYLOAD_OFFSET))])?;
    let mut hasher = PageHasher::new();
    hasher.update(file);
    Ok((header, hasher))
}

pub(super) fn same_or_undeclared<T: PartialEq + fmt::Display>(
    name: &str, declared: Option<T>, here: &T,
) -> Result<(), PageError> {
    match declared {
        Some(declared) if declared != *here => Err(PageError::Place(format!(
            "header declares {name} {declared}, this place is {here}: the page belongs elsewhere"
        ))),
        _ => Ok(()),
    }
}

/// The part of `buffer` that the next `bytes_left` bytes of a file fill.
fn next_piece(buffer: &mut [u8], bytes_left: u64) -> &mut [u8] {
    let length = usize::try_from(bytes_left).unwrap_or(usize::MAX);
    let length = length.min(buffer.len());
    &mut buffer[..length]
}

/// Fills `piece` from `offset`; a file that ends before is refused.
fn read_exact_at(
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<usize>, offset: u64, piece: &mut [u8],
    file_bytes: u64,
) -> Result<(), VerifyError> {
    let mut filled = 0;
    while filled < piece.len() {
        let position = offset + filled as u64;
        match read_at(position, &mut piece[filled..]) {
            Ok(0) => {
                return Err(VerifyError::Page(PageError::Size(format!(
                    "file ends at byte {position} of {file_bytes}: it was cut while it was read"
                ))));
            }
            Ok(bytes) if bytes <= piece.len() - filled => filled += bytes,
            Ok(_) => {
                let message = "the reader gave more bytes than it was asked for";
                return Err(VerifyError::Io(io::Error::other(message)));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(VerifyError::Io(error)),
        }
    }
    Ok(())
}

impl From<PageError> for VerifyError {
    fn from(error: PageError) -> Self {
        Self::Page(error)
    }
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "page cannot be read: {error}"),
            Self::Page(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for VerifyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::Page(error) => Some(error),
        }
    }
}

#[cfg(test)]
mod tests;

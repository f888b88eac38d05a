//! The state of a recurrent layer after some row: what an engine goes on from.
//!
//! A page is a part of what its layer keeps, a state is all of it, so one of a prefix is worth
//! nothing for another: its header must name the tokens that it has seen, by their hash.

use std::fmt;
use std::io;

use super::check::{VerifyError, hash_bytes, hash_file, same_or_undeclared};
use super::checksum::{Checksum, PageDigest, PageHasher, PageIdentity, StateIdentity};
use super::error::PageError;
use super::header::{build_state_header, parse_state_header};
use super::identity::ModelIdentity;
use super::layer_kind::{LayerKind, StateShape};
use super::limits::{MAX_TOKEN_START, PAYLOAD_OFFSET, index};
use super::manifest::Manifest;
use super::metadata::{CHECKSUM, LAYER, MODEL, Metadata, PREFIX, ROW, parsed};
use super::{Dtype, Layer, PrefixHash, TokenStart};

/// A place where a state may lie: cache, layer and the row after which it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePlace {
    model: ModelIdentity,
    dtype: Dtype,
    shape: StateShape,
    layer: Layer,
    row: TokenStart,
}

/// What the header of an accepted state says beyond its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateHeader {
    /// `kvfs.prefix`: the hash of the tokens before the row, see [`Manifest::prefix_of`].
    pub prefix: PrefixHash,
    /// `kvfs.checksum`, absent if the writer left it out.
    pub checksum: Option<Checksum>,
}

/// A state whose header and bytes were checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedState {
    /// Its header.
    pub header: StateHeader,
    /// Its checksums.
    pub digest: PageDigest,
}

impl StatePlace {
    /// The place of the state of `layer` after `row` tokens.
    ///
    /// # Errors
    /// [`PageError::Place`] if the cache has no such state.
    pub fn new(manifest: &Manifest, layer: Layer, row: TokenStart) -> Result<Self, PageError> {
        let shape = match manifest.layer_kind(layer) {
            Some(LayerKind::State(shape)) => shape,
            Some(LayerKind::Recurrent) => {
                return Err(PageError::Place(format!(
                    "layer {layer} is recurrent and the manifest does not say what its state \
                     consists of"
                )));
            }
            Some(_) => {
                return Err(PageError::Place(format!(
                    "layer {layer} is not recurrent: it keeps pages, not states"
                )));
            }
            None => {
                return Err(PageError::Place(format!(
                    "layer {layer} does not exist: the manifest has num_layers {}",
                    manifest.geometry().num_layers()
                )));
            }
        };
        if row.0 == 0 || row.0 > MAX_TOKEN_START {
            return Err(PageError::Place(format!(
                "no state is after {row} tokens: 1 to {MAX_TOKEN_START}"
            )));
        }
        let dtype = manifest.geometry().dtype();
        Ok(Self { model: manifest.identity(), dtype, shape, layer, row })
    }

    /// What the state consists of.
    pub fn shape(&self) -> &StateShape {
        &self.shape
    }

    /// What the store's checksum of a state here is bound to: that of a page without tokens.
    pub fn identity(&self) -> PageIdentity {
        let Self { model, layer, row, dtype, .. } = *self;
        PageIdentity { model, layer, start: row, tokens: 0, dtype }
    }

    /// Checks the first 4096 bytes of a file of `file_bytes`, without its payload.
    ///
    /// # Errors
    /// As [`PageHeader::parse`](super::PageHeader::parse), and [`PageError::Place`] if the state says
    /// it belongs elsewhere.
    pub fn check_header(
        &self, first_bytes: &[u8], file_bytes: u64,
    ) -> Result<StateHeader, PageError> {
        let metadata = parse_state_header(first_bytes, file_bytes, &self.shape)?;
        let model = parsed(&metadata, MODEL, "32 lower-case hexadecimal digits")?;
        same_or_undeclared(MODEL, model, &self.model)?;
        same_or_undeclared(LAYER, parsed(&metadata, LAYER, "a decimal number")?, &self.layer.0)?;
        same_or_undeclared(ROW, parsed(&metadata, ROW, "a decimal number")?, &self.row.0)?;
        let checksum = parsed(&metadata, CHECKSUM, "32 lower-case hexadecimal digits")?;
        let prefix = parsed(&metadata, PREFIX, "64 lower-case hexadecimal digits")?;
        let prefix = prefix.ok_or_else(|| {
            PageError::Header(format!(
                "header metadata {PREFIX} is missing: a state says which tokens it has seen"
            ))
        })?;
        Ok(StateHeader { prefix, checksum })
    }

    /// Reads and checks a whole file, as [`PagePlace::verify`](super::PagePlace::verify) does a page's.
    ///
    /// # Errors
    /// As there.
    pub fn verify(
        &self, read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<usize>, file_bytes: u64,
    ) -> Result<VerifiedState, VerifyError> {
        let (header, hasher) =
            hash_file(read_at, file_bytes, |first| self.check_header(first, file_bytes))?;
        Ok(self.conclude(header, &hasher)?)
    }

    /// [`StatePlace::verify`] of a file that is in memory.
    ///
    /// # Errors
    /// As [`check_header`](Self::check_header), and [`PageError::Checksum`].
    pub fn verify_bytes(&self, file: &[u8]) -> Result<VerifiedState, PageError> {
        let (header, hasher) =
            hash_bytes(file, |first| self.check_header(first, file.len() as u64))?;
        self.conclude(header, &hasher)
    }

    fn conclude(
        &self, header: StateHeader, hasher: &PageHasher,
    ) -> Result<VerifiedState, PageError> {
        let identity = StateIdentity { place: self.identity(), prefix: header.prefix };
        let digest = hasher.finish_state(&identity);
        match header.checksum {
            Some(declared) if declared != digest.page => {
                Err(PageError::Checksum { declared, computed: digest.page })
            }
            _ => Ok(VerifiedState { header, digest }),
        }
    }
}

/// The file of a state at a place, which says where it belongs, what it has seen and what its checksum
/// is. `tensors` are the bytes of the tensors, one behind the other.
///
/// # Errors
/// [`PageError::Rows`] if they have another length.
pub fn pack_state(
    place: &StatePlace, prefix: PrefixHash, tensors: &[u8],
) -> Result<Vec<u8>, PageError> {
    let expected = place.shape.payload_bytes();
    if tensors.len() as u64 != expected {
        return Err(PageError::Rows(format!(
            "a state of layer {} is {expected} bytes, {} were given",
            place.layer,
            tensors.len()
        )));
    }
    let payload = index(PAYLOAD_OFFSET);
    let mut file = vec![0; index(place.shape.file_bytes())];
    file[payload..payload + tensors.len()].copy_from_slice(tensors);
    let mut hasher = PageHasher::new();
    hasher.update(&file);
    let identity = StateIdentity { place: place.identity(), prefix };
    let entries: [(&str, &dyn fmt::Display); 5] = [
        (MODEL, &place.model),
        (LAYER, &place.layer),
        (ROW, &place.row),
        (PREFIX, &prefix),
        (CHECKSUM, &hasher.finish_state(&identity).page),
    ];
    let metadata: Metadata =
        entries.into_iter().map(|(name, value)| (name.to_owned(), value.to_string())).collect();
    file[..payload].copy_from_slice(&build_state_header(&place.shape, &metadata)?);
    Ok(file)
}

#[cfg(test)]
mod tests;

//! Sequences whose tokens were removed or moved: how far a prefix of theirs is what its tokens say.

use super::access::Readers;
use crate::fs::{FileSystem, FsError};
use crate::page::{MAX_POSITIONS_BYTES, Positions, names};
use crate::store::record::InodeId;

impl FileSystem {
    /// Where the rows of a sequence stand; `None` if its `positions.json` cannot be used, and
    /// nothing of it can be told.
    pub(super) fn positions_of(&self, sequence: InodeId) -> Result<Option<Positions>, FsError> {
        if self.file_bytes(sequence, names::POSITIONS)? > MAX_POSITIONS_BYTES as u64 {
            return Ok(None);
        }
        match self.whole_file((sequence, names::POSITIONS), Readers::NOBODY) {
            Ok(None) => Ok(Some(Positions::default())),
            Ok(Some(json)) => Ok(Positions::parse(&json).ok()),
            Err(error) => {
                log::warn!("{} of a sequence cannot be read: {error}", names::POSITIONS);
                Ok(None)
            }
        }
    }
}

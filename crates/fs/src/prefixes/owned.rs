//! Whose sequences begin with a prefix, for who asks something of it.

use super::Virtual;
use super::find::Indexed;
use crate::errands::End;
use crate::{Caller, FileSystem, FsError};
use kvfs_storage::store::record::InodeId;

/// Sequences that are looked at. The rest of those that begin so is not met.
const HOLDERS_MAX: usize = 256;

/// The sequences of a user, or of all for root, that begin with a prefix, and where it ends. EPERM where only others have
/// one, EOPNOTSUPP for what is no prefix.
pub(crate) fn prefix_owned_by(
    fs: &FileSystem, id: InodeId, caller: Caller,
) -> Result<Vec<(InodeId, End)>, FsError> {
    let Ok(Virtual::Prefix(model, hash)) = fs.prefixes.meaning_of(id) else {
        return Err(FsError::Unsupported);
    };
    fs.prepare_to_find()?;
    let own = {
        let mut state = fs.core.state();
        let rules = fs.core.model_of(&mut state, model).map_err(|_| FsError::NotFound)?;
        let page_tokens = u64::from(rules.manifest.geometry().page_tokens());
        let mut own = Vec::new();
        for (sequence, page) in state.metadata.prefix_holders(model, &hash.0, HOLDERS_MAX)? {
            let Some(directory) = state.metadata.inode(sequence)? else { continue };
            if [0, directory.uid].contains(&caller.uid) {
                let tokens = (u64::from(page) + 1) * page_tokens;
                own.push((sequence, End { tokens, page_tokens }));
            }
        }
        own
    };
    if !own.is_empty() {
        return Ok(own);
    }
    // What the caller would not be shown is not told, either.
    let is_shown = fs.finder().pages_of_prefix(model, hash)?.is_some();
    Err(if is_shown { FsError::NotPermitted } else { FsError::NotFound })
}

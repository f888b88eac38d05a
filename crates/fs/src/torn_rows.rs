//! What a power cut leaves of a row at the end of a tail, in layers whose rows have a part beside K and V.
//!
//! There a tail that is no whole rows counts as one without any, for whoever leaves that part out shifts all rows
//! ([`Geometry::rows_in`](kvfs_page::Geometry::rows_in)). After a crash the rest of a row is most likely what the
//! disk had of the last append, and is cut off: if all rows are there that `tokens` names. If not, nobody can tell
//! how the tail came to be as long as it is, and its rows stay what they are, a miss.

use crate::FsError;
use crate::core::Core;
use crate::core::rows::TOKEN_BYTES;
use crate::core::state::State;
use kvfs_page::{Layer, names};
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::record::{DirectoryClass, InodeId, Kind, Role};

/// Looks at the tails that were changing when the store's last mount ended.
pub(super) fn cut_after_crash(core: &Core) {
    let tails = core.state().full_tails.clone();
    for id in tails {
        if let Err(error) = cut(core, id) {
            let name = core.state().any_path(id);
            let name = name.unwrap_or_else(|| format!("inode {}", id.0));
            log::warn!("{name} ends within a row, which could not be cut off: {error}");
        }
    }
}

fn cut(core: &Core, id: InodeId) -> Result<(), FsError> {
    let Some((directory, start)) = core.tail_of(id)? else { return Ok(()) };
    let mut state = core.state();
    let (_, class) = state.directory(directory)?;
    let DirectoryClass::Layer(layer) = class else { return Ok(()) };
    // Without its manifest it is no tail of anything.
    let Ok(model) = core.model_of(&mut state, directory) else { return Ok(()) };
    let geometry = model.manifest.layer_geometry(Layer(layer));
    if geometry.side_row_bytes() == 0 {
        return Ok(());
    }
    let inode = state.inode(id)?;
    let object = inode.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
    let named = named_tokens(core, &state, directory)?;
    drop(state);
    let file = core.store.open_object(object, Access::ReadWrite)?;
    let length = file.stat()?.length;
    let rows = length / geometry.row_bytes();
    if rows * geometry.row_bytes() == length || start + rows < named {
        return Ok(());
    }
    core.cut_rows(Role::Tail { start, directory }, file.as_ref(), rows * geometry.row_bytes())?;
    inode.file().into_iter().for_each(|record| core.publish_rows(record));
    Ok(())
}

/// How many tokens the sequence of a layer's directory names.
fn named_tokens(core: &Core, state: &State, layer: InodeId) -> Result<u64, FsError> {
    let Kind::Directory { parent, .. } = state.inode(layer)?.kind else { return Ok(0) };
    match state.entry(parent, names::TOKENS.as_bytes())? {
        Some(tokens) => Ok(state.attributes(&core.store, tokens.inode)?.size / TOKEN_BYTES),
        None => Ok(0),
    }
}

//! Tails that are full and no pages: a crash, or a disk without room, came between the row that
//! completes a page and the page. They are sealed when the store is mounted, else by the next commit
//! that finds room.

use super::attributes::Place;
use super::publish::Publishing;
use super::{FileSystem, FsError};
use crate::core::rows::{append_turn, rows_bytes};
use kvfs_page::{TokenStart, names};
use kvfs_storage::ingest::seal::SealError;
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::record::{DirectoryClass, InodeId};

/// Seals, durably, the tails that a crash left full.
pub(super) fn seal_after_crash(fs: &FileSystem) {
    if fs.publishing().seal_full_tails() > 0
        && let Err(error) = fs.commit()
    {
        log::warn!("what was sealed after a crash is not durable yet: {error}");
    }
}

impl Publishing<'_> {
    /// Looks again at tails that may be full, and seals those that are; how many were.
    pub(super) fn seal_full_tails(&self) -> usize {
        let waiting = self.core.state().full_tails.clone();
        let mut sealed = 0;
        for id in waiting {
            let outcome = self.seal_if_full(id);
            sealed += usize::from(matches!(outcome, Ok(true)));
            if let Err(error) = &outcome {
                let name = self.core.state().any_path(id);
                let name = name.unwrap_or_else(|| format!("inode {}", id.0));
                log::warn!("{name} is full and not sealed yet: {error}");
                if error.is_internal() {
                    // The others would find no room either.
                    break;
                }
            }
            self.core.state().full_tails.remove(&id);
        }
        sealed
    }

    /// Seals a tail if it is full. One beside a page of its tokens stays: nobody knows which of them
    /// is meant.
    fn seal_if_full(&self, id: InodeId) -> Result<bool, FsError> {
        let Some((directory, start)) = self.core.tail_of(id)? else { return Ok(false) };
        let page = {
            let mut state = self.core.state();
            let (_, class) = state.directory(directory)?;
            let layer = if let DirectoryClass::Layer(layer) = class { layer } else { 0 };
            let model = self.core.model_of(&mut state, directory);
            model.and_then(|model| model.place(layer, start).map_err(SealError::Refused))
        };
        let page = match page {
            Ok(page) => page,
            Err(SealError::Io(error)) => return Err(error.into()),
            // Without its manifest it is no tail of anything.
            Err(SealError::Refused(_)) => return Ok(false),
        };
        let turn = append_turn(&mut self.core.state(), id);
        let outcome = {
            let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.seal_rows(id, &page)
        };
        self.core.state().drop_node_if_idle(id)?;
        outcome
    }

    fn seal_rows(&self, id: InodeId, page: &kvfs_page::PagePlace) -> Result<bool, FsError> {
        let Some((parent, start)) = self.core.tail_of(id)? else { return Ok(false) };
        let name = names::format_tail(TokenStart(start)).into_bytes();
        let place = Place { parent, name };
        let inode = {
            let state = self.core.state();
            let page_name = names::format_page(TokenStart(start));
            let is_named = state.entry(parent, &place.name)?.is_some_and(|entry| entry.inode == id);
            if !is_named || state.entry(parent, page_name.as_bytes())?.is_some() {
                return Ok(false);
            }
            state.inode(id)?
        };
        let object = inode.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
        let file = self.core.store.open_object(object, Access::Read)?;
        if file.stat()?.length != rows_bytes(page) {
            return Ok(false);
        }
        self.seal_tail(id, &inode, file.as_ref(), (&place, page)).map(|()| true)
    }
}

//! What an open slot has beside pages and tails: rows that begin in the middle of a page, states, and checkpoints.
//!
//! Their names are none that a watch hears of, so what they led to is noted when the slot is opened, and compared
//! with each time that something of it was read.

use super::read::{Page, PageKind};
use super::{Finder, OpenSlot, Slots};
use crate::FsError;
use crate::core::Core;
use kvfs_page::{Layer, LayerKind, Manifest, TokenStart, names};
use kvfs_storage::store::record::{InodeId, Time};

/// A file of a layer, or of the sequence, as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Of the sequence, if of none.
    layer: Option<Layer>,
    directory: InodeId,
    name: String,
    inode: InodeId,
    bytes: u64,
    written: Time,
}

/// Those of a slot.
#[derive(Debug, Default)]
pub(super) struct Marks(Vec<Mark>);

impl Marks {
    /// Those of a slot with so many tokens, as far as they are there.
    pub(super) fn of(
        core: &Core, manifest: &Manifest, (sequence, layers): (InodeId, &[Option<InodeId>]),
        tokens: u32,
    ) -> Result<Self, FsError> {
        let page_tokens = u64::from(manifest.geometry().page_tokens());
        let tokens = u64::from(tokens);
        let name = names::format_checkpoints(TokenStart(tokens));
        let mut marks: Vec<Mark> = Mark::of(core, None, sequence, name)?.into_iter().collect();
        for (layer, directory) in (0..).map(Layer).zip(layers) {
            let name = match manifest.layer_kind(layer) {
                Some(LayerKind::Sliding { window }) => {
                    let first = tokens.saturating_sub(u64::from(window));
                    if first.is_multiple_of(page_tokens) {
                        continue;
                    }
                    names::format_window_rows(TokenStart(first))
                }
                Some(LayerKind::State(_)) => names::format_state(TokenStart(tokens)),
                _ => continue,
            };
            if let Some(directory) = directory {
                marks.extend(Mark::of(core, Some(layer), *directory, name)?);
            }
        }
        Ok(Self(marks))
    }

    /// What a slot has of a layer, or of the sequence, beside pages and tails.
    fn find(&self, layer: Option<Layer>) -> Option<&Mark> {
        self.0.iter().find(|mark| mark.layer == layer)
    }

    /// Whether only the remote has that.
    pub(super) fn is_away(&self, finder: Finder<'_>, layer: Option<Layer>) -> bool {
        self.find(layer).is_some_and(|mark| finder.waits_for_remote(mark.inode))
    }
}

impl Mark {
    fn of(
        core: &Core, layer: Option<Layer>, directory: InodeId, name: String,
    ) -> Result<Option<Self>, FsError> {
        let state = core.state();
        let Some(entry) = state.entry(directory, name.as_bytes())? else { return Ok(None) };
        let found = state.attributes(&core.store, entry.inode)?;
        let (bytes, written) = (found.size, found.mtime);
        Ok(Some(Self { layer, directory, name, inode: entry.inode, bytes, written }))
    }

    /// Fills `to` from a place in the file on.
    fn read(
        &self, slots: &Slots<'_>, slot: &OpenSlot, offset: u64, to: &mut [u8],
    ) -> Result<usize, FsError> {
        if !slot.readers.may_read(&slots.core.state().inode(self.inode)?) {
            return Err(FsError::NotPermitted);
        }
        let filled = slots.files.read_file(self.inode, offset, to)?;
        // Before a read nobody looks: what came between was read, and is found out here.
        let now = Self::of(slots.core, self.layer, self.directory, self.name.clone())?;
        if now.as_ref() != Some(self) {
            return Err(FsError::Stale);
        }
        slots.files.note_use_of(self.inode, slot.flags);
        Ok(filled)
    }
}

/// Fills `to` from a place in the file on that a slot has beside pages and tails.
pub(super) fn read_marked(
    slots: &Slots<'_>, slot: &OpenSlot, layer: Option<Layer>, offset: u64, to: &mut [u8],
) -> Result<usize, FsError> {
    slot.marks.find(layer).ok_or(FsError::Stale)?.read(slots, slot, offset, to)
}

/// The rows of a slot in the page at `start` that begin in the middle of it.
pub(super) fn window_rows(
    slots: &Slots<'_>, slot: &OpenSlot, layer: Layer, start: u64,
) -> Result<Page, FsError> {
    let kind = slot.rules.manifest.layer_kind(layer);
    let Some(LayerKind::Sliding { window }) = kind else { return Err(FsError::Stale) };
    let first = u64::from(slot.cells.saturating_sub(window)).max(start);
    let mark = slot.marks.find(Some(layer)).ok_or(FsError::Stale)?;
    let geometry = slot.rules.manifest.geometry();
    let end = (start + u64::from(geometry.page_tokens())).min(slot.cells.into());
    // Whoever may write there may have made it as large as he likes before somebody looked.
    if mark.bytes != end.saturating_sub(first) * geometry.row_bytes() {
        return Err(FsError::Stale);
    }
    let mut bytes = vec![0; usize::try_from(mark.bytes).map_err(|_| FsError::TooLarge)?];
    if mark.read(slots, slot, 0, &mut bytes)? < bytes.len() {
        return Err(FsError::Stale);
    }
    Ok(Page { layer, start, first, bytes, kind: PageKind::Rows })
}

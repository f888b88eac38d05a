//! Reading an open slot: what lies where in it, and the rows that are gathered page by page.

use std::sync::{Arc, PoisonError};

use kvfs_formats::slot::Part;
use kvfs_formats::slot::reference::Reference;

use super::marks::{read_marked, window_rows};
use super::{OpenSlot, References, Slots};
use crate::FsError;
use crate::transfer::copy_text;
use kvfs_page::limits::PAYLOAD_OFFSET;
use kvfs_page::{Geometry, Layer, PageView, StateTensor, TokenStart, names};
use kvfs_storage::store::disk::DiskFile;
use kvfs_storage::store::record::{Entry, InodeId};

/// A stretch of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::prefixes) enum Stretch {
    /// What stands before rows, and references.
    AtHand(u64),
    /// Zeros in the place of rows that are referred to.
    Zeros(u64),
    /// Rows that are read from pages, and states.
    Rows(u64),
}

/// A page, or what stands in its place.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) layer: Layer,
    /// Where the page begins.
    pub(super) start: u64,
    /// Where the rows begin that are there.
    pub(super) first: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) kind: PageKind,
}

/// What a [`Page`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    Sealed,
    /// Each K, then V.
    Rows,
}

impl OpenSlot {
    /// Where the kernel reads it, if it does.
    pub(crate) fn file(&self) -> Option<&Arc<dyn DiskFile>> {
        self.file.as_ref().map(|slot| &slot.file)
    }

    pub(in crate::prefixes) fn length(&self) -> u64 {
        self.layout.length()
    }

    /// Whether references stand for pages.
    pub(in crate::prefixes) fn is_of_references(&self) -> bool {
        self.references.is_some()
    }

    /// Whether what lies there needs no page.
    pub(in crate::prefixes) fn is_at_hand(&self, offset: u64, length: u64) -> bool {
        let end = offset.saturating_add(length);
        self.stretches(offset)
            .take_while(|(at, _)| *at < end)
            .all(|(_, stretch)| !matches!(stretch, Stretch::Rows(_)))
    }

    /// What it is made of from `offset` on, and where that begins.
    pub(in crate::prefixes) fn stretches(
        &self, offset: u64,
    ) -> impl Iterator<Item = (u64, Stretch)> {
        let mut next = offset;
        std::iter::from_fn(move || {
            let at = next;
            let stretch = self.stretch(at)?;
            let (Stretch::AtHand(length) | Stretch::Zeros(length) | Stretch::Rows(length)) =
                stretch;
            next += length;
            Some((at, stretch))
        })
    }

    fn stretch(&self, offset: u64) -> Option<Stretch> {
        let (part, rest) = self.layout.part(offset)?;
        let (is_v, at) = match part {
            Part::Rows { is_v, at, .. } => (is_v, at),
            Part::State { .. } | Part::Checkpoints { .. } => return Some(Stretch::Rows(rest)),
            Part::Head { .. } | Part::TensorHead { .. } => return Some(Stretch::AtHand(rest)),
        };
        let pages = self.references.as_ref().map_or(0, |references| references.prefixes.len());
        let row_bytes = self.layout.row_bytes(is_v);
        let page_bytes = u64::from(self.rules.manifest.geometry().page_tokens()) * row_bytes;
        if at >= pages as u64 * page_bytes {
            return Some(Stretch::Rows(rest));
        }
        let filled = Reference::filled_bytes(row_bytes).min(page_bytes);
        Some(match at % page_bytes {
            at if at < filled => Stretch::AtHand(filled - at),
            at => Stretch::Zeros(page_bytes - at),
        })
    }

    /// Fills `to` with what stands for a page's rows, from byte `at` on; returns how much. Nothing, if
    /// its rows are to be read.
    fn read_reference(
        &self, (layer, is_v): (Layer, bool), start: u64, at: u64, to: &mut [u8],
    ) -> Option<usize> {
        let References { key, prefixes } = self.references.as_ref()?;
        let tokens = self.rules.manifest.geometry().page_tokens();
        let page = usize::try_from(start / u64::from(tokens)).ok()?;
        let reference = Reference { prefix: *prefixes.get(page)?, layer: layer.0, is_v, tokens };
        let row_bytes = self.layout.row_bytes(is_v);
        let rest = u64::from(tokens) * row_bytes - at;
        let count = usize::try_from(rest).unwrap_or(usize::MAX).min(to.len());
        reference.write(key, row_bytes, at, &mut to[..count]);
        Some(count)
    }
}

impl Slots<'_> {
    /// Fills `buffer` with what a slot has at `offset`; returns how much.
    pub(crate) fn read(
        &self, slot: &OpenSlot, offset: u64, buffer: &mut [u8],
    ) -> Result<usize, FsError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let Some((part, rest)) = slot.layout.part(offset + filled as u64) else { break };
            let rest = usize::try_from(rest).unwrap_or(usize::MAX);
            let count = rest.min(buffer.len() - filled);
            let to = &mut buffer[filled..filled + count];
            let read = match part {
                Part::Head { number, at } => copy_text(&slot.heads[number], at, to),
                Part::TensorHead { bytes, at } => copy_text(&bytes, at, to),
                Part::Rows { layer, is_v, first, at } => {
                    self.read_rows(slot, (layer, is_v), (first, at), to)?
                }
                Part::State { layer, tensor, at } => {
                    let at = state_offset(slot, layer, tensor)? + at;
                    read_marked(self, slot, Some(layer), at, to)?
                }
                Part::Checkpoints { at } => read_marked(self, slot, None, at, to)?,
            };
            if read == 0 {
                return Err(FsError::Stale);
            }
            filled += read;
        }
        Ok(filled)
    }

    /// Copies rows of K or V of one page, from byte `at` of those of the layer on.
    fn read_rows(
        &self, slot: &OpenSlot, (layer, is_v): (Layer, bool), (first, at): (u32, u64),
        to: &mut [u8],
    ) -> Result<usize, FsError> {
        let geometry = slot.rules.manifest.geometry();
        let row_bytes = slot.layout.row_bytes(is_v);
        let token = u64::from(first) + at / row_bytes;
        let start = token - token % u64::from(geometry.page_tokens());
        let place = (layer, is_v);
        // There are references only where the first row is that of the first token.
        if let Some(count) =
            slot.read_reference(place, start, at.wrapping_sub(start * row_bytes), to)
        {
            return Ok(count);
        }
        // Not held while a page is read: who reads one that is far away keeps nobody waiting.
        let known = slot.page.lock().unwrap_or_else(PoisonError::into_inner).take();
        let page = match known.filter(|page| (page.layer, page.start) == (layer, start)) {
            Some(page) => page,
            None => self.slot_page(slot, layer, start)?,
        };
        let rows = page.rows(geometry)?;
        let end = start + u64::from(geometry.page_tokens());
        let mut filled = 0;
        let mut row = Vec::new();
        for token in token..end {
            if filled == to.len() {
                break;
            }
            row.clear();
            let token = token.checked_sub(page.first).ok_or(FsError::Stale)?;
            rows.push(token, is_v, &mut row)?;
            let skip = (at + filled as u64) % row_bytes;
            filled += copy_text(&row, skip, &mut to[filled..]);
        }
        *slot.page.lock().unwrap_or_else(PoisonError::into_inner) = Some(page);
        Ok(filled)
    }

    /// Whether what a slot has there is made of a page that only the remote has.
    pub(in crate::prefixes) fn reading_waits_for_remote(
        &self, slot: &OpenSlot, offset: u64, length: u32,
    ) -> Result<bool, FsError> {
        let page_tokens = u64::from(slot.rules.manifest.geometry().page_tokens());
        let (mut at, end) = (offset, offset.saturating_add(u64::from(length)));
        while at < end {
            let Some((part, rest)) = slot.layout.part(at) else { break };
            at += match part {
                Part::Rows { layer, is_v, first, at } => {
                    let row_bytes = slot.layout.row_bytes(is_v);
                    let token = u64::from(first) + at / row_bytes;
                    let start = token / page_tokens * page_tokens;
                    if self.page_is_away(slot.sequence, layer, start)?
                        || slot.marks.is_away(self.finder, Some(layer))
                    {
                        return Ok(true);
                    }
                    let end = (start + page_tokens - u64::from(first)) * row_bytes;
                    rest.min(end - at)
                }
                Part::State { layer, .. } if slot.marks.is_away(self.finder, Some(layer)) => {
                    return Ok(true);
                }
                Part::Checkpoints { .. } if slot.marks.is_away(self.finder, None) => {
                    return Ok(true);
                }
                _ => rest,
            };
        }
        Ok(false)
    }

    /// Whether only the remote has a page of a sequence.
    pub(super) fn page_is_away(
        &self, sequence: InodeId, layer: Layer, start: u64,
    ) -> Result<bool, FsError> {
        let page = {
            let state = self.core.state();
            let layer = names::format_layer(layer);
            let Some(directory) = state.entry(sequence, layer.as_bytes())? else {
                return Ok(false);
            };
            state.entry(directory.inode, names::format_page(TokenStart(start)).as_bytes())?
        };
        Ok(page.is_some_and(|page| self.finder.waits_for_remote(page.inode)))
    }

    fn slot_page(&self, slot: &OpenSlot, layer: Layer, start: u64) -> Result<Page, FsError> {
        let directory =
            slot.layers.get(layer.0 as usize).copied().flatten().ok_or(FsError::Stale)?;
        let start_token = TokenStart(start);
        let name = names::format_page(start_token);
        let page = || self.files.whole_file((directory, &name), slot.readers);
        let tail =
            || self.files.whole_file((directory, &names::format_tail(start_token)), slot.readers);
        let (bytes, kind) = match page()? {
            Some(page) => (page, PageKind::Sealed),
            None => match tail()? {
                Some(tail) => (tail, PageKind::Rows),
                // It became a page between the two, or begins in the middle of one.
                None => match page()? {
                    Some(page) => (page, PageKind::Sealed),
                    None => return window_rows(self, slot, layer, start),
                },
            },
        };
        let state = self.core.state();
        let name = if kind == PageKind::Sealed { name } else { names::format_tail(start_token) };
        let entry = state.entry(directory, name.as_bytes())?;
        let is_other = |entry: Entry| {
            kind == PageKind::Sealed
                && state.metadata.watches.has_other_content(entry.inode, &slot.watch)
        };
        // What was read may be of a file that came later: it was written for those whom the sequence lets in now.
        if slot.watch.has_changed() || entry.is_some_and(is_other) {
            return Err(FsError::Stale);
        }
        drop(state);
        if let Some(entry) = entry {
            self.files.note_use_of(entry.inode, slot.flags);
        }
        Ok(Page { layer, start, first: start, bytes, kind })
    }
}

/// Where a tensor of a state begins in its file.
fn state_offset(slot: &OpenSlot, layer: Layer, tensor: usize) -> Result<u64, FsError> {
    let shape = slot.rules.manifest.state_shape(layer).ok_or(FsError::Stale)?;
    let bytes = |tensor: &StateTensor| tensor.bytes().unwrap_or(0);
    Ok(PAYLOAD_OFFSET + shape.state.iter().take(tensor).map(bytes).sum::<u64>())
}

/// The rows of a page.
enum Rows<'p> {
    Page(PageView<'p>, u32),
    /// Each K, then V; bytes of K, and of both.
    Tail(&'p [u8], usize, usize),
}

impl Page {
    /// Its header is read once, not for each row.
    fn rows(&self, geometry: &Geometry) -> Result<Rows<'_>, FsError> {
        let heads = geometry.num_kv_heads();
        if self.kind == PageKind::Rows {
            let k_bytes = usize::try_from(u64::from(heads) * geometry.k_row_bytes());
            let row_bytes = usize::try_from(geometry.row_bytes());
            let (Ok(k_bytes), Ok(row_bytes)) = (k_bytes, row_bytes) else {
                return Err(FsError::TooLarge);
            };
            return Ok(Rows::Tail(&self.bytes, k_bytes, row_bytes));
        }
        let page = PageView::parse(&self.bytes, geometry).map_err(|_| FsError::Stale)?;
        Ok(Rows::Page(page, heads))
    }
}

impl Rows<'_> {
    /// Appends K, or V, of a token: `[kv_heads, head_dim]`.
    fn push(&self, token: u64, is_v: bool, to: &mut Vec<u8>) -> Result<(), FsError> {
        match self {
            Self::Tail(bytes, k_bytes, row_bytes) => {
                let token = usize::try_from(token).map_err(|_| FsError::TooLarge)?;
                let row = bytes.chunks_exact(*row_bytes).nth(token).ok_or(FsError::Stale)?;
                to.extend_from_slice(if is_v { &row[*k_bytes..] } else { &row[..*k_bytes] });
            }
            Self::Page(page, heads) => {
                let token = u32::try_from(token).map_err(|_| FsError::TooLarge)?;
                if token >= page.tokens() {
                    return Err(FsError::Stale);
                }
                for head in 0..*heads {
                    to.extend_from_slice(if is_v {
                        page.v_row(head, token)
                    } else {
                        page.k_row(head, token)
                    });
                }
            }
        }
        Ok(())
    }
}

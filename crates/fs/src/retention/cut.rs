//! Taking the end off a sequence: its last pages in all layers, and the tokens that they are about.
//!
//! Everything that one cut removes is removed with the state held, so it is one commit: after a
//! crash the sequence is as it was or as it is. `tokens` gets another file, since what is cut off in
//! place could not come back. States may be many where pages are few: what is more than one cut may
//! remove of them goes before, the last first, and the rest is a sequence with fewer places to go on from.
//! A sequence whose tokens were moved goes as a whole: `positions.json` says
//! where its rows stand, and rows that take the place of those that were cut off would not stand there.

use std::collections::BTreeMap;

use super::InUse;
use super::enforcer::Enforcer;
use super::remove::{Kept, Removal};
use super::rights::Right;
use crate::FsError;
use crate::attributes::Place;
use crate::core::happened;
use crate::core::idle::lets_go;
use crate::core::orphan::remove_name;
use crate::core::stale::{mark_stale_without_names, tell_stale};
use crate::core::state::State;
use kvfs_page::{LayerKind, TokenStart, names};
use kvfs_storage::ingest::seal;
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::metadata::TokensChange;
use kvfs_storage::store::record::{
    DirectoryClass, Entry, InodeId, Kind, ObjectId, ObjectKind, Role, Time,
};

/// Pages that one cut removes, or one range of tokens if that has more: it looks for their users and
/// removes them with the state held.
const PAGES_MAX: usize = 64;
/// Bytes of one token id.
const TOKEN_BYTES: u64 = 4;

/// Files of a directory whose sizes are asked for at once, with the state held.
const SIZES_AT_ONCE: usize = 256;

/// A page, tail or state, rows of a window or checkpoints, and its bytes if there is room for them when it goes.
#[derive(Clone, Debug)]
struct Piece {
    id: InodeId,
    place: Place,
    bytes: u64,
    /// The row after which it is what its layer keeps, if it is a state.
    row: Option<u64>,
}

/// What goes at once.
#[derive(Debug)]
struct Going<'a> {
    right: Right<'a>,
    /// The last first.
    ranges: &'a [(u64, Vec<Piece>)],
    /// The pages of a range of which only states go, and the tokens stay: nobody may use them either.
    beside: Option<&'a [Piece]>,
}

/// A sequence as it was listed.
#[derive(Debug, Default)]
struct Listed {
    /// By the first token.
    pieces: BTreeMap<u64, Vec<Piece>>,
    layers: Vec<InodeId>,
    tokens: Option<InodeId>,
    /// Nothing of it goes without the rest.
    is_whole: bool,
}

/// `tokens` with another file, of which only a part will stay.
struct NewTokens {
    id: InodeId,
    old: ObjectId,
    length: u64,
    new: ObjectId,
}

impl Enforcer<'_> {
    /// Removes pages from the end of a sequence until so many bytes are gone, or all of it.
    pub(super) fn cut_from_end(
        &self, sequence: InodeId, bytes_max: u64, (right, why): (Right<'_>, &str),
    ) -> Result<Removal, FsError> {
        if !right.holds(self, &self.core.state())? {
            return Ok(Removal { kept: Some(Kept::Changed), ..Removal::default() });
        }
        let event = Event { used: right.used(), ..Event::new(What::Deleted, why).of(sequence) };
        let mut listed = self.list_sequence(sequence, right)?;
        let thinned = self.thin((right, &event), sequence, &mut listed, bytes_max)?;
        if thinned.kept.is_some() || thinned.bytes >= bytes_max {
            return Ok(thinned);
        }
        let bytes_max = bytes_max - thinned.bytes;
        let (mut chosen, mut bytes, mut pages) = (Vec::new(), 0_u64, 0);
        for (start, pieces) in listed.pieces.iter().rev() {
            // All layers of a range go together, however many there are.
            let is_enough = bytes >= bytes_max || (pages > 0 && pages + pieces.len() > PAGES_MAX);
            if is_enough && !listed.is_whole {
                break;
            }
            chosen.push((*start, pieces.clone()));
            bytes += pieces.iter().map(|piece| piece.bytes).sum::<u64>();
            pages += pieces.len();
        }
        let ends = chosen.len() == listed.pieces.len();
        let going = Going { right, ranges: &chosen, beside: None };
        let mut removal = self.cut(&event, sequence, &listed, &going)?;
        if removal.kept.is_none() && ends {
            let rest = self.remove_rest(event, right, sequence)?;
            removal.files += rest.files;
            removal.bytes += rest.bytes;
            removal.kept = rest.kept;
        } else if removal.kept.is_none() {
            removal.has_more = removal.bytes < bytes_max;
        }
        removal.files += thinned.files;
        removal.bytes += thinned.bytes;
        Ok(removal)
    }

    /// Removes states of the last range, the last first, as long as the range is more than one cut removes.
    fn thin(
        &self, (right, event): (Right<'_>, &Event), sequence: InodeId, listed: &mut Listed,
        bytes_max: u64,
    ) -> Result<Removal, FsError> {
        let mut thinned = Removal::default();
        if listed.is_whole {
            return Ok(thinned);
        }
        let Some((start, pieces)) = listed.pieces.pop_last() else { return Ok(thinned) };
        let (mut states, pages): (Vec<Piece>, Vec<Piece>) =
            pieces.into_iter().partition(|piece| piece.row.is_some());
        states.sort_unstable_by_key(|piece| piece.row);
        while pages.len() + states.len() > PAGES_MAX && !states.is_empty() {
            let surplus = pages.len() + states.len() - PAGES_MAX;
            let last = states.split_off(states.len() - surplus.min(PAGES_MAX).min(states.len()));
            let ranges = [(start, last)];
            let going = Going { right, ranges: &ranges, beside: Some(&pages) };
            let removal = self.cut(event, sequence, listed, &going)?;
            thinned.files += removal.files;
            thinned.bytes += removal.bytes;
            thinned.kept = removal.kept;
            if thinned.kept.is_some() || thinned.bytes >= bytes_max {
                break;
            }
        }
        listed.pieces.insert(start, states.into_iter().chain(pages).collect());
        Ok(thinned)
    }

    fn list_sequence(&self, sequence: InodeId, right: Right<'_>) -> Result<Listed, FsError> {
        let mut listed = Listed::default();
        let mut state = self.core.state();
        let mut page_tokens = None;
        if let Ok(model) = self.core.model_of(&mut state, sequence) {
            page_tokens = Some(u64::from(model.manifest.geometry().page_tokens()));
            // Where pages of such a layer stand says nothing of the tokens that they are about.
            let kinds = model.manifest.fields().layers.as_deref().unwrap_or_default();
            listed.is_whole = kinds.contains(&LayerKind::Cross);
        }
        let (mut directories, mut checkpoints) = (Vec::new(), Vec::new());
        state.metadata.entries(sequence, 0, |_, name, entry| {
            if name == names::TOKENS.as_bytes() {
                listed.tokens = Some(entry.inode);
            } else if name == names::POSITIONS.as_bytes() {
                listed.is_whole = true;
            } else if entry.file_type == libc::S_IFDIR {
                directories.push(entry.inode);
            } else if let Some(start) = checkpoints_range(name, page_tokens) {
                let place = Place { parent: sequence, name: name.to_vec() };
                checkpoints.push((start, Piece { id: entry.inode, place, bytes: 0, row: None }));
            }
            true
        })?;
        drop(state);
        for (start, piece) in self.sized(checkpoints, right) {
            listed.pieces.entry(start).or_default().push(piece);
        }
        for directory in directories {
            let state = self.core.state();
            let class = state.directory(directory).map(|(_, class)| class);
            if !matches!(class, Ok(DirectoryClass::Layer(_))) {
                continue;
            }
            listed.layers.push(directory);
            let mut found = Vec::new();
            state.metadata.entries(directory, 0, |_, name, entry| {
                let place = || Place { parent: directory, name: name.to_vec() };
                let start = range_of(name, page_tokens);
                let row = names::parse_state(name).map(|row| row.0);
                let piece =
                    |start| (start, Piece { id: entry.inode, place: place(), bytes: 0, row });
                found.extend(start.map(piece));
                true
            })?;
            drop(state);
            for (start, piece) in self.sized(found, right) {
                listed.pieces.entry(start).or_default().push(piece);
            }
        }
        Ok(listed)
    }

    /// Pieces with their bytes; a layer may keep thousands of states.
    fn sized(&self, mut found: Vec<(u64, Piece)>, right: Right<'_>) -> Vec<(u64, Piece)> {
        for some in found.chunks_mut(SIZES_AT_ONCE) {
            let state = self.core.state();
            for (_, piece) in some {
                let shown = state.attributes(&self.core.store, piece.id).ok();
                let own = shown.filter(|shown| right.would_free(piece.id, shown.links));
                piece.bytes = own.map_or(0, |shown| shown.size);
            }
        }
        found
    }

    /// Removes ranges of pages, the last first, up to the first that must stay.
    fn cut(
        &self, event: &Event, sequence: InodeId, listed: &Listed, chosen: &Going<'_>,
    ) -> Result<Removal, FsError> {
        let &Going { right, ranges: chosen, beside } = chosen;
        let (Some((last, _)), Some((first, _))) = (chosen.first(), chosen.last()) else {
            return Ok(Removal::default());
        };
        let tokens = if beside.is_some() { None } else { self.copy_tokens(listed.tokens, *first)? };
        for piece in chosen.iter().flat_map(|(_, pieces)| pieces) {
            lets_go(self.core, piece.id);
        }
        let mut state = self.core.state_to_change()?;
        let used = right.used();
        let mut kept = (!right.holds(self, &state)?).then_some(Kept::Changed);
        let is_followed = self.is_followed(&mut state, (sequence, listed), *last)?;
        if is_followed || !self.is_same(&state, (listed, used), tokens.as_ref())? {
            kept = kept.or(Some(Kept::InUse));
        }
        let beside_kept = self.keeps_any(&state, beside.unwrap_or_default(), used)?;
        kept = kept.or(beside_kept);
        let mut going = Vec::new();
        for (start, pieces) in chosen {
            kept =
                kept.map_or_else(|| self.keeps_any(&state, pieces, used), |kept| Ok(Some(kept)))?;
            if kept.is_some() {
                break;
            }
            going.push((*start, pieces));
        }
        if kept.is_some() && listed.is_whole {
            going.clear();
        }
        let mut removal = Removal { kept, ..Removal::default() };
        for (_, pieces) in &going {
            for piece in *pieces {
                let mut inode = state.inode(piece.id)?;
                let size =
                    remove_name(self.core, &mut state, (piece.id, &mut inode), &piece.place)?;
                if right.has_freed(piece.id, inode.links) {
                    removal.bytes += size;
                }
                mark_stale_without_names(&mut state, piece.id)?;
                removal.files += 1;
            }
        }
        if let Some((start, _)) = going.last() {
            let path = state.directory_path(sequence);
            // Of a range that is thinned only states went.
            let rows = going.iter().flat_map(|(_, pieces)| *pieces).filter_map(|piece| piece.row);
            let thinned = beside.and_then(|_| rows.min());
            let from = thinned.map_or(*start, |row| row.saturating_sub(1));
            let event = told(event, path, (&removal, from));
            self.core.store.events.note(event);
        }
        match (tokens, going.last()) {
            (Some(tokens), Some((start, _))) => {
                self.replace_tokens(&mut state, sequence, &tokens, *start)?;
            }
            (Some(tokens), None) => state.drop_object(tokens.new)?,
            (None, _) => {}
        }
        drop(state);
        for piece in going.iter().flat_map(|(_, pieces)| *pieces) {
            tell_stale(self.core, piece.place.parent, piece.id);
        }
        Ok(removal)
    }

    /// Why a range of a sequence that was used last at that time must stay, if it must.
    fn keeps_any(
        &self, state: &State, pieces: &[Piece], used: Option<Time>,
    ) -> Result<Option<Kept>, FsError> {
        for piece in pieces {
            let entry = state.entry(piece.place.parent, &piece.place.name)?;
            let inode = state.metadata.inode(piece.id)?;
            let Some(inode) = inode.filter(|_| entry.is_some_and(|e| e.inode == piece.id)) else {
                return Ok(Some(Kept::Changed));
            };
            // What it shares, others use.
            if inode.links == 1
                && self.retention.is_used_since((state, &self.core.store), (piece.id, &inode), used)
            {
                return Ok(Some(Kept::Changed));
            }
            if let Some(kept) = self.keeps(state, piece.id, &inode)? {
                return Ok(Some(kept));
            }
        }
        Ok(None)
    }

    /// A copy of `tokens`, if a cut at this token shortens it.
    fn copy_tokens(&self, id: Option<InodeId>, cut: u64) -> Result<Option<NewTokens>, FsError> {
        let Some(id) = id else {
            return Ok(None);
        };
        let (old, new) = {
            let mut state = self.core.state_to_change()?;
            let inode = state.inode(id)?;
            let file = inode.file().filter(|file| file.role == Role::Tokens);
            let Some(old) = file.and_then(|file| file.object) else {
                return Ok(None);
            };
            (old, state.metadata.new_object())
        };
        let length = self.core.store.stat_object(old)?.length;
        if length <= cut * TOKEN_BYTES {
            self.core.state().metadata.staged.remove(&new);
            return Ok(None);
        }
        seal::copy(&self.core.store, old, new)?;
        Ok(Some(NewTokens { id, old, length, new }))
    }

    /// Whether `tokens` is what was copied, and nobody is about to change it.
    fn is_same(
        &self, state: &State, (listed, used): (&Listed, Option<Time>), tokens: Option<&NewTokens>,
    ) -> Result<bool, FsError> {
        let Some(id) = listed.tokens else {
            return Ok(true);
        };
        if state.nodes.get(&id).is_some_and(crate::core::node::Node::is_in_use) {
            return Ok(false);
        }
        let inode = state.metadata.inode(id)?;
        if inode.as_ref().is_none_or(|inode| {
            self.retention.is_used_since((state, &self.core.store), (id, inode), used)
        }) {
            return Ok(false);
        }
        let Some(tokens) = tokens else {
            return Ok(true);
        };
        let object = inode.as_ref().and_then(|inode| inode.file()).and_then(|file| file.object);
        let length = self.core.store.stat_object(tokens.old)?.length;
        Ok(object == Some(tokens.old) && length == tokens.length)
    }

    fn replace_tokens(
        &self, state: &mut State, sequence: InodeId, tokens: &NewTokens, cut: u64,
    ) -> Result<(), FsError> {
        let file = self.core.store.open_object(tokens.new, Access::ReadWrite)?;
        file.set_length(tokens.length.min(cut * TOKEN_BYTES))?;
        // Nobody used the sequence.
        file.set_modified(self.core.store.stat_object(tokens.old)?.mtime)?;
        let mut inode = state.inode(tokens.id)?;
        if let Some(file) = inode.file_mut() {
            file.object = Some(tokens.new);
        }
        state.publish(tokens.new, ObjectKind::Rows, 0)?;
        state.put_inode(tokens.id, &inode);
        state.metadata.tokens_changed(sequence, TokensChange::Truncated);
        state.drop_object(tokens.old)
    }

    /// Removes a sequence and what is left in it, as far as nobody uses it.
    fn remove_rest(
        &self, event: Event, right: Right<'_>, sequence: InodeId,
    ) -> Result<Removal, FsError> {
        if !right.holds(self, &self.core.state())? {
            return Ok(Removal { kept: Some(Kept::Changed), ..Removal::default() });
        }
        let Kind::Directory { parent, name, .. } = self.core.state().inode(sequence)?.kind else {
            return Ok(Removal::default());
        };
        let entry = Entry { inode: sequence, file_type: libc::S_IFDIR };
        let place = Place { parent, name };
        let removal = self.remove_tree(&place, entry, InUse::Stays)?;
        if removal.kept.is_none() {
            let Removal { files, bytes, .. } = removal;
            let event = Event { files, ..event.with_bytes(bytes) };
            happened::note_at(self.core, &self.core.state(), &place, event);
        }
        Ok(removal)
    }

    /// Whether a layer has a page or tail behind the last one that was listed: somebody writes.
    fn is_followed(
        &self, state: &mut State, (sequence, listed): (InodeId, &Listed), last: u64,
    ) -> Result<bool, FsError> {
        let Ok(model) = self.core.model_of(state, sequence) else {
            return Ok(false);
        };
        let page_tokens = u64::from(model.manifest.geometry().page_tokens());
        let next = TokenStart(last.saturating_add(page_tokens));
        for layer in &listed.layers {
            for name in [names::format_page(next), names::format_tail(next)] {
                if state.entry(*layer, name.as_bytes())?.is_some() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// The first token of the range that a name in a layer's directory goes with; a state goes with the page in
/// which its last row is, rows of a window with the page that they are a part of.
fn range_of(name: &[u8], page_tokens: Option<u64>) -> Option<u64> {
    let page = names::parse_page(name).or_else(|| names::parse_tail(name));
    let window_rows = || range_with(names::parse_window_rows(name)?.0, page_tokens);
    let state = || range_after(names::parse_state(name)?, page_tokens);
    page.map(|start| start.0).or_else(window_rows).or_else(state)
}

/// The same of a name in the sequence's directory.
fn checkpoints_range(name: &[u8], page_tokens: Option<u64>) -> Option<u64> {
    range_after(names::parse_checkpoints(name)?, page_tokens)
}

/// The range with the last of so many tokens.
fn range_after(tokens: TokenStart, page_tokens: Option<u64>) -> Option<u64> {
    range_with(tokens.0.saturating_sub(1), page_tokens)
}

fn range_with(token: u64, page_tokens: Option<u64>) -> Option<u64> {
    page_tokens.map(|page_tokens| token - token % page_tokens)
}

/// What is told of a cut: one event for all layers, since whoever asks after a page finds it by its sequence and
/// its first token.
fn told(event: &Event, path: Option<String>, (removal, start): (&Removal, u64)) -> Event {
    let Removal { files, bytes, .. } = *removal;
    let (bytes, from_token) = (Some(bytes), Some(start));
    Event { files, bytes, from_token, ..event.clone() }.at(path)
}

#[cfg(test)]
mod tests;

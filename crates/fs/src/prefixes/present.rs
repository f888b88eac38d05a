//! How far what a sequence keeps is there, so that an engine can go on after it: each kind of layer has
//! its rule ([`Needed`]).

use std::ops::Range;

use super::find::{Finder, Question};
use crate::FsError;
use crate::core::state::State;
use kvfs_page::{Geometry, Layer, LayerKind, Manifest, Needed, PrefixHash, TokenStart, names};
use kvfs_storage::store::record::{Entry, InodeId, Role};

/// Names of a recurrent layer that are looked at for one answer, with the lock held: some milliseconds.
/// A state every 128 tokens of a million is fewer.
const NAMES_MAX: usize = 8192;

/// States of a sequence that are tried for one answer, from the last on. More than one is needed only
/// where other layers lack theirs.
const ROWS_MAX: usize = 1024;

impl Finder<'_> {
    /// After how many of the first `wanted` tokens of a sequence an engine can go on.
    ///
    /// Layers with a window need what the window at the end covers, recurrent layers all a state after
    /// the same row. What an encoder read is not in the tokens, and states that the manifest does not
    /// describe may be of anything, so a model with such layers shares nothing.
    pub(super) fn present_tokens(
        &self, question: &Question<'_>, sequence: InodeId, wanted: u64,
    ) -> Result<u64, FsError> {
        Presence { finder: self, question, sequence }.tokens(wanted)
    }
}

/// What is there of one sequence, for one question.
struct Presence<'a> {
    finder: &'a Finder<'a>,
    question: &'a Question<'a>,
    sequence: InodeId,
}

impl Presence<'_> {
    fn manifest(&self) -> &Manifest {
        &self.question.rules.manifest
    }

    fn tokens(&self, wanted: u64) -> Result<u64, FsError> {
        let manifest = self.manifest();
        let mut tokens = wanted;
        let (mut windows, mut recurrent) = (Vec::new(), Vec::new());
        for layer in (0..manifest.geometry().num_layers()).map(Layer) {
            match manifest.layer_kind(layer).as_ref().map(LayerKind::needed) {
                Some(Needed::All) => {
                    tokens = self.layer_end(layer, 0..tokens)?;
                }
                Some(Needed::End { window }) => windows.push((layer, u64::from(window))),
                Some(Needed::State) => recurrent.push(layer),
                Some(Needed::Untold) | None => return Ok(0),
            }
        }
        if recurrent.is_empty() {
            loop {
                let before = tokens;
                tokens = self.windows_end(&windows, tokens)?;
                if tokens == before {
                    return Ok(tokens);
                }
            }
        }
        for row in self.state_rows(&recurrent, tokens)? {
            if self.has_states(&recurrent, row)? && self.windows_end(&windows, row)? == row {
                return Ok(row);
            }
        }
        Ok(0)
    }

    /// How far the pages reach that cover the windows at the end of some tokens.
    fn windows_end(&self, windows: &[(Layer, u64)], mut tokens: u64) -> Result<u64, FsError> {
        let page_tokens = u64::from(self.manifest().geometry().page_tokens());
        for &(layer, window) in windows {
            let begin = tokens.saturating_sub(window);
            let mut first = begin / page_tokens * page_tokens;
            if begin > first {
                let end = tokens.min(first + page_tokens);
                if self.has_window_rows(layer, begin..end)? {
                    first = end;
                }
            }
            tokens = self.layer_end(layer, first..tokens)?;
        }
        Ok(tokens)
    }

    /// Whether a layer has these rows of a page in a file of their own.
    fn has_window_rows(&self, layer: Layer, rows: Range<u64>) -> Result<bool, FsError> {
        let state = self.finder.core().state();
        let Some(directory) = state.entry(self.sequence, names::format_layer(layer).as_bytes())?
        else {
            return Ok(false);
        };
        let name = names::format_window_rows(TokenStart(rows.start));
        let Some(found) = state.entry(directory.inode, name.as_bytes())? else {
            return Ok(false);
        };
        let bytes = (rows.end - rows.start) * self.manifest().layer_geometry(layer).row_bytes();
        let size = state.attributes(&self.finder.core().store, found.inode)?.size;
        Ok(size == bytes && self.finder.residency.can_be_had(&state, found.inode)?)
    }

    /// Rows up to `tokens` after which the first of these layers has a state, the last first.
    fn state_rows(&self, recurrent: &[Layer], tokens: u64) -> Result<Vec<u64>, FsError> {
        let state = self.finder.core().state();
        let Some(first) = recurrent.first() else { return Ok(Vec::new()) };
        let Some(layer) = state.entry(self.sequence, names::format_layer(*first).as_bytes())?
        else {
            return Ok(Vec::new());
        };
        let (mut rows, mut names) = (Vec::new(), 0);
        state.metadata.entries(layer.inode, 0, |_, name, _| {
            rows.extend(names::parse_state(name).map(|row| row.0).filter(|row| *row <= tokens));
            names += 1;
            names < NAMES_MAX
        })?;
        rows.sort_unstable_by(|one, other| other.cmp(one));
        rows.truncate(ROWS_MAX);
        Ok(rows)
    }

    /// Whether each of these layers has a state after so many tokens of the prompt, and of them.
    fn has_states(&self, recurrent: &[Layer], row: u64) -> Result<bool, FsError> {
        let Some(prefix) = self.question.prefix(row) else { return Ok(false) };
        let state = self.finder.core().state();
        for layer in recurrent {
            let directory = state.entry(self.sequence, names::format_layer(*layer).as_bytes())?;
            let Some(directory) = directory else { return Ok(false) };
            let kept = state.state_of(directory.inode, row, prefix)?;
            let Some(kept) = kept else { return Ok(false) };
            let model = self.question.model;
            // An engine may keep its states for itself, where it shows its pages to all.
            if !self.finder.residency.can_be_had(&state, kept.inode)?
                || !state.lets_askers_read(model, self.sequence, kept.inode)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Where the pages of a layer that cover `wanted` from its beginning on, without a hole, end.
    fn layer_end(&self, layer: Layer, wanted: Range<u64>) -> Result<u64, FsError> {
        let geometry = self.manifest().layer_geometry(layer);
        let state = self.finder.core().state();
        let Some(directory) = state.entry(self.sequence, names::format_layer(layer).as_bytes())?
        else {
            return Ok(wanted.start);
        };
        let mut at = wanted.start;
        let mut last = None;
        while at < wanted.end {
            let page = names::format_page(TokenStart(at));
            let Some(page) = state.entry(directory.inode, page.as_bytes())? else { break };
            if !self.finder.residency.can_be_had(&state, page.inode)? {
                break;
            }
            last = Some(page);
            at += u64::from(geometry.page_tokens());
        }
        // Only the last page of a layer may be short.
        if let Some(last) = last
            && let Some(Role::Page(page)) = state.inode(last.inode)?.file().map(|file| file.role)
            && page.tokens < geometry.page_tokens()
        {
            return Ok((page.start + u64::from(page.tokens)).min(wanted.end));
        }
        if at < wanted.end {
            at += geometry.rows_in(self.tail_bytes(&state, directory.inode, at)?);
        }
        Ok(at.min(wanted.end))
    }

    /// Bytes of the tail that begins at a token; 0 without one.
    fn tail_bytes(&self, state: &State, layer: InodeId, at: u64) -> Result<u64, FsError> {
        let name = names::format_tail(TokenStart(at));
        match state.entry(layer, name.as_bytes())? {
            Some(tail) => Ok(state.attributes(&self.finder.core().store, tail.inode)?.size),
            None => Ok(0),
        }
    }
}

impl State {
    /// The full page of a layer's directory that begins at a token.
    pub(super) fn full_page(
        &self, layer: InodeId, start: u64, geometry: &Geometry,
    ) -> Result<Option<Entry>, FsError> {
        let name = names::format_page(TokenStart(start));
        let Some(entry) = self.entry(layer, name.as_bytes())? else { return Ok(None) };
        let is_full = matches!(
            self.inode(entry.inode)?.file().map(|file| file.role),
            Some(Role::Page(page)) if page.tokens == geometry.page_tokens()
        );
        Ok(is_full.then_some(entry))
    }

    /// The state of a layer's directory after a row, if it is one of these tokens.
    pub(super) fn state_of(
        &self, layer: InodeId, row: u64, prefix: PrefixHash,
    ) -> Result<Option<Entry>, FsError> {
        let name = names::format_state(TokenStart(row));
        let Some(entry) = self.entry(layer, name.as_bytes())? else { return Ok(None) };
        let is_of_them = matches!(
            self.inode(entry.inode)?.file().map(|file| file.role),
            Some(Role::Page(page)) if page.is_state_of(prefix)
        );
        Ok(is_of_them.then_some(entry))
    }
}

//! Keeps the index in step with the token files.
//!
//! What changes a token file only notes the sequence; rounds of indexing, once a second and before
//! each question, read what was added. A crash loses notes, so after one every sequence whose token
//! file is not as long as the index knows it is noted again, before anything is answered.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::Prefixes;
use super::find::Finder;
use super::room::Room;
use crate::core::Core;
use crate::core::guard::StateGuard;
use crate::core::latest::open_latest;
use crate::core::models::model_directory;
use crate::core::state::State;
use crate::demotion::Commits;
use crate::{FileSystem, FsError};
use kvfs_page::{PrefixHash, names};
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::disk::{DiskFile, is_of_file, is_unavailable};
use kvfs_storage::store::metadata::{LEAD_TOKENS_MAX, TokensChange};
use kvfs_storage::store::record::{
    DirectoryClass, IndexedPage, IndexedTokens, InodeId, Kind, ObjectId,
};

/// Bytes of one token id.
pub(crate) const TOKEN_BYTES: usize = 4;

/// Pages that are put into the index, or taken out of it, with the state held: some 0.2 ms.
const PAGES_AT_ONCE: usize = 16;

/// Tokens that cannot be read are tried again, for a twentieth of the time at most: a disk may take seconds for each.
const TRIED_EVERY: Duration = Duration::from_secs(60);
const ROUNDS_APART: u32 = 20;

/// The token file of a sequence of which the index has some pages only, since they are being taken out.
const NO_TOKENS: InodeId = InodeId(0);

/// How far the index is.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// What an earlier mount left behind is noted.
    pub(super) is_noted: bool,
    /// Sequences whose tokens could not be read, and when that is tried again.
    unreadable: BTreeMap<InodeId, TokensChange>,
    next_try: Option<Instant>,
}

/// Why a sequence could not be brought up to date.
enum Failure {
    /// Its token file cannot be read, as it lies on the disk.
    Unreadable(io::Error),
    Other(FsError),
}

impl From<FsError> for Failure {
    fn from(error: FsError) -> Failure {
        Failure::Other(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        Failure::Other(error.into())
    }
}

impl Failure {
    fn of_file(error: FsError) -> Failure {
        match error {
            FsError::Io(error) if is_of_file(&error) || is_unavailable(&error) => {
                Failure::Unreadable(error)
            }
            error => Failure::Other(error),
        }
    }
}

/// The token file of a sequence.
struct Source {
    model: InodeId,
    rules: Arc<Model>,
    tokens: InodeId,
    object: ObjectId,
}

impl Source {
    fn page_bytes(&self) -> u64 {
        u64::from(self.rules.manifest.geometry().page_tokens()) * TOKEN_BYTES as u64
    }
}

/// What brings the index of prefixes up to date.
#[derive(Clone, Copy, Debug)]
pub struct Indexer<'a> {
    pub(super) finder: Finder<'a>,
    pub(super) prefixes: &'a Prefixes,
    commits: &'a dyn Commits,
}

impl FileSystem {
    /// What brings the index of prefixes up to date.
    pub fn indexer(&self) -> Indexer<'_> {
        Indexer { finder: self.finder(), prefixes: &self.prefixes, commits: self }
    }
}

impl Indexer<'_> {
    fn core(&self) -> &Core {
        self.finder.core()
    }

    /// Indexes what has changed since the last time.
    pub fn update(&self) -> Result<(), FsError> {
        let mut turn = self.prefixes.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.core().state().refusal.is_some() {
            return Ok(());
        }
        note_left_behind(self.core(), &mut turn.is_noted)?;
        let begin = Instant::now();
        let tries_again = turn.next_try.is_none_or(|time| time <= begin);
        if tries_again {
            note_again(self.core(), turn.unreadable.clone());
        }
        // What arrives meanwhile is for the next round: somebody who always writes must not keep
        // this one going.
        let noted = std::mem::take(&mut self.core().state().metadata.unindexed);
        let mut noted = noted.into_iter();
        let mut pages = 0;
        while let Some((sequence, change)) = noted.next() {
            let outcome = match self.index_sequence(sequence, change) {
                Ok(count) => {
                    turn.unreadable.remove(&sequence);
                    Ok(count)
                }
                Err(Failure::Unreadable(why)) => {
                    if turn.unreadable.insert(sequence, change).is_none() {
                        tell_of_unreadable(self.core(), sequence, &why);
                    }
                    self.take_out(sequence)
                }
                Err(Failure::Other(error)) => Err(error),
            };
            let goes_on = outcome.and_then(|count| self.commit_at(&mut pages, count));
            if let Err(error) = goes_on {
                note_again(self.core(), noted.chain([(sequence, change)]));
                return Err(error);
            }
        }
        if tries_again {
            turn.next_try = Some(Instant::now() + TRIED_EVERY.max(begin.elapsed() * ROUNDS_APART));
        }
        Ok(())
    }

    /// Notes the sequences that an interrupted mount, or one that knew no index, has left behind.
    pub fn note_unindexed(&self) -> Result<(), FsError> {
        let mut turn = self.prefixes.turn.lock().unwrap_or_else(PoisonError::into_inner);
        note_left_behind(self.core(), &mut turn.is_noted)
    }

    /// So many pages more were indexed: commits where they are enough for one.
    fn commit_at(&self, pages: &mut usize, more: usize) -> Result<(), FsError> {
        *pages += more;
        if *pages >= Room::of(self.core())?.pages_per_commit() {
            self.commits.commit()?;
            *pages = 0;
        }
        Ok(())
    }

    /// A sequence whose tokens nobody can read has no prefixes.
    fn take_out(&self, sequence: InodeId) -> Result<usize, FsError> {
        let known = self.core().state().metadata.indexed(sequence)?;
        known.map_or(Ok(0), |known| self.remove_from_index(sequence, known.model))
    }

    /// Brings one sequence up to date. Returns how many pages that took.
    fn index_sequence(&self, sequence: InodeId, change: TokensChange) -> Result<usize, Failure> {
        let (mut source, known) = {
            let mut state = self.core().state_to_change()?;
            (source_of(self.core(), &mut state, sequence)?, state.metadata.indexed(sequence)?)
        };
        // As long as it is not known where the rows stand, the index stays as it is.
        if source.is_some() && self.note_away(sequence)? {
            return Ok(0);
        }
        let file = match source {
            Some(_) => open_latest(self.core(), |state| {
                source = source_of(self.core(), state, sequence)?;
                Ok(source.as_ref().map(|source| source.object))
            })
            .map_err(Failure::of_file)?,
            None => None,
        };
        let length = file.as_ref().map_or(Ok(0), |file| file.stat().map(|stat| stat.length));
        let length = length.map_err(|error| Failure::of_file(error.into()))?;
        // Tokens that came after an edit do not follow from those before them alone.
        let known_rows = match source {
            Some(_) => {
                self.finder.positions_of(sequence)?.map_or(0, |positions| positions.edited_at())
            }
            None => 0,
        };
        let length = length.min(known_rows.saturating_mul(TOKEN_BYTES as u64));
        let length = length - length % TOKEN_BYTES as u64;
        let goes_on = |known: &IndexedTokens| {
            change == TokensChange::Grown
                && source.as_ref().is_some_and(|source| {
                    (source.model, source.tokens) == (known.model, known.tokens)
                })
                && known.length <= length
        };
        let (mut pages, mut from) = (0, 0);
        match known {
            Some(known) if goes_on(&known) => from = known.length,
            Some(known) => pages += self.remove_from_index(sequence, known.model)?,
            None => {}
        }
        match (source, file) {
            // Few pages take no more than what else is written with them.
            (Some(source), Some(_))
                if from < length
                    && length - from > PAGES_AT_ONCE as u64 * source.page_bytes()
                    && !Room::of(self.core())?.is_enough() =>
            {
                self.core().state().metadata.tokens_changed(sequence, change);
                Ok(pages)
            }
            (Some(source), Some(file)) if from < length => {
                Ok(pages + self.add_to_index(sequence, &source, file.as_ref(), from..length)?)
            }
            _ => Ok(pages),
        }
    }

    fn remove_from_index(&self, sequence: InodeId, model: InodeId) -> Result<usize, FsError> {
        // Should this end in the middle, whoever goes on must not take what is left for whole.
        let unfinished = IndexedTokens { model, tokens: NO_TOKENS, length: 0 };
        self.core().state_to_change()?.metadata.put_indexed(sequence, &unfinished);
        let (mut removed, mut first, mut uncommitted) = (0, 0, 0);
        loop {
            let mut state = self.core().state_to_change()?;
            let pages = state.metadata.some_indexed_pages(sequence, first, PAGES_AT_ONCE)?;
            first = pages.last().map_or(first, |(last, _)| last.saturating_add(1));
            for (number, page) in &pages {
                state.metadata.remove_indexed_page((model, sequence), *number, page);
            }
            removed += pages.len();
            if pages.len() < PAGES_AT_ONCE {
                state.metadata.remove_indexed(sequence);
                return Ok(removed);
            }
            drop(state);
            uncommitted += pages.len();
            if uncommitted >= Room::of(self.core())?.pages_per_commit() {
                self.commits.commit()?;
                uncommitted = 0;
            }
        }
    }

    /// Adds the pages of `bytes` of a token file; all before is in the index already.
    fn add_to_index(
        &self, sequence: InodeId, source: &Source, file: &dyn DiskFile, bytes: std::ops::Range<u64>,
    ) -> Result<usize, Failure> {
        let page_bytes = source.page_bytes();
        // A page that was not full is read again.
        let mut number = u32::try_from(bytes.start / page_bytes).map_err(|_| FsError::TooLarge)?;
        let mut parent = match number.checked_sub(1) {
            None => source.rules.manifest.prefix_root(),
            Some(last) => {
                let last = self.core().state().metadata.indexed_page(sequence, last)?;
                let hash = last.and_then(|page| page.hash);
                Some(PrefixHash(hash.ok_or(FsError::Corrupt)?))
            }
        };
        let mut at = u64::from(number) * page_bytes;
        let (mut count, mut uncommitted) = (0, 0);
        while at < bytes.end {
            let mut pages = Vec::new();
            while at < bytes.end && pages.len() < PAGES_AT_ONCE {
                let end = bytes.end.min(at + page_bytes);
                let mut tokens = vec![0; usize::try_from(end - at).unwrap_or(usize::MAX)];
                let read = file.read_at(&mut tokens, at);
                if read.map_err(|error| Failure::of_file(error.into()))? < tokens.len() {
                    // It was truncated meanwhile, which has noted the sequence again.
                    return Ok(count);
                }
                let is_full = end - at == page_bytes;
                let hash = is_full.then(|| PrefixHash::next(parent, &tokens));
                tokens.truncate(LEAD_TOKENS_MAX * TOKEN_BYTES);
                let parent_bytes = parent.map_or([0; 32], |parent| parent.0);
                let hash_bytes = hash.map(|hash| hash.0);
                pages.push(IndexedPage { parent: parent_bytes, hash: hash_bytes, lead: tokens });
                parent = hash;
                at = end;
            }
            count += pages.len();
            uncommitted += pages.len();
            // A sequence may be as long as somebody likes.
            let room = Room::of(self.core())?;
            if uncommitted >= room.pages_per_commit() {
                self.commits.commit()?;
                uncommitted = 0;
            }
            if count > PAGES_AT_ONCE && !room.is_enough() {
                self.core().state().metadata.tokens_changed(sequence, TokensChange::Grown);
                return Ok(count);
            }
            let state = self.core().state_to_change()?;
            if state.entry(sequence, names::TOKENS.as_bytes())?.map(|entry| entry.inode)
                != Some(source.tokens)
            {
                return Ok(count);
            }
            put_pages(state, sequence, source, number, &pages, at)?;
            number += u32::try_from(pages.len()).unwrap_or(u32::MAX);
        }
        Ok(count)
    }
}

/// The token file of a sequence, if both are there and the model has a manifest.
fn source_of(core: &Core, state: &mut State, sequence: InodeId) -> Result<Option<Source>, FsError> {
    let Some(directory) = state.metadata.inode(sequence)? else {
        return Ok(None);
    };
    let Kind::Directory { class: DirectoryClass::Sequence, .. } = directory.kind else {
        return Ok(None);
    };
    let Some(entry) = state.entry(sequence, names::TOKENS.as_bytes())? else {
        return Ok(None);
    };
    let model = model_directory(state, sequence)?;
    let Ok(rules) = core.model_of(state, sequence) else {
        return Ok(None);
    };
    let inode = state.inode(entry.inode)?;
    let object = inode.file().and_then(|file| file.object);
    Ok(object.map(|object| Source { model, rules, tokens: entry.inode, object }))
}

/// Notes once what an earlier mount has left behind: whoever asks before would hear that it is not there.
fn note_left_behind(core: &Core, is_noted: &mut bool) -> Result<(), FsError> {
    if *is_noted {
        return Ok(());
    }
    let snapshot = {
        let state = core.state();
        *is_noted = state.metadata.was_clean && state.metadata.has_index()?;
        if *is_noted {
            return Ok(());
        }
        state.metadata.snapshot()?
    };
    // Of those that are gone a crash may have left pages in the index.
    let mut sequences = snapshot.indexed_sequences()?;
    snapshot.for_each_named(b'E', |parent, offset_and_name| {
        if offset_and_name.get(8..) == Some(names::TOKENS.as_bytes()) {
            sequences.push(InodeId(parent));
        }
    })?;
    for sequence in sequences {
        core.state().metadata.tokens_changed(sequence, TokensChange::Grown);
    }
    *is_noted = true;
    Ok(())
}

/// The next round looks at these.
fn note_again(core: &Core, sequences: impl IntoIterator<Item = (InodeId, TokensChange)>) {
    let mut state = core.state();
    for (sequence, change) in sequences {
        state.metadata.tokens_changed(sequence, change);
    }
}

/// Says which sequence is found by no prefix, and why.
fn tell_of_unreadable(core: &Core, sequence: InodeId, why: &io::Error) {
    let path = core.state().directory_path(sequence).unwrap_or_default();
    log::warn!("the sequence {path} is found by no prefix: its tokens cannot be read: {why}");
}

fn put_pages(
    mut state: StateGuard<'_>, sequence: InodeId, source: &Source, first: u32,
    pages: &[IndexedPage], length: u64,
) -> Result<(), FsError> {
    let at = (source.model, sequence);
    if let Some(old) = state.metadata.indexed_page(sequence, first)? {
        state.metadata.remove_indexed_page(at, first, &old);
    }
    for (number, page) in (first..).zip(pages) {
        state.metadata.add_indexed_page(at, number, page);
    }
    let indexed = IndexedTokens { model: source.model, tokens: source.tokens, length };
    state.metadata.put_indexed(sequence, &indexed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::Unmounted;
    use kvfs_storage::store::disk::{Access, read_all};

    #[test]
    fn tokens_that_could_not_be_read_are_tried_again_later() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let sequence = model.make_sequence("sequence", &[0], 1);
        fs.indexer().update().unwrap();
        fs.commit().unwrap();
        let object = source_of(&fs.core, &mut fs.core.state(), sequence).unwrap().unwrap().object;
        let file = fs.core.store.open_object(object, Access::Read).unwrap();
        let bytes = read_all(file.as_ref(), 1 << 20).unwrap();
        fs.core.store.remove_object(object).unwrap();
        fs.core.state().metadata.tokens_changed(sequence, TokensChange::Grown);
        let is_indexed = || {
            fs.indexer().update().unwrap();
            fs.core.state().metadata.indexed(sequence).unwrap().is_some()
        };
        assert!(!is_indexed());
        let file = fs.core.store.create_object(object).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let next_try = |time| fs.prefixes.turn.lock().unwrap().next_try = Some(time);
        next_try(Instant::now() + TRIED_EVERY);
        assert!(!is_indexed(), "each try may take seconds");
        next_try(Instant::now());
        assert!(is_indexed());
        let turn = fs.prefixes.turn.lock().unwrap();
        assert!(turn.unreadable.is_empty() && turn.next_try > Some(Instant::now()));
    }

    #[test]
    fn a_daemon_without_descriptors_takes_no_sequence_out_of_the_index() {
        let of_file = |code| {
            let error = io::Error::from_raw_os_error(code);
            matches!(Failure::of_file(FsError::Io(error)), Failure::Unreadable(_))
        };
        assert!([libc::EIO, libc::ENOENT, libc::EACCES].into_iter().all(of_file));
        assert!(![libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EINTR].into_iter().any(of_file));
    }
}

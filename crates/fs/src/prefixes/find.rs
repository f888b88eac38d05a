//! Who has the pages for a prefix: the index proposes, the names in the sequences decide.
//!
//! The longest match is found from its end. Hashes tell how many full pages of the prompt any
//! sequence has; the index, which is ordered by the tokens that follow, tells who goes on longest.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::sync::Arc;

use super::index::TOKEN_BYTES;
use crate::core::Core;
use crate::core::latest::open_tokens;
use crate::core::state::State;
use crate::residency::Residency;
use crate::{FileSystem, FsError};
use kvfs_page::{Layer, LayerKind, Positions, PrefixHash, names};
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::disk::{is_of_file, is_unavailable};
use kvfs_storage::store::metadata::{LEAD_TOKENS_MAX, TokensChange};
use kvfs_storage::store::record::{Entry, InodeId, Kind};
use kvfs_storage::tier::counters::Tier;

/// Sequences that are looked at for one answer. More than one is needed only where pages of some
/// were removed; then the answer may be shorter than what could be found.
const CANDIDATES_MAX: usize = 64;

/// A page that ends a prefix, or the state after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefixPage {
    pub(super) layer: Layer,
    /// The directory of the layer.
    pub(super) directory: InodeId,
    pub(super) entry: Entry,
}

/// The sequence that has most of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// Tokens from the first that are the same, and after which an engine can go on with what is there.
    pub(crate) tokens: u64,
    /// The sequence's name.
    pub(crate) sequence: Vec<u8>,
    /// Of those tokens, how many each tier has ([`Tier`]'s order), as far as some pages of one layer tell.
    pub(crate) in_tiers: [u64; 3],
}

/// A question: which model's sequences, and the prompt, four bytes for each token.
pub(super) struct Question<'a> {
    pub(super) model: InodeId,
    pub(super) rules: Arc<Model>,
    prompt: &'a [u8],
    /// Hashes of its full pages, once somebody has asked for them.
    pages: OnceCell<Vec<PrefixHash>>,
}

impl<'a> Question<'a> {
    pub(super) fn new(model: InodeId, rules: Arc<Model>, prompt: &'a [u8]) -> Self {
        let prompt = &prompt[..prompt.len() - prompt.len() % TOKEN_BYTES];
        Self { model, rules, prompt, pages: OnceCell::new() }
    }

    fn page_bytes(&self) -> usize {
        self.rules.manifest.geometry().page_tokens() as usize * TOKEN_BYTES
    }

    /// What the index calls everything before a page, given the hashes of the pages before.
    fn parent(&self, hashes: &[PrefixHash]) -> [u8; 32] {
        let root = || self.rules.manifest.prefix_root();
        hashes.last().copied().or_else(root).map_or([0; 32], |hash| hash.0)
    }

    /// The hash of the first tokens of the prompt, as `Manifest::prefix_of` gives it; `None` if there
    /// are not so many.
    pub(super) fn prefix(&self, tokens: u64) -> Option<PrefixHash> {
        let end = usize::try_from(tokens).ok()?.checked_mul(TOKEN_BYTES)?;
        let wanted = self.prompt.get(..end)?;
        let root = self.rules.manifest.prefix_root();
        let pages = self.pages.get_or_init(|| {
            let mut hashes: Vec<PrefixHash> = Vec::new();
            for page in self.prompt.chunks_exact(self.page_bytes()) {
                hashes.push(PrefixHash::next(hashes.last().copied().or(root), page));
            }
            hashes
        });
        let full = end / self.page_bytes();
        let parent = full.checked_sub(1).map_or(root, |last| pages.get(last).copied());
        match &wanted[full * self.page_bytes()..] {
            [] => parent,
            rest => Some(PrefixHash::next(parent, rest)),
        }
    }
}

/// The best so far, and who was looked at.
#[derive(Default)]
struct Search {
    best: Option<(u64, InodeId)>,
    seen: HashSet<InodeId>,
}

impl Search {
    fn tokens(&self) -> u64 {
        self.best.map_or(0, |(tokens, _)| tokens)
    }
}

/// Where the rows of sequences stand.
pub(super) trait Positioned: std::fmt::Debug {
    /// Where the rows of a sequence stand; `None` if its `positions.json` cannot be used, and nothing of it can be told.
    fn positions_of(&self, sequence: InodeId) -> Result<Option<Positions>, FsError>;
}

/// What finds the pages for a prefix, among names that are there and bytes that can be had.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finder<'a> {
    pub(super) residency: Residency<'a>,
    positions: &'a dyn Positioned,
}

impl Finder<'_> {
    /// Where the rows of a sequence stand ([`Positioned::positions_of`]).
    pub(super) fn positions_of(&self, sequence: InodeId) -> Result<Option<Positions>, FsError> {
        self.positions.positions_of(sequence)
    }

    /// Whether opening a file will wait for the remote.
    pub(super) fn waits_for_remote(&self, id: InodeId) -> bool {
        self.residency.comes_from(id) == Some(Tier::Remote)
    }
}

impl FileSystem {
    pub(crate) fn finder(&self) -> Finder<'_> {
        Finder { residency: self.residency(), positions: self }
    }
}

/// What answers rely on.
pub(crate) trait Indexed: std::fmt::Debug {
    /// Brings the index up to date.
    fn index(&self) -> Result<(), FsError>;

    /// The same, and pages that were written in place and whose writers are done.
    fn prepare_to_find(&self) -> Result<(), FsError>;
}

impl Indexed for FileSystem {
    fn index(&self) -> Result<(), FsError> {
        self.indexer().update()
    }

    fn prepare_to_find(&self) -> Result<(), FsError> {
        if !self.core.state().pending.is_empty() {
            self.publishing().publish_all(None);
        }
        self.indexer().update()
    }
}

impl Finder<'_> {
    pub(super) fn core(&self) -> &Core {
        self.residency.core
    }

    /// The sequence of a model that shares the longest prefix with a prompt, to the token.
    pub(super) fn longest_match(
        &self, model: InodeId, prompt: &[u8],
    ) -> Result<Option<Match>, FsError> {
        let rules =
            self.core().model_of(&mut self.core().state(), model).map_err(|_| FsError::NotFound)?;
        let question = Question::new(model, rules, prompt);
        let mut hashes = self.known_prefixes(&question)?;
        let mut search = Search::default();
        loop {
            self.try_continuations(&question, &hashes, &mut search)?;
            let Some(last) = hashes.last().copied() else { break };
            let reached = hashes.len() as u64 * (question.page_bytes() / TOKEN_BYTES) as u64;
            if search.tokens() < reached {
                let holders =
                    self.core().state().metadata.prefix_holders(model, &last.0, CANDIDATES_MAX)?;
                self.try_sequences(&question, &holders, &mut search)?;
            }
            if search.tokens() >= reached || search.seen.len() >= CANDIDATES_MAX {
                break;
            }
            hashes.pop();
        }
        match search.best {
            Some((tokens, sequence)) => self.match_of(&question.rules, sequence, tokens),
            None => Ok(None),
        }
    }

    /// What a sequence has of a prompt.
    pub(crate) fn match_in(
        &self, model: InodeId, sequence: InodeId, prompt: &[u8],
    ) -> Result<Option<Match>, FsError> {
        let rules =
            self.core().model_of(&mut self.core().state(), model).map_err(|_| FsError::NotFound)?;
        let question = Question::new(model, rules, prompt);
        let same = self.same_tokens(sequence, question.prompt)?;
        let tokens = self.present_tokens(&question, sequence, same)?;
        self.match_of(&question.rules, sequence, tokens)
    }

    fn match_of(
        &self, rules: &Model, sequence: InodeId, tokens: u64,
    ) -> Result<Option<Match>, FsError> {
        let kind = self.core().state().inode(sequence)?.kind;
        let Kind::Directory { name, .. } = kind else { return Ok(None) };
        if tokens == 0 {
            return Ok(None);
        }
        let in_tiers = self.tiers_of(rules, sequence, tokens)?;
        Ok(Some(Match { tokens, sequence: name, in_tiers }))
    }

    /// Hashes of the prompt's full pages as far as any sequence has them.
    fn known_prefixes(&self, question: &Question<'_>) -> Result<Vec<PrefixHash>, FsError> {
        let mut hashes: Vec<PrefixHash> = Vec::new();
        for page in question.prompt.chunks_exact(question.page_bytes()) {
            let parent = hashes.last().copied().or_else(|| question.rules.manifest.prefix_root());
            let hash = PrefixHash::next(parent, page);
            if self.core().state().metadata.prefix_holders(question.model, &hash.0, 1)?.is_empty() {
                break;
            }
            hashes.push(hash);
        }
        Ok(hashes)
    }

    /// Looks at the sequences whose next page begins most like the rest of the prompt does.
    fn try_continuations(
        &self, question: &Question<'_>, hashes: &[PrefixHash], search: &mut Search,
    ) -> Result<(), FsError> {
        let rest = &question.prompt[hashes.len() * question.page_bytes()..];
        let lead = &rest[..rest.len().min(LEAD_TOKENS_MAX * TOKEN_BYTES)];
        let parent = question.parent(hashes);
        let find = |tokens: usize, count| {
            let tokens = &lead[..tokens * TOKEN_BYTES];
            self.core().state().metadata.prefix_continuations(
                question.model,
                &parent,
                tokens,
                count,
            )
        };
        // Whoever begins with n tokens begins with fewer, too: halving finds the most.
        let (mut some, mut none) = (0, lead.len() / TOKEN_BYTES + 1);
        while some + 1 < none {
            let middle = usize::midpoint(some, none);
            if find(middle, 1)?.is_empty() { none = middle } else { some = middle }
        }
        if some == 0 {
            return Ok(());
        }
        self.try_sequences(question, &find(some, CANDIDATES_MAX)?, search)?;
        // Where some of their pages are gone, others may have more, although they differ earlier.
        let page_tokens = (question.page_bytes() / TOKEN_BYTES) as u64;
        let reached = hashes.len() as u64 * page_tokens;
        let more = usize::try_from(search.tokens().saturating_sub(reached) + 1).unwrap_or(some);
        if more < some {
            let count = CANDIDATES_MAX + search.seen.len();
            self.try_sequences(question, &find(more, count)?, search)?;
        }
        Ok(())
    }

    fn try_sequences(
        &self, question: &Question<'_>, candidates: &[(InodeId, u32)], search: &mut Search,
    ) -> Result<(), FsError> {
        for (sequence, _) in candidates {
            if search.seen.len() >= CANDIDATES_MAX || !search.seen.insert(*sequence) {
                continue;
            }
            match self.tokens_of(question, *sequence, search.tokens()) {
                Ok(tokens) if tokens > search.tokens() => search.best = Some((tokens, *sequence)),
                Ok(_) => {}
                // A crash took the sequence, and left it in the index: it is not for this one to fail.
                Err(error) if error.errno() == libc::ENOENT => {
                    let metadata = &mut self.core().state().metadata;
                    metadata.tokens_changed(*sequence, TokensChange::Truncated);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tokens from the first that a sequence's token file has in common with a prompt. Others may have as many, so one that
    /// cannot be read fails no question.
    fn same_tokens(&self, sequence: InodeId, prompt: &[u8]) -> Result<u64, FsError> {
        let mut tokens = vec![0; prompt.len()];
        let read = open_tokens(self.core(), sequence).and_then(|file| match file {
            Some(file) => Ok(file.read_at(&mut tokens, 0)?),
            None => Ok(0),
        });
        let count = match read {
            Err(FsError::Io(error)) if is_of_file(&error) || is_unavailable(&error) => {
                log::debug!("the tokens of sequence {} cannot be read: {error}", sequence.0);
                return Ok(0);
            }
            outcome => outcome?,
        };
        let same = tokens[..count].iter().zip(prompt).take_while(|(a, b)| a == b).count();
        Ok((same / TOKEN_BYTES) as u64)
    }

    /// Whether another store of the remote claims to have a prefix.
    pub(super) fn is_elsewhere(&self, model: InodeId, hash: PrefixHash) -> bool {
        let rules = self.core().model_of(&mut self.core().state(), model);
        rules.is_ok_and(|rules| self.residency.foreign.has(&rules.manifest, &hash))
    }

    /// The page that ends a prefix, by layer, of a sequence that has it in every layer.
    pub(super) fn pages_of_prefix(
        &self, model: InodeId, hash: PrefixHash,
    ) -> Result<Option<Vec<PrefixPage>>, FsError> {
        let mut state = self.core().state();
        let Ok(rules) = self.core().model_of(&mut state, model) else { return Ok(None) };
        for found in state.metadata.prefix_holders(model, &hash.0, CANDIDATES_MAX)? {
            let Some(pages) = pages_at(&state, &rules, found, hash)? else { continue };
            let can_be_had = |entry: &Entry| -> Result<bool, FsError> {
                Ok(self.residency.can_be_had(&state, entry.inode)?
                    && state.lets_askers_read(model, found.0, entry.inode)?)
            };
            let mut all = pages.iter().map(|page| can_be_had(&page.entry));
            if all.try_fold(true, |so_far, one| one.map(|one| so_far && one))?
                && state.is_open_to_askers(model, found.0, rules.manifest.geometry())?
            {
                return Ok(Some(pages));
            }
        }
        Ok(None)
    }

    /// How much a sequence has of a prompt, if that is more than so many tokens.
    fn tokens_of(
        &self, question: &Question<'_>, sequence: InodeId, found: u64,
    ) -> Result<u64, FsError> {
        let geometry = question.rules.manifest.geometry();
        {
            let state = self.core().state();
            let is_open = state.is_open_to_askers(question.model, sequence, geometry)?;
            if !is_open || !can_be_told(&state.inode(sequence)?.kind) {
                return Ok(0);
            }
        }
        let mut same = self.same_tokens(sequence, question.prompt)?;
        if same > found {
            let positions = self.positions.positions_of(sequence)?;
            same = same.min(positions.map_or(0, |positions| positions.prefix_rows()));
        }
        if same > found { self.present_tokens(question, sequence, same) } else { Ok(0) }
    }
}

/// Whether an answer can have the name: JSON has no other bytes than those of UTF-8, and another name is another sequence.
fn can_be_told(kind: &Kind) -> bool {
    matches!(kind, Kind::Directory { name, .. } if std::str::from_utf8(name).is_ok())
}

/// A full page of every layer of a sequence that keeps pages, and of a recurrent layer the state after it;
/// `None` if one is missing.
fn pages_at(
    state: &State, rules: &Model, (sequence, number): (InodeId, u32), hash: PrefixHash,
) -> Result<Option<Vec<PrefixPage>>, FsError> {
    let geometry = rules.manifest.geometry();
    let page_tokens = u64::from(geometry.page_tokens());
    let start = u64::from(number) * page_tokens;
    let mut pages = Vec::new();
    for layer in (0..geometry.num_layers()).map(Layer) {
        let is_state = match rules.manifest.layer_kind(layer) {
            // What it keeps is not told, so nobody can look for it here.
            Some(LayerKind::Recurrent) => continue,
            // What the encoder read is not in the tokens.
            Some(LayerKind::Cross) => return Ok(None),
            Some(LayerKind::State(_)) => true,
            _ => false,
        };
        let directory = state.entry(sequence, names::format_layer(layer).as_bytes())?;
        let Some(directory) = directory else { return Ok(None) };
        let entry = if is_state {
            state.state_of(directory.inode, start + page_tokens, hash)?
        } else {
            state.full_page(directory.inode, start, geometry)?
        };
        let Some(entry) = entry else { return Ok(None) };
        pages.push(PrefixPage { layer, directory: directory.inode, entry });
    }
    Ok(Some(pages))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, PAGE_TOKENS, Unmounted};
    use kvfs_storage::store::metadata::Life;

    /// A page on the disk, of the sequence `kept`.
    fn one_page() -> Match {
        let tokens = u64::from(PAGE_TOKENS);
        Match { tokens, sequence: b"kept".to_vec(), in_tiers: [0, tokens, 0] }
    }

    #[test]
    fn a_sequence_that_only_the_index_knows_fails_no_question() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let lost = model.make_sequence("lost", &[0], 1);
        let kept = model.make_sequence("kept", &[0], 1);
        let prompt: Vec<u8> = (0..PAGE_TOKENS).flat_map(u32::to_le_bytes).collect();
        fs.indexer().update().unwrap();
        let hash = model.manifest.prefix_of(&prompt).unwrap();
        let holders =
            |count| fs.core.state().metadata.prefix_holders(model.directory, &hash.0, count);
        assert_eq!(holders(9).unwrap().len(), 2);
        fs.core.state().metadata.remove_inode(Life::Durable, lost).unwrap();
        let found = fs.finder().longest_match(model.directory, &prompt).unwrap().unwrap();
        assert_eq!(found, one_page());
        // It is taken out of the index.
        fs.indexer().update().unwrap();
        assert_eq!(holders(9).unwrap(), [(kept, 0)]);
    }

    #[test]
    fn tokens_that_cannot_be_read_fail_no_question_about_others_and_no_unmount() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let [lost, kept] = ["lost", "kept"].map(|name| model.make_sequence(name, &[0], 1));
        let prompt: Vec<u8> = (0..PAGE_TOKENS).flat_map(u32::to_le_bytes).collect();
        fs.indexer().update().unwrap();
        fs.commit().unwrap();
        let object = {
            let state = fs.core.state();
            let entry = state.entry(lost, names::TOKENS.as_bytes()).unwrap().unwrap();
            state.inode(entry.inode).unwrap().file().unwrap().object.unwrap()
        };
        let hash = model.manifest.prefix_of(&prompt).unwrap();
        let holders =
            || fs.core.state().metadata.prefix_holders(model.directory, &hash.0, 9).unwrap();
        assert_eq!(holders().len(), 2);
        // The index still has it.
        fs.core.store.remove_object(object).unwrap();
        let ask = || fs.finder().longest_match(model.directory, &prompt).unwrap().unwrap();
        let found = one_page();
        assert_eq!(ask(), found);
        let note = || fs.core.state().metadata.tokens_changed(lost, TokensChange::Grown);
        note();
        fs.indexer().update().unwrap();
        assert_eq!(holders(), [(kept, 0)]);
        assert_eq!(ask(), found);
        assert!(fs.core.state().metadata.unindexed.is_empty(), "nobody waits for it");
        unmounted.write(FILES, "unsynced", b"bytes");
        fs.commit_and_close().unwrap();
        assert_eq!(fs.core.state().metadata.uncommitted(), 0);
    }

    #[test]
    fn a_name_that_no_answer_can_have_is_not_told_as_another() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let sequence = model.make_sequence("caf", &[0], 1);
        let prompt: Vec<u8> = (0..PAGE_TOKENS).flat_map(u32::to_le_bytes).collect();
        fs.indexer().update().unwrap();
        assert!(fs.finder().longest_match(model.directory, &prompt).unwrap().is_some());
        {
            let mut state = fs.core.state();
            let mut inode = state.inode(sequence).unwrap();
            let Kind::Directory { name, .. } = &mut inode.kind else { panic!() };
            name.push(0xe9);
            state.put_inode(sequence, &inode);
        }
        assert_eq!(fs.finder().longest_match(model.directory, &prompt).unwrap(), None);
    }
}

//! `prefixes/match`: whoever writes the tokens of a prompt reads which sequence has most of them.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::find::Match;
use super::index::TOKEN_BYTES;
use super::shares::Share;
use super::view::VirtualDirectories;
use crate::FsError;
use crate::reply::Reply;
use kvfs_page::limits::MAX_PROMPT_TOKENS;
use kvfs_storage::store::record::InodeId;

const PROMPT_BYTES_MAX: usize = MAX_PROMPT_TOKENS * TOKEN_BYTES;

/// An open `prefixes/match`.
#[derive(Debug)]
pub(crate) struct Query {
    model: InodeId,
    dialogue: Mutex<Dialogue>,
    /// Counts the bytes of the prompt.
    held: Mutex<Share>,
    /// Counted.
    _open: Share,
}

/// What was written, and the answer to it once somebody has read it.
#[derive(Debug, Default)]
struct Dialogue {
    prompt: Vec<u8>,
    /// What this machine has of it, once somebody has looked.
    local: Option<LocalAnswer>,
    reply: Reply,
}

/// The best that this machine has, if it has anything.
#[derive(Debug)]
struct LocalAnswer(Option<Match>);

impl Query {
    pub(super) fn new(model: InodeId, held: Share, open: Share) -> Query {
        Query { model, dialogue: Mutex::default(), held: Mutex::new(held), _open: open }
    }

    /// Adds tokens to the question; `offset` tells only where the descriptor is then.
    pub(crate) fn ask(&self, bytes: &[u8], offset: u64) -> Result<(), FsError> {
        // Whoever answers it may be waiting for the remote.
        let mut dialogue = match self.dialogue.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(FsError::TryAgain),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(dialogue) => dialogue,
        };
        if dialogue.prompt.len() + bytes.len() > PROMPT_BYTES_MAX {
            return Err(FsError::TooLarge);
        }
        if !self.held.lock().unwrap_or_else(PoisonError::into_inner).grow(bytes.len() as u64) {
            return Err(FsError::NoRoom);
        }
        dialogue.prompt.extend_from_slice(bytes);
        dialogue.local = None;
        dialogue.reply.withdraw();
        dialogue.reply.note_question(offset, bytes.len());
        Ok(())
    }

    fn dialogue(&self) -> MutexGuard<'_, Dialogue> {
        self.dialogue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VirtualDirectories<'_> {
    /// Answers a question with one line of JSON, of which `buffer` gets what lies at `offset`.
    /// Returns how much.
    pub(crate) fn answer(
        &self, query: &Query, offset: u64, buffer: &mut [u8],
    ) -> Result<usize, FsError> {
        let mut dialogue = query.dialogue();
        if !dialogue.reply.is_given() {
            let found = match dialogue.local.take() {
                Some(LocalAnswer(found)) => found,
                None => self.local_match(query.model, &dialogue.prompt)?,
            };
            let tokens = found.as_ref().map_or(0, |found| found.tokens);
            let foreign = self.adoption.longest_match(query.model, &dialogue.prompt, tokens)?;
            let (is_own, found) = (foreign.is_none(), foreign.or(found));
            let asked = dialogue.prompt.len() / TOKEN_BYTES;
            let answered = found.as_ref().map_or(0, |found| found.tokens);
            let in_tiers = found.as_ref().map_or([0; 3], |found| found.in_tiers);
            self.core.observer.matched(asked as u64, in_tiers, is_own);
            self.core.hits.note_question(query.model, asked as u64, answered);
            dialogue.reply.give(to_json(found.as_ref()), offset);
        }
        Ok(dialogue.reply.copy(offset, buffer))
    }

    fn local_match(&self, model: InodeId, prompt: &[u8]) -> Result<Option<Match>, FsError> {
        self.indexed.prepare_to_find()?;
        self.finder.longest_match(model, prompt)
    }

    /// Whether a question has an answer that another store must be asked for. Notes what this machine
    /// knows.
    pub(super) fn answer_waits_for_remote(&self, query: &Query) -> Result<bool, FsError> {
        if !self.adoption.has_stores() {
            return Ok(false);
        }
        // Somebody else waits for the answer to the same question already.
        let Ok(mut dialogue) = query.dialogue.try_lock() else { return Ok(true) };
        if dialogue.reply.is_given() {
            return Ok(false);
        }
        let found = self.local_match(query.model, &dialogue.prompt)?;
        let tokens = found.as_ref().map_or(0, |found| found.tokens);
        dialogue.local = Some(LocalAnswer(found));
        self.adoption.others_have_more(query.model, &dialogue.prompt, tokens)
    }
}

/// What `longest_prefix` of `kvfs-runtime` reads.
fn to_json(found: Option<&Match>) -> String {
    let tokens = found.map_or(0, |found| found.tokens);
    let sequence = found.map(|found| String::from_utf8_lossy(&found.sequence));
    format!("{}\n", serde_json::json!({ "tokens": tokens, "sequence": sequence }))
}

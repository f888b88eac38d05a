//! Sequences of a model go into the slots of a server.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::server::{Exchanged, Server};
use super::state::SlotState;
use crate::cli::output::Failure;
use crate::page::names::{
    REFERENCES_4_SUFFIX, REFERENCES_SUFFIX, SLOT_4_SUFFIX, SLOT_SUFFIX, SLOTS, TOKENS,
};
use crate::reader::Sequence;
use crate::sequence::Sequences;

/// What a server says that keeps its slots apart.
pub(super) const NOT_UNIFIED: &str = "the server keeps each slot in a stream of its own, and restores no sequence into such \
     a slot: start it with --kv-unified";

/// Where a server gets conversations from.
#[derive(Debug)]
pub(super) struct Source<'a> {
    server: &'a Server,
    /// The model's directory, as an absolute path.
    model: &'a Path,
    is_mapped: bool,
    /// Tokens that were restored: the server does not tell of slots that had no task.
    tokens_restored: Cell<u64>,
}

/// What became of a slot.
#[derive(Debug)]
pub(super) struct Restored {
    pub(super) slot: u64,
    pub(super) sequence: PathBuf,
    /// How many tokens were restored.
    pub(super) outcome: Result<u64, Failure>,
}

impl Restored {
    /// A line without its end.
    pub(super) fn line(&self) -> String {
        let told = match &self.outcome {
            Ok(tokens) => format!("{tokens} tokens restored"),
            Err(why) => why.line().to_owned(),
        };
        format!("slot {}: {}: {told}", self.slot, self.sequence.display())
    }

    /// The same for programs.
    pub(super) fn to_json(&self) -> Value {
        let sequence = self.sequence.display().to_string();
        let why = self.outcome.as_ref().err().map(Failure::line);
        let tokens = self.outcome.as_ref().ok();
        json!({ "slot": self.slot, "sequence": sequence, "tokens": tokens, "why": why })
    }
}

impl<'a> Source<'a> {
    pub(super) fn new(server: &'a Server, model: &'a Path, is_mapped: bool) -> Self {
        Self { server, model, is_mapped, tokens_restored: Cell::new(0) }
    }

    /// Gives each slot that nobody has used one of the latest conversations that are in no slot yet.
    pub(super) fn restore_latest(
        &self, held: &BTreeSet<PathBuf>,
    ) -> Result<Vec<Restored>, Failure> {
        let sequences = latest(self.model, held)?;
        let slots = self.server.numbers(SlotState::is_unused)?;
        let mut restored = Vec::new();
        for (slot, sequence) in slots.into_iter().zip(sequences) {
            // Somebody may have begun meanwhile, and would lose what the slot has.
            let is_free = |state: &SlotState| state.number == slot && state.is_unused();
            if self.server.arguments.slot.is_none() && !self.server.slots()?.iter().any(is_free) {
                continue;
            }
            // Slots share the server's cache: where an older conversation has no room, the latest stay.
            let outcome = self.restore_slot(slot, &sequence);
            restored.push(Restored { slot, sequence, outcome });
        }
        Ok(restored)
    }

    /// Why no slot was given a conversation, where none was refused.
    pub(super) fn why_none(&self) -> Result<String, Failure> {
        let slots = self.server.numbers(SlotState::is_unused)?;
        Ok(if slots.is_empty() {
            "every slot is used: --slot names one".to_owned()
        } else {
            format!("{} has no sequence with tokens", self.model.display())
        })
    }

    /// How many tokens were restored.
    pub(super) fn restore_slot(&self, slot: u64, sequence: &Path) -> Result<u64, Failure> {
        let name = sequence.file_name().unwrap_or_default();
        let read = |suffix: &str| {
            let mut name = name.to_owned();
            name.push(suffix);
            let link = Exchanged::new(self.server);
            let target = self.model.join(SLOTS).join(name);
            symlink(target, &link.path).map_err(|error| link.explain(&error))?;
            self.server.ask(slot, "restore", &link).map_err(Failure::from)
        };
        let [newer, older] = suffixes(self.is_mapped);
        // A server does not say which version it reads, and refuses the other.
        let answer = read(newer).or_else(|_| read(older));
        let answer = answer.map_err(|failure| self.explain(slot, sequence).unwrap_or(failure))?;
        let tokens = answer["n_restored"].as_u64().unwrap_or(0);
        self.tokens_restored.set(self.tokens_restored.get() + tokens);
        Ok(tokens)
    }

    /// What a server means that refuses a slot: it has the same words for everything.
    fn explain(&self, slot: u64, sequence: &Path) -> Option<Failure> {
        if is_apart(self.server, slot, self.model).ok()? {
            return Some(Failure::Failed(NOT_UNIFIED.to_owned()));
        }
        let tokens = Sequence::open(sequence).and_then(|sequence| sequence.valid_tokens()).ok()?;
        let slots = self.server.slots().ok()?;
        let room = slots.iter().find(|state| state.number == slot)?.room?;
        let others = slots.iter().filter(|state| state.number != slot);
        let used: u64 = others.filter_map(|state| state.turn?.tokens).sum();
        no_room(tokens, room, used + self.tokens_restored.get()).map(Failure::Failed)
    }
}

/// Why a conversation has no room in a cache that slots share, if that is so.
fn no_room(tokens: u64, room: u64, used: u64) -> Option<String> {
    let free = room.saturating_sub(used);
    (tokens > free).then(|| {
        format!(
            "no room: it has {tokens} tokens, and of the {room} that the server's slots share \
             {free} are free: start it with a larger --ctx-size"
        )
    })
}

/// Whether the server keeps each slot in a stream of its own, as what it saves tells.
pub(super) fn is_apart(server: &Server, slot: u64, model: &Path) -> Result<bool, Failure> {
    let (_file, saved) = server.saved(slot, model)?;
    Ok(saved.streams() > 1)
}

/// The conversations of a model, those first that were saved last.
fn latest(model: &Path, held: &BTreeSet<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
    let all = Sequences::open(model).map_err(Failure::failed)?;
    let mut sequences: Vec<(SystemTime, PathBuf)> = Vec::new();
    for name in all.names().map_err(Failure::failed)? {
        let path = all.path(&name);
        // What is no conversation has none, and what was removed meanwhile neither.
        let saved = path.join(TOKENS).metadata().and_then(|tokens| tokens.modified());
        sequences.extend(saved.ok().map(|saved| (saved, path)));
    }
    sequences.sort_by(|a, b| b.cmp(a));
    let paths = sequences.into_iter().map(|(_, path)| path);
    Ok(paths.filter(|path| !held.contains(path)).collect())
}

/// What slots are called, of the newer version first.
fn suffixes(is_mapped: bool) -> [&'static str; 2] {
    if is_mapped { [REFERENCES_4_SUFFIX, REFERENCES_SUFFIX] } else { [SLOT_4_SUFFIX, SLOT_SUFFIX] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_that_have_no_room() {
        assert_eq!(no_room(100, 1024, 924), None);
        let why = no_room(101, 1024, 924).unwrap();
        assert!(why.contains("101 tokens") && why.contains("1024") && why.contains("100 are free"));
        assert!(no_room(1, 1024, 2000).is_some());
    }
}

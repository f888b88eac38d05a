//! What is known of the server that runs now, and what follows from what it says of its slots: which have changed
//! and are to be saved, which were lost, whether it is another server than before. Nothing here asks anybody.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::cli::slots::state::{SlotState, Turn};

/// Of the time, one part goes into saving a slot, and so many are left to the server.
const REST_PARTS: u32 = 9;
/// What fails again and again is tried after so long.
const RETRY_MAX: Duration = Duration::from_secs(600);

/// A server, as it was seen last.
#[derive(Debug)]
pub(super) struct Seen {
    interval: Duration,
    is_known: bool,
    /// What it drew at random when it started, if it does so.
    marker: Option<String>,
    slots: BTreeMap<u64, Known>,
    /// Whether its slots were given what there was to restore.
    is_filled: bool,
    filling: Tries,
}

/// A slot.
#[derive(Debug, Default)]
struct Known {
    /// At the last look.
    turn: Option<Turn>,
    /// When it was saved.
    saved: Option<Turn>,
    /// What it was saved as, or restored from.
    sequence: Option<PathBuf>,
    tries: Tries,
}

/// When something is done again.
#[derive(Debug, Default)]
struct Tries {
    /// Nothing is tried before.
    not_before: Option<Instant>,
    /// After the last try, if that failed.
    wait: Duration,
}

impl Tries {
    fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|time| time <= now)
    }

    fn succeeded(&mut self, rest: Duration, now: Instant) {
        *self = Self { not_before: Some(now + rest), wait: Duration::ZERO };
    }

    fn failed(&mut self, rest: Duration, now: Instant) {
        self.wait = (self.wait * 2).min(RETRY_MAX).max(rest);
        self.not_before = Some(now + self.wait);
    }
}

/// What was new at a look.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// The server has started since the last look, or this is the first one.
    pub(super) is_new: bool,
    /// Slots that had something that was not saved, and have not any more.
    pub(super) lost: Vec<u64>,
}

impl Seen {
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            interval,
            is_known: false,
            marker: None,
            slots: BTreeMap::new(),
            is_filled: false,
            filling: Tries::default(),
        }
    }

    /// The server is gone: the next one is new.
    pub(super) fn forget(&mut self) {
        *self = Self::new(self.interval);
    }

    /// What was saved may not be there any more.
    pub(super) fn forget_saved(&mut self) {
        for known in self.slots.values_mut() {
            *known = Known { turn: known.turn, ..Known::default() };
        }
    }

    /// Takes in what the server says of its slots.
    pub(super) fn look(&mut self, marker: Option<&str>, slots: &[SlotState]) -> News {
        let is_new = self.is_another(marker, slots);
        if is_new {
            self.forget();
        }
        self.is_known = true;
        self.marker = marker.map(str::to_owned);
        let mut lost = Vec::new();
        for slot in slots {
            let known = self.slots.entry(slot.number).or_default();
            if known.has_lost(slot) {
                lost.push(slot.number);
            }
            if slot.turn.is_some() && known.turn != slot.turn && known.saved != slot.turn {
                // It went on from what it had, or has something else.
                known.sequence = None;
            }
            known.turn = slot.turn;
        }
        News { is_new, lost }
    }

    fn is_another(&self, marker: Option<&str>, slots: &[SlotState]) -> bool {
        let went_back = |slot: &SlotState| {
            let before = self.slots.get(&slot.number).and_then(|known| known.turn);
            match (before, slot.turn) {
                (Some(before), Some(now)) => now.task < before.task,
                (Some(_), None) => true,
                (None, _) => false,
            }
        };
        !self.is_known
            || self.marker.as_deref() != marker
            || self.slots.len() != slots.len()
            || slots.iter().any(went_back)
    }

    /// Slots that have changed, do not work, and have rested.
    pub(super) fn due(&self, slots: &[SlotState], now: Instant) -> Vec<u64> {
        let has_rested = |slot: &&SlotState| {
            self.slots.get(&slot.number).is_none_or(|known| known.tries.is_due(now))
        };
        let changed = slots.iter().filter(|slot| self.has_changed(slot) && !slot.is_processing);
        changed.filter(has_rested).map(|slot| slot.number).collect()
    }

    /// Whether slots that had no task are to be given something now.
    pub(super) fn is_filling_due(&self, now: Instant) -> bool {
        !self.is_filled && self.filling.is_due(now)
    }

    /// Slots whose last turn is saved nowhere, whatever they do.
    pub(super) fn unsaved(&self, slots: &[SlotState]) -> Vec<u64> {
        slots.iter().filter(|slot| self.has_changed(slot)).map(|slot| slot.number).collect()
    }

    fn has_changed(&self, slot: &SlotState) -> bool {
        let saved = self.slots.get(&slot.number).and_then(|known| known.saved);
        slot.turn.is_some_and(|turn| turn.tokens != Some(0) && Some(turn) != saved)
    }

    /// A slot was saved after it had been seen last, which took so long.
    pub(super) fn saved(
        &mut self, slot: u64, sequence: Option<PathBuf>, took: Duration, now: Instant,
    ) {
        let rest = self.rest(took);
        let known = self.slots.entry(slot).or_default();
        known.saved = known.turn;
        known.sequence = sequence;
        known.tries.succeeded(rest, now);
    }

    /// Saving a slot has failed.
    pub(super) fn failed(&mut self, slot: u64, took: Duration, now: Instant) {
        let rest = self.rest(took);
        self.slots.entry(slot).or_default().tries.failed(rest, now);
    }

    /// For so long a slot is left to the server that was written by it for so long.
    fn rest(&self, took: Duration) -> Duration {
        self.interval.max(took * REST_PARTS)
    }

    /// Slots were given what there was, or nothing was there.
    pub(super) fn filled(&mut self) {
        self.is_filled = true;
    }

    /// Whether there is anything to give, or whether it may be given, cannot be told now.
    pub(super) fn not_filled(&mut self, now: Instant) {
        self.filling.failed(self.interval, now);
    }

    /// A slot that had no task was given a conversation.
    pub(super) fn restored(&mut self, slot: u64, sequence: PathBuf) {
        self.slots.entry(slot).or_default().sequence = Some(sequence);
    }

    /// Sequences that slots have as they are.
    pub(super) fn held(&self) -> BTreeSet<PathBuf> {
        self.slots.values().filter_map(|known| known.sequence.clone()).collect()
    }
}

impl Known {
    /// Whether a slot has lost a turn that was not saved: it has no tokens any more, and no later task took them.
    fn has_lost(&self, now: &SlotState) -> bool {
        let (Some(before), Some(now)) = (self.turn, now.turn) else { return false };
        let had_any = before.tokens.is_some_and(|tokens| tokens > 0);
        had_any && now.tokens == Some(0) && now.task == before.task && self.saved != Some(before)
    }
}

#[cfg(test)]
mod tests;

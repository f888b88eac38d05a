//! Events on their way into `meta.redb`, and back to whoever asks what happened.
//!
//! They wait in memory and go with the next commit, which has what they tell of as well: after a crash there is
//! either both or neither. Alone they are no reason for a commit that somebody waits for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::database::{decode, encode};
use super::event::{Event, EventHeads, Ring, What};
use super::metadata::{self, Metadata};
use super::{StoreError, keys};

/// Events that wait for a commit, which comes every second: more than are deleted or moved in one, in some 4 MB.
/// They enter a layer with the state held, which takes as many microseconds as requests may wait for.
const WAITING_MAX: usize = 1 << 13;
/// For how long events alone wait, which nobody needs after a crash: a mount that only reads writes seldom.
const ALONE_MAX: Duration = Duration::from_secs(5);

/// What happened since the last commit.
#[derive(Debug, Default)]
pub struct Events(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    heads: EventHeads,
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Events for which there was no room.
    lost: u64,
    since: Option<Instant>,
}

impl Waiting {
    fn add(&mut self, event: Event) {
        let ring = event.what.ring();
        let given = &mut self.heads.given[ring as usize];
        let slot = *given % ring.slots();
        *given += 1;
        self.heads.numbered += 1;
        let event = Event { number: self.heads.numbered, ..event };
        self.records.insert(keys::event(ring, slot), encode(&event));
        self.since.get_or_insert_with(Instant::now);
    }
}

impl Events {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A mount begins: events are numbered from where the last one ended.
    pub fn begin(&self, metadata: &Metadata) -> Result<(), StoreError> {
        let heads = metadata::events::heads(metadata)?;
        *self.waiting() = Waiting { heads, ..Waiting::default() };
        Ok(())
    }

    /// Something happened.
    pub fn note(&self, event: Event) {
        let mut waiting = self.waiting();
        if waiting.records.len() < WAITING_MAX {
            waiting.add(event);
        } else {
            waiting.lost += 1;
        }
    }

    /// Whether events have waited for a commit for so long that they are worth one.
    pub fn are_due(&self) -> bool {
        self.waiting().since.is_some_and(|since| since.elapsed() >= ALONE_MAX)
    }

    /// Makes what happened so far part of the next commit.
    pub fn write_to(&self, metadata: &mut Metadata) {
        let (heads, records) = {
            let mut waiting = self.waiting();
            let lost = std::mem::take(&mut waiting.lost);
            if lost > 0 {
                let reason = "more happened at once than is remembered";
                waiting.add(Event { files: lost, ..Event::new(What::Lost, reason) });
            }
            waiting.since = None;
            (waiting.heads, std::mem::take(&mut waiting.records))
        };
        if !records.is_empty() {
            metadata::events::put(metadata, &heads, records);
        }
    }

    /// The number of the last event; 0 if nothing has happened yet.
    pub fn last_number(&self) -> u64 {
        self.waiting().heads.numbered
    }

    /// Where somebody goes on who has read the events up to this number.
    pub fn after(&self, metadata: &Metadata, number: u64) -> Result<EventCursor, StoreError> {
        let waiting = self.waiting();
        let mut from = EventCursor::default();
        for ring in Ring::ALL {
            // Numbers grow along a ring.
            let Range { mut start, mut end } = waiting.heads.kept(ring);
            while start < end {
                let middle = start.midpoint(end);
                let mut at = middle;
                match next(&waiting, metadata, ring, &mut at, end)? {
                    Some(event) if event.number <= number => start = at,
                    _ => end = middle,
                }
            }
            from.next[ring as usize] = start;
        }
        Ok(from)
    }

    /// The next events from a place on, in the order in which they happened, `max` at most. Where the rings went
    /// on past the place, those that are left.
    pub fn read(
        &self, metadata: &Metadata, from: &mut EventCursor, max: usize,
    ) -> Result<Vec<Event>, StoreError> {
        let waiting = self.waiting();
        let mut events = Vec::new();
        while events.len() < max {
            for ring in Ring::ALL {
                let index = ring as usize;
                if from.ahead[index].is_none() {
                    let Range { start, end } = waiting.heads.kept(ring);
                    let at = &mut from.next[index];
                    *at = (*at).max(start);
                    from.ahead[index] = next(&waiting, metadata, ring, at, end)?;
                }
            }
            let numbers = from.ahead.iter().flatten().map(|event| event.number);
            let Some(first) = numbers.min() else { break };
            let is_first = |event: &Event| event.number == first;
            events.extend(from.ahead.iter_mut().find_map(|ahead| {
                if ahead.as_ref().is_some_and(is_first) { ahead.take() } else { None }
            }));
        }
        Ok(events)
    }
}

/// The next event of one ring from a place on, which is behind it then. One that cannot be decoded, as that of a
/// later version, is passed over.
fn next(
    waiting: &Waiting, metadata: &Metadata, ring: Ring, at: &mut u64, end: u64,
) -> Result<Option<Event>, StoreError> {
    while *at < end {
        let key = keys::event(ring, *at % ring.slots());
        *at += 1;
        let event = match waiting.records.get(&key) {
            Some(value) => decode(value).ok(),
            None => metadata::events::read(metadata, &key)?,
        };
        if event.is_some() {
            return Ok(event);
        }
    }
    Ok(None)
}

/// How far somebody has read.
#[derive(Clone, Debug, Default)]
pub struct EventCursor {
    next: [u64; 3],
    /// Read, and not given out: another ring has older ones.
    ahead: [Option<Event>; 3],
}

#[cfg(test)]
mod tests;

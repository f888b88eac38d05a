//! What could not be done, on its way into the events: each cause is told at once, and then every some minutes.
//!
//! A remote that is down for a day while a hundred thousand files wait for it would otherwise push everything else out
//! of what is remembered.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::core::Core;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::record::InodeId;

/// Between two events of one cause.
const TELL_EVERY: Duration = Duration::from_secs(600);
/// Files of one cause that are told apart between two events, 8 bytes each. Beyond them each failure counts as a file.
const FILES_MAX: usize = 1 << 12;

/// What was tried, and the kind of error: both are words of the program, so there are few.
pub(crate) type Cause = (&'static str, &'static str);

/// What was told of each cause, and when.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<BTreeMap<Cause, Told>>);

#[derive(Debug)]
struct Told {
    at: Instant,
    /// What came since.
    since: Option<Since>,
}

#[derive(Debug)]
struct Since {
    /// The last one, with the sums of all.
    event: Event,
    files: BTreeSet<InodeId>,
}

impl Since {
    /// Files add up. What is about all that waits takes the place of what was there.
    fn add(&mut self, event: Event) {
        let Some(id) = event.inode else {
            self.event = event;
            return;
        };
        let is_new = self.files.len() >= FILES_MAX || self.files.insert(id);
        let before = std::mem::replace(&mut self.event, event);
        let (files, bytes) =
            if is_new { (before.files + 1, self.event.bytes) } else { (before.files, None) };
        self.event.files = files;
        self.event.bytes = sum(before.bytes, bytes);
        if files > 1 {
            (self.event.inode, self.event.directory) = (None, None);
        }
    }
}

fn sum(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    Some(one?.saturating_add(other.unwrap_or(0)))
}

impl Failures {
    fn told(&self) -> MutexGuard<'_, BTreeMap<Cause, Told>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something failed at that time; the event, if it is to be told now.
    fn note(&self, cause: Cause, event: Event, now: Instant) -> Option<Event> {
        let mut told = self.told();
        let Some(before) = told.get_mut(&cause) else {
            told.insert(cause, Told { at: now, since: None });
            return Some(event);
        };
        if let Some(since) = &mut before.since {
            since.add(event);
        } else {
            let files = event.inode.into_iter().collect();
            before.since = Some(Since { event, files });
        }
        before.take_due(now)
    }

    /// What waited for its time, which has come.
    fn take_due(&self, now: Instant) -> Vec<Event> {
        let mut told = self.told();
        let due = told.values_mut().filter_map(|told| told.take_due(now)).collect();
        // The next one is told at once.
        told.retain(|_, told| now.duration_since(told.at) < TELL_EVERY);
        due
    }
}

impl Told {
    fn take_due(&mut self, now: Instant) -> Option<Event> {
        if now.duration_since(self.at) < TELL_EVERY {
            return None;
        }
        let since = self.since.take()?;
        self.at = now;
        Some(since.event)
    }
}

/// Something could not be done to a file of so many bytes.
pub(crate) fn note_failure(
    core: &Core, cause: Cause, (id, bytes): (InodeId, Option<u64>), why: impl Into<String>,
) {
    let directory = core.state().nodes.get(&id).and_then(|node| node.found_in);
    let event = Event::new(What::Failed, why).of(id);
    tell(core, cause, Event { bytes, directory, ..event });
}

/// Something could not be done that is about so many files and bytes together, or about none.
pub(crate) fn note_failure_of_all(
    core: &Core, cause: Cause, (files, bytes): (u64, Option<u64>), why: impl Into<String>,
) {
    tell(core, cause, Event { files, bytes, ..Event::new(What::Failed, why) });
}

fn tell(core: &Core, cause: Cause, event: Event) {
    if let Some(event) = core.failures.note(cause, event, Instant::now()) {
        core.store.events.note(event);
    }
}

/// Tells of the failures whose time has come.
pub(crate) fn tell_due(core: &Core) {
    for event in core.failures.take_due(Instant::now()) {
        core.store.events.note(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAUSE: Cause = ("upload", "full");

    fn of(id: u64) -> Event {
        Event::new(What::Failed, format!("file {id}")).of(InodeId(id)).with_bytes(10)
    }

    #[test]
    fn a_cause_is_told_at_once_and_then_with_all_its_files() {
        let (failures, begun) = (Failures::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(
            failures.note(CAUSE, of(1), at(0)).map(|event| event.inode),
            Some(Some(InodeId(1)))
        );
        assert!(failures.note(("fetch", "full"), of(1), at(0)).is_some(), "another cause");
        for id in [2, 3, 3, 2] {
            assert_eq!(failures.note(CAUSE, of(id), at(1)), None);
        }
        assert!(failures.take_due(at(599)).is_empty());
        let due = failures.take_due(at(600));
        let told = due.iter().map(|event| (event.files, event.bytes, event.inode));
        assert_eq!(told.collect::<Vec<_>>(), [(2, Some(20), None)]);
        assert_eq!(due[0].reason, "file 2");
        // One that comes late is told with what waited.
        assert_eq!(failures.note(CAUSE, of(4), at(700)), None);
        let late = failures.note(CAUSE, of(5), at(1300)).unwrap();
        assert_eq!((late.files, late.bytes), (2, Some(20)));
        // Nothing came for that long: the next one is told at once.
        assert!(failures.take_due(at(2000)).is_empty());
        assert_eq!(failures.note(CAUSE, of(6), at(2001)).map(|event| event.files), Some(1));
    }

    #[test]
    fn what_is_about_all_that_waits_does_not_add_up() {
        let (failures, begun) = (Failures::default(), Instant::now());
        let waiting =
            |files| Event { files, bytes: Some(files), ..Event::new(What::Failed, "down") };
        assert!(failures.note(CAUSE, waiting(5), begun).is_some());
        for files in [7, 100_000, 9] {
            assert_eq!(failures.note(CAUSE, waiting(files), begun), None);
        }
        let due = failures.take_due(begun + TELL_EVERY);
        assert_eq!(
            due.iter().map(|event| (event.files, event.bytes)).collect::<Vec<_>>(),
            [(9, Some(9))]
        );
    }

    #[test]
    fn what_is_remembered_of_files_is_bounded() {
        let (failures, begun) = (Failures::default(), Instant::now());
        let last = FILES_MAX as u64 * 2;
        for id in 0..=last {
            failures.note(CAUSE, of(id), begun);
        }
        let kept = failures.told()[&CAUSE].since.as_ref().map(|since| since.files.len());
        assert_eq!(kept, Some(FILES_MAX));
        assert_eq!(failures.take_due(begun + TELL_EVERY)[0].files, last);
    }
}

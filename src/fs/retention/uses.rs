//! When files were last used.
//!
//! An open notes the time in memory alone: a record for each would make every reader a writer. A walk
//! puts it into the file's access time once that lags far enough behind.

use std::collections::HashMap;
use std::time::Duration;

use crate::store::record::{InodeId, Time};

/// Files remembered, 32 bytes each. Beyond that, the access time on record has to do.
const FILES_MAX: usize = 1 << 20;
/// How far the access time on record may lag behind: so much is forgotten in a crash.
const LAG_SECONDS: i64 = 600;

/// Uses since the access times on record.
#[derive(Debug, Default)]
pub(super) struct Uses {
    last: HashMap<InodeId, Time>,
}

impl Uses {
    /// A file is used now.
    pub(super) fn note(&mut self, id: InodeId, now: Time) {
        if self.last.len() < FILES_MAX || self.last.contains_key(&id) {
            self.last.insert(id, now);
        }
    }

    /// The last use that is not on record.
    pub(super) fn of(&self, id: InodeId) -> Option<Time> {
        self.last.get(&id).copied()
    }

    /// The time to put on record, if what is there lags behind.
    pub(super) fn overdue(&mut self, id: InodeId, recorded: Time) -> Option<Time> {
        let last = self.of(id)?;
        let lags = last.seconds.saturating_sub(recorded.seconds) >= LAG_SECONDS;
        if lags {
            self.last.remove(&id);
        }
        lags.then_some(last)
    }

    /// Makes room when it is full: what is so old that a walk would have put it on record was not
    /// below any limit.
    pub(super) fn trim(&mut self, now: Time) {
        if self.last.len() >= FILES_MAX {
            let since = now.seconds.saturating_sub(2 * LAG_SECONDS);
            self.last.retain(|_, last| last.seconds >= since);
        }
    }
}

/// A time so much later.
pub(super) fn after(time: Time, duration: Duration) -> Time {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Time { seconds: time.seconds.saturating_add(seconds), ..time }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_is_recorded_once_the_record_lags_behind() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let (mut uses, id) = (Uses::default(), InodeId(9));
        uses.note(id, at(10_000));
        assert_eq!(uses.overdue(id, at(9_500)), None);
        assert_eq!(uses.of(id), Some(at(10_000)));
        assert_eq!(uses.overdue(id, at(9_000)), Some(at(10_000)));
        assert_eq!(uses.of(id), None);
    }
}

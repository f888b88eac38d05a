//! Uses are put on record now and then, whether or not any directory has a limit: what a crash forgets is bounded.
//!
//! Only files that were used since the last time are looked at, some at a time beside requests and commits: with half a
//! million of them it takes two minutes, which with the time between two rounds is less than the ten minutes that a
//! record may lag behind.

use std::time::{Duration, Instant};

use super::{Retainer, Retention};
use crate::FsError;
use crate::core::Core;
use crate::core::state::State;
use kvfs_storage::store::record::{InodeId, Time};

/// Between the beginnings of two rounds, by the wall clock, by which uses are noted.
const ROUND_SECONDS: i64 = 300;
/// Uses recorded with the state held, some 10 us each: a request may have to wait for them.
const WITH_STATE_HELD: usize = 64;
/// Uses recorded in one step...
const PER_STEP: usize = 512;
/// ... and the time between two steps: a commit of each second has some thousands of them.
const STEP_PAUSE: Duration = Duration::from_millis(100);
/// Uses put on record in one commit when a mount ends, and nobody waits for the state.
const PER_LAST_COMMIT: usize = 1 << 14;

/// How far the rounds are.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    begun: Option<Time>,
    /// When the last step of the round that is going on was done, if one is.
    stepped: Option<Instant>,
    /// The round has come to what was used last.
    has_turned: bool,
}

impl Rounds {
    /// Whether something is to be recorded now.
    fn is_due(&mut self, wall: Time, now: Instant) -> bool {
        if let Some(stepped) = self.stepped {
            return now.duration_since(stepped) >= STEP_PAUSE;
        }
        let begun = *self.begun.get_or_insert(wall);
        let passed = wall.seconds.saturating_sub(begun.seconds);
        if (0..ROUND_SECONDS).contains(&passed) {
            return false;
        }
        // A clock that was set back begins a round as well.
        *self = Rounds { begun: Some(wall), ..Rounds::default() };
        true
    }
}

impl Retention {
    /// A step of recording uses, if one is due; how long until the next one.
    pub(super) fn record_in_rounds(
        &self, core: &Core, retainer: &mut Retainer,
    ) -> Option<Duration> {
        let rounds = &mut retainer.rounds;
        if !rounds.is_due(Time::now(), Instant::now()) {
            return rounds.stepped.map(|_| STEP_PAUSE);
        }
        let mut recorded = 0;
        while recorded < PER_STEP {
            match self.record_some(core, &mut rounds.has_turned) {
                Ok(0) => {
                    rounds.stepped = None;
                    return None;
                }
                Ok(count) => recorded += count,
                Err(error) => {
                    log::warn!("when files were used is not on record: {error}");
                    rounds.stepped = None;
                    return None;
                }
            }
        }
        rounds.stepped = Some(Instant::now());
        Some(STEP_PAUSE)
    }

    /// Puts some uses on record, which the next commit makes durable; how many.
    fn record_some(&self, core: &Core, has_turned: &mut bool) -> Result<usize, FsError> {
        // Whoever asks for the last use of a file has the state: it is either noted or on record.
        let mut state = core.state();
        if state.refusal.is_some() {
            return Ok(0);
        }
        let some = self.uses().take_some(WITH_STATE_HELD, has_turned);
        for (index, &(id, used)) in some.iter().enumerate() {
            if let Err(error) = record(&mut state, id, used) {
                self.uses().put_back(&some[index..]);
                return Err(error);
            }
        }
        Ok(some.len())
    }

    /// Puts all uses on record, when a mount that may change something ends.
    pub(in super::super) fn record_uses(
        &self, core: &Core, commit: impl Fn() -> Result<(), FsError>,
    ) -> Result<(), FsError> {
        let uses = self.uses().take();
        for batch in uses.chunks(PER_LAST_COMMIT) {
            let mut state = core.state();
            if state.refusal.is_some() {
                return Ok(());
            }
            for &(id, used) in batch {
                record(&mut state, id, used)?;
            }
            drop(state);
            commit()?;
        }
        Ok(())
    }
}

fn record(state: &mut State, id: InodeId, used: Time) -> Result<(), FsError> {
    let Some(mut inode) = state.metadata.inode(id)? else { return Ok(()) };
    if inode.links > 0 && inode.atime < used {
        inode.atime = used;
        let life = state.metadata.life(id);
        state.metadata.put_use(life, id, &inode);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted, at};

    #[test]
    fn a_use_is_on_record_after_a_round_and_a_crash() {
        let unmounted = Unmounted::new();
        let [read, other] = ["read", "other"].map(|name| unmounted.write(FILES, name, b"bytes"));
        for id in [read, other] {
            unmounted.date(id, at(1000));
        }
        let fs = &unmounted.fs;
        fs.retention.note_use(&fs.core, read, libc::O_RDONLY);
        let mut retainer = Retainer::default();
        assert_eq!(fs.retention.record_in_rounds(&fs.core, &mut retainer), None, "a mount begins");
        retainer.rounds.begun = Some(at(0));
        let told = fs.core.state().metadata.names_changed;
        fs.retention.record_in_rounds(&fs.core, &mut retainer);
        assert_eq!(fs.core.state().metadata.names_changed, told, "no names for that alone");
        fs.commit().unwrap();
        let again = unmounted.after_crash();
        let atime = |id| again.fs.core.state().inode(id).unwrap().atime.seconds;
        assert!(atime(read) > 1000);
        assert_eq!(atime(other), 1000);
    }

    #[test]
    fn a_round_begins_all_five_minutes_and_goes_on_in_steps() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let (mut rounds, now) = (Rounds::default(), Instant::now());
        assert!(!rounds.is_due(at(1000), now), "a mount begins");
        assert!(!rounds.is_due(at(1000 + ROUND_SECONDS - 1), now));
        assert!(rounds.is_due(at(1000 + ROUND_SECONDS), now));
        rounds.stepped = Some(now);
        assert!(!rounds.is_due(at(9999), now));
        assert!(rounds.is_due(at(1300), now + STEP_PAUSE));
        rounds.stepped = None;
        assert!(!rounds.is_due(at(1599), now));
        assert!(rounds.is_due(at(1600), now));
        assert!(rounds.is_due(at(10), now), "the clock was set back");
    }
}

//! When a client that changes something goes on: at once, a little later, or after a commit.
//!
//! Long before as many changes wait as may ([`super::backlog`]), a commit is asked for; when they still become more, each
//! new one waits a little, so that nobody ever waits for a whole commit.

use std::time::Duration;

use super::backlog::{Backlog, changes, lacks_room};
use super::demotion::Commits;
use super::discarded::{self, Remover};
use super::postponed::Postponed;
use super::{FileSystem, FsError};
use crate::core::Core;
use crossbeam_channel::Sender;

/// Thousandths of what may wait at which a commit is asked for.
const COMMIT_FROM: usize = 250;
/// And from which on changes wait.
const DELAY_FROM: usize = 500;
/// How long the last change waits for which there is room. A thousand clients in as many directories make 20,000
/// changes a second then: more than a disk makes durable. Those in one directory wait for each other.
const DELAY_MAX: Duration = Duration::from_millis(50);
/// Less than this is not worth another thread.
const DELAY_MIN: Duration = Duration::from_micros(20);

/// When a change may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Now.
    AtOnce,
    /// After this time, if there is room then.
    After(Duration),
    /// When a commit was tried: those before it failed, and its client is to hear of it. Where the disk lacks room
    /// for one, nothing is added to what waits, or a removal that would make room could not be committed either.
    AfterCommit,
}

/// What paces changes: it looks at what waits, and asks for commits.
#[derive(Clone, Copy, Debug)]
pub struct Pacing<'a> {
    core: &'a Core,
    backlog: &'a Backlog,
    remover: &'a Remover,
    postponed: &'a Postponed,
    commits: &'a dyn Commits,
}

impl FileSystem {
    /// What paces changes.
    pub fn pacing(&self) -> Pacing<'_> {
        Pacing {
            core: &self.core,
            backlog: &self.backlog,
            remover: &self.remover,
            postponed: &self.postponed,
            commits: self,
        }
    }
}

impl Pacing<'_> {
    /// How a commit is asked for before the timer asks.
    pub fn ask_through(&self, wanted: Sender<()>) {
        let _ = self.backlog.wanted.set(wanted);
    }

    /// When the next change may be made.
    pub fn pace(&self) -> Pace {
        let (fill, left, fails, lacks_room) = {
            let state = self.core.state();
            let fill = self.backlog.fill_thousandths(&state);
            let left = discarded::fill_thousandths(&state.metadata.discarded);
            let left = left.max(self.postponed.fill_thousandths());
            self.remover.wake_for(&state.metadata.discarded);
            (fill, left, state.commit_failure.is_some(), lacks_room(&state))
        };
        if lacks_room {
            return Pace::AfterCommit;
        }
        // Where commits fail, the timer tries again.
        if fill >= COMMIT_FROM
            && !fails
            && let Some(wanted) = self.backlog.wanted.get()
        {
            // If one is asked for already, it takes these changes as well.
            let _ = wanted.try_send(());
        }
        match delay(fill.max(left)) {
            Some(_) if fails && fill >= DELAY_FROM => Pace::AfterCommit,
            Some(delay) if delay >= DELAY_MIN => Pace::After(delay),
            _ => Pace::AtOnce,
        }
    }

    /// Whether another change may be made, or a commit has failed, which its client will be told.
    pub fn has_room(&self) -> bool {
        let state = self.core.state();
        self.backlog.limits().fill_thousandths(&state) < 1000 || state.commit_failure.is_some()
    }

    /// Commits before changing more when there is no room, in memory or on the disk: both stay bounded whoever
    /// makes changes.
    pub(super) fn throttle(&self) -> Result<(), FsError> {
        let look = || {
            let state = self.core.state();
            let is_full = self.backlog.limits().are_reached(&state) || lacks_room(&state);
            (changes(&state), is_full)
        };
        let (changes, mut is_full) = look();
        // The disk may be slow to tell: the state is not held meanwhile.
        if !is_full && self.backlog.look_again(changes, &self.core.store) {
            (_, is_full) = look();
        }
        if is_full { self.commits.commit() } else { Ok(()) }
    }

    /// The same before something is removed, which must go on where the disk is too full for a commit.
    pub(super) fn throttle_removal(&self) {
        // The commits of the timer tell of it.
        let _ = self.throttle();
    }

    /// The same before a file is rewritten, which may be what makes room on the disk: it fails only where as many changes
    /// wait as may.
    pub(super) fn throttle_rewriting(&self) -> Result<(), FsError> {
        match self.throttle() {
            Err(error) if self.backlog.limits().are_reached(&self.core.state()) => Err(error),
            _ => Ok(()),
        }
    }
}

/// How long a change waits; `None` if it need not. It grows with the square of what is above the bound, so that
/// few clients are hardly held up and many are.
fn delay(fill: usize) -> Option<Duration> {
    let above = fill.min(1000).checked_sub(DELAY_FROM)?;
    let whole = 1000 - DELAY_FROM;
    let parts = u32::try_from(above * above).ok()?;
    Some(DELAY_MAX * parts / u32::try_from(whole * whole).ok()?)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::backlog::*;
    use crate::core::state::CommitFailure;
    use crate::health::Refusal;
    use crate::unmounted::Unmounted;
    use crate::{Caller, NewNode, Place};
    use kvfs_storage::store::metadata::Life;
    use kvfs_storage::store::record::InodeId;

    const FILES: InodeId = InodeId(3);

    /// Until the next commit looks.
    fn limit(fs: &FileSystem, limits: Limits) {
        *fs.backlog.locked() = limits;
        fs.backlog.next_look.store(usize::MAX, Ordering::Relaxed);
    }

    #[test]
    fn a_commit_is_asked_for_before_anybody_waits_and_makes_room() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let (wanted, requests) = crossbeam_channel::bounded(1);
        fs.pacing().ask_through(wanted);
        let caller = Caller::DAEMON;
        let mut number = 0;
        let mut make = || {
            number += 1;
            let place = Place { parent: FILES, name: format!("d{number}").into_bytes() };
            fs.make(&place, &NewNode::Directory, 0o755, caller).unwrap();
            fs.pacing().pace()
        };
        while make() == Pace::AtOnce && requests.is_empty() {}
        assert_eq!(requests.try_recv(), Ok(()), "somebody waits before a commit was asked for");
        assert_eq!(make(), Pace::AtOnce);
        let mut longest = Duration::ZERO;
        while fs.pacing().has_room() {
            if let Pace::After(delay) = make() {
                assert!(delay >= longest && delay <= DELAY_MAX, "{delay:?} after {longest:?}");
                longest = delay;
            }
        }
        assert_eq!(longest, DELAY_MAX);
        fs.commit().unwrap();
        assert!(fs.pacing().has_room());
        assert_eq!(fs.pacing().pace(), Pace::AtOnce);
    }

    #[test]
    fn the_less_room_the_disk_has_the_less_may_wait() {
        let limits = |room_bytes| Limits::of_room(room_bytes);
        assert_eq!(limits(1 << 40), Limits::default());
        assert_eq!(limits(0), Limits { changes: CHANGES_MIN, bytes: BYTES_MIN });
        assert_eq!(limits(16 << 20), Limits { changes: 1024, bytes: 4 << 20 });
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        fs.commit().unwrap();
        limit(fs, Limits::of_room(16 << 20));
        add(fs, 0, 768, 0);
        assert!(fill(fs) == 1000 && !fs.pacing().has_room());
        fs.pacing().throttle().unwrap();
        assert_eq!(fill(fs), 1000, "there is a margin for those that are under way");
        add(fs, 1000, 256, 0);
        fs.pacing().throttle().unwrap();
        assert_eq!(fill(fs), 0);
        assert!(fs.backlog.limits() != Limits::of_room(16 << 20), "each commit looks again");
    }

    #[test]
    fn the_room_is_looked_at_again_before_many_changes_wait() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        fs.commit().unwrap();
        let stale = Limits::of_room(100 << 20);
        *fs.backlog.locked() = stale;
        let mut seen = Vec::new();
        for number in 0..3 * CHANGES_MIN {
            fs.pacing().throttle().unwrap();
            if fs.backlog.limits() != stale {
                seen.push(number);
                *fs.backlog.locked() = stale;
            }
            add(fs, number as u64, 1, 0);
        }
        assert_eq!(seen, [CHANGES_MIN, 2 * CHANGES_MIN]);
        fs.commit().unwrap();
        assert_eq!(fs.backlog.next_look.load(Ordering::Relaxed), CHANGES_MIN);
    }

    #[test]
    fn a_change_waits_the_longer_the_more_there_are() {
        assert_eq!(delay(0), None);
        assert_eq!(delay(DELAY_FROM - 1), None);
        assert_eq!(delay(DELAY_FROM), Some(Duration::ZERO));
        assert_eq!(delay(1000), Some(DELAY_MAX));
        assert_eq!(delay(5000), Some(DELAY_MAX));
        let delays: Vec<_> = (DELAY_FROM..=1000).map(delay).collect();
        assert!(delays.is_sorted());
        let half = delay(750).unwrap();
        assert!(half < DELAY_MAX / 3 && half > DELAY_MAX / 5, "{half:?}");
    }

    #[test]
    fn files_that_are_opened_to_be_rewritten_count_as_changes() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let written = unmounted.write(FILES, "written", b"before");
        fs.commit().unwrap();
        for _ in 0..2 * CHANGES_MIN {
            // Each commit looks anew how much may wait.
            limit(fs, Limits::of_room(0));
            let opened = fs.open_file(written, libc::O_WRONLY | libc::O_TRUNC).unwrap();
            fs.write(opened.handle, 0, b"after", false).unwrap();
            fs.flush(opened.handle).unwrap();
            fs.release(opened.handle).unwrap();
            let waiting = fs.core.state().metadata.uncommitted();
            assert!(waiting < CHANGES_MIN + 8, "{waiting}");
        }
    }

    #[test]
    fn where_commits_fail_a_file_is_rewritten_as_long_as_its_change_may_wait() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        fs.commit().unwrap();
        limit(fs, Limits::of_room(0));
        fs.core.state().refusal = Some(Refusal::DiskFailed);
        add(fs, 0, CHANGES_MIN as u64 - 1, 0);
        fail(fs, true);
        fs.pacing().throttle_rewriting().unwrap();
        add(fs, 1000, 1, 0);
        assert!(matches!(fs.pacing().throttle_rewriting(), Err(FsError::ReadOnly)));
    }

    #[test]
    fn what_is_kept_low_slows_changes_down_and_refuses_none() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        fs.commit().unwrap();
        add(fs, 0, CHANGES_MIN as u64 / 2, 0);
        assert_eq!(fs.pacing().pace(), Pace::AtOnce);
        let kept_low = fs.backlog.keep_low();
        assert!(
            matches!(fs.pacing().pace(), Pace::After(delay) if delay < DELAY_MAX),
            "{:?}",
            fs.pacing().pace()
        );
        add(fs, 1000, 2 * CHANGES_MIN as u64, 0);
        assert_eq!(fs.pacing().pace(), Pace::After(DELAY_MAX));
        assert!(fs.pacing().has_room());
        let waiting = fs.core.state().metadata.uncommitted();
        fs.pacing().throttle().unwrap();
        assert_eq!(fs.core.state().metadata.uncommitted(), waiting, "nobody commits for it");
        drop(kept_low);
        assert_eq!(fs.pacing().pace(), Pace::AtOnce);
    }

    /// Adds so many attributes of so many bytes to what waits.
    fn add(fs: &FileSystem, from: u64, count: u64, bytes: usize) {
        let mut state = fs.core.state();
        for number in from..from + count {
            let id = InodeId(1_000_000 + number);
            state.metadata.put_attribute(Life::Durable, id, b"a", &vec![0; bytes]);
        }
    }

    fn fail(fs: &FileSystem, lacks_room: bool) {
        let failure = CommitFailure { why: "test".to_owned(), lacks_room };
        fs.core.state().commit_failure = Some(failure);
    }

    fn fill(fs: &FileSystem) -> usize {
        fs.backlog.limits().fill_thousandths(&fs.core.state())
    }

    #[test]
    fn what_is_full_makes_no_room_for_one_more_change() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        fs.commit().unwrap();
        let room = (CHANGES_MAX - CHANGES_MARGIN) as u64;
        add(fs, 0, room - 1, 0);
        assert!(fill(fs) == 999 && fs.pacing().has_room());
        add(fs, room, 1, 0);
        assert!(fill(fs) == 1000 && !fs.pacing().has_room());
        // A commit that failed is told to whoever makes the change.
        fail(fs, false);
        assert!(fs.pacing().has_room());
        assert_eq!(fs.pacing().pace(), Pace::AfterCommit);
        fs.core.state().commit_failure = None;
        fs.pacing().throttle().unwrap();
        assert_eq!(fill(fs), 1000, "there is a margin for those that are under way");
        add(fs, 2 * room, CHANGES_MARGIN as u64, 0);
        fs.pacing().throttle().unwrap();
        assert_eq!(fill(fs), 0);
    }

    #[test]
    fn large_changes_count_by_their_bytes() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        fs.commit().unwrap();
        let large = 64 << 10;
        let margin = (BYTES_MAX - BYTES_MARGIN) / large;
        add(fs, 0, margin as u64 / 2 + 1, large);
        assert!((DELAY_FROM..DELAY_FROM + 10).contains(&fill(fs)), "{}", fill(fs));
        assert_eq!(fs.pacing().pace(), Pace::AtOnce, "less is not worth another thread");
        add(fs, 1000, margin as u64 / 2 + 1, large);
        assert!(!fs.pacing().has_room());
        fs.pacing().throttle().unwrap();
        assert!(!fs.pacing().has_room());
        add(fs, 2000, (BYTES_MARGIN / large) as u64, large);
        fs.pacing().throttle().unwrap();
        assert_eq!(fill(fs), 0);
    }

    #[test]
    fn a_disk_without_room_holds_every_change_up_until_a_commit_was_tried() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let (wanted, requests) = crossbeam_channel::bounded(1);
        fs.pacing().ask_through(wanted);
        let throttles: [fn(Pacing<'_>); 2] =
            [|pacing| pacing.throttle_removal(), |pacing| pacing.throttle().unwrap()];
        for throttle in throttles {
            add(fs, 0, 1, 0);
            fail(fs, true);
            assert_eq!(fs.pacing().pace(), Pace::AfterCommit);
            throttle(fs.pacing());
            assert!(fs.core.state().commit_failure.is_none());
            assert_eq!(fs.pacing().pace(), Pace::AtOnce);
        }
        // What failed for another reason is tried by the timer alone.
        add(fs, 0, CHANGES_MAX as u64 / 3, 0);
        fail(fs, false);
        assert_eq!(fs.pacing().pace(), Pace::AtOnce);
        fs.pacing().throttle().unwrap();
        assert!(requests.is_empty() && fs.core.state().commit_failure.is_some());
        fs.core.state().commit_failure = None;
        assert_eq!(fs.pacing().pace(), Pace::AtOnce);
        assert_eq!(requests.len(), 1);
        requests.try_recv().unwrap();
        fs.commit().unwrap();
        assert_eq!(fs.pacing().pace(), Pace::AtOnce);
        assert!(requests.is_empty(), "nothing waits");
    }
}

//! A budget for what is written to the disk: flash wears out with each byte.
//!
//! Bytes that may be written come in evenly through the day, a day's worth at most. What must be written is written
//! all the same, and is owed: nothing more is left until that has come in.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::record::{ObjectId, WritesLeft};

/// The budget of a disk that may be written to without end.
const NO_LIMIT: u64 = u64::MAX;
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Objects that were asked for once are remembered in two parts of so many, 8 bytes each: when one is full, the older
/// one is forgotten.
const ASKED_MAX: usize = 32_768;

/// The budget, and what was asked for while it was used up.
#[derive(Debug)]
pub struct WriteBudget {
    /// Changed under the lock of `account`; [`NO_LIMIT`] without one.
    day_bytes: AtomicU64,
    written_bytes: AtomicU64,
    account: Mutex<Account>,
    asked: Mutex<[HashSet<ObjectId>; 2]>,
}

/// What is left, as of a moment; below zero: what is owed. It goes on while there is no limit, for there may be one again.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// The last limit that there was.
    day_bytes: u64,
    left_bytes: i64,
    at: Instant,
}

impl Account {
    /// What came in since is there. The moment moves on only by the time that whole bytes took, so that looking
    /// often takes nothing away.
    fn fill(&mut self, now: Instant) {
        let day_bytes = self.day_bytes;
        let since = now.saturating_duration_since(self.at).min(DAY);
        let came = u128::from(day_bytes) * since.as_nanos() / DAY.as_nanos();
        let took = came * DAY.as_nanos() / u128::from(day_bytes.max(1));
        let most = clamped(day_bytes);
        self.left_bytes =
            self.left_bytes.saturating_add(i64::try_from(came).unwrap_or(i64::MAX)).min(most);
        self.at = if since == DAY || self.left_bytes == most {
            now
        } else {
            self.at + Duration::from_nanos(u64::try_from(took).unwrap_or(u64::MAX))
        };
    }
}

impl WriteBudget {
    /// So many bytes a day, or no limit; a whole day's are left.
    pub fn new(day_bytes: Option<u64>) -> WriteBudget {
        let day_bytes = day_bytes.unwrap_or(NO_LIMIT);
        let account = Account { day_bytes, left_bytes: clamped(day_bytes), at: Instant::now() };
        WriteBudget {
            day_bytes: AtomicU64::new(day_bytes),
            written_bytes: AtomicU64::new(0),
            account: Mutex::new(account),
            asked: Mutex::default(),
        }
    }

    /// Bytes a day, if there is a limit.
    pub fn day_bytes(&self) -> Option<u64> {
        Some(self.day_bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes != NO_LIMIT)
    }

    /// Changes the budget: what was written today counts for the new one as well.
    pub fn set_day_bytes(&self, day_bytes: Option<u64>) {
        let mut account = self.filled();
        if let Some(now) = day_bytes {
            let spent = clamped(account.day_bytes).saturating_sub(account.left_bytes);
            account.left_bytes = clamped(now).saturating_sub(spent).max(-clamped(now));
            account.day_bytes = now;
        }
        self.day_bytes.store(day_bytes.unwrap_or(NO_LIMIT), Ordering::Relaxed);
    }

    /// So much was left when the store was mounted last. A clock that went back brings nothing in.
    pub fn resume(&self, known: &WritesLeft, now_seconds: i64) {
        let Some(day_bytes) = self.day_bytes() else { return };
        let away = u64::try_from(now_seconds.saturating_sub(known.at_seconds)).unwrap_or(0);
        let came =
            u128::from(day_bytes) * u128::from(away.min(DAY.as_secs())) / u128::from(DAY.as_secs());
        let came = i64::try_from(came).unwrap_or(i64::MAX);
        let mut account = self.account();
        account.left_bytes =
            known.left_bytes.saturating_add(came).clamp(-clamped(day_bytes), clamped(day_bytes));
        account.at = Instant::now();
    }

    /// What the next mount is to know.
    pub fn left_at(&self, now_seconds: i64) -> Option<WritesLeft> {
        self.day_bytes()?;
        Some(WritesLeft { left_bytes: self.filled().left_bytes, at_seconds: now_seconds })
    }

    /// So many bytes were written, or are about to be. More than a day's worth is never owed.
    pub fn note(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut account = self.filled();
        let left = account.left_bytes.saturating_sub(clamped(bytes));
        account.left_bytes = left.max(-clamped(account.day_bytes));
    }

    /// Bytes written since the mount began.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that may still be written now; 0 where some are owed.
    pub fn left_bytes(&self) -> u64 {
        u64::try_from(self.filled().left_bytes).unwrap_or(0)
    }

    /// Whether nothing is to be written that need not be.
    pub fn is_used_up(&self) -> bool {
        self.day_bytes().is_some() && self.filled().left_bytes <= 0
    }

    /// Somebody asks for an object that only the remote has, or memory. Whether somebody did before.
    pub fn note_asked(&self, object: ObjectId) -> bool {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.iter().any(|part| part.contains(&object)) {
            return true;
        }
        if asked[0].len() >= ASKED_MAX {
            asked.swap(0, 1);
            asked[0].clear();
        }
        asked[0].insert(object);
        false
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn filled(&self) -> MutexGuard<'_, Account> {
        let mut account = self.account();
        account.fill(Instant::now());
        account
    }
}

fn clamped(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_evenly_and_a_day_of_them_at_most() {
        let begin = Instant::now();
        let mut account = Account { day_bytes: 86_400_000, left_bytes: 0, at: begin };
        let after = |seconds| begin + Duration::from_secs(seconds);
        account.fill(after(60));
        assert_eq!(account.left_bytes, 60_000);
        account.fill(after(24 * 3600 * 9));
        assert_eq!(account.left_bytes, 86_400_000);
        // Who looks all the time gets no less.
        let mut account = Account { day_bytes: 86_400, left_bytes: -500, at: begin };
        for look in 0..1000 {
            account.fill(begin + Duration::from_millis(look));
        }
        account.fill(after(1000));
        assert_eq!(account.left_bytes, 500);
        // Nor does a clock that stands still or goes back.
        account.fill(begin);
        assert_eq!(account.left_bytes, 500);
    }

    #[test]
    fn what_must_be_written_is_owed() {
        let budget = WriteBudget::new(Some(1000));
        assert!(!budget.is_used_up() && budget.left_bytes() == 1000);
        budget.note(999);
        assert!(!budget.is_used_up());
        budget.note(1);
        assert!(budget.is_used_up() && budget.left_bytes() == 0);
        budget.note(1 << 40);
        let left = budget.left_at(5).unwrap();
        assert_eq!((left.left_bytes, left.at_seconds), (-1000, 5));
        assert_eq!(budget.written_bytes(), 1000 + (1 << 40));
        // More a day, and what was spent of the old one counts.
        budget.set_day_bytes(Some(3000));
        assert_eq!(budget.left_bytes(), 1000);
        // Without a limit for a moment, too.
        budget.set_day_bytes(None);
        budget.note(400);
        assert!(!budget.is_used_up() && budget.left_at(5).is_none());
        budget.set_day_bytes(Some(3000));
        assert_eq!(budget.left_bytes(), 600);
        let budget = WriteBudget::new(None);
        budget.note(1 << 40);
        assert!(!budget.is_used_up());
    }

    #[test]
    fn a_mount_goes_on_where_the_last_one_ended() {
        let left = |left_bytes, away: i64| {
            let budget = WriteBudget::new(Some(86_400));
            budget.resume(&WritesLeft { left_bytes, at_seconds: 1000 }, 1000 + away);
            budget.left_at(0).unwrap().left_bytes
        };
        assert_eq!(left(0, 0), 0);
        assert_eq!(left(-50, 60), 10);
        assert_eq!(left(100, -500), 100, "a clock that went back");
        assert_eq!(left(0, 1 << 40), 86_400, "one that went far ahead");
        assert_eq!(left(i64::MAX, 0), 86_400, "a budget that was larger");
        assert_eq!(left(i64::MIN, 0), -86_400);
    }

    #[test]
    fn who_asks_twice_is_known_and_memory_is_bounded() {
        let budget = WriteBudget::new(Some(1));
        assert!(!budget.note_asked(ObjectId(1)));
        assert!(budget.note_asked(ObjectId(1)));
        for object in 2..=2 * ASKED_MAX as u64 + 1 {
            assert!(!budget.note_asked(ObjectId(object)));
        }
        assert!(!budget.note_asked(ObjectId(1)), "it was forgotten");
        let remembered: usize = budget.asked.lock().unwrap().iter().map(HashSet::len).sum();
        assert!(remembered <= 2 * ASKED_MAX);
    }
}

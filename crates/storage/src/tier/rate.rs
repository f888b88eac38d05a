//! How fast a link is, from what was moved over it.
//!
//! Transfers overlap, so what counts is the time in which any of them ran. Old seconds count less:
//! what is known is halved whenever it covers half a minute.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time after which what is known is halved.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Less than this says more about the first round trip than about the link.
const KNOWN_AFTER_BYTES: u64 = 1 << 20;

/// A running rate.
#[derive(Debug, Default)]
pub struct Rate(Mutex<Measured>);

#[derive(Debug, Default)]
struct Measured {
    running: u32,
    since: Option<Instant>,
    busy: Duration,
    bytes: u64,
}

impl Rate {
    /// Counts a transfer; its bytes only if it succeeds.
    pub fn measure<T, E>(
        &self, bytes: u64, transfer: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.measured().begin();
        let outcome = transfer();
        self.measured().end(if outcome.is_ok() { bytes } else { 0 });
        outcome
    }

    /// Bytes per second, once enough was moved.
    pub fn bytes_per_second(&self) -> Option<u64> {
        let measured = self.measured();
        let micros = u64::try_from(measured.busy.as_micros()).ok().filter(|micros| *micros > 0)?;
        let is_known = measured.bytes >= KNOWN_AFTER_BYTES;
        is_known.then(|| measured.bytes.saturating_mul(1_000_000) / micros)
    }

    fn measured(&self) -> MutexGuard<'_, Measured> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Measured {
    fn begin(&mut self) {
        self.running += 1;
        self.since.get_or_insert_with(Instant::now);
    }

    fn end(&mut self, bytes: u64) {
        let now = Instant::now();
        if let Some(since) = self.since.replace(now) {
            self.busy += now.duration_since(since);
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.running -= 1;
        if self.running == 0 {
            self.since = None;
        }
        if self.busy > REMEMBERED {
            self.busy /= 2;
            self.bytes /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_transfers_share_their_time() {
        let mut measured = Measured::default();
        measured.begin();
        measured.begin();
        std::thread::sleep(Duration::from_millis(20));
        measured.end(100);
        measured.end(100);
        assert_eq!((measured.bytes, measured.since), (200, None));
        assert!(measured.busy >= Duration::from_millis(20), "{:?}", measured.busy);
    }

    #[test]
    fn a_failed_or_small_transfer_says_nothing() {
        let rate = Rate::default();
        assert_eq!(rate.measure(1 << 30, || Err::<(), _>(7)), Err(7));
        assert_eq!(rate.measure(1000, || Ok::<_, ()>(7)), Ok(7));
        assert_eq!(rate.bytes_per_second(), None);
        let slow = || -> Result<(), ()> {
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        };
        rate.measure(4 << 20, slow).unwrap();
        assert!(rate.bytes_per_second().unwrap() < (4 << 20) * 500 + (1 << 20));
    }

    #[test]
    fn a_rate_is_known_once_enough_has_taken_some_time() {
        let rate = |bytes, busy| {
            Rate(Mutex::new(Measured { busy, bytes, ..Measured::default() })).bytes_per_second()
        };
        let half = Duration::from_millis(500);
        assert_eq!(rate(KNOWN_AFTER_BYTES, half), Some(2 * KNOWN_AFTER_BYTES));
        assert_eq!(rate(KNOWN_AFTER_BYTES - 1, half), None);
        assert_eq!(rate(KNOWN_AFTER_BYTES, Duration::ZERO), None);
    }

    #[test]
    fn what_was_long_ago_counts_half() {
        let busy = REMEMBERED * 2;
        let mut measured = Measured { bytes: 1000, busy, ..Measured::default() };
        measured.begin();
        measured.end(0);
        assert_eq!(measured.bytes, 500);
        assert!((REMEMBERED..busy).contains(&measured.busy), "{:?}", measured.busy);
    }
}

//! Whether the clock may be believed when it says that something is too old.
//!
//! Limits of age delete by the wall clock, and that may be wrong: a board without a battery, a guest
//! that was restored, a mistyped date. A clock that is ahead for three seconds would delete everything at
//! once. So a clock that went ahead by more than it was watched to is not believed for an hour, in
//! which whoever keeps it can set it right. A machine that was off or asleep looks the same, and loses
//! nothing but that hour.

use std::time::{Duration, Instant};

use kvfs_storage::store::record::Time;

/// How far the clock may be ahead of what is expected.
const AHEAD_SECONDS_MAX: i64 = 3600;
/// How long a clock that went further is not believed.
const DOUBT: Duration = Duration::from_secs(3600);

/// What is known of the clock.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// A time that was right, and when that was. It stays while the clock goes ahead of it by less than is doubted, so that
    /// small steps add up.
    right: Option<(Time, Instant)>,
    doubted_until: Option<Instant>,
}

impl Clock {
    /// A mount begins; the clock was last believed at that time, as far as is known. What passed between two
    /// mounts is not: a clock that was wrong when the last one ended is not believed now either.
    pub(super) fn begin(&mut self, believed: Option<Time>) {
        let now = Instant::now();
        self.right = believed.map(|believed| (believed, now));
        self.look(Time::now(), now);
    }

    /// Looks at the clock. Returns whether it may be believed.
    pub(super) fn look(&mut self, wall: Time, now: Instant) -> bool {
        let ahead =
            self.expected(now).map(|expected| wall.seconds.saturating_sub(expected.seconds));
        if let Some(ahead) = ahead.filter(|ahead| *ahead > AHEAD_SECONDS_MAX) {
            log::warn!(
                "the clock is {ahead} s ahead of what was expected: nothing is deleted for its age \
                 in the next {} minutes",
                DOUBT.as_secs() / 60
            );
            self.doubted_until = Some(now + DOUBT);
        }
        if !ahead.is_some_and(|ahead| (1..=AHEAD_SECONDS_MAX).contains(&ahead)) {
            self.right = Some((wall, now));
        }
        self.doubt(now).is_none()
    }

    /// What it should say by the last time that was right.
    pub(super) fn expected(&self, now: Instant) -> Option<Time> {
        let (right, at) = self.right?;
        let passed = i64::try_from(now.duration_since(at).as_secs()).unwrap_or(i64::MAX);
        Some(Time { seconds: right.seconds.saturating_add(passed), ..right })
    }

    /// How long it will not be believed.
    pub(super) fn doubt(&self, now: Instant) -> Option<Duration> {
        let left = self.doubted_until?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3600;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    #[test]
    fn a_clock_that_jumps_ahead_is_doubted_for_an_hour() {
        let begun = Instant::now();
        let later = |seconds: i64| begun + Duration::from_secs(seconds.unsigned_abs());
        let mut clock = Clock { right: Some((at(0), begun)), doubted_until: None };
        assert!(clock.look(at(5), later(5)));
        // Not more than an hour.
        assert!(clock.look(at(5 + HOUR), later(5)));
        assert!(clock.look(at(5), later(5)));
        // Both clocks went on for two hours.
        assert!(clock.look(at(2 * HOUR), later(2 * HOUR)));
        assert!(!clock.look(at(60 * 24 * HOUR), later(2 * HOUR + 1)));
        assert!(!clock.look(at(60 * 24 * HOUR + HOUR - 1), later(3 * HOUR)));
        assert!(clock.look(at(60 * 24 * HOUR + HOUR), later(3 * HOUR + 1)));
        // It is set right, which deletes nothing.
        assert!(clock.look(at(3 * HOUR), later(3 * HOUR + 2)));
    }

    #[test]
    fn a_clock_that_goes_ahead_in_steps_is_doubted_as_well() {
        let begun = Instant::now();
        let later = |seconds: i64| begun + Duration::from_secs(seconds.unsigned_abs());
        let step = HOUR * 2 / 3;
        let mut clock = Clock { right: Some((at(0), begun)), doubted_until: None };
        assert!(clock.look(at(step), later(5)));
        // What a mount puts on record is not what the clock says: the next one begins with it.
        assert_eq!(clock.expected(later(5)), Some(at(5)));
        assert!(clock.look(at(step + 5), later(10)));
        assert!(!clock.look(at(2 * step), later(15)));
        // Set back, it is right from then on.
        let mut clock = Clock { right: Some((at(0), begun)), doubted_until: None };
        assert!(clock.look(at(step), later(5)) && clock.look(at(-step), later(10)));
        assert_eq!(clock.expected(later(12)), Some(at(2 - step)));
        assert!(!clock.look(at(step), later(20)));
    }

    #[test]
    fn nothing_is_doubted_without_a_time_to_compare_with() {
        let mut clock = Clock::default();
        assert!(clock.look(at(1 << 40), Instant::now()));
    }
}

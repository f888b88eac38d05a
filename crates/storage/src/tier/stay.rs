//! How long a copy was in a tier, and whether anybody used it there. Whether a budget is worth its bytes shows when
//! copies leave: those that nobody used again took the room of others, and those that leave soon after a use were missed.

use std::time::{Duration, Instant, SystemTime};

use crate::store::record::Time;

/// Since when a copy is in a tier, and when it was last used there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    came: Instant,
    used: Option<Instant>,
}

impl Stay {
    /// It comes now. The use because of which it comes is none of its own.
    pub fn begin() -> Stay {
        Stay { came: Instant::now(), used: None }
    }

    /// It came so long ago, and was last used there so long ago, if it was.
    pub fn since(age: Duration, idle: Option<Duration>) -> Stay {
        let now = Instant::now();
        // A clock that began later than that knows no such moment.
        let ago = |time: Duration| now.checked_sub(time).unwrap_or(now);
        Stay { came: ago(age), used: idle.map(ago) }
    }

    /// Somebody uses it.
    pub fn note_use(&mut self) {
        self.used = Some(Instant::now());
    }

    /// When somebody used it last since it came, by the wall clock.
    pub fn last_use(&self) -> Option<Time> {
        let since = self.used?.elapsed();
        SystemTime::now().checked_sub(since).map(Time::from)
    }

    /// Whether anybody has used it since it came.
    pub fn is_used(&self) -> bool {
        self.used.is_some()
    }

    /// Since it came.
    pub fn age(&self) -> Duration {
        self.came.elapsed()
    }

    /// Since it was last used, or came.
    pub fn idle(&self) -> Duration {
        self.used.unwrap_or(self.came).elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_ends_idleness_and_not_age() {
        let mut stay = Stay::begin();
        std::thread::sleep(Duration::from_millis(30));
        assert!(!stay.is_used() && stay.idle() >= Duration::from_millis(30));
        assert_eq!(stay.last_use(), None);
        let before = Time::now();
        stay.note_use();
        // Both clocks are read, one after the other.
        assert!(stay.last_use().unwrap().seconds >= before.seconds - 1);
        let (idle, age) = (stay.idle(), stay.age());
        assert!(stay.is_used() && age >= idle + Duration::from_millis(30), "{idle:?} {age:?}");
        let again = Stay::since(age, Some(idle));
        assert!(again.age() >= age && again.idle() >= idle && again.idle() < again.age());
        assert!(!Stay::since(age, None).is_used());
    }
}

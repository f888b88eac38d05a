//! How slowly the bytes of an object may come.
//!
//! A remote that hangs is given up after a silence; one that gives a byte now and then is never silent, and would hold
//! the thread of its call, of which there are few, for as long as it likes. So bytes have to come at a rate, over all
//! of the transfer and a beginning without any:
//!
//! time that the remote was waited for  <=  grace + bytes that came / [`RATE_MIN`]
//!
//! Only waiting for the remote counts: not for a thread, not for `--remote-bandwidth`, not for the disk that takes the
//! bytes. What goes to an object store has a time of its own, of the same rate (`super::object::patience`).

use std::time::Duration;

/// The lowest rate, in bytes per second: an eighth of what each of eight calls at a time
/// ([`super::Limits::threads_max`]) has on a link of 1 MiB/s. A page of 4 MiB holds its thread for four minutes at most.
pub(super) const RATE_MIN: u64 = 16 << 10;

/// What a transfer has come to.
#[derive(Debug)]
pub(super) struct Pace {
    grace: Duration,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    /// `grace` is how long the remote may be silent in this transfer: then no silence alone is too slow.
    pub(super) fn new(grace: Duration) -> Pace {
        Pace { grace, waited: Duration::ZERO, bytes: 0 }
    }

    /// So many bytes came after the remote was waited for so long; why that is too slow, if it is.
    pub(super) fn step(&mut self, bytes: u64, waited: Duration) -> Result<(), String> {
        self.bytes += bytes;
        self.waited += waited;
        let allowed =
            self.grace + Duration::from_millis(self.bytes.saturating_mul(1000) / RATE_MIN);
        if self.waited <= allowed {
            return Ok(());
        }
        Err(format!(
            "gave {} bytes in {:.0} s, which is slower than {} KiB/s",
            self.bytes,
            self.waited.as_secs_f64(),
            RATE_MIN >> 10
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(15);
    const SECOND: Duration = Duration::from_secs(1);

    /// After how many steps it is too slow.
    fn steps(bytes: u64, waited: Duration) -> Option<u32> {
        let mut pace = Pace::new(GRACE);
        (1..100_000).find(|_| pace.step(bytes, waited).is_err())
    }

    #[test]
    fn a_byte_now_and_then_is_too_slow_soon_and_a_slow_link_never() {
        assert_eq!(steps(1, SECOND), Some(16));
        assert_eq!(steps(RATE_MIN / 2, SECOND), Some(31));
        assert_eq!(steps(RATE_MIN, SECOND), None);
        // One silence is not.
        let mut pace = Pace::new(GRACE);
        pace.step(0, GRACE).unwrap();
        let line = pace.step(17, SECOND).unwrap_err();
        assert_eq!(line, "gave 17 bytes in 16 s, which is slower than 16 KiB/s");
    }
}

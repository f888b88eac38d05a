//! A limit on bandwidth, so that moving cold objects leaves the network to others.

use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::error::Result;
use super::name::{RemoteName, RemotePrefix};
use super::transfer::{Extent, ReadAt, Sink, Source, WriteAt};
use super::{BlobStore, Listing, Put, PutMode, Stat};

/// What may be sent at once after idling: 50 ms worth. Larger bursts would show up as latency to
/// others, smaller ones as wakeups.
const BURST: Duration = Duration::from_millis(50);

/// How often who waits looks whether he still has to.
const NAP_MAX: Duration = Duration::from_millis(50);

/// A token bucket that all transfers share. Bytes are paid for after they moved, so a transfer
/// larger than the bucket needs no special case: the bucket goes into debt and the next one waits.
#[derive(Debug)]
pub struct Bucket {
    /// 0 for no limit.
    bytes_per_second: AtomicU64,
    /// When all bytes that were taken will have been paid for.
    paid_at: Mutex<Instant>,
}

impl Bucket {
    /// A full bucket.
    pub fn new(bytes_per_second: NonZeroU64) -> Bucket {
        Bucket::limited_to(Some(bytes_per_second))
    }

    /// One that may have no limit.
    pub fn limited_to(bytes_per_second: Option<NonZeroU64>) -> Bucket {
        let bytes_per_second = AtomicU64::new(bytes_per_second.map_or(0, NonZeroU64::get));
        Bucket { bytes_per_second, paid_at: Mutex::new(Instant::now()) }
    }

    /// Bytes per second, if there is a limit.
    pub fn bytes_per_second(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.bytes_per_second.load(Ordering::Relaxed))
    }

    /// Changes the rate. What was taken at the other one is paid for by now.
    pub fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) {
        let mut paid_at = self.paid_at.lock().unwrap_or_else(PoisonError::into_inner);
        *paid_at = (*paid_at).min(Instant::now());
        let rate = bytes_per_second.map_or(0, NonZeroU64::get);
        self.bytes_per_second.store(rate, Ordering::Relaxed);
    }

    /// Takes bytes at a time, and says how long to wait before the next.
    fn take(&self, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = self.bytes_per_second() else { return Duration::ZERO };
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate.get());
        let cost = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        let mut paid_at = self.paid_at.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = now.checked_sub(BURST).unwrap_or(now);
        *paid_at = (*paid_at).max(oldest) + cost;
        paid_at.saturating_duration_since(now)
    }

    /// Waits as long as the rate demands for bytes that were moved, or until `is_over`. When the rate changes, what was
    /// taken before is paid for.
    pub fn pay_unless(&self, bytes: u64, is_over: &dyn Fn() -> bool) {
        let rate = self.bytes_per_second();
        let mut left = self.take(bytes, Instant::now());
        while !left.is_zero() && self.bytes_per_second() == rate && !is_over() {
            let nap = left.min(NAP_MAX);
            std::thread::sleep(nap);
            left -= nap;
        }
    }

    fn pay(&self, bytes: usize) {
        self.pay_unless(bytes as u64, &|| false);
    }

    /// Bytes to move in one go: a tenth of a second's, so that a transfer is seen to make progress
    /// at the lowest rate, and at least 4 KiB.
    pub fn step_bytes(&self) -> usize {
        let rate = self.bytes_per_second().map_or(u64::MAX, NonZeroU64::get);
        usize::try_from(rate / 10).unwrap_or(usize::MAX).max(4096)
    }
}

/// A store whose transfers, in both directions together, stay below a rate.
#[derive(Debug)]
pub struct Throttled {
    store: Arc<dyn BlobStore>,
    bucket: Arc<Bucket>,
}

impl Throttled {
    /// Limits a store.
    pub fn new(store: Arc<dyn BlobStore>, bucket: Arc<Bucket>) -> Throttled {
        Throttled { store, bucket }
    }
}

struct SlowSource(Arc<dyn ReadAt>, Arc<Bucket>);
struct SlowSink(Sink, Arc<Bucket>);

impl ReadAt for SlowSource {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let length = buffer.len().min(self.1.step_bytes());
        let count = self.0.read_at(&mut buffer[..length], offset)?;
        self.1.pay(count);
        Ok(count)
    }
}

impl WriteAt for SlowSink {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let step = self.1.step_bytes();
        for (index, part) in bytes.chunks(step).enumerate() {
            self.0.write_all_at(part, offset + (index * step) as u64)?;
            self.1.pay(part.len());
        }
        Ok(())
    }
}

impl BlobStore for Throttled {
    fn place(&self) -> &str {
        self.store.place()
    }

    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put> {
        let bucket = Arc::clone(&self.bucket);
        let slow = source.through(|bytes| Arc::new(SlowSource(bytes, bucket)));
        self.store.put(name, slow, mode)
    }

    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64> {
        let slow = SlowSink(sink, Arc::clone(&self.bucket));
        self.store.get(name, extent, Arc::new(slow))
    }

    fn head(&self, name: RemoteName) -> Result<Option<Stat>> {
        self.store.head(name)
    }

    fn refresh(&self, name: RemoteName) -> Result<()> {
        self.store.refresh(name)
    }

    fn delete(&self, name: RemoteName) -> Result<()> {
        self.store.delete(name)
    }

    fn delete_if_older(&self, name: RemoteName, than: SystemTime) -> Result<bool> {
        self.store.delete_if_older(name, than)
    }

    fn settling(&self) -> Duration {
        self.store.settling()
    }

    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        self.store.list(prefix, after)
    }

    fn sweep(&self, older_than: SystemTime) -> Result<u64> {
        self.store.sweep(older_than)
    }

    fn is_vacant(&self) -> Result<bool> {
        self.store.is_vacant()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_and_idling_saves_up_one_burst_only() {
        let bucket = Bucket::new(NonZeroU64::new(1_000_000).unwrap());
        let start = Instant::now() + Duration::from_secs(3600);
        let seconds = Duration::from_secs;
        // After a long idle time 50 ms are free, the rest is paid for.
        assert_eq!(bucket.take(1_050_000, start), seconds(1));
        assert_eq!(bucket.take(1_000_000, start), seconds(2));
        assert_eq!(bucket.take(0, start + seconds(2)), seconds(0));
        assert_eq!(bucket.take(1_000_000, start + seconds(2)), seconds(1));
    }

    #[test]
    fn a_rate_may_change_and_what_was_taken_before_is_forgiven() {
        let bucket = Bucket::limited_to(None);
        let now = Instant::now();
        assert_eq!(bucket.take(u64::MAX, now), Duration::ZERO);
        bucket.set_rate(NonZeroU64::new(1_000_000));
        let left = bucket.take(3600 * 1_000_000, now);
        assert!(left > Duration::from_secs(3599), "{left:?}");
        bucket.set_rate(NonZeroU64::new(2_000_000));
        let left = bucket.take(2_000_000, Instant::now());
        assert!(left <= Duration::from_secs(1), "{left:?}");
        bucket.set_rate(None);
        assert_eq!(bucket.take(u64::MAX, Instant::now()), Duration::ZERO);
    }

    #[test]
    fn who_waits_at_a_low_rate_hears_of_a_higher_one() {
        for rate in [None, NonZeroU64::new(1_000_000_000)] {
            let bucket = Bucket::new(NonZeroU64::MIN);
            let begun = Instant::now();
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| bucket.pay(4096));
                std::thread::sleep(Duration::from_millis(100));
                assert!(!waits.is_finished(), "4096 bytes take more than an hour");
                bucket.set_rate(rate);
                waits.join().unwrap();
            });
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        }
    }
}

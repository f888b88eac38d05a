//! The lock of the state. Nearly every request takes it, so whoever holds it for long holds up everybody.
//!
//! It is fair: a thread that goes through a million things, and lets go after each few, would otherwise have the lock
//! again before whoever waits has woken up. `parking_lot` hands it over to who waits once it was held for a
//! millisecond, and every half a millisecond (<https://docs.rs/parking_lot/latest/parking_lot/type.Mutex.html>).

use super::state::State;

/// See the module.
pub(super) type StateLock = parking_lot::Mutex<State>;

/// The state, for as long as this lives.
pub(crate) type StateGuard<'a> = parking_lot::MutexGuard<'a, State>;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use kvfs_observe::Observer;
    use kvfs_storage::store::Store;

    use crate::FileSystem;

    /// Whoever goes through many things takes the lock again at once, each time for a moment.
    #[test]
    fn who_waits_has_the_state_soon_although_others_take_it_again_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        let (sender, _invalidations) = crossbeam_channel::bounded(1);
        let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
        let is_over = AtomicBool::new(false);
        let longest = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _state = fs.core.state();
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
            let waited = (0..50).map(|_| {
                std::thread::sleep(Duration::from_millis(1));
                let asked = Instant::now();
                drop(fs.core.state());
                asked.elapsed()
            });
            let longest = waited.max().unwrap_or_default();
            is_over.store(true, Ordering::Relaxed);
            longest
        });
        // The rest is for a machine that is busy.
        assert!(longest < Duration::from_millis(200), "{longest:?}");
    }
}

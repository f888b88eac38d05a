//! Threads that take requests where those that should do so are held up.
//!
//! A request may hold its thread: the disk is slow, a lock is taken, no processor is free. Whoever asks meanwhile would wait
//! behind it. So a thread that rests looks now and then whether requests wait and none was begun since, and takes them
//! then. The one that was held up rests in its place when it comes back.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often one of them looks while requests wait for each other: they wait for a thread that is held up for as long, and as
/// long again.
const CROWDED_INTERVAL: Duration = Duration::from_millis(1);
/// How often otherwise: what holds a thread longer is a fault. A timer that is soon due makes each wake-up of a processor that
/// was idle dearer: on a virtual machine a write of 4 KiB takes 25 us with this one, 28 with 5 ms, 36 with 1 ms.
const CALM_INTERVAL: Duration = Duration::from_millis(20);
/// Looks in which none waits before it looks less often, and sleeps until there is a request.
const QUIET_LOOKS: u32 = 100;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Understudies {
    /// Requests that were begun.
    begun: AtomicU64,
    /// Those of them that hold a thread.
    in_service: AtomicUsize,
    /// Times that one of them took over.
    takeovers: AtomicU64,
    /// Requests wait for each other.
    is_crowded: AtomicBool,
    /// The one that looks sleeps until there is a request.
    is_asleep: AtomicBool,
    /// Threads that take requests beyond those that should.
    surplus: AtomicUsize,
    watch: Mutex<Watch>,
    /// Signalled for the one that looks.
    stirred: Condvar,
    /// Signalled for the others, one of which looks when the first one has gone.
    vacant: Condvar,
}

#[derive(Debug, Default)]
struct Watch {
    /// One of them looks.
    is_taken: bool,
    /// The mount has ended.
    is_over: bool,
}

impl Understudies {
    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread begins to serve a request; to be told to [`Understudies::note_ended`].
    pub(super) fn note_begun(&self) -> u64 {
        self.in_service.fetch_add(1, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.wake();
        self.takeovers.load(Ordering::SeqCst)
    }

    /// It ends; whether another thread has taken over meanwhile.
    pub(super) fn note_ended(&self, takeovers: u64) -> bool {
        self.in_service.fetch_sub(1, Ordering::SeqCst);
        self.takeovers.load(Ordering::SeqCst) != takeovers
    }

    /// Several requests wait until a thread is free.
    pub(super) fn note_crowd(&self) {
        if !self.is_crowded.swap(true, Ordering::SeqCst) {
            self.stir();
        }
    }

    /// There is a request: the one that looks does not sleep any longer.
    pub(super) fn wake(&self) {
        if self.is_asleep.load(Ordering::SeqCst) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.stir();
        }
    }

    fn stir(&self) {
        // Not between its last look and its sleep.
        drop(self.watch());
        self.stirred.notify_one();
    }

    /// Whether more threads take requests than should.
    pub(super) fn has_surplus(&self) -> bool {
        self.surplus.load(Ordering::SeqCst) > 0
    }

    /// Whether the calling thread, which has nothing to do or was replaced, is to rest.
    pub(super) fn give_up_surplus(&self) -> bool {
        let one_less = |surplus: usize| surplus.checked_sub(1);
        self.surplus.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok()
    }

    /// The mount has ended.
    pub(super) fn end(&self) {
        self.watch().is_over = true;
        self.stirred.notify_all();
        self.vacant.notify_all();
    }

    /// Rests until requests wait and nobody begins any; false if the mount has ended. `do_wait` tells whether requests wait.
    pub(super) fn rest(&self, do_wait: impl Fn() -> bool) -> bool {
        let mut watch = self.watch();
        while watch.is_taken && !watch.is_over {
            watch = self.vacant.wait(watch).unwrap_or_else(PoisonError::into_inner);
        }
        if watch.is_over {
            return false;
        }
        watch.is_taken = true;
        let mut watch = self.look(watch, do_wait);
        watch.is_taken = false;
        self.vacant.notify_one();
        if !watch.is_over {
            self.surplus.fetch_add(1, Ordering::SeqCst);
            self.takeovers.fetch_add(1, Ordering::SeqCst);
        }
        !watch.is_over
    }

    /// Looks until nobody begins what waits, or the mount has ended.
    fn look<'a>(
        &'a self, mut watch: MutexGuard<'a, Watch>, do_wait: impl Fn() -> bool,
    ) -> MutexGuard<'a, Watch> {
        // As the last look found it: requests wait, and nobody has begun any.
        let (mut do_wait_since, mut waited) = (false, false);
        let mut quiet_looks = 0;
        loop {
            let before = self.begun.load(Ordering::SeqCst);
            let is_crowded = self.is_crowded.load(Ordering::SeqCst);
            watch = if quiet_looks >= QUIET_LOOKS && !is_crowded {
                quiet_looks = 0;
                self.sleep(watch, before)
            } else {
                let interval =
                    if is_crowded || do_wait_since { CROWDED_INTERVAL } else { CALM_INTERVAL };
                let waiting = self.stirred.wait_timeout(watch, interval);
                waiting.unwrap_or_else(PoisonError::into_inner).0
            };
            if watch.is_over {
                return watch;
            }
            let (do_wait, is_any_begun) = (do_wait(), self.begun.load(Ordering::SeqCst) != before);
            if do_wait && waited && !is_any_begun {
                return watch;
            }
            (do_wait_since, waited) = (do_wait, do_wait && !is_any_begun);
            let is_busy = is_any_begun || self.in_service.load(Ordering::SeqCst) > 0;
            let is_quiet = !do_wait && (is_crowded || !is_busy);
            quiet_looks = if is_quiet { quiet_looks + 1 } else { 0 };
            if is_crowded && quiet_looks >= QUIET_LOOKS {
                self.is_crowded.store(false, Ordering::SeqCst);
                quiet_looks = 0;
            }
        }
    }

    /// Sleeps until more requests than so many were begun, or one waits. Where one holds a thread, the next may wait for it.
    fn sleep<'a>(&'a self, mut watch: MutexGuard<'a, Watch>, begun: u64) -> MutexGuard<'a, Watch> {
        self.is_asleep.store(true, Ordering::SeqCst);
        while self.is_asleep.load(Ordering::SeqCst)
            && self.begun.load(Ordering::SeqCst) == begun
            && self.in_service.load(Ordering::SeqCst) == 0
            && !watch.is_over
        {
            watch = self.stirred.wait(watch).unwrap_or_else(PoisonError::into_inner);
        }
        self.is_asleep.store(false, Ordering::SeqCst);
        watch
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use crossbeam_channel::{Receiver, unbounded};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(30);

    /// One that rests while `do_wait` says so, and what came of it.
    fn resting(
        understudies: &Arc<Understudies>, do_wait: &Arc<AtomicBool>,
    ) -> (Receiver<bool>, std::thread::JoinHandle<()>) {
        let (told, heard) = unbounded();
        let (understudies, do_wait) = (Arc::clone(understudies), Arc::clone(do_wait));
        let rest = move || {
            let _ = told.send(understudies.rest(|| do_wait.load(Ordering::SeqCst)));
        };
        (heard, std::thread::Builder::new().spawn(rest).unwrap())
    }

    fn serve(understudies: &Understudies) {
        let takeovers = understudies.note_begun();
        assert!(!understudies.note_ended(takeovers));
    }

    #[test]
    fn it_does_not_sleep_while_a_thread_is_held_and_wakes_for_what_waits() {
        let understudies = Arc::new(Understudies::default());
        let do_wait = Arc::new(AtomicBool::new(false));
        let held = understudies.note_begun();
        let (heard, thread) = resting(&understudies, &do_wait);
        std::thread::sleep(CALM_INTERVAL * (QUIET_LOOKS + 20));
        assert!(!understudies.is_asleep.load(Ordering::SeqCst));
        understudies.note_ended(held);
        let end = Instant::now() + LONG;
        while !understudies.is_asleep.load(Ordering::SeqCst) {
            assert!(Instant::now() < end, "it looks and looks");
            std::thread::sleep(CROWDED_INTERVAL);
        }
        // Whoever took it waits for another one.
        do_wait.store(true, Ordering::SeqCst);
        understudies.wake();
        assert_eq!(heard.recv_timeout(LONG), Ok(true));
        thread.join().unwrap();
    }

    #[test]
    fn one_takes_over_where_requests_wait_and_none_is_begun() {
        for is_crowd in [true, false] {
            let understudies = Understudies::default();
            let (told, heard) = unbounded();
            // Between two looks one is begun, and others wait.
            let are_served = AtomicBool::new(true);
            let do_wait = || {
                if are_served.load(Ordering::SeqCst) {
                    serve(&understudies);
                }
                true
            };
            if is_crowd {
                understudies.note_crowd();
            }
            std::thread::scope(|scope| {
                scope.spawn(|| told.send(understudies.rest(do_wait)).unwrap());
                assert!(heard.recv_timeout(SHORT * 3).is_err(), "requests are served");
                assert!(!understudies.give_up_surplus());
                // This one holds its thread.
                let held = understudies.note_begun();
                are_served.store(false, Ordering::SeqCst);
                assert_eq!(heard.recv_timeout(LONG), Ok(true));
                let another = understudies.note_begun();
                assert!(!understudies.note_ended(another), "it took over itself");
                assert!(understudies.note_ended(held));
                assert!(understudies.give_up_surplus());
                assert!(!understudies.give_up_surplus(), "there was one");
            });
        }
    }

    #[test]
    fn one_looks_after_the_other_and_all_end_with_the_mount() {
        let understudies = Arc::new(Understudies::default());
        let do_wait = Arc::new(AtomicBool::new(true));
        for (heard, thread) in [(); 3].map(|()| resting(&understudies, &do_wait)) {
            assert_eq!(heard.recv_timeout(LONG), Ok(true));
            thread.join().unwrap();
        }
        assert!((0..3).all(|_| understudies.give_up_surplus()));
        do_wait.store(false, Ordering::SeqCst);
        let late = [(); 2].map(|()| resting(&understudies, &do_wait));
        std::thread::sleep(SHORT);
        understudies.end();
        for (heard, thread) in late {
            assert_eq!(heard.recv_timeout(LONG), Ok(false));
            thread.join().unwrap();
        }
        assert!(!understudies.rest(|| true));
    }

    #[test]
    fn it_looks_less_often_in_peace_and_sleeps_without_requests() {
        let understudies = Arc::new(Understudies::default());
        let do_wait = Arc::new(AtomicBool::new(false));
        understudies.note_crowd();
        let (heard, thread) = resting(&understudies, &do_wait);
        for is_asleep in [false, true, true] {
            let end = Instant::now() + LONG;
            while understudies.is_crowded.load(Ordering::SeqCst)
                || understudies.is_asleep.load(Ordering::SeqCst) != is_asleep
            {
                assert!(Instant::now() < end, "it looks and looks");
                std::thread::sleep(CROWDED_INTERVAL);
            }
            if is_asleep {
                serve(&understudies);
                let end = Instant::now() + LONG;
                while understudies.is_asleep.load(Ordering::SeqCst) {
                    assert!(Instant::now() < end, "it sleeps beside requests");
                    std::thread::yield_now();
                }
            }
        }
        do_wait.store(true, Ordering::SeqCst);
        assert_eq!(heard.recv_timeout(LONG), Ok(true));
        thread.join().unwrap();
    }
}

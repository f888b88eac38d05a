//! Work that several ask for (`crates/fs/src/flights.rs`), in the order in which `shuttle` lets threads go on.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use shuttle::sync::Mutex;
use shuttle::thread;

use super::try_interleavings;

#[allow(unreachable_pub, reason = "the product needs it in one module only")]
#[path = "../../crates/fs/src/flights.rs"]
mod flights;

use flights::Flights;

const KEYS: [u8; 3] = [1, 1, 2];

#[derive(Debug, Default)]
struct Work {
    /// By key: the number of what is being done, and of what somebody has the result of.
    running: [usize; 3],
    known: [usize; 3],
    begun: usize,
}

struct Shared {
    flights: Flights<u8, usize>,
    work: Mutex<Work>,
}

impl Shared {
    /// Asks for work about a key; does it, if `fails` not to its end.
    fn ask(&self, key: u8, fails: bool) {
        let slot = usize::from(key);
        let known = self.work.lock().unwrap().known[slot];
        let work = || {
            let number = {
                let mut work = self.work.lock().unwrap();
                assert_eq!(work.running[slot], 0, "it is done twice at a time");
                work.begun += 1;
                work.running[slot] = work.begun;
                work.begun
            };
            thread::yield_now();
            let mut work = self.work.lock().unwrap();
            work.running[slot] = 0;
            if fails {
                drop(work);
                // Without the words of a panic.
                resume_unwind(Box::new("it fails"));
            }
            number
        };
        if let Ok(Some(number)) = catch_unwind(AssertUnwindSafe(|| self.flights.share(key, work))) {
            assert!(number > known, "the result of {number} was known before this was asked");
            let mut work = self.work.lock().unwrap();
            work.known[slot] = work.known[slot].max(number);
        }
    }
}

fn ask_at_once(fails: bool) {
    let shared =
        Arc::new(Shared { flights: Flights::default(), work: Mutex::new(Work::default()) });
    let threads: Vec<_> = KEYS
        .into_iter()
        .map(|key| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.ask(key, fails);
                shared.ask(key, false);
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(shared.flights.share(1, || 0), Some(0), "nothing is left under way");
}

#[test]
fn who_waits_for_others_gets_what_they_got() {
    try_interleavings("sharing", || ask_at_once(false));
}

#[test]
fn who_waits_for_one_that_panics_is_told() {
    try_interleavings("sharing with panics", || ask_at_once(true));
}

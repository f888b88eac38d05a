//! Which edges of the code were taken, where the compiler counts them.
//!
//! `mount-scripts/fuzz.sh` builds kvfs and these tests with LLVM's `inline-8bit-counters`, which
//! call [`__sanitizer_cov_8bit_counters_init`] before `main`. In an ordinary build nobody calls it, and
//! there are no counters.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Address and length of the counters of each object file; equal ones are announced several times.
static COUNTERS: Mutex<BTreeSet<(usize, usize)>> = Mutex::new(BTreeSet::new());

#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, end: *mut u8) {
    let length = end.addr() - start.addr();
    let mut counters = COUNTERS.lock().unwrap_or_else(PoisonError::into_inner);
    counters.insert((start.expose_provenance(), length));
}

/// What was taken so far.
pub(crate) struct Coverage {
    counters: Vec<(usize, usize)>,
    /// For each counter the magnitudes that it had, as bits.
    seen: Vec<Vec<u8>>,
}

impl Coverage {
    pub(crate) fn new() -> Coverage {
        let known = COUNTERS.lock().unwrap_or_else(PoisonError::into_inner);
        let counters: Vec<_> = known.iter().copied().collect();
        let seen = counters.iter().map(|(_, length)| vec![0; *length]).collect();
        Coverage { counters, seen }
    }

    /// Before a run.
    pub(crate) fn reset(&mut self) {
        for &(start, length) in &self.counters {
            counters(start, length).fill(0);
        }
    }

    /// After a run: whether an edge was taken for the first time, or much more often than before.
    pub(crate) fn is_new(&mut self) -> bool {
        let mut is_new = false;
        for (&(start, length), seen) in self.counters.iter().zip(&mut self.seen) {
            for (count, seen) in counters(start, length).iter().zip(seen) {
                // 1, 2, 4, 8 ... times.
                let magnitude = count.checked_ilog2().map_or(0, |power| 1_u8 << power);
                is_new |= magnitude & !*seen != 0;
                *seen |= magnitude;
            }
        }
        is_new
    }

    /// How many were taken in all.
    pub(crate) fn edges(&self) -> usize {
        self.seen.iter().flatten().filter(|seen| **seen != 0).count()
    }
}

fn counters(start: usize, length: usize) -> &'static mut [u8] {
    let start = std::ptr::with_exposed_provenance_mut(start);
    // SAFETY: the compiler laid these counters out, they live as long as the program, and only
    // instrumented code and the one thread that fuzzes touch them; a lost count does no harm.
    unsafe { std::slice::from_raw_parts_mut(start, length) }
}

//! What a reader counts until it [reports](kvfs_page::reader_report) it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Counts;

/// [`Counts`] that several threads add to.
#[derive(Debug, Default)]
pub(super) struct Counters([AtomicU64; 5]);

impl Counters {
    pub(super) fn add(&self, counts: &Counts) {
        for (counter, value) in self.0.iter().zip(counts.values()) {
            counter.fetch_add(value, Ordering::Relaxed);
        }
    }

    pub(super) fn counts(&self) -> Counts {
        let load = |index: usize| self.0[index].load(Ordering::Relaxed);
        Counts::from_values(std::array::from_fn(load))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences() {
        let counters = Counters::default();
        counters.add(&Counts::from_values([1, 2, 3, 4, 5]));
        let first = counters.counts();
        counters.add(&Counts::from_values([10, 0, 0, 0, 50]));
        assert_eq!(counters.counts().since(&first).values(), [10, 0, 0, 0, 50]);
    }
}

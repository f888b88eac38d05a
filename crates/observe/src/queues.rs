//! Requests that wait until a thread of their kind is free.

use std::sync::{Mutex, PoisonError};

use super::gauges::Gauges;

/// How many wait in a queue now.
type Length = Box<dyn Fn() -> usize + Send + Sync>;

/// The queues of a mount, by the kind of their requests.
#[derive(Default)]
pub(super) struct Queues(Mutex<Vec<(&'static str, Length)>>);

impl Queues {
    pub(super) fn add(&self, kind: &'static str, length: Length) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((kind, length));
    }

    pub(super) fn add_lengths(&self, gauges: &mut Gauges) {
        let help = "Requests that wait until a thread of their kind is free";
        for (kind, length) in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let waiting = length() as u64;
            gauges.add_labelled(("kind", kind), "kvfs_requests_waiting", help, waiting);
        }
    }
}

impl std::fmt::Debug for Queues {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Queues").finish_non_exhaustive()
    }
}

//! The last errors, for `.kvfs/errors`.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Lines kept: enough for the pages that a broken engine writes in a minute.
const LINES_MAX: usize = 1000;

/// A bounded list of error lines.
#[derive(Debug, Default)]
pub(super) struct RecentErrors(Mutex<(u64, VecDeque<String>)>);

impl RecentErrors {
    pub(super) fn add(&self, text: &str) {
        let seconds = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0.0, |since| since.as_secs_f64());
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, lines) = &mut *guard;
        *count += 1;
        if lines.len() == LINES_MAX {
            lines.pop_front();
        }
        lines.push_back(format!("{seconds:.3} {text}\n"));
    }

    pub(super) fn text(&self) -> String {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        guard.1.iter().map(String::as_str).collect()
    }

    pub(super) fn count(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0
    }
}

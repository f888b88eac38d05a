//! A mount that is asked to end, while another program is about to take the process over.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whether the mount is being ended. Nobody goes on with it then: the program that took the process over would not
/// know that it was asked to end.
#[derive(Debug, Default)]
pub struct Ending(Mutex<bool>);

impl Ending {
    /// What is known of it, which does not change as long as this is held. Who learns by a signal that the mount
    /// is to end takes this before the signal: it is still there for the other program otherwise.
    pub fn hold(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

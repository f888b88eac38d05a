//! What a fork of the process must not touch.
//!
//! Threads do not come along, so whatever has some (a sequence that is read, attention) would wait for them for
//! ever in the child, also when it is dropped. The child leaves it alone and opens its own.

use std::sync::{Arc, Mutex, PoisonError};

use kvfs_runtime::reader::{Limits, Residents, Settings};

use crate::errors::Failure;

/// The number of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// The one that asks.
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Refuses what another process has opened.
    pub(crate) fn check(self, what: &str) -> Result<(), Failure> {
        if self == Self::this() {
            return Ok(());
        }
        Err(Failure::changed(format!(
            "{what} was opened by process {} before a fork: open it again in this one",
            self.0
        )))
    }
}

/// Belongs to the process that made it; another one leaks it.
#[derive(Debug)]
pub(crate) struct OfProcess<T> {
    process: Process,
    /// Always there until it is dropped.
    value: Option<T>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: Process::this(), value: Some(value) }
    }

    pub(crate) fn peek(&self) -> Result<&T, Failure> {
        self.process.check("this sequence")?;
        self.value.as_ref().ok_or_else(|| Failure::changed("already closed"))
    }

    pub(crate) fn get(&mut self) -> Result<&mut T, Failure> {
        self.process.check("this sequence")?;
        self.value.as_mut().ok_or_else(|| Failure::changed("already closed"))
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.process != Process::this() {
            std::mem::forget(self.value.take());
        }
    }
}

/// Settings with residents of this process. The parent's are locked for ever if one of its threads had them
/// while it forked.
pub(crate) fn settings() -> Settings {
    static OF_PROCESS: Mutex<Option<(Process, Arc<Residents>)>> = Mutex::new(None);
    let mut held = OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let this = Process::this();
    let residents = match held.as_ref() {
        Some((process, residents)) if *process == this => Arc::clone(residents),
        _ => {
            let made = Arc::new(Residents::new(Limits::default()));
            // Its pages are another process's matter.
            std::mem::forget(held.replace((this, Arc::clone(&made))));
            made
        }
    };
    Settings { residents, ..Settings::default() }
}

//! Mapped pages that the device reads by itself, without a copy into a pinned buffer.
//!
//! Registering pins a page's memory and costs about 0.1 s for each GB, so it pays for pages that are
//! read again at the next step: those that the reader keeps mapped from the mount's RAM tier. Not
//! every system allows it for memory that may only be read, so it is tried once.

use std::collections::HashMap;
use std::sync::Arc;

use super::CudaError;
use super::driver::{Context, Registered};
use crate::reader::LoadedPage;
use crate::sys;

/// Of the trial: one OS page.
const TRIAL_BYTES: u64 = 4096;

/// The registered pages of one sequence.
#[derive(Debug, Default)]
pub(super) struct Registry {
    sequence: Option<u64>,
    /// By layer and first token.
    pages: HashMap<(usize, u64), Registered<LoadedPage>>,
    bytes: u64,
    bytes_max: u64,
}

impl Registry {
    /// For so many bytes; for none if the system does not allow it.
    pub(super) fn new(context: &Context, bytes_max: u64) -> Self {
        let is_wanted = bytes_max > 0 && context.properties().registers_read_only;
        let outcome = if is_wanted { trial(context) } else { Ok(false) };
        let is_allowed = outcome.unwrap_or_else(|error| {
            log::debug!("{error}: pages go through pinned buffers");
            false
        });
        Self { bytes_max: if is_allowed { bytes_max } else { 0 }, ..Self::default() }
    }

    /// Whether pages are registered at all.
    pub(super) fn is_used(&self) -> bool {
        self.bytes_max > 0
    }

    /// A scan of a sequence begins: pages of another one are let go of.
    pub(super) fn begin(&mut self, sequence: u64) {
        if self.sequence != Some(sequence) {
            self.pages.clear();
            (self.sequence, self.bytes) = (Some(sequence), 0);
        }
    }

    /// The page, registered; `None` if it is not mapped or there is no room. Whoever came first
    /// stays, as a scan comes back to the beginning.
    pub(super) fn get(
        &mut self, context: &Context, key: (usize, u64), page: &Arc<LoadedPage>,
    ) -> Option<&Registered<LoadedPage>> {
        if !self.is_used() || !page.is_mapped() {
            return None;
        }
        let is_other = |known: &Registered<LoadedPage>| !Arc::ptr_eq(known.owner(), page);
        if self.pages.get(&key).is_some_and(is_other)
            && let Some(known) = self.pages.remove(&key)
        {
            self.bytes -= known.owner().bytes();
        }
        if !self.pages.contains_key(&key) {
            if self.bytes + page.bytes() > self.bytes_max {
                return None;
            }
            match Registered::new(context, Arc::clone(page)) {
                Ok(registered) => {
                    self.bytes += page.bytes();
                    self.pages.insert(key, registered);
                }
                Err(error) => {
                    // What is registered stays; the rest goes through pinned buffers.
                    log::debug!("{error}: no more pages are registered");
                    self.bytes_max = self.bytes;
                    return None;
                }
            }
        }
        self.pages.get(&key)
    }
}

/// Registers a mapped file.
fn trial(context: &Context) -> Result<bool, CudaError> {
    let file = tempfile::tempfile().and_then(|file| {
        file.set_len(TRIAL_BYTES)?;
        sys::map_populated(&file)
    });
    let Ok(map) = file else { return Ok(false) };
    Registered::new(context, Arc::new(map)).map(|_| true)
}

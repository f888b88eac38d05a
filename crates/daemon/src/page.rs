//! What a browser gets from the address of the metrics: the border to the program, which draws it.
//!
//! The daemon knows who asks, the mount and the connection; what is shown of it in which words is the program's, as with
//! commands that show the same.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvfs_fs::glance::{Looker, Told};

/// What somebody may be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Sums: no names of files, directories or places.
    Sums,
    /// What the user of the daemon may see through the mount.
    All,
}

/// A look at directories that is worth only so much: the mount may end meanwhile, and whoever asked gives up.
#[derive(Debug)]
pub struct Look<'a> {
    /// Who looks.
    pub looker: Looker<'a>,
    pub(super) ends: Instant,
    pub(super) is_ending: &'a AtomicBool,
}

impl Look<'_> {
    /// Why it must end, if it must.
    pub fn refusal(&self) -> Option<&'static str> {
        if self.is_ending.load(Ordering::Relaxed) {
            return Some("the mount ends");
        }
        (Instant::now() >= self.ends).then_some("it took too long")
    }
}

/// Who draws it.
pub trait Page: Debug + Send + Sync {
    /// Takes in what the mount says now. It comes at least every ten seconds.
    fn note(&self, told: Told);

    /// The number of the last event that was taken in.
    fn last_event(&self) -> u64;

    /// The document, whose scripts and styles have this nonce.
    fn document(&self, access: Access, nonce: &str) -> String;

    /// What the document shows, as JSON.
    fn figures(&self, access: Access) -> String;

    /// A map of the sequence or model at a path below the mountpoint, as JSON.
    ///
    /// # Errors
    /// A line that says why there is none.
    fn map(&self, look: &Look<'_>, path: &str) -> Result<String, String>;

    /// Paths of which there may be a map, as JSON.
    ///
    /// # Errors
    /// A line that says why there are none.
    fn names(&self, look: &Look<'_>) -> Result<String, String>;
}

//! Reading a sequence while another process writes it, layer by layer.
//!
//! A writer that computes a prompt finishes the pages of one layer after the other. Who is to go on
//! with the sequence can have each as soon as it is sealed: [`Sequence::wait_for`] looks for the one
//! page, or the one tail, that comes next, so waiting costs two requests per look however many
//! layers and pages there are. Nothing has to be registered and nobody is told: a writer that dies
//! leaves a reader whose time runs out.
//!
//! ```no_run
//! use std::time::Duration;
//! use kvfs_runtime::reader::Sequence;
//!
//! let mut sequence = Sequence::open("/mnt/kv/models/llama/sequences/chat".as_ref())?;
//! for start in (0..8192).step_by(1024) {
//!     for layer in sequence.layers() {
//!         let end = start + 1024;
//!         if sequence.wait_for(layer, end, Duration::from_secs(60))? < end {
//!             return Ok(()); // nobody writes any more
//!         }
//!         let mut stream = sequence.stream_layers(&[layer], start..end)?;
//!         while let Some(_run) = stream.next_run()? { /* send it to the device */ }
//!     }
//! }
//! # Ok::<(), kvfs_runtime::reader::ReadError>(())
//! ```

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::listing::{ListedLayer, layer_directory};
use super::{ReadError, Sequence};
use crate::page::{Layer, Manifest, TokenStart, names};
use crate::sys;

/// Between two looks. One costs some 40 us of the processor, so waiting takes a twelfth of a core,
/// and a page is seen a quarter of a millisecond late on average.
const LOOK_EVERY: Duration = Duration::from_micros(500);

impl Sequence {
    /// Waits until a layer has rows of all tokens before `end`, but no longer than that. Returns how
    /// many tokens it has; streams that begin now see them.
    ///
    /// Only what comes behind the pages that are known is looked for: [`refresh`](Self::refresh)
    /// finds those that were replaced.
    ///
    /// # Errors
    /// [`ReadError::Arguments`] for a layer without pages, [`ReadError::Refused`] if the next page
    /// is none, [`ReadError::Io`] and [`ReadError::Disconnected`].
    pub fn wait_for(
        &mut self, layer: Layer, end: u64, longest: Duration,
    ) -> Result<u64, ReadError> {
        let deadline = Instant::now() + longest;
        loop {
            let reached = self.look_for(layer, end)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if reached >= end || left.is_zero() {
                return Ok(reached);
            }
            std::thread::sleep(LOOK_EVERY.min(left));
        }
    }

    fn look_for(&mut self, layer: Layer, end: u64) -> Result<u64, ReadError> {
        let known = self.layer_tokens(layer)?;
        if known >= end {
            return Ok(known);
        }
        let directory = layer_directory(&self.source.path, layer);
        let listed = &mut self.layers[layer.0 as usize];
        while listed.end < end && listed.find_next(&directory, layer, &self.source.manifest)? {}
        Ok(listed.end)
    }
}

impl ListedLayer {
    /// Looks for the page behind the last one, else for rows in the tail there. Whether there was a
    /// page.
    fn find_next(
        &mut self, directory: &Path, layer: Layer, manifest: &Manifest,
    ) -> Result<bool, ReadError> {
        let geometry = manifest.layer_geometry(layer);
        let page_tokens = u64::from(geometry.page_tokens());
        let start = TokenStart(self.pages.last().map_or(0, |last| last.start.0 + page_tokens));
        if let Some(page) = ListedLayer::page_at(directory, start)? {
            let mut grown = self.clone();
            grown.pages.push(page);
            (grown.tail, grown.tail_inode) = (None, 0);
            grown.end = grown.find_end(directory, layer, manifest)?;
            *self = grown;
            return Ok(true);
        }
        let path = directory.join(names::format_tail(start));
        match sys::metadata_no_follow(&path) {
            Ok(metadata) => {
                (self.tail, self.tail_inode) = (Some(start), metadata.ino());
                self.end = start.0 + geometry.rows_in(metadata.len());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(ReadError::io(&path)(error)),
        }
        Ok(false)
    }
}

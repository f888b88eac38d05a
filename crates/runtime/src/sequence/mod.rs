//! Operations on whole sequences, with the meaning that llama.cpp's memory interface gives them.
//!
//! | llama.cpp | here | what happens to the files |
//! |---|---|---|
//! | `llama_memory_seq_rm` | [`Sequences::seq_rm`] | pages without a token go, a hole in a page is noted, at the end a page becomes a tail again |
//! | `llama_memory_seq_cp` | [`Sequences::seq_cp`] | hard links of the pages, a copy of the tail |
//! | `llama_memory_seq_keep` | [`Sequences::seq_keep`] | the other sequences go |
//! | `llama_memory_seq_add`, `_div` | [`Sequences::seq_add`], [`Sequences::seq_div`] | `positions.json` alone; K stays as it was rotated |
//! | `llama_memory_clear` | [`Sequences::clear`], [`Sequences::clear_all`] | |
//! | `llama_memory_seq_pos_min`, `_max` | [`Sequences::seq_pos`] | |
//! | `llama_state_seq_get_data`, `_set_data` | [`Sequences::state_write`], [`Sequences::state_read`] | a tar archive |
//! | a decode that failed half-way | [`Sequences::trim`] | rows that not every layer has go |
//! | a cache with a sliding window | [`Sequences::drop_outside_window`] | pages of such layers that no later token looks at go |
//!
//! There is no defragmentation: rows never move, so nothing is ever scattered. Holes inside of a page
//! take room until the last token of the page goes.
//!
//! ```no_run
//! use kvfs_runtime::sequence::Sequences;
//!
//! // A context of 4096 tokens is full: keep four, drop 1020, move the rest up.
//! let sequences = Sequences::open("/mnt/kv/models/llama".as_ref())?;
//! sequences.seq_rm("chat", 4..1024)?;
//! sequences.seq_add("chat", 1024.., -1020)?;
//! // The same in one step, beside the engine, and what is dropped can still be found.
//! let shift = sequences.start_context_shift("chat", 4..1024, "chat.full")?;
//! shift.join().expect("it does not panic")?;
//! # Ok::<(), kvfs_runtime::sequence::SequenceError>(())
//! ```
//!
//! Two things differ from one cache in memory. Every sequence has positions of its own: moving the
//! tokens of one does not move those that it shares with another. And `seq_cp` makes a sequence, or
//! fills an empty one; it adds nothing to tokens that are there.
//!
//! Each operation is one step for everybody else, also for a crash: one rename gives a sequence its
//! new `positions.json`, or changes its name with that of another directory (`RENAME_EXCHANGE`) that
//! was made beside it as `NAME~`. What a crash leaves under that name goes with the next operation.
//! When an operation returns, it is durable. Operations on the sequences of a model take turns
//! (`flock`); whoever appends to a sequence must wait meanwhile, and open its tails anew afterwards. Where it does not, most
//! of what it does is noticed, and the operation begins again, five times at most ([`SequenceError::Changed`]). A page
//! that an operation divides is opened before its turn: no other waits until a remote has brought it.
//!
//! It works on a mount and on a copy of one.

mod archive;
mod beside;
mod change;
mod error;
mod files;
mod held;
mod opened;
mod range;
mod rebuild;
mod revision;
mod source;
mod turn;
mod whole;
mod work;

#[cfg(test)]
mod tests;

use std::io;
use std::ops::{Range, RangeBounds};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};

pub use error::SequenceError;
pub use revision::begin_revision;
pub use turn::tell_of_waits;

use crate::page::{Layer, LayerKind, Manifest, Positions, names};
use crate::reader::layer_scan::Rules;
use crate::reader::listing;
use crate::reader::page::Home;
use crate::sys;
use range::{bounds, outside};
use rebuild::Rebuild;
use source::{Listed, attempt};

/// The sequences of a model.
#[derive(Debug, Clone)]
pub struct Sequences {
    directory: PathBuf,
    manifest: Manifest,
    home: Home,
}

impl Sequences {
    /// The sequences of the model in directory `MOUNT/models/NAME`.
    ///
    /// # Errors
    /// [`SequenceError::Read`] if there is no manifest.
    pub fn open(model: &Path) -> Result<Self, SequenceError> {
        let directory = model.join(names::SEQUENCES);
        let (manifest, home) = listing::manifest_of_model(model)?;
        // A model without sequences has none.
        match sys::metadata_no_follow(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(SequenceError::io(&directory)(error))
            }
            _ => Ok(Self { directory, manifest, home }),
        }
    }

    /// The model's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The directory of a sequence.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The names of the sequences, in order.
    ///
    /// # Errors
    /// [`SequenceError::Io`].
    pub fn names(&self) -> Result<Vec<String>, SequenceError> {
        let mut names = Vec::new();
        let Some(opened) = self.enter()? else { return Ok(names) };
        for entry in opened.directory.entries()? {
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let name = entry.file_name().into_string();
            names.extend(name.ok().filter(|name| is_directory && check_name(name).is_ok()));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Where the rows of a sequence stand, and how many there are.
    ///
    /// # Errors
    /// [`SequenceError::NoSuchSequence`], [`SequenceError::Read`].
    pub fn positions(&self, name: &str) -> Result<(Positions, u64), SequenceError> {
        self.with_listed(name, |listed| Ok((listed.listing.positions, listed.rows)))
    }

    /// First and last position of a sequence; `None` if it is empty. Every position between them
    /// that is there is there in all layers: with sliding windows the first is that of the layer that
    /// has forgotten most.
    ///
    /// # Errors
    /// As [`positions`](Self::positions).
    pub fn seq_pos(&self, name: &str) -> Result<Option<(u64, u64)>, SequenceError> {
        self.with_listed(name, |listed| {
            let positions = &listed.listing.positions;
            let Some((mut first, last)) = positions.ends(listed.rows) else { return Ok(None) };
            for (_, pages) in self.sliding_layers(&listed) {
                let tail = || pages.tail.map_or(0, |tail| tail.0);
                let end = pages.pages.first().map_or_else(tail, |page| page.start.0);
                let ends = positions.within(0..end.min(listed.rows));
                first = ends.map(|run| run.positions().end).fold(first, u64::max);
            }
            Ok(Some((first, last)))
        })
    }

    /// Removes the tokens at some positions.
    ///
    /// # Errors
    /// [`SequenceError::NoSnapshot`] if the end of a model's recurrent layers would have to go back
    /// to a token that they have no snapshot of; the others as their names say. The sequence is as it
    /// was then.
    pub fn seq_rm(
        &self, name: &str, positions: impl RangeBounds<u64>,
    ) -> Result<(), SequenceError> {
        let positions = bounds(&positions);
        self.change(name, |stands, rows| {
            stands.remove(rows, positions);
            Ok(())
        })
    }

    /// Moves the tokens at some positions by `delta`; those that would stand before 0 are removed.
    ///
    /// # Errors
    /// As [`seq_rm`](Self::seq_rm), and [`SequenceError::Positions`] for tokens that would stand too
    /// far behind.
    pub fn seq_add(
        &self, name: &str, positions: impl RangeBounds<u64>, delta: i64,
    ) -> Result<(), SequenceError> {
        let positions = bounds(&positions);
        self.change(name, |stands, rows| stands.add(rows, positions, delta))
    }

    /// Divides the positions of some tokens, rounding down. Each of them moves by another distance,
    /// so attention rotates the queries once for each; it is as slow as it is in memory without
    /// rewriting K.
    ///
    /// # Errors
    /// As [`seq_rm`](Self::seq_rm), and [`SequenceError::Positions`] for a divisor of 0 and for more
    /// than a million tokens.
    pub fn seq_div(
        &self, name: &str, positions: impl RangeBounds<u64>, divisor: u64,
    ) -> Result<(), SequenceError> {
        let positions = bounds(&positions);
        self.change(name, |stands, rows| stands.divide(rows, positions, divisor))
    }

    /// Makes `to` of the tokens of `from` at some positions; they share their pages from then on.
    ///
    /// # Errors
    /// [`SequenceError::Exists`] if `to` has tokens, else as [`seq_rm`](Self::seq_rm).
    pub fn seq_cp(
        &self, from: &str, to: &str, positions: impl RangeBounds<u64>,
    ) -> Result<(), SequenceError> {
        if from == to {
            return self.with_listed(from, |_| Ok(()));
        }
        let (before, behind) = outside(&positions);
        let select = |listed: &Listed<'_>| {
            let mut stands = listed.listing.positions.clone();
            for gone in [before, behind].into_iter().flatten() {
                stands.remove(listed.rows, gone);
            }
            let end = stands.end_row(listed.rows);
            if end < listed.rows {
                stands.truncate(end);
            }
            Ok((stands, end))
        };
        self.fetch(from, select);
        let turn = self.begin(to)?;
        attempt(&self.path(from), || {
            let listed = turn.list(from)?;
            let (stands, end) = select(&listed)?;
            let is_there = turn.has(to)?;
            if is_there {
                let there = turn.list(to)?;
                if there.rows > 0 {
                    return Err(SequenceError::Exists(to.to_owned()));
                }
                there.directory().check_may_change()?;
            }
            let rebuild = Rebuild { from: &listed, positions: &stands, end, keeps_layers: true };
            turn.copy(&rebuild, to, is_there)
        })
    }

    /// Removes the tokens at some positions and moves those behind them up, in one step: what an
    /// engine does when its context is full. The sequence as it was becomes `snapshot`, which shares
    /// its pages, so what was dropped is still found by its prefix, and a prompt that begins like it
    /// is restored and not computed.
    ///
    /// # Errors
    /// As [`seq_cp`](Self::seq_cp) and [`seq_rm`](Self::seq_rm).
    pub fn context_shift(
        &self, name: &str, dropped: Range<u64>, snapshot: &str,
    ) -> Result<(), SequenceError> {
        match self.seq_cp(name, snapshot, ..) {
            // One that was interrupted has made it already.
            Err(SequenceError::Exists(_)) if self.is_copy(snapshot, name)? => {}
            outcome => outcome?,
        }
        self.change(name, |stands, rows| {
            let count = dropped.end.saturating_sub(dropped.start).cast_signed();
            stands.remove(rows, dropped.clone());
            stands.add(rows, dropped.end.., count.saturating_neg())
        })
    }

    /// The same on a thread of its own, while the engine goes on with what it has in memory. It must
    /// not append to the sequence before the thread has ended.
    ///
    /// # Errors
    /// [`SequenceError::Io`] if there can be no thread.
    pub fn start_context_shift(
        &self, name: &str, dropped: Range<u64>, snapshot: &str,
    ) -> Result<JoinHandle<Result<(), SequenceError>>, SequenceError> {
        let (all, name, snapshot) = (self.clone(), name.to_owned(), snapshot.to_owned());
        let thread = Builder::new().name("kvfs-shift".to_owned());
        thread
            .spawn(move || all.context_shift(&name, dropped, &snapshot))
            .map_err(SequenceError::io(&self.directory))
    }

    /// Removes all other sequences.
    ///
    /// # Errors
    /// [`SequenceError::NoSuchSequence`], before anything is removed; [`SequenceError::Io`].
    pub fn seq_keep(&self, name: &str) -> Result<(), SequenceError> {
        self.with_listed(name, |_| Ok(()))?;
        let others = self.names()?.into_iter().filter(|other| other != name);
        others.into_iter().try_for_each(|other| self.remove(&other))
    }

    /// Removes all tokens of a sequence; its directory and its limits stay.
    ///
    /// # Errors
    /// [`SequenceError::NoSuchSequence`], [`SequenceError::Read`], [`SequenceError::Io`].
    pub fn clear(&self, name: &str) -> Result<(), SequenceError> {
        let turn = self.begin(name)?;
        attempt(&self.path(name), || {
            let (from, positions) = (&turn.list_settled(name)?, &Positions::default());
            let rebuild = Rebuild { from, positions, end: 0, keeps_layers: false };
            turn.replace(&rebuild, name, |_| Ok((Positions::default(), 0)))
        })
    }

    /// Takes out rows and ids that not every layer has: what a writer left that did not come to its end. Returns
    /// whether there were any; the directory is another one then.
    ///
    /// # Errors
    /// As [`clear`](Self::clear).
    pub fn trim(&self, name: &str) -> Result<bool, SequenceError> {
        let turn = self.begin(name)?;
        attempt(&self.path(name), || {
            let listed = turn.list_settled(name)?;
            if listed.is_whole(&self.manifest)? {
                return Ok(false);
            }
            let (positions, end) = (&listed.listing.positions, listed.rows);
            let rebuild = Rebuild { from: &listed, positions, end, keeps_layers: true };
            turn.replace(&rebuild, name, |now| Ok((now.listing.positions.clone(), now.rows)))?;
            Ok(true)
        })
    }

    /// Removes all sequences, and what interrupted operations left.
    ///
    /// # Errors
    /// [`SequenceError::Io`].
    pub fn clear_all(&self) -> Result<(), SequenceError> {
        self.names()?.iter().try_for_each(|name| self.remove(name))?;
        self.remove_rests()
    }

    /// Removes pages of layers with a sliding window that neither the last token nor any later one
    /// looks at. Returns how many.
    ///
    /// # Errors
    /// As [`clear`](Self::clear).
    pub fn drop_outside_window(&self, name: &str) -> Result<u64, SequenceError> {
        let turn = self.begin(name)?;
        let listed = turn.list(name)?;
        let page_tokens = u64::from(self.manifest.geometry().page_tokens());
        let (mut dropped, mut count) = (Vec::new(), 0);
        for (layer, pages) in self.sliding_layers(&listed) {
            let rules = Rules::new(layer, &self.manifest, &listed.listing.positions, listed.rows);
            let is_passed = |page: &&listing::ListedPage| {
                // The last one may be short, and tells how long the layer is.
                let rows = page.start.0..page.start.0 + page_tokens;
                rows.end <= listed.rows && rules.has_passed(rows)
            };
            let passed = pages.pages.iter().filter(is_passed);
            let passed: Vec<_> = passed.map(|page| names::format_page(page.start)).collect();
            if !passed.is_empty() {
                count += passed.len() as u64;
                dropped.push((layer, passed));
            }
        }
        files::remove_all(&listed, &dropped, self.home)?;
        Ok(count)
    }

    /// The last snapshot of a recurrent layer: the tokens that it has seen, and the file. An engine
    /// goes on from there; what stands behind it must be computed again.
    ///
    /// # Errors
    /// As [`positions`](Self::positions).
    pub fn latest_snapshot(
        &self, name: &str, layer: Layer,
    ) -> Result<Option<(u64, PathBuf)>, SequenceError> {
        self.with_listed(name, |listed| {
            let Some(directory) = listed.layer(layer)? else { return Ok(None) };
            let mut latest = None;
            for entry in directory.entries()? {
                let name = entry.file_name();
                if let Some(tokens) = names::parse_state(name.as_bytes()) {
                    latest = latest.max(Some((tokens.0, directory.known_path(&name))));
                }
            }
            Ok(latest)
        })
    }

    fn sliding_layers<'a>(
        &'a self, listed: &'a Listed<'_>,
    ) -> impl Iterator<Item = (Layer, &'a listing::ListedLayer)> {
        let layers = (0..self.manifest.geometry().num_layers()).map(Layer);
        let all = layers.zip(&listed.listing.layers);
        all.filter(|(layer, _)| {
            matches!(self.manifest.layer_kind(*layer), Some(LayerKind::Sliding { .. }))
        })
    }
}

/// A sequence is a directory that is no staging name and no work of an operation.
fn check_name(name: &str) -> Result<(), SequenceError> {
    let is_odd = name.is_empty()
        || name.contains(['/', '\0'])
        || name.ends_with(names::WORK_SUFFIX)
        || names::is_staging(name.as_bytes());
    if is_odd { Err(SequenceError::Name(name.to_owned())) } else { Ok(()) }
}

//! Dropping tokens of a sequence while it is in use.
//!
//! The files are not to be touched by the engine while the snapshot is made, so the rows of the
//! next tokens are kept in memory for that long; what attention reads of the pages stays mapped.

use std::ops::Range;
use std::thread::JoinHandle;

use kvfs::sequence::{SequenceError, Sequences};

use super::MountCache;
use crate::Result;

/// A shift that is under way.
#[derive(Debug)]
pub(super) struct Shift {
    thread: JoinHandle<std::result::Result<(), SequenceError>>,
    /// Tokens that came since it began: their ids and rows are only here.
    held: usize,
}

/// A shift that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shifted {
    /// The sequence that has all tokens as they were.
    pub(crate) snapshot: String,
    /// Positions that were dropped.
    pub(crate) dropped: Range<usize>,
    /// Tokens that were computed before its files were done.
    pub(crate) beside: usize,
}

impl MountCache {
    /// All sequences of the model.
    pub(crate) fn sequences(&self) -> Result<Sequences> {
        let sequence = std::path::absolute(&self.sequence)?;
        let model = sequence.ancestors().nth(2).ok_or("not in a model")?;
        Ok(Sequences::open(model)?)
    }

    /// The name of this one.
    pub(crate) fn name(&self) -> Result<String> {
        let name = self.sequence.file_name().and_then(|name| name.to_str());
        Ok(name.ok_or("a sequence has a name")?.to_owned())
    }

    /// What was dropped so far.
    pub(crate) fn shifts(&self) -> &[Shifted] {
        &self.shifted
    }

    /// Drops the tokens at these positions, moves those behind them up, and returns at once. The
    /// files follow: the sequence as it was becomes `snapshot`.
    pub(crate) fn start_shift(
        &mut self, all: &Sequences, dropped: Range<usize>, snapshot: &str,
    ) -> Result<()> {
        self.finish_shift()?;
        self.settle()?;
        let rows = self.layers.iter().map(super::LayerFiles::end).max().unwrap_or(0) as u64;
        let [start, end] = [dropped.start as u64, dropped.end as u64];
        let thread = all.start_context_shift(&self.name()?, start..end, snapshot)?;
        self.shift = Some(Shift { thread, held: 0 });
        self.positions.remove(rows, start..end);
        self.positions.add(rows, end.., -i64::try_from(dropped.len())?)?;
        self.dropped += dropped.len();
        self.shifted.push(Shifted { snapshot: snapshot.to_owned(), dropped, beside: 0 });
        Ok(())
    }

    /// Ends a shift whose files are done, or that has to be: rows are about to fill a page.
    pub(super) fn end_shift_if_due(&mut self, tokens: usize) -> Result<()> {
        let Some(shift) = &self.shift else { return Ok(()) };
        let end = self.layers.iter().map(super::LayerFiles::end).max().unwrap_or(0);
        let fills = end % self.page_tokens + tokens >= self.page_tokens;
        if fills || shift.thread.is_finished() { self.finish_shift() } else { Ok(()) }
    }

    /// Waits until the files are done, and writes what was kept back meanwhile: first the rows.
    pub(super) fn finish_shift(&mut self) -> Result<()> {
        let Some(Shift { thread, held }) = self.shift.take() else { return Ok(()) };
        thread.join().map_err(|_| "the thread that drops tokens has panicked")??;
        self.layers.iter_mut().try_for_each(super::LayerFiles::settle)?;
        self.tokens.write_noted(held)?;
        if let Some(last) = self.shifted.last_mut() {
            last.beside = held;
        }
        Ok(())
    }

    /// Keeps ids back, whose rows are. Whether it does.
    pub(super) fn holds_back(&mut self, ids: &[u32]) -> bool {
        let Some(shift) = &mut self.shift else { return false };
        shift.held += ids.len();
        self.tokens.note(ids);
        true
    }
}

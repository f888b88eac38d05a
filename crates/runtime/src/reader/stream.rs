//! A scan in order: pages are handed out while the next ones are being loaded.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::attend::length;
use super::layer_scan::LayerScan;
use super::loader::{Answer, Done, Job};
use super::page::LoadedPage;
use super::run::Run;
use super::{Counts, ReadError, Sequence};
use crate::attention::KvBlock;
use crate::page::{Layer, Positions, TokenStart};

/// Pages that a stream holds ready, resident ones included: a million tokens of a layer in pages of
/// 1024.
const AHEAD_PAGES_MAX: usize = 1024;

/// Pages of a stream that are being loaded or were and wait to be handed out.
const WINDOW_PAGES_MAX: u64 = 64;

/// A page on its way to the caller.
#[derive(Debug)]
struct Slot {
    /// Index of its layer.
    scan: usize,
    /// Index of the page in the layer.
    page: usize,
    /// It was not resident.
    is_load: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    Loading,
    Ready(Result<Arc<LoadedPage>, ReadError>),
}

/// A scan of some layers of a sequence, one after the other. Dropping it cancels what is not being
/// read yet.
///
/// Pages of the next layers are loaded while those of one are attended to: K and V do not depend on
/// the query. Tails are read when their turn comes, so rows appended until then are there.
#[derive(Debug)]
pub struct Stream<'s> {
    sequence: &'s Sequence,
    scans: Vec<LayerScan>,
    tokens: Range<u64>,
    /// The layer that is handed out, and the page of it that comes next.
    current: (usize, usize),
    has_tail: bool,
    /// Which pages are read, by their place from the first token on, the tail as one of them; all
    /// that there are if absent.
    seen: Option<Vec<bool>>,
    /// Layers before this one are read ahead.
    reach: usize,
    /// The next page to ask for: layer and page.
    cursor: (usize, usize),
    ahead: VecDeque<Slot>,
    /// Number of the first slot.
    front: u64,
    /// Slots that are loads.
    loads: u64,
    window: u64,
    done: (Sender<Done>, Receiver<Done>),
    cancelled: Arc<AtomicBool>,
    has_failed: bool,
}

impl<'s> Stream<'s> {
    pub(super) fn new(sequence: &'s Sequence, scans: Vec<LayerScan>, tokens: Range<u64>) -> Self {
        sequence.source.residents.begin_scan();
        let geometry = sequence.manifest().largest_geometry();
        let page_bytes = geometry.file_bytes(geometry.page_tokens());
        // A run has up to half as many as are on their way.
        let window = (sequence.stream_bytes / page_bytes * 2 / 3).clamp(2, WINDOW_PAGES_MAX);
        let capacity = usize::try_from(window).unwrap_or(2);
        Self {
            sequence,
            has_tail: false,
            seen: None,
            reach: scans.len(),
            scans,
            tokens,
            current: (0, 0),
            cursor: (0, 0),
            ahead: VecDeque::new(),
            front: 0,
            loads: 0,
            window,
            done: bounded(capacity),
            cancelled: Arc::default(),
            has_failed: false,
        }
    }

    pub(super) fn scans(&self) -> &[LayerScan] {
        &self.scans
    }

    /// The layer whose pages come next; `None` after the last one.
    pub fn layer(&self) -> Option<Layer> {
        self.scans.get(self.current.0).map(LayerScan::layer)
    }

    /// The rows that the stream goes through in each layer: from the beginning of the first page.
    pub fn tokens(&self) -> Range<u64> {
        let page_tokens = u64::from(self.sequence.manifest().geometry().page_tokens());
        let start = if self.tokens.is_empty() { 0 } else { self.tokens.start % page_tokens };
        self.tokens.start - start..self.tokens.end.max(self.tokens.start)
    }

    /// The pages of each layer, and the tail, without their bytes, as they were written: what
    /// [`PageTopK::select`](crate::attention::select::PageTopK::select) chooses among.
    pub fn outline(&self) -> Vec<KvBlock<'static>> {
        let page_tokens = u64::from(self.sequence.manifest().geometry().page_tokens());
        let tokens = self.tokens();
        let starts = (tokens.start..tokens.end).step_by(usize::try_from(page_tokens).unwrap_or(1));
        let length = |start| usize::try_from(page_tokens.min(tokens.end - start)).unwrap_or(0);
        starts.map(|start| KvBlock::outline(length(start), start)).collect()
    }

    /// The next pages of this layer, as many as are in memory; waits only if the first of them is
    /// not. `None` after the last one, and the next call begins with the next layer. Pages that a
    /// window has passed are left out where they are gone.
    ///
    /// # Errors
    /// What [`ReadError`] says of pages. The scan ends there.
    pub fn next_run(&mut self) -> Result<Option<Run>, ReadError> {
        self.narrow(None, self.scans.len());
        self.next_seen_run()
    }

    /// From here on reads these pages alone, the tail as the one behind them or all if absent, and
    /// ahead in the layers before `reach`. What was asked for under another rule is let go of.
    pub(crate) fn narrow(&mut self, seen: Option<Vec<bool>>, reach: usize) {
        self.reach = reach;
        if self.seen == seen {
            return;
        }
        self.seen = seen;
        // Whatever is still being loaded answers to nobody.
        self.cancelled.store(true, Ordering::Relaxed);
        self.cancelled = Arc::default();
        self.done = bounded(usize::try_from(self.window).unwrap_or(2));
        self.ahead.clear();
        self.loads = 0;
        self.cursor = self.current;
    }

    /// The layers from this one on, in order.
    pub(super) fn layers_left(&self) -> impl Iterator<Item = (usize, Layer)> {
        self.scans.iter().map(LayerScan::layer).enumerate().skip(self.current.0)
    }

    pub(crate) fn manifest(&self) -> &'s crate::page::Manifest {
        self.sequence.manifest()
    }

    /// As [`next_run`](Self::next_run), of the pages that are seen.
    pub(super) fn next_seen_run(&mut self) -> Result<Option<Run>, ReadError> {
        self.unless_failed(|stream| stream.gather(true))
    }

    /// As [`next_seen_run`](Self::next_seen_run), without the tail: who reads ahead of the queries
    /// would miss the rows that come with them.
    pub(crate) fn next_pages(&mut self) -> Result<Option<Run>, ReadError> {
        self.unless_failed(|stream| stream.gather(false))
    }

    /// The tail of a layer by its index, if it is seen and there is one.
    pub(crate) fn tail_of(&mut self, index: usize) -> Result<Option<Run>, ReadError> {
        self.unless_failed(|stream| {
            let layer = stream.scans[index].layer();
            let mut run = Run::new(layer, stream.sequence, &stream.tokens);
            stream.add_tail(index, &mut run)?;
            Ok((!run.is_empty()).then_some(run))
        })
    }

    /// Whether [`next_pages`](Self::next_pages) would not wait.
    pub(crate) fn poll_ready(&mut self) -> bool {
        self.ask_ahead();
        self.ahead.front().is_none_or(|slot| matches!(slot.state, State::Ready(_)))
    }

    /// The index of the layer that is handed out; the number of layers after the last one.
    pub(crate) fn index(&self) -> usize {
        self.current.0
    }

    /// A layer by its index.
    pub(crate) fn layer_at(&self, index: usize) -> Option<Layer> {
        self.scans.get(index).map(LayerScan::layer)
    }

    /// Start and inode of the pages of a layer, as they were listed.
    pub(crate) fn listed(&self, index: usize) -> impl Iterator<Item = (u64, u64)> {
        self.scans[index].pages().iter().map(|page| (page.start.0, page.inode))
    }

    /// What tells the sequence from others of this process.
    pub(crate) fn sequence_number(&self) -> u64 {
        self.sequence.source.number
    }

    /// Goes back to the beginning of a layer, to read it under another rule.
    pub(crate) fn rewind(&mut self, index: usize, seen: Option<Vec<bool>>, reach: usize) {
        (self.current, self.has_tail) = ((index, 0), false);
        // Also where the rule is the same, what is under way is of other pages.
        self.seen = None;
        self.narrow(Some(Vec::new()), reach);
        self.narrow(seen, reach);
    }

    fn unless_failed<T>(
        &mut self, act: impl FnOnce(&mut Self) -> Result<T, ReadError>,
    ) -> Result<T, ReadError> {
        if self.has_failed {
            let why = "a page of this scan could not be read: begin another one";
            return Err(ReadError::Arguments(why.to_owned()));
        }
        let outcome = act(self);
        self.has_failed = outcome.is_err();
        outcome
    }

    fn gather(&mut self, with_tail: bool) -> Result<Option<Run>, ReadError> {
        let Some(layer) = self.layer() else { return Ok(None) };
        let mut run = Run::new(layer, self.sequence, &self.tokens);
        let mut counts = Counts::default();
        let mut loads = 0;
        loop {
            self.ask_ahead();
            let Some(front) = self.ahead.front().filter(|slot| slot.scan == self.current.0) else {
                break;
            };
            let (is_load, is_there) = (front.is_load, matches!(front.state, State::Ready(_)));
            if run.has_pages() && (!is_there || is_load && loads >= self.window / 2) {
                break;
            }
            let stalled = self.wait_for_front();
            loads += u64::from(is_load);
            let page = self.take_front()?;
            count(&mut counts, &page, is_load, stalled);
            run.push(page)?;
        }
        let wants_tail = with_tail && !self.has_tail;
        if wants_tail && self.cursor.0 > self.current.0 && !self.is_ahead() {
            self.add_tail(self.current.0, &mut run)?;
            self.has_tail = run.has_tail();
        }
        self.sequence.counters.add(&counts);
        if run.is_empty() {
            self.current = (self.current.0 + 1, 0);
            self.has_tail = false;
            return Ok(None);
        }
        Ok(Some(run))
    }

    /// Whether pages of this layer are still to be handed out.
    fn is_ahead(&self) -> bool {
        self.ahead.front().is_some_and(|slot| slot.scan == self.current.0)
    }

    fn is_seen(&self, start: TokenStart) -> bool {
        let page_tokens = u64::from(self.sequence.manifest().geometry().page_tokens());
        let place = length(&(self.tokens().start..start.0)) as u64 / page_tokens;
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        self.seen.as_ref().is_none_or(|seen| seen.get(place).is_some_and(|seen| *seen))
    }

    /// A page of this layer that is wanted, and that a window has passed: it is gone.
    pub(super) fn passed_page(&self) -> Option<TokenStart> {
        let scan = self.scans.get(self.current.0)?;
        scan.passed().iter().copied().find(|start| self.is_seen(*start))
    }

    /// Of the layer that comes next.
    pub(super) fn positions(&self) -> &'s Positions {
        let layer = self.layer();
        layer.map_or(&self.sequence.positions, |layer| self.sequence.positions_of(layer))
    }

    /// Whether every page of every layer is there and stands where it was written.
    pub(crate) fn is_plain(&self) -> bool {
        self.sequence.positions.is_plain() && self.scans.iter().all(|scan| scan.passed().is_empty())
    }

    /// Asks for pages until enough are on their way.
    fn ask_ahead(&mut self) {
        self.take_answers();
        while self.ahead.len() < AHEAD_PAGES_MAX {
            let (index, at) = self.cursor;
            let Some(scan) = self.scans[..self.reach].get(index) else { return };
            let Some(page) = scan.pages().get(at).copied() else {
                self.cursor = (index + 1, 0);
                continue;
            };
            if !self.is_seen(page.start) {
                self.cursor.1 += 1;
                continue;
            }
            let source = &self.sequence.source;
            let resident = source.residents.get(&source.key(scan.layer(), &page));
            let is_load = resident.is_none();
            if is_load && self.loads >= self.window {
                return;
            }
            let number = self.front + self.ahead.len() as u64;
            let state = resident.map_or(State::Loading, |page| State::Ready(Ok(page)));
            self.ahead.push_back(Slot { scan: index, page: at, is_load, state });
            self.cursor.1 += 1;
            if is_load {
                self.loads += 1;
                let (to, cancelled) = (self.done.0.clone(), Arc::clone(&self.cancelled));
                let answer = Answer { number, to, cancelled, is_given: false };
                self.sequence.loader.submit(Job { layer: scan.layer(), page, answer });
            }
        }
    }

    fn take_answers(&mut self) {
        while let Ok(done) = self.done.1.try_recv() {
            self.take_answer(done);
        }
    }

    fn take_answer(&mut self, (number, outcome): Done) {
        let index = usize::try_from(number - self.front).unwrap_or(usize::MAX);
        if let Some(slot) = self.ahead.get_mut(index) {
            slot.state = State::Ready(outcome);
        }
    }

    /// How long the first page was waited for, if it was.
    fn wait_for_front(&mut self) -> Option<Duration> {
        let is_loading = |stream: &Self| {
            stream.ahead.front().is_some_and(|slot| matches!(slot.state, State::Loading))
        };
        if !is_loading(self) {
            return None;
        }
        let start = Instant::now();
        while is_loading(self) {
            // We hold a sender, so the channel stays connected, and every job answers.
            if let Ok(done) = self.done.1.recv() {
                self.take_answer(done);
            }
        }
        Some(start.elapsed())
    }

    fn take_front(&mut self) -> Result<Arc<LoadedPage>, ReadError> {
        let slot = self.ahead.pop_front().expect("the caller has seen it");
        self.front += 1;
        self.current.1 = slot.page + 1;
        self.loads -= u64::from(slot.is_load);
        match slot.state {
            State::Ready(outcome) => outcome,
            State::Loading => unreachable!("the caller has waited for it"),
        }
    }

    fn add_tail(&self, index: usize, run: &mut Run) -> Result<(), ReadError> {
        let scan = &self.scans[index];
        let wanted = scan.tail().filter(|(start, _)| self.is_seen(*start));
        let Some((start, tokens)) = wanted else { return Ok(()) };
        run.add_tail(self.sequence.tail_rows(scan.layer(), start, tokens)?);
        Ok(())
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.sequence.report_if_due();
    }
}

fn count(counts: &mut Counts, page: &LoadedPage, is_load: bool, stalled: Option<Duration>) {
    let bytes = page.bytes();
    if is_load && !page.is_mapped() {
        counts.streamed_bytes += bytes;
    } else {
        counts.resident_bytes += bytes;
    }
    match stalled {
        Some(stalled) => {
            counts.stalled_bytes += bytes;
            counts.stalled += stalled;
        }
        None if is_load => counts.prefetched_bytes += bytes,
        None => {}
    }
}

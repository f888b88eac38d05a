//! A scan in order: pages are handed out while the next ones are being loaded.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::listing::{ListedLayer, ListedPage, layer_directory};
use super::loader::{Answer, Done, Job};
use super::page::LoadedPage;
use super::tail::TailRows;
use super::{Counts, ReadError, Sequence};
use crate::attention::{Attention, KvBlock, Options, Partials, Queries};
use crate::page::{Geometry, Layer, TokenStart, names};

/// Pages that a stream holds ready, resident ones included: a million tokens of a layer in pages of
/// 1024.
const AHEAD_PAGES_MAX: usize = 1024;

/// Pages of a stream that are being loaded or were and wait to be handed out.
const WINDOW_PAGES_MAX: u64 = 64;

/// What a stream reads of one layer.
#[derive(Debug)]
pub(super) struct LayerScan {
    layer: Layer,
    pages: Vec<ListedPage>,
    /// Where the tail starts, and how many of its tokens are wanted.
    tail: Option<(TokenStart, u64)>,
}

impl LayerScan {
    /// The pages with `tokens`, without a hole.
    pub(super) fn new(
        layer: Layer, listed: &ListedLayer, tokens: &Range<u64>, page_tokens: u64,
    ) -> Result<Self, ReadError> {
        let mut at = tokens.start / page_tokens * page_tokens;
        let first = listed.pages.partition_point(|page| page.start.0 < at);
        let mut scan = Self { layer, pages: Vec::new(), tail: None };
        for page in &listed.pages[first..] {
            if at >= tokens.end || page.start.0 != at {
                break;
            }
            scan.pages.push(*page);
            at += page_tokens;
        }
        let left = tokens.end.saturating_sub(at);
        if left == 0 || tokens.is_empty() {
            return Ok(scan);
        }
        let mut missing = TokenStart(at);
        if listed.tail == Some(missing) {
            if left <= page_tokens {
                scan.tail = Some((missing, left));
                return Ok(scan);
            }
            missing.0 += page_tokens;
        }
        Err(ReadError::Missing { layer, start: missing })
    }
}

impl LayerScan {
    pub(super) fn layer(&self) -> Layer {
        self.layer
    }

    pub(super) fn pages(&self) -> &[ListedPage] {
        &self.pages
    }

    pub(super) fn tail_tokens(&self) -> u64 {
        self.tail.map_or(0, |(_, tokens)| tokens)
    }
}

/// A page on its way to the caller.
#[derive(Debug)]
struct Slot {
    /// Index of its layer.
    scan: usize,
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
    /// The layer that is handed out.
    current: usize,
    has_tail: bool,
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
        let geometry = sequence.manifest().geometry();
        let page_bytes = geometry.file_bytes(geometry.page_tokens());
        // A run has up to half as many as are on their way.
        let window = (sequence.stream_bytes / page_bytes * 2 / 3).clamp(2, WINDOW_PAGES_MAX);
        let capacity = usize::try_from(window).unwrap_or(2);
        Self {
            sequence,
            has_tail: false,
            scans,
            tokens,
            current: 0,
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
        self.scans.get(self.current).map(|scan| scan.layer)
    }

    /// The next pages of this layer, as many as are in memory; waits only if the first of them is
    /// not. `None` after the last one, and the next call begins with the next layer.
    ///
    /// # Errors
    /// What [`ReadError`] says of pages. The scan ends there.
    pub fn next_run(&mut self) -> Result<Option<Run>, ReadError> {
        if self.has_failed {
            let why = "a page of this scan could not be read: begin another one";
            return Err(ReadError::Arguments(why.to_owned()));
        }
        let outcome = self.gather();
        self.has_failed = outcome.is_err();
        outcome
    }

    /// Attends to this layer, and goes on to the next one.
    ///
    /// The queries see the tokens of the stream, as far as the options let them. A mask and a
    /// selection count tokens of all blocks, so they need all blocks at once: take the
    /// [`runs`](Self::next_run) and call [`Attention::run`].
    ///
    /// # Errors
    /// As [`next_run`](Self::next_run), [`ReadError::Attention`] as [`Attention::run`], and
    /// [`ReadError::Arguments`] for a mask or a selection, or if there is no layer left.
    pub fn attend(
        &mut self, attention: &Attention, queries: &Queries<'_>, options: &Options<'_>,
    ) -> Result<Partials, ReadError> {
        if options.mask.is_some() || options.selection.is_some() {
            let why = "a mask or a selection needs all blocks at once";
            return Err(ReadError::Arguments(why.to_owned()));
        }
        if self.layer().is_none() {
            return Err(ReadError::Arguments("no layer of the scan is left".to_owned()));
        }
        // Refuses what does not fit even where there are no tokens.
        let mut all = attention.run(queries, &[], options)?;
        while let Some(run) = self.next_run()? {
            all.merge(&attention.run(queries, &run.blocks(), options)?)?;
        }
        Ok(all)
    }

    fn gather(&mut self) -> Result<Option<Run>, ReadError> {
        let Some(layer) = self.layer() else { return Ok(None) };
        let mut run = Run::new(layer, *self.sequence.manifest().geometry(), &self.tokens);
        let mut counts = Counts::default();
        let mut loads = 0;
        loop {
            self.ask_ahead();
            let Some(front) = self.ahead.front().filter(|slot| slot.scan == self.current) else {
                break;
            };
            let (is_load, is_there) = (front.is_load, matches!(front.state, State::Ready(_)));
            if !run.pages.is_empty() && (!is_there || is_load && loads >= self.window / 2) {
                break;
            }
            let stalled = self.wait_for_front();
            loads += u64::from(is_load);
            let page = self.take_front()?;
            count(&mut counts, &page, is_load, stalled);
            run.push(page)?;
        }
        if self.cursor.0 > self.current && !self.is_ahead() {
            self.add_tail(&mut run)?;
        }
        self.sequence.counters.add(&counts);
        if run.is_empty() {
            self.current += 1;
            self.has_tail = false;
            return Ok(None);
        }
        Ok(Some(run))
    }

    /// Whether pages of this layer are still to be handed out.
    fn is_ahead(&self) -> bool {
        self.ahead.front().is_some_and(|slot| slot.scan == self.current)
    }

    /// Asks for pages until enough are on their way.
    fn ask_ahead(&mut self) {
        self.take_answers();
        while self.ahead.len() < AHEAD_PAGES_MAX {
            let (index, page) = self.cursor;
            let Some(scan) = self.scans.get(index) else { return };
            let Some(page) = scan.pages.get(page).copied() else {
                self.cursor = (index + 1, 0);
                continue;
            };
            let source = &self.sequence.source;
            let resident = source.residents.get(&source.key(scan.layer, &page));
            let is_load = resident.is_none();
            if is_load && self.loads >= self.window {
                return;
            }
            let number = self.front + self.ahead.len() as u64;
            let state = resident.map_or(State::Loading, |page| State::Ready(Ok(page)));
            self.ahead.push_back(Slot { scan: index, is_load, state });
            self.cursor.1 += 1;
            if is_load {
                self.loads += 1;
                let (to, cancelled) = (self.done.0.clone(), Arc::clone(&self.cancelled));
                let answer = Answer { number, to, cancelled, is_given: false };
                self.sequence.loader.submit(Job { layer: scan.layer, page, answer });
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
        self.loads -= u64::from(slot.is_load);
        match slot.state {
            State::Ready(outcome) => outcome,
            State::Loading => unreachable!("the caller has waited for it"),
        }
    }

    fn add_tail(&mut self, run: &mut Run) -> Result<(), ReadError> {
        let scan = &self.scans[self.current];
        let Some((start, tokens)) = scan.tail.filter(|_| !self.has_tail) else { return Ok(()) };
        let source = &self.sequence.source;
        let path = layer_directory(&source.path, scan.layer).join(names::format_tail(start));
        let tail = &self.sequence.tails[scan.layer.0 as usize];
        let place = (scan.layer, start);
        run.tail = Some(tail.read(&path, place, tokens, source.manifest.geometry())?);
        self.has_tail = true;
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

/// Consecutive pages of a layer, and the tail if it follows. While it lives they stay in memory.
#[derive(Debug)]
pub struct Run {
    layer: Layer,
    geometry: Geometry,
    /// Of the stream.
    end: u64,
    pages: Vec<Arc<LoadedPage>>,
    tail: Option<TailRows>,
}

impl Run {
    fn new(layer: Layer, geometry: Geometry, tokens: &Range<u64>) -> Self {
        Self { layer, geometry, end: tokens.end, pages: Vec::new(), tail: None }
    }

    /// The layer.
    pub fn layer(&self) -> Layer {
        self.layer
    }

    /// How many tokens it has, up to the end of the stream.
    pub fn tokens(&self) -> u64 {
        let tail = self.tail.as_ref().map_or(0, TailRows::tokens);
        self.pages.iter().map(|page| self.tokens_of(page)).sum::<u64>() + tail
    }

    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        let tail = self.tail.as_ref().map_or(0, |tail| tail.bytes(&self.geometry));
        self.pages.iter().map(|page| page.bytes()).sum::<u64>() + tail
    }

    /// Bytes of them that are mapped from the mount's memory.
    pub fn mapped_bytes(&self) -> u64 {
        self.pages.iter().filter(|page| page.is_mapped()).map(|page| page.bytes()).sum()
    }

    /// K and V in order, at the positions that they were written for.
    pub fn blocks(&self) -> Vec<KvBlock<'_>> {
        let pages = self.pages.iter().map(|page| {
            let mut block = page.block();
            let tokens = usize::try_from(self.tokens_of(page));
            block.tokens = block.tokens.min(tokens.unwrap_or(usize::MAX));
            block
        });
        pages.chain(self.tail.iter().map(|tail| tail.block(&self.geometry))).collect()
    }

    fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.tail.is_none()
    }

    fn tokens_of(&self, page: &LoadedPage) -> u64 {
        u64::from(page.tokens()).min(self.end.saturating_sub(page.start()))
    }

    /// A page that is shorter than the stream wants is the last of its layer.
    fn push(&mut self, page: Arc<LoadedPage>) -> Result<(), ReadError> {
        let wanted = u64::from(self.geometry.page_tokens()).min(self.end - page.start());
        if u64::from(page.tokens()) < wanted {
            let start = TokenStart(page.start() + u64::from(page.tokens()));
            return Err(ReadError::Missing { layer: self.layer, start });
        }
        self.pages.push(page);
        Ok(())
    }
}

//! A sequence of a mount, layer by layer: the pages of the hot window stay on the device, the others
//! pass through the ring, and some may be left to the CPU.
//!
//! The ring is filled on the caller's thread while kernels and uploads go on: during a layer with its
//! own pages, and at its end with the first ones of the next layers, which the reader has loaded
//! meanwhile. Nothing is asked of the device that it has not been given, so there is no thread to be
//! woken and no lock. Rows of a tail come with the layer's queries, so the tail has a slot of its own
//! and is read when its turn comes.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use super::CudaError;
use super::attention::CudaAttention;
use super::hot::HotPage;
use super::launches::Step;
use super::on_stream::{DeviceQueries, DeviceResult};
use super::queries::Asked;
use super::ring::Wanted;
use super::table::Placed;
use crate::attention::select::TokenSet;
use crate::attention::{Attention, AttentionError, KvBlock, Options, Partials, Queries, Shape};
use crate::page::{Layer, Positions};
use crate::reader::attend::{length, seen_pages};
use crate::reader::{LoadedPage, ReadError, Run, Sequence, Stream};

/// Pages for the CPU that wait for their layer's queries. They may be in our memory.
const CPU_PAGES_MAX: usize = 16;

/// Pages that are looked at for one slot: small ones, of which many fit.
const STAGED_PAGES_MAX: usize = 64;

/// Which pages of a layer are read.
type Seen = Option<Vec<bool>>;

/// A page that the CPU attends to.
#[derive(Debug)]
struct CpuPage {
    layer: usize,
    run: Arc<Run>,
    block: usize,
}

/// A scan of all layers, one after the other; the counterpart of
/// [`Stream::attend`](crate::reader::Stream::attend).
#[derive(Debug)]
pub struct Scan<'c, 's> {
    cuda: &'c mut CudaAttention,
    cpu: Option<(&'c Attention, f64)>,
    stream: Stream<'s>,
    span: Range<u64>,
    page_tokens: u64,
    /// `[layers][pages]`: on the device when the scan began.
    hot: Vec<Vec<bool>>,
    /// The layer that is attended to next.
    layer: usize,
    /// Which pages the stream reads.
    seen: Option<Seen>,
    /// Layers before this one are staged ahead.
    reach: usize,
    /// What the stream has handed out, and its next block.
    run: Option<(usize, Arc<Run>, usize)>,
    cpu_pages: VecDeque<CpuPage>,
    has_failed: bool,
}

impl CudaAttention {
    /// Scans all layers of a sequence, the pages with `tokens`.
    ///
    /// # Errors
    /// As [`Sequence::stream`] and [`CudaAttention::run`]. Pages that do not fit into a slot of the
    /// ring are [`CudaError::Unsupported`], and so are tokens that were removed or moved.
    pub fn scan<'c, 's>(
        &'c mut self, sequence: &'s Sequence, tokens: Range<u64>,
    ) -> Result<Scan<'c, 's>, CudaError> {
        let stream = sequence.stream(tokens)?;
        if !stream.is_plain() {
            let why = "a sequence whose tokens were removed or moved: attend on the CPU";
            return Err(CudaError::Unsupported(why.to_owned()));
        }
        let geometry = &sequence.manifest().largest_geometry();
        let layers = sequence.layers().len();
        self.prepare_scan(geometry, layers)?;
        self.registry.begin(stream.sequence_number());
        let mut hot = Vec::new();
        if let Some(window) = &mut self.hot {
            window.begin(stream.sequence_number());
        }
        for layer in 0..layers {
            let pages: Vec<_> = stream.listed(layer).collect();
            let is_hot = |(index, file): (usize, &(u64, u64))| {
                self.hot.as_ref().is_some_and(|window| {
                    window.is_within(index, pages.len())
                        && window.page(layer, index, *file).is_some()
                })
            };
            hot.push(pages.iter().enumerate().map(is_hot).collect());
        }
        self.ring.clear();
        Ok(Scan {
            cuda: self,
            cpu: None,
            span: stream.tokens(),
            page_tokens: u64::from(geometry.page_tokens()),
            stream,
            hot,
            layer: 0,
            seen: None,
            reach: 0,
            run: None,
            cpu_pages: VecDeque::new(),
            has_failed: false,
        })
    }
}

impl<'c> Scan<'c, '_> {
    /// Leaves a share of the pages that are not on the device to the CPU, which attends to them
    /// where they lie ([`cost`](crate::attention::cost) tells the best share).
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if it is for another shape.
    pub fn with_cpu(mut self, attention: &'c Attention, share: f64) -> Result<Self, CudaError> {
        if attention.shape() != self.cuda.shape() {
            return Err(CudaError::Unsupported("a CPU runtime of another shape".to_owned()));
        }
        self.cpu = Some((attention, share.clamp(0.0, 1.0)));
        Ok(self)
    }

    /// The layer that is attended to next; `None` after the last one.
    pub fn layer(&self) -> Option<Layer> {
        self.stream.layer_at(self.layer)
    }

    /// Tokens of the scan that are on the device already, of all layers.
    pub fn hot_tokens(&self) -> u64 {
        let pages = self.hot.iter().flatten().filter(|is_hot| **is_hot).count();
        pages as u64 * self.page_tokens
    }

    /// Attends to this layer, and goes on to the next one.
    ///
    /// # Errors
    /// As [`CudaAttention::run`], and [`CudaError::Read`] for a page that cannot be read. The scan
    /// ends there.
    pub fn attend(
        &mut self, queries: &Queries<'_>, options: &Options<'_>,
    ) -> Result<Partials, CudaError> {
        self.begin()?;
        let asked = Asked::new(queries, self.cuda.shape())?;
        let step = self.cuda.launches.begin(&asked, options, length(&self.span), &[0])?;
        let mut partials = Partials::empty(self.cuda.shape(), queries.positions.len());
        self.gather(&step, queries, options, &mut partials)?;
        self.cuda.launches.begin_result()?;
        self.look_ahead()?;
        partials.merge(&self.cuda.launches.result()?)?;
        self.end();
        Ok(partials)
    }

    /// The same after what is in a stream of the caller's, and before what comes there later, with
    /// queries and result on the device: the host does not wait for the layer, so it is on its way to
    /// the next one while the device attends.
    ///
    /// # Errors
    /// As [`attend`](Self::attend), and [`CudaError::Unsupported`] if a share of the pages is left to
    /// the CPU, which has no queries then, and for a stream that is being captured into a graph; the
    /// scan goes on after these two. A kernel that fails later is an error of a later call.
    ///
    /// # Safety
    /// As [`CudaAttention::run_on`].
    pub unsafe fn attend_on(
        &mut self, stream: *mut c_void, queries: DeviceQueries<'_>, options: &Options<'_>,
        result: DeviceResult,
    ) -> Result<(), CudaError> {
        if self.cpu.is_some() {
            let what = "a share for the CPU of queries on the device";
            return Err(CudaError::Unsupported(what.to_owned()));
        }
        let asked = queries.asked()?;
        // SAFETY: the caller's promise.
        let callers = unsafe { self.cuda.after(stream) }?;
        self.begin()?;
        let step = self.cuda.launches.begin(&asked, options, length(&self.span), &[0])?;
        let seen_by = Queries { q: &[], positions: queries.positions };
        self.gather(&step, &seen_by, options, &mut Partials::empty(self.cuda.shape(), 0))?;
        // SAFETY: the caller's promise.
        unsafe { self.cuda.launches.deliver(result) }?;
        self.cuda.before(&callers)?;
        self.look_ahead()?;
        self.end();
        Ok(())
    }

    /// A layer begins.
    fn begin(&mut self) -> Result<(), CudaError> {
        if self.layer().is_none() || self.has_failed {
            let why = "no layer of the scan is left".to_owned();
            return Err(CudaError::Read(ReadError::Arguments(why)));
        }
        // Until all has gone well.
        self.has_failed = true;
        Ok(())
    }

    fn end(&mut self) {
        self.layer += 1;
        self.has_failed = false;
    }

    /// Attends to all of the layer; what the CPU finds goes to `partials`.
    fn gather(
        &mut self, step: &Step<'_>, queries: &Queries<'_>, options: &Options<'_>,
        partials: &mut Partials,
    ) -> Result<(), CudaError> {
        self.follow(queries, options);
        self.attend_tail(step)?;
        self.attend_hot(step)?;
        loop {
            while self.cuda.ring.front() == Some(self.layer) {
                self.cuda.launches.consume(step, &mut self.cuda.ring)?;
            }
            self.attend_on_cpu(queries, options, partials)?;
            if self.is_through() {
                return Ok(());
            }
            self.stage_some(true)?;
        }
    }

    /// The device has work: meanwhile what comes next is brought into the ring.
    fn look_ahead(&mut self) -> Result<(), CudaError> {
        while self.stream.poll_ready() && self.stage_some(false)? {}
        Ok(())
    }

    /// Whether all of the layer has been handed to somebody.
    fn is_through(&self) -> bool {
        self.cuda.ring.front() != Some(self.layer)
            && self.cpu_pages.front().is_none_or(|page| page.layer != self.layer)
            && self.run.as_ref().is_none_or(|(layer, ..)| *layer != self.layer)
            && self.stream.index() > self.layer
    }

    /// Reads what this layer's queries see. What was staged under another rule is let go of.
    fn follow(&mut self, queries: &Queries<'_>, options: &Options<'_>) {
        let visible =
            seen_pages(queries, options, &self.span, (self.page_tokens, &Positions::default()));
        let seen = self.cold(visible, self.layer);
        self.reach = self.layer + 1;
        if options.selection.is_none() {
            let kind = |index: usize| {
                let layer = self.stream.layer_at(index)?;
                self.stream.manifest().layer_kind(layer)
            };
            while kind(self.reach).is_some_and(|other| Some(other) == kind(self.layer))
                && self.hot[self.reach] == self.hot[self.layer]
            {
                self.reach += 1;
            }
        }
        if self.seen.as_ref() == Some(&seen) {
            self.stream.narrow(seen, self.reach);
            return;
        }
        self.cuda.ring.clear();
        (self.run, self.seen) = (None, Some(seen.clone()));
        self.cpu_pages.clear();
        self.stream.rewind(self.layer, seen, self.reach);
    }

    /// The pages that are seen and not on the device.
    fn cold(&self, visible: Seen, layer: usize) -> Seen {
        let hot = &self.hot[layer];
        if !hot.contains(&true) {
            return visible;
        }
        let pages = length(&self.span).div_ceil(usize::try_from(self.page_tokens).unwrap_or(1));
        let is_cold = |index: usize| {
            let is_visible = visible.as_ref().is_none_or(|seen| seen[index]);
            is_visible && !hot.get(index).copied().unwrap_or(false)
        };
        Some((0..pages.max(hot.len())).map(is_cold).collect())
    }

    /// The index of a block's first token in the scan.
    fn start(&self, block: &KvBlock<'_>) -> usize {
        length(&(self.span.start..block.first_position))
    }

    fn attend_tail(&mut self, step: &Step<'_>) -> Result<(), CudaError> {
        let Some(run) = self.stream.tail_of(self.layer)? else { return Ok(()) };
        check(&run.blocks(), self.cuda.shape())?;
        for block in run.blocks() {
            let wanted = Wanted {
                tokens: 0..block.tokens,
                start: self.start(&block),
                queries: 0,
                home: None,
                block,
            };
            self.cuda.attend_tail(step, wanted)?;
        }
        Ok(())
    }

    /// Attends to the pages that are on the device.
    fn attend_hot(&mut self, step: &Step<'_>) -> Result<(), CudaError> {
        let Some(window) = &self.cuda.hot else { return Ok(()) };
        let mut blocks: Vec<Placed> = Vec::new();
        let mut dtype = None;
        for (index, file) in self.stream.listed(self.layer).enumerate() {
            if !self.hot[self.layer][index] {
                continue;
            }
            let Some(page) = window.page(self.layer, index, file) else { continue };
            let tokens = length(&(page.start..self.span.end)).min(page.placed.tokens);
            let start = length(&(self.span.start..page.start));
            blocks.push(Placed { tokens, start, ..page.placed });
            dtype = Some(page.dtype);
        }
        let Some(dtype) = dtype else { return Ok(()) };
        match &mut self.cuda.hot {
            Some(window) => self.cuda.launches.attend_hot(step, window, dtype, &blocks),
            None => Ok(()),
        }
    }

    /// Attends to the first page that waits for the CPU, if it is of this layer.
    fn attend_on_cpu(
        &mut self, queries: &Queries<'_>, options: &Options<'_>, partials: &mut Partials,
    ) -> Result<(), CudaError> {
        let is_due = self.cpu_pages.front().is_some_and(|page| page.layer == self.layer);
        let (Some((attention, _)), true) = (self.cpu, is_due) else { return Ok(()) };
        let Some(page) = self.cpu_pages.pop_front() else { return Ok(()) };
        let mut blocks = page.run.page_blocks(page.block..page.block + 1);
        let Some(block) = blocks.next() else { return Ok(()) };
        let start = self.start(&block);
        let selection = options.selection.map(|selection: &TokenSet| {
            selection.gather(std::slice::from_ref(&(start..start + block.tokens)))
        });
        let options = Options { selection: selection.as_ref(), ..*options };
        partials.merge(&attention.run(queries, &[block], &options)?)?;
        Ok(())
    }

    /// Stages the next pages into a slot, or leaves one to the CPU; false if there are none, or no
    /// room for them. With `wait` it waits for pages that are being read.
    fn stage_some(&mut self, wait: bool) -> Result<bool, CudaError> {
        let has_room = self.cuda.ring.has_room() && self.cpu_pages.len() < CPU_PAGES_MAX;
        if !has_room || !self.next_run(wait)? {
            return Ok(false);
        }
        let Some((layer, run, next)) = self.run.take() else { return Ok(false) };
        let end = run.pages().min(next + STAGED_PAGES_MAX);
        let blocks: Vec<KvBlock<'_>> = run.page_blocks(next..end).collect();
        let for_gpu = blocks.iter().take_while(|block| !self.is_for_cpu(block)).count();
        let taken = if for_gpu == 0 {
            self.cpu_pages.push_back(CpuPage { layer, run: Arc::clone(&run), block: next });
            1
        } else {
            self.stage(layer, &blocks[..for_gpu], run.page(next))?
        };
        let next = next + taken;
        self.run = (next < run.pages()).then_some((layer, Arc::clone(&run), next));
        Ok(true)
    }

    /// Makes sure that a block is there; false if there is none within reach.
    fn next_run(&mut self, wait: bool) -> Result<bool, CudaError> {
        while self.run.is_none() {
            let index = self.stream.index();
            if index >= self.reach || !(wait && index == self.layer || self.stream.poll_ready()) {
                return Ok(false);
            }
            let run = self.stream.next_pages()?;
            self.run = run.map(|run| (index, Arc::new(run), 0));
        }
        Ok(true)
    }

    /// Every so many pages, evenly, so that both have something to do all the time.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "pages are far below 2^53, and the share is not negative"
    )]
    fn is_for_cpu(&self, block: &KvBlock<'_>) -> bool {
        let Some((_, share)) = self.cpu else { return false };
        let page = (block.first_position / self.page_tokens) as f64;
        ((page + 1.0) * share) as u64 > (page * share) as u64
    }

    /// Stages the first of some pages, by itself if it can be read where it is mapped; returns how
    /// many.
    fn stage(
        &mut self, layer: usize, blocks: &[KvBlock<'_>], page: Option<&Arc<LoadedPage>>,
    ) -> Result<usize, CudaError> {
        let pages: Vec<(u64, u64)> = self.stream.listed(layer).collect();
        let first = pages.first().map_or(0, |(start, _)| *start);
        let index_of = |block: &KvBlock<'_>| {
            length(&(first..block.first_position)) / usize::try_from(self.page_tokens).unwrap_or(1)
        };
        let (cuda, span) = (&mut *self.cuda, &self.span);
        let shape = cuda.shape();
        check(blocks, shape)?;
        let window = cuda.hot.as_ref();
        let adopts = |block: &KvBlock<'_>| {
            // A page that the scan has not all of would be short in the window.
            let is_whole = block.first_position + self.page_tokens <= span.end;
            is_whole
                .then_some(window)?
                .filter(|window| window.is_within(index_of(block), pages.len()))
        };
        let wanted: Vec<Wanted<'_>> = blocks
            .iter()
            .map(|block| Wanted {
                block: *block,
                tokens: 0..block.tokens,
                start: length(&(span.start..block.first_position)),
                queries: 0,
                home: adopts(block).map(|window| window.home(layer, index_of(block))),
            })
            .collect();
        if let Some(window) = window
            && wanted.iter().any(|wanted| wanted.home.is_some())
        {
            window.before_copies(&cuda.copies)?;
        }
        let key = (layer, blocks[0].first_position);
        let registered = page.and_then(|page| cuda.registry.get(&cuda.context, key, page));
        let taken = if let Some(from) = registered {
            cuda.ring.stage_registered(&cuda.copies, shape, &wanted[0], from, layer)?;
            1
        } else {
            let (taken, cut) = cuda.ring.stage(&cuda.copies, shape, &wanted, layer)?;
            if cut > 0 {
                let why = "a page that is larger than a slot of the ring";
                return Err(CudaError::Unsupported(why.to_owned()));
            }
            taken
        };
        let adopted: Vec<usize> =
            (0..taken).filter(|index| wanted[*index].home.is_some()).collect();
        let staged = cuda.ring.last_staged().to_vec();
        if let Some(window) = cuda.hot.as_mut().filter(|_| !adopted.is_empty()) {
            cuda.copies.record(&window.copied)?;
            for at in adopted {
                let index = index_of(&blocks[at]);
                let (start, inode) = pages[index];
                let (dtype, placed) = (blocks[at].dtype, staged[at]);
                window.set(layer, index, HotPage { start, inode, dtype, placed });
            }
        }
        Ok(taken)
    }
}

/// What a manifest says may be another shape than what was asked for.
fn check(blocks: &[KvBlock<'_>], shape: Shape) -> Result<(), CudaError> {
    for (index, block) in blocks.iter().enumerate() {
        block.check(shape).map_err(|why| AttentionError::Block { index, why })?;
    }
    Ok(())
}

//! Attention on a GPU, for one shape: the counterpart of
//! [`Attention`](crate::attention::Attention).

use super::driver::{Context, Event, Stream};
use super::hot::{HotWindow, place_bytes};
use super::kernels::module_name;
use super::launches::{Launches, Step};
use super::queries::{Asked, shifts};
use super::registry::Registry;
use super::ring::{Ring, SLOTS, Wanted};
use super::rules::Rules;
use super::{CudaError, Properties};
use crate::attention::{AttentionError, KvBlock, Options, Partials, Queries, Shape};
use crate::page::{Dtype, Geometry};

/// One tail is attended to while the next layer's is uploaded.
const TAIL_SLOTS: usize = 2;

/// Device memory that the hot window leaves to partial results and queries.
const RESERVED_BYTES: u64 = 256 << 20;

/// How much of the machine is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Of each of the four pinned buffers, and of the device memory behind it.
    pub slot_bytes: usize,
    /// Threads that copy pages into them, of which the caller is one.
    pub copy_threads: usize,
    /// Device memory for pages that stay between scans; 0 for none.
    pub hot_bytes: u64,
    /// Mapped pages that the device may read by itself, if the system allows it; they are pinned
    /// until another sequence is scanned.
    pub registered_bytes: u64,
    /// Which of the GPUs that the driver shows; `CUDA_VISIBLE_DEVICES` chooses them.
    pub device: u32,
}

impl Default for Settings {
    /// 8 MiB, two pages of the usual size, take a third of a millisecond on `PCIe` 4; two threads copy
    /// what it carries. No page stays on the device. What is mapped is the mount's and in memory
    /// anyway, so as much as a large machine has is registered.
    fn default() -> Self {
        let registered_bytes = 256 << 30;
        Self { slot_bytes: 8 << 20, copy_threads: 2, hot_bytes: 0, registered_bytes, device: 0 }
    }
}

/// Attention on a GPU.
#[derive(Debug)]
pub struct CudaAttention {
    shape: Shape,
    settings: Settings,
    pub(super) launches: Launches,
    pub(super) ring: Ring,
    /// For the rows behind the pages, which come with the queries.
    tail: Ring,
    pub(super) hot: Option<HotWindow>,
    /// Bytes of a page and layers that it was made for, or that there was no memory for.
    hot_for: Option<(usize, usize)>,
    pub(super) registry: Registry,
    pub(super) copies: Stream,
    /// Of a caller's stream: what it had to do before a call.
    pub(super) asked: Event,
    /// The call is done.
    pub(super) answered: Event,
    pub(super) context: Context,
}

impl CudaAttention {
    /// On the GPU that the settings name.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] without a driver or a GPU, [`CudaError::Unsupported`] for a shape
    /// that there are no kernels for, [`CudaError::OutOfMemory`] if there is none for the ring, and
    /// [`CudaError::Device`] for anything else that the driver refuses.
    pub fn new(shape: Shape, settings: Settings) -> Result<Self, CudaError> {
        // Of any dtype; each one says at its first use whether it has kernels for the rows.
        module_name(Dtype::F16, shape)?;
        let context = Context::open(settings.device)?;
        Ok(Self {
            shape,
            settings,
            launches: Launches::new(&context, shape)?,
            ring: Ring::new(&context, SLOTS, settings.slot_bytes, settings.copy_threads)?,
            tail: Ring::new(&context, TAIL_SLOTS, 1, 1)?,
            hot: None,
            hot_for: None,
            registry: Registry::new(&context, settings.registered_bytes),
            copies: context.stream()?,
            asked: context.event()?,
            answered: context.event()?,
            context,
        })
    }

    /// The heads.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What was asked for.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// The device.
    pub fn properties(&self) -> &Properties {
        self.context.properties()
    }

    /// As [`Attention::run`](crate::attention::Attention::run), over blocks in host memory: what no
    /// query sees is not brought to the device.
    ///
    /// # Errors
    /// [`CudaError::Attention`] for what does not fit, [`CudaError::Unsupported`] for a mask of
    /// values, `ALiBi` and rows that the kernels do not take, [`CudaError::Device`] and
    /// [`CudaError::OutOfMemory`].
    pub fn run(
        &mut self, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
    ) -> Result<Partials, CudaError> {
        let tokens = self.check(blocks)?;
        let shifts = shifts(blocks, options)?;
        let asked = Asked::new(queries, self.shape)?;
        let step = self.launches.begin(&asked, options, tokens, &shifts)?;
        let wanted = seen_blocks(step.rules(), blocks, &shifts);
        self.pass(self.shape, wanted, |cuda| cuda.launches.consume(&step, &mut cuda.ring))?;
        self.launches.begin_result()?;
        self.launches.result()
    }

    /// Whether blocks hold what they say; their tokens.
    pub(super) fn check(&self, blocks: &[KvBlock<'_>]) -> Result<usize, AttentionError> {
        for (index, block) in blocks.iter().enumerate() {
            let checked = block.check(self.shape);
            checked.map_err(|why| AttentionError::Block { index, why })?;
        }
        let tokens = blocks.iter().try_fold(0_usize, |sum, block| sum.checked_add(block.tokens));
        tokens.ok_or_else(|| AttentionError::Arguments("too many tokens".to_owned()))
    }

    /// Brings blocks of a shape through the ring; `consume` does something with the oldest slot.
    pub(super) fn pass(
        &mut self, shape: Shape, mut wanted: Vec<Wanted<'_>>,
        mut consume: impl FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.ring.clear();
        wanted.reverse();
        loop {
            while self.ring.has_room() && !wanted.is_empty() {
                self.stage_last(shape, &mut wanted)?;
            }
            if self.ring.front().is_none() {
                return Ok(());
            }
            consume(self)?;
        }
    }

    /// Stages the last blocks of a list in reverse order, and takes them off.
    fn stage_last(&mut self, shape: Shape, wanted: &mut Vec<Wanted<'_>>) -> Result<(), CudaError> {
        // As many as a slot may hold at most; it is far more than there are mostly.
        let few = wanted.iter().rev().take(64).cloned().collect::<Vec<_>>();
        let (taken, cut) = self.ring.stage(&self.copies, shape, &few, 0)?;
        wanted.truncate(wanted.len() - taken);
        if cut > 0
            && let Some(last) = wanted.last_mut()
        {
            last.tokens.start += cut;
            if last.tokens.is_empty() {
                wanted.pop();
            }
        }
        Ok(())
    }

    /// Makes room for the pages of a sequence: slots that hold one, a slot for the tail, and the hot
    /// window, as much of it as there is memory for.
    pub(super) fn prepare_scan(
        &mut self, geometry: &Geometry, layers: usize,
    ) -> Result<(), CudaError> {
        let page_bytes = place_bytes(geometry, self.shape);
        let threads = self.settings.copy_threads;
        // Kernels and uploads of another scan may be under way.
        self.copies.synchronize()?;
        self.launches.computes.synchronize()?;
        if self.ring.slot_bytes() < page_bytes {
            self.ring = Ring::new(&self.context, SLOTS, page_bytes, threads)?;
        }
        if self.tail.slot_bytes() < page_bytes {
            self.tail = Ring::new(&self.context, TAIL_SLOTS, page_bytes, 1)?;
        }
        self.tail.clear();
        let asked = self.settings.hot_bytes;
        if asked == 0 || self.hot_for == Some((page_bytes, layers)) {
            return Ok(());
        }
        self.hot = None;
        let free = self.context.free_bytes()? as u64;
        let most = asked.min(free.saturating_sub(RESERVED_BYTES));
        self.hot = HotWindow::new(&self.context, geometry, self.shape, layers, most)?;
        self.hot_for = Some((page_bytes, layers));
        let had = self.hot_bytes();
        if most < asked || had < asked / 2 {
            log::warn!("cuda: the hot window has {had} bytes of {asked}: there is no more memory");
        }
        Ok(())
    }

    /// Whether the device reads mapped pages by itself.
    pub fn reads_mapped_pages(&self) -> bool {
        self.registry.is_used()
    }

    /// Bytes of device memory that the hot window of the last scan has; fewer than asked for if there
    /// is no more memory.
    pub fn hot_bytes(&self) -> u64 {
        self.hot.as_ref().map_or(0, |hot| hot.bytes() as u64)
    }

    /// The same before the first scan: what was asked for.
    pub(super) fn hot_bytes_planned(&self) -> u64 {
        if self.hot_for.is_some() { self.hot_bytes() } else { self.settings.hot_bytes }
    }

    /// Attends to a tail, which does not wait behind pages of later layers.
    pub(super) fn attend_tail(
        &mut self, step: &Step<'_>, wanted: Wanted<'_>,
    ) -> Result<(), CudaError> {
        self.tail.stage(&self.copies, self.shape, &[wanted], 0)?;
        self.launches.consume(step, &mut self.tail)
    }
}

impl Drop for CudaAttention {
    fn drop(&mut self) {
        // Kernels read memory that is about to be freed. A failure means that nothing runs any more.
        let _ = self.copies.synchronize();
        let _ = self.launches.computes.synchronize();
    }
}

/// The blocks with a token that some query sees, from the first to the last of those.
pub(super) fn seen_blocks<'a>(
    rules: &Rules<'_>, blocks: &[KvBlock<'a>], shifts: &[i64],
) -> Vec<Wanted<'a>> {
    let mut wanted = Vec::new();
    let mut start = 0;
    for block in blocks {
        let seen = rules.seen(block.first_position, block.tokens, start);
        if let (Some(first), Some(last)) = (seen.runs.first(), seen.runs.last()) {
            let copy = shifts.iter().position(|shift| *shift == block.shift).unwrap_or(0);
            wanted.push(Wanted {
                block: *block,
                tokens: first.start..last.end,
                start,
                queries: u32::try_from(copy).unwrap_or(u32::MAX),
                home: None,
            });
        }
        start += block.tokens;
    }
    wanted
}

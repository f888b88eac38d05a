//! The compute stream: prepared queries, kernels over what is on the device, and partial results.

use super::CudaError;
use super::arguments::Heads;
use super::driver::{Context, DeviceMemory, Stream};
use super::hot::HotWindow;
use super::kernels::{AttendKernels, Call, CommonKernels, module_name};
use super::mass::MassMemory;
use super::on_stream::DeviceResult;
use super::partials::Gathered;
use super::queries::{Asked, QueryBuffers};
use super::ring::Ring;
use super::rules::Rules;
use super::table::{Placed, Table};
use crate::attention::{Options, Partials, Shape};
use crate::page::Dtype;

/// Blocks for each multiprocessor and launch: two fit at once, and twice as many even out.
const BLOCKS_FOR_EACH: u32 = 4;

/// Queries of a call; more are several calls.
const QUERIES_MAX: usize = 4096;

/// One call or layer that is under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step<'a> {
    rules: Rules<'a>,
    heads: Heads,
    window: u32,
    soft_cap: f32,
}

/// Everything that launches need besides pages.
#[derive(Debug)]
pub(super) struct Launches {
    context: Context,
    shape: Shape,
    pub(super) computes: Stream,
    common: CommonKernels,
    /// Compiled when a dtype first comes up.
    kernels: Vec<(Dtype, AttendKernels)>,
    queries: QueryBuffers,
    /// For the number of queries of the last call.
    gathered: Gathered,
}

impl Step<'_> {
    /// Which tokens are seen.
    pub(super) fn rules(&self) -> &Rules<'_> {
        &self.rules
    }

    fn call<'a>(&self, queries: &'a QueryBuffers) -> Call<'a> {
        let (heads, window, soft_cap) = (self.heads, self.window, self.soft_cap);
        Call { heads, window, soft_cap, queries: queries.memory() }
    }
}

impl Launches {
    pub(super) fn new(context: &Context, shape: Shape) -> Result<Self, CudaError> {
        Ok(Self {
            context: context.clone(),
            shape,
            computes: context.stream()?,
            common: CommonKernels::load(context)?,
            kernels: Vec::new(),
            queries: QueryBuffers::new(context)?,
            gathered: Gathered::new(context, Heads::new(shape, 1))?,
        })
    }

    /// Begins a call over `tokens` tokens: prepares its queries, a copy for each shift.
    pub(super) fn begin<'q>(
        &mut self, queries: &Asked<'q>, options: &'q Options<'q>, tokens: usize, shifts: &[i64],
    ) -> Result<Step<'q>, CudaError> {
        let rules = Rules::new(self.shape, queries.positions, options, tokens)?;
        let count = queries.positions.len();
        if count > QUERIES_MAX {
            return Err(CudaError::Unsupported(format!("{count} queries in one call")));
        }
        let heads = Heads::new(self.shape, u32::try_from(count).unwrap_or(u32::MAX));
        if self.gathered.num_queries() != heads.num_queries {
            // Kernels may still write to the old ones.
            self.computes.synchronize()?;
            self.gathered = Gathered::new(&self.context, heads)?;
        }
        self.gathered.clear();
        let place = (&self.context, &self.computes);
        let shape = (self.shape, heads);
        self.queries.prepare(place, &self.common, shape, (queries, options, shifts))?;
        let window = options.window.map_or(0, |window| u32::try_from(window).unwrap_or(0));
        Ok(Step { rules, heads, window, soft_cap: options.soft_cap.unwrap_or(0.0) })
    }

    /// Attends to the oldest slot of a ring.
    pub(super) fn consume(&mut self, step: &Step<'_>, ring: &mut Ring) -> Result<(), CudaError> {
        let Some((dtype, blocks)) = ring.front_blocks() else { return Ok(()) };
        self.load(dtype)?;
        let table = self.table(step, dtype, blocks)?;
        if !table.splits.is_empty() {
            let memory = ring.open(&self.computes, &table)?;
            self.attend(step, dtype, &table, memory)?;
        }
        ring.close(&self.computes)
    }

    /// Attends to pages of the hot window.
    pub(super) fn attend_hot(
        &mut self, step: &Step<'_>, window: &mut HotWindow, dtype: Dtype, blocks: &[Placed],
    ) -> Result<(), CudaError> {
        self.load(dtype)?;
        let table = self.table(step, dtype, blocks)?;
        if table.splits.is_empty() {
            return Ok(());
        }
        self.computes.wait(&window.copied)?;
        let memory = window.table.upload(&self.context, &self.computes, &table)?;
        self.attend(step, dtype, &table, memory)?;
        self.computes.record(&window.idle)
    }

    /// Starts to merge what was gathered and to bring it to the host.
    pub(super) fn begin_result(&mut self) -> Result<(), CudaError> {
        self.gathered.begin_result(&self.common, &self.computes)
    }

    /// Merges what was gathered into memory of a caller's.
    ///
    /// # Safety
    /// As [`CommonKernels::deliver`].
    pub(super) unsafe fn deliver(&mut self, to: DeviceResult) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.gathered.deliver(&self.common, &self.computes, to) }
    }

    /// Waits for the result.
    pub(super) fn result(&mut self) -> Result<Partials, CudaError> {
        self.gathered.result(self.shape)
    }

    /// Adds the weights of what is in the oldest slot of a ring to the mass of its tokens.
    pub(super) fn consume_mass(
        &mut self, step: &Step<'_>, ring: &mut Ring, mass: &MassMemory,
    ) -> Result<(), CudaError> {
        let Some((dtype, blocks)) = ring.front_blocks() else { return Ok(()) };
        self.load(dtype)?;
        let table = self.table(step, dtype, blocks)?;
        if !table.splits.is_empty() {
            let memory = ring.open(&self.computes, &table)?;
            let kernels = kernels(&self.kernels, dtype)?;
            let table = (&table, memory);
            let (totals, sums) = mass.memories();
            kernels.add_mass(&self.computes, step.call(&self.queries), table, totals, sums)?;
        }
        ring.close(&self.computes)
    }

    /// Writes the bounds of the pages in the oldest slot of a ring; the first one is page `first`.
    pub(super) fn consume_bounds(
        &mut self, ring: &mut Ring, bounds: &DeviceMemory, first: usize,
    ) -> Result<(), CudaError> {
        let Some((dtype, blocks)) = ring.front_blocks() else { return Ok(()) };
        self.load(dtype)?;
        let table = Table::whole(blocks);
        let memory = ring.open(&self.computes, &table)?;
        let kernels = kernels(&self.kernels, dtype)?;
        let heads = Heads::new(self.shape, 1);
        kernels.summarise(&self.computes, heads, (&table, memory), (bounds, first))?;
        ring.close(&self.computes)
    }

    /// Writes the most that a logit of the queries can be for each of some pages.
    pub(super) fn bound(
        &self, step: &Step<'_>, table: (&Table, &DeviceMemory), bounds: &DeviceMemory,
        most: &DeviceMemory,
    ) -> Result<(), CudaError> {
        self.common.bound(&self.computes, step.call(&self.queries), table, bounds, most)
    }

    fn load(&mut self, dtype: Dtype) -> Result<(), CudaError> {
        if self.kernels.iter().all(|(of, _)| *of != dtype) {
            let name = module_name(dtype, self.shape)?;
            self.kernels.push((dtype, AttendKernels::load(&self.context, &name)?));
        }
        Ok(())
    }

    /// The tokens of some blocks that are seen, divided so that the device is busy.
    fn table(&self, step: &Step<'_>, dtype: Dtype, blocks: &[Placed]) -> Result<Table, CudaError> {
        let mut table = Table::new(blocks, &step.rules);
        let of_split = kernels(&self.kernels, dtype)?.blocks_of_split(step.heads, table.is_masked);
        let wanted = self.context.properties().multiprocessors * BLOCKS_FOR_EACH;
        let splits = wanted.div_ceil(of_split.max(1));
        table.divide(splits.clamp(1, self.gathered.splits_max()));
        Ok(table)
    }

    fn attend(
        &mut self, step: &Step<'_>, dtype: Dtype, table: &Table, memory: &DeviceMemory,
    ) -> Result<(), CudaError> {
        let count = u32::try_from(table.splits.len()).unwrap_or(u32::MAX);
        let to = self.gathered.reserve(&self.common, &self.computes, count)?;
        let call = step.call(&self.queries);
        kernels(&self.kernels, dtype)?.attend(&self.computes, call, (table, memory), to)
    }
}

fn kernels(kernels: &[(Dtype, AttendKernels)], dtype: Dtype) -> Result<&AttendKernels, CudaError> {
    let found = kernels.iter().find(|(of, _)| *of == dtype);
    found.map(|(_, kernels)| kernels).ok_or_else(|| CudaError::Unsupported(dtype.to_string()))
}

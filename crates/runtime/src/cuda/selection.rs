//! What selections are made of: the attention that each token got (heavy hitters), and what a page's
//! keys can be at most (pages by their bounds).
//!
//! The selection itself is the host's, as on the CPU, and what it leaves out is not brought to the
//! device.

use super::attention::CudaAttention;
use super::driver::{DeviceMemory, Pinned};
use super::kernels::bounds_bytes;
use super::mass::MassMemory;
use super::queries::{Asked, shifts};
use super::ring::{TableMemory, Wanted};
use super::table::{Placed, Table};
use super::{CudaError, arguments::Heads};
use crate::attention::select::{PageTopK, SelectedPages};
use crate::attention::{AttentionError, KvBlock, Options, Partials, Queries, Shape, Values};

/// Smallest and largest K of some pages, in device memory: the counterpart of a list of
/// [`PageSummary`](crate::attention::PageSummary). It may be used with the [`CudaAttention`] that made
/// it, and one of the same device and shape.
#[derive(Debug)]
pub struct DeviceSummaries {
    /// `[pages, num_kv_heads, 2, head_dim]`
    bounds: DeviceMemory,
    pages: usize,
}

impl DeviceSummaries {
    /// Pages.
    pub fn len(&self) -> usize {
        self.pages
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        self.bounds.bytes() as u64
    }
}

impl CudaAttention {
    /// As [`Attention::run_with_mass`](crate::attention::Attention::run_with_mass). A weight is known
    /// when all tokens have been seen, so K goes to the device a second time.
    ///
    /// # Errors
    /// As [`CudaAttention::run`], and [`CudaError::Attention`] if there is not one mass for each token.
    pub fn run_with_mass(
        &mut self, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
        mass: &mut [f32],
    ) -> Result<Partials, CudaError> {
        let tokens: usize = blocks.iter().map(|block| block.tokens).sum();
        if mass.len() != tokens {
            let why = format!("{} values of mass for {tokens} tokens", mass.len());
            return Err(AttentionError::Arguments(why).into());
        }
        let partials = self.run(queries, blocks, options)?;
        let keys: Vec<KvBlock<'_>> = blocks.iter().map(keys_of).collect();
        let shifts = shifts(blocks, options)?;
        let asked = Asked::new(queries, self.shape())?;
        let step = self.launches.begin(&asked, options, tokens, &shifts)?;
        let computes = &self.launches.computes;
        let mut memory = MassMemory::new(&self.context, computes, &partials, tokens)?;
        let wanted = super::attention::seen_blocks(step.rules(), &keys, &shifts);
        self.pass(self.key_shape()?, wanted, |cuda| {
            cuda.launches.consume_mass(&step, &mut cuda.ring, &memory)
        })?;
        memory.add_to(&self.launches.computes, mass)?;
        Ok(partials)
    }

    /// Reads the keys of some blocks.
    ///
    /// # Errors
    /// As [`CudaAttention::run`], and [`CudaError::Unsupported`] for a block whose keys are more than a
    /// slot of the ring.
    pub fn summarise(&mut self, blocks: &[KvBlock<'_>]) -> Result<DeviceSummaries, CudaError> {
        let bytes = blocks.len() * bounds_bytes(Heads::new(self.shape(), 1));
        let bounds = DeviceMemory::new(&self.context, "page summaries", bytes)?;
        let mut summaries = DeviceSummaries { bounds, pages: 0 };
        self.summarise_from(&mut summaries, blocks, 0)?;
        Ok(summaries)
    }

    /// Makes summaries those of `blocks`, of which the keys are read from block `first` on: what is
    /// known of sealed pages stays, while rows and pages come behind them. After an error only the
    /// first ones are left.
    ///
    /// # Errors
    /// As [`summarise`](Self::summarise), and [`CudaError::Attention`] if there are fewer than `first`
    /// summaries or blocks.
    pub fn summarise_from(
        &mut self, summaries: &mut DeviceSummaries, blocks: &[KvBlock<'_>], first: usize,
    ) -> Result<(), CudaError> {
        self.check(blocks)?;
        if first > summaries.pages.min(blocks.len()) {
            let (known, blocks) = (summaries.pages, blocks.len());
            let why = format!("{known} page summaries and {blocks} blocks, from block {first} on");
            return Err(AttentionError::Arguments(why).into());
        }
        summaries.pages = first;
        self.make_room(summaries, blocks.len())?;
        let wanted = blocks[first..].iter().map(|block| Wanted {
            block: keys_of(block),
            tokens: 0..block.tokens,
            start: 0,
            queries: 0,
            home: None,
        });
        let mut at = first;
        self.pass(self.key_shape()?, wanted.collect(), |cuda| {
            let count = cuda.ring.front_blocks().map_or(0, |(_, blocks)| blocks.len());
            if at + count > blocks.len() {
                let why = "keys of a page that are more than a slot of the ring";
                return Err(CudaError::Unsupported(why.to_owned()));
            }
            cuda.launches.consume_bounds(&mut cuda.ring, &summaries.bounds, at)?;
            at += count;
            Ok(())
        })?;
        self.launches.computes.synchronize()?;
        summaries.pages = blocks.len();
        Ok(())
    }

    /// Room for so many summaries, and as many again where there was none: those that are known move.
    fn make_room(&self, summaries: &mut DeviceSummaries, pages: usize) -> Result<(), CudaError> {
        let of_page = bounds_bytes(Heads::new(self.shape(), 1));
        if pages * of_page <= summaries.bounds.bytes() {
            return Ok(());
        }
        let bounds = DeviceMemory::new(&self.context, "page summaries", 2 * pages * of_page)?;
        let computes = &self.launches.computes;
        computes.copy(&summaries.bounds, &bounds, summaries.pages * of_page)?;
        // What they were copied from is freed.
        computes.synchronize()?;
        summaries.bounds = bounds;
        Ok(())
    }

    /// As [`PageTopK::select`], by summaries on the device. K and V of the blocks are not read.
    ///
    /// # Errors
    /// As [`PageTopK::select`] and [`CudaAttention::run`].
    pub fn select_pages(
        &mut self, pages: &PageTopK, queries: &Queries<'_>, blocks: &[KvBlock<'_>],
        summaries: &DeviceSummaries, options: &Options<'_>,
    ) -> Result<SelectedPages, CudaError> {
        if summaries.pages != blocks.len() {
            let (found, blocks) = (summaries.pages, blocks.len());
            let why = format!("{found} page summaries for {blocks} blocks");
            return Err(AttentionError::Arguments(why).into());
        }
        let shifts = shifts(blocks, options)?;
        let options = Options { selection: None, mask: None, ..*options };
        let tokens = blocks.iter().map(|block| block.tokens).sum();
        let asked = Asked::new(queries, self.shape())?;
        let step = self.launches.begin(&asked, &options, tokens, &shifts)?;
        let placed: Vec<Placed> = blocks.iter().map(|block| outline(block, &shifts)).collect();
        let table = Table::whole(&placed);
        let rows = queries.positions.len() * self.shape().num_qo_heads();
        let bytes = rows * blocks.len() * size_of::<f32>();
        let most = DeviceMemory::new(&self.context, "bounds of pages", bytes)?;
        let mut result = Pinned::new(&self.context, "bounds of pages", bytes)?;
        let mut memory = TableMemory::new(&self.context)?;
        let uploaded = memory.upload(&self.context, &self.launches.computes, &table)?;
        self.launches.bound(&step, (&table, uploaded), &summaries.bounds, &most)?;
        self.launches.computes.download(&most, 0, &mut result, 0..bytes)?;
        let most = result.bytes()?.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let most: Vec<f32> = most.take(rows * blocks.len()).collect();
        Ok(pages.select_by(most.chunks(blocks.len().max(1)), blocks))
    }

    /// Blocks whose values are their keys.
    fn key_shape(&self) -> Result<Shape, CudaError> {
        let shape = self.shape();
        let dim = shape.head_dim();
        Ok(Shape::new(shape.num_qo_heads(), shape.num_kv_heads(), dim, dim)?)
    }
}

/// The same block without its values.
fn keys_of<'a>(block: &KvBlock<'a>) -> KvBlock<'a> {
    KvBlock { v: Values::Latent, ..*block }
}

/// A page that lies nowhere: the kernel looks at its number of tokens and its copy of the queries.
fn outline(block: &KvBlock<'_>, shifts: &[i64]) -> Placed {
    let copy = shifts.iter().position(|shift| *shift == block.shift).unwrap_or(0);
    Placed {
        k: 0,
        v: 0,
        k_strides: (0, 0),
        v_strides: (0, 0),
        tokens: block.tokens,
        first_position: block.first_position,
        start: 0,
        queries: u32::try_from(copy).unwrap_or(u32::MAX),
    }
}

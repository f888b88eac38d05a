//! Attention for one shape, with its threads.

use std::mem::offset_of;
use std::num::NonZero;
use std::thread::available_parallelism;

use super::block::{self, Block};
use super::memory::{Caller, Structure};
use super::options::{Options, Queries};
use super::partials::Partials;
use super::status::{Failure, Status, guard};
use crate::attention::{self, InstructionSet, Shape, THREADS_MAX};

/// Vector instructions.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instructions {
    /// The fastest that the processor has.
    Fastest = 0,
    /// None: works everywhere.
    Scalar = 1,
    /// AVX2 with FMA and F16C.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512 = 3,
    /// The same with VNNI and VBMI.
    Avx512Vnni = 4,
}

/// The heads of a layer, and who attends.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AttentionConfig {
    /// `sizeof(kvfs_attention_config)`
    pub size: usize,
    /// Query heads, a multiple of `num_kv_heads`. Query head `h` reads KV head
    /// `h / (num_qo_heads / num_kv_heads)`.
    pub num_qo_heads: u32,
    /// KV heads, at most 1024.
    pub num_kv_heads: u32,
    /// Elements of a K row and of a query, at most 4096.
    pub head_dim: u32,
    /// Elements of a V row and of an output, at most 4096; 0: `head_dim`.
    pub v_head_dim: u32,
    /// Threads, of which the one that calls is one, at most 256; 0: one for each processor that
    /// the process may use.
    pub threads: u32,
    /// One of `kvfs_instructions`.
    pub instructions: u32,
}

// SAFETY: numbers without gaps.
unsafe impl Structure for AttentionConfig {
    const NAME: &'static str = "kvfs_attention_config";
    const REQUIRED_BYTES: usize = offset_of!(Self, threads);
}

/// Attention for one shape, with its threads. Several threads may use one at the same time; with
/// more than one thread of its own, it serves one call after the other.
#[derive(Debug)]
pub struct Attention {
    inner: attention::Attention,
    /// Its threads are in no other.
    process: u32,
}

impl AttentionConfig {
    fn create(&self) -> Result<Attention, Failure> {
        let v_head_dim = if self.v_head_dim == 0 { self.head_dim } else { self.v_head_dim };
        let [num_qo_heads, num_kv_heads, head_dim, v_head_dim] =
            [self.num_qo_heads, self.num_kv_heads, self.head_dim, v_head_dim].map(|n| n as usize);
        let shape = Shape::new(num_qo_heads, num_kv_heads, head_dim, v_head_dim)?;
        let threads = match self.threads {
            0 => available_parallelism().map_or(1, NonZero::get).min(THREADS_MAX),
            threads => threads as usize,
        };
        let set = match self.instructions {
            0 => InstructionSet::detect(),
            1 => InstructionSet::Scalar,
            2 => InstructionSet::Avx2,
            3 => InstructionSet::Avx512,
            4 => InstructionSet::Avx512Vnni,
            other => return Err(Failure::argument(format!("instructions {other} are unknown"))),
        };
        let inner = attention::Attention::with_instructions(shape, threads, set)?;
        Ok(Attention { inner, process: std::process::id() })
    }
}

impl Attention {
    fn run(
        &self, caller: &Caller, queries: *const Queries, blocks: &[Block], options: *const Options,
        partials: *mut Partials,
    ) -> Result<(), Failure> {
        if self.process != std::process::id() {
            return Err(Failure::argument(format!(
                "the handle belongs to process {}: threads do not survive a fork, create another",
                self.process
            )));
        }
        let shape = self.inner.shape();
        let (queries, partials) = (caller.read(queries)?, caller.read(partials)?);
        let queries = queries.borrow(caller, shape)?;
        partials.check_result(caller, shape, queries.positions.len())?;
        let (blocks, tokens) = block::borrow_all(caller, blocks, shape)?;
        let options = if options.is_null() { Options::default() } else { caller.read(options)? };
        let selection = options.selection(caller, tokens)?;
        let options = options.borrow(caller, selection.as_ref())?;
        if partials.mass.is_null() {
            let result = self.inner.run(&queries, &blocks, &options)?;
            return partials.store(caller, &result);
        }
        let mut mass = caller.slice(partials.mass, partials.mass_count, "mass")?.to_vec();
        let result = self.inner.run_with_mass(&queries, &blocks, &options, &mut mass)?;
        partials.store(caller, &result)?;
        caller.store(&mass, partials.mass, "mass")
    }
}

/// Creates `*attention`, to be freed with `kvfs_attention_free`. Its threads start now and sleep
/// between calls. It belongs to this process: after a fork the child creates its own.
///
/// `KVFS_STATUS_ARGUMENT` for a shape that cannot be, `KVFS_STATUS_UNSUPPORTED` if the processor
/// lacks the instructions or the threads do not start.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_attention_create(
    config: *const AttentionConfig, attention: *mut *mut Attention,
) -> Status {
    let call = |caller: &Caller| caller.create(attention, || caller.read(config)?.create());
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Frees what `kvfs_attention_create` gave, when no call uses it any more. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_attention_free(attention: *mut Attention) {
    let call = |caller: &Caller| {
        if let Some(attention) = caller.take(attention)?
            && attention.process != std::process::id()
        {
            // Its threads cannot be joined: they are in the parent.
            std::mem::forget(attention);
        }
        Ok(())
    };
    // SAFETY: the promises of the header.
    let _ = unsafe { guard(call) };
}

/// Attends to `num_blocks` blocks (none is fine) and writes `partials`. The order of the blocks
/// does not matter, except for mask, selection and mass, which count tokens in it. `options` may
/// be NULL for all defaults: plain causal attention.
///
/// NaN and infinities in K and V are data: they propagate into the heads that see them and into no
/// other query. K and V that no query sees are never touched. What is read of K and V must not
/// change and not shrink during the call; sealed pages of a mount do neither.
///
/// `KVFS_STATUS_ARGUMENT` for queries, options or partials that do not fit the shape or each other,
/// `KVFS_STATUS_BLOCK` for a block that does not fit the shape or its own bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_attention_run(
    attention: *const Attention, queries: *const Queries, blocks: *const Block, num_blocks: usize,
    options: *const Options, partials: *mut Partials,
) -> Status {
    let call = |caller: &Caller| {
        let attention = caller.handle(attention, "attention")?;
        let blocks = caller.read_all(blocks, num_blocks)?;
        attention.run(caller, queries, &blocks, options, partials)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

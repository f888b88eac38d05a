//! Which pages are worth reading, on an NVIDIA GPU: the smallest and largest K of each, and a choice by
//! them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::block::{self, Block};
use super::cuda::{Cuda, guard_context};
use super::memory::{Caller, Structure};
use super::options::{Options, Queries, TokenRange};
use super::status::{Failure, Status};
use crate::attention::select::{PageTopK, SelectedPages};
use crate::attention::{KvBlock, Shape};
use crate::cuda::DeviceSummaries;

/// The smallest and largest K of some blocks, in device memory.
#[derive(Debug)]
pub struct CudaSummaries {
    inner: Mutex<DeviceSummaries>,
    shape: Shape,
}

/// How many pages are read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PageBudget {
    /// `sizeof(kvfs_page_budget)`
    pub size: usize,
    /// In all, at least the ones below.
    pub pages: u64,
    /// First ones that are always read.
    pub sinks: u64,
    /// Last ones that are always read.
    pub recent: u64,
}

// SAFETY: numbers without gaps.
unsafe impl Structure for PageBudget {
    const NAME: &'static str = "kvfs_page_budget";
    const REQUIRED_BYTES: usize = size_of::<Self>();
}

/// What pages are chosen among, and for what.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PageSelection {
    /// `sizeof(kvfs_page_selection)`
    pub size: usize,
    /// How many pages.
    pub budget: *const PageBudget,
    /// The queries, in host memory.
    pub queries: *const Queries,
    /// `[num_blocks]`: the blocks that were summarised.
    pub blocks: *const Block,
    /// How many.
    pub num_blocks: usize,
    /// As they will be attended to; NULL: the defaults.
    pub options: *const Options,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for PageSelection {
    const NAME: &'static str = "kvfs_page_selection";
    const REQUIRED_BYTES: usize = size_of::<Self>();
}

impl PageBudget {
    fn top_k(&self) -> PageTopK {
        let [pages, sinks, recent] = [self.pages, self.sinks, self.recent]
            .map(|pages| usize::try_from(pages).unwrap_or(usize::MAX));
        PageTopK { pages, sinks, recent }
    }
}

impl CudaSummaries {
    /// To be used with attention of a shape: rows of another one would be elsewhere.
    fn lock(&self, shape: Shape) -> Result<MutexGuard<'_, DeviceSummaries>, Failure> {
        if shape != self.shape {
            return Err(Failure::argument("summaries of a kvfs_cuda with other heads"));
        }
        Ok(self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The tokens of the selected blocks; those that follow each other are one range.
fn ranges(selected: &SelectedPages, blocks: &[KvBlock<'_>]) -> Vec<TokenRange> {
    let mut ranges: Vec<TokenRange> = Vec::new();
    let mut first = 0;
    for (index, block) in blocks.iter().enumerate() {
        let end = first + block.tokens as u64;
        if selected.blocks.binary_search(&index).is_ok() {
            match ranges.last_mut() {
                Some(last) if last.end == first => last.end = end,
                _ => ranges.push(TokenRange { first, end }),
            }
        }
        first = end;
    }
    ranges
}

/// Creates `*summaries` of no block, to be freed with `kvfs_cuda_summaries_free`. They are for `cuda`, and
/// for another one with the same heads on the same device.
///
/// `KVFS_STATUS_MEMORY` and `KVFS_STATUS_DEVICE` as `kvfs_cuda_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_summaries_create(
    cuda: *const Cuda, summaries: *mut *mut CudaSummaries,
) -> Status {
    let call = |caller: &Caller| {
        caller.create(summaries, || {
            caller.handle(cuda, "cuda")?.with(|cuda| {
                let inner = Mutex::new(cuda.summarise(&[])?);
                Ok(CudaSummaries { inner, shape: cuda.shape() })
            })
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard_context(call) }
}

/// Frees what `kvfs_cuda_summaries_create` gave. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_summaries_free(summaries: *mut CudaSummaries) {
    let call = |caller: &Caller| caller.take(summaries).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard_context(call) };
}

/// Makes summaries those of `num_blocks` blocks in host memory, of which K is read from block `first` on:
/// what is known of sealed pages stays, while tokens come behind them. It returns when they are there.
///
/// `KVFS_STATUS_ARGUMENT` if fewer than `first` are known, `KVFS_STATUS_UNSUPPORTED` for a block whose K is
/// more than a pinned buffer; the others as `kvfs_cuda_run`. After an error only the first ones are left.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_summarise(
    cuda: *const Cuda, summaries: *const CudaSummaries, blocks: *const Block, num_blocks: usize,
    first: usize,
) -> Status {
    let call = |caller: &Caller| {
        caller.handle(cuda, "cuda")?.with(|cuda| {
            let mut known = caller.handle(summaries, "summaries")?.lock(cuda.shape())?;
            let blocks = caller.read_all(blocks, num_blocks)?;
            let (blocks, _) = block::borrow_all(caller, &blocks, cuda.shape())?;
            Ok(cuda.summarise_from(&mut known, &blocks, first)?)
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard_context(call) }
}

/// Writes to `ranges`, `[capacity]`, the tokens of the blocks that can matter most to queries in host
/// memory (Quest), ascending and as `kvfs_options.selection` takes them, and to `*count` how many ranges
/// there are. `num_blocks / 2 + 1` are enough; where there are more than `capacity` the first ones are
/// written. There is one summary for each block; K and V are not read. `options` may be NULL; a selection
/// in it is not looked at.
///
/// As `kvfs_cuda_run`. It waits for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_cuda_select_pages(
    cuda: *const Cuda, summaries: *const CudaSummaries, selection: *const PageSelection,
    ranges: *mut TokenRange, capacity: usize, count: *mut u64,
) -> Status {
    let call = |caller: &Caller| {
        let selection = caller.read(selection)?;
        caller.handle(cuda, "cuda")?.with(|cuda| {
            let known = caller.handle(summaries, "summaries")?.lock(cuda.shape())?;
            let blocks = caller.read_all(selection.blocks, selection.num_blocks)?;
            let (blocks, _) = block::borrow_all(caller, &blocks, cuda.shape())?;
            let queries = caller.read(selection.queries)?;
            let queries = queries.borrow(caller, cuda.shape())?;
            let options = selection.options;
            let options =
                if options.is_null() { Options::default() } else { caller.read(options)? };
            let options = options.borrow(caller, None)?;
            let top_k = caller.read(selection.budget)?.top_k();
            let selected = cuda.select_pages(&top_k, &queries, &blocks, &known, &options)?;
            let found = self::ranges(&selected, &blocks);
            caller.store(&found[..found.len().min(capacity)], ranges, "ranges")?;
            caller.store(&[found.len() as u64], count, "count")
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard_context(call) }
}

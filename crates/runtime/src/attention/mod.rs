//! Attention over pages where they lie, at the speed of the memory.
//!
//! A decode step reads all of K and V once, so what counts is bytes per second. [`Attention`] takes
//! [`Queries`] and a list of [`KvBlock`]s, borrowed views of pages, tails or any other memory, and
//! gives [`Partials`] `(o, m, l)`, which merge with those of other blocks, threads or devices:
//!
//! ```
//! use kvfs_runtime::attention::{Attention, KvBlock, Options, Queries, Shape, Tensor, Values};
//! use kvfs_page::{Dtype, Strides};
//!
//! // Four query heads on two KV heads of 64; three tokens [heads, tokens, dim] in f16.
//! let attention = Attention::new(Shape::new(4, 2, 64, 64)?, 1)?;
//! let rows = vec![0; 2 * 3 * 64 * 2];
//! let tensor = Tensor { bytes: &rows, strides: Strides { head: 3 * 64 * 2, token: 64 * 2 } };
//! let block = KvBlock {
//!     k: tensor, v: Values::Rows(tensor), dtype: Dtype::F16, tokens: 3, first_position: 0, shift: 0,
//! };
//! let queries = Queries { q: &[0.5; 4 * 64], positions: &[2] };
//! let partials = attention.run(&queries, &[block], &Options::default())?;
//! assert_eq!(partials.finish(None)?, vec![0.0; 4 * 64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | question it answers |
//! |---|---|
//! | `shape`, `block`, `options` | what is attended to, and how |
//! | `plan` | which tokens each query sees, and which thread reads them |
//! | `kernel` | one tile of tokens, as fast as the processor can |
//! | `worker`, `pool` | one thread's share, and the threads |
//! | `state` | how partial results merge |
//! | `rotation` | what if pages moved |
//! | `summary`, `select`, `mass` | which tokens are worth reading |
//! | `cost` | GPU or CPU |
//! | `bench` | how fast is it |
//!
//! NaN and infinities in K and V are data: they propagate into the heads that see them, as NaN
//! where infinities meet, and into no other query. K and V that no query sees are never touched.

pub mod bench;
mod block;
pub mod cost;
mod error;
mod kernel;
mod mass;
mod options;
mod plan;
pub(crate) mod pool;
mod rotation;
pub mod select;
mod shape;
mod state;
mod summary;
mod worker;

#[cfg(test)]
mod tests;

pub use block::{KvBlock, Tensor, Values};
pub use error::AttentionError;
pub use kernel::InstructionSet;
pub use options::{Mask, Options, Queries};
pub use rotation::{Pairing, Rotation};
pub use shape::Shape;
pub use state::{EMPTY_M, Partials};
pub use summary::PageSummary;

use std::sync::{Mutex, PoisonError};

use kernel::Kernel;
use mass::Recorder;
use plan::Plan;
use pool::Pool;
use worker::Worker;

/// Most threads of one runtime; beyond the memory's bandwidth more do not help.
pub const THREADS_MAX: usize = 256;

/// Attention for one shape, with its threads.
#[derive(Debug)]
pub struct Attention {
    shape: Shape,
    kernel: Kernel,
    pool: Pool,
    /// One for each thread. Locked by calls that count mass, for as long as they take.
    recorders: Mutex<Vec<Mutex<Recorder>>>,
}

impl Attention {
    /// With the fastest instructions of this processor and `threads` threads, of which the caller
    /// is one.
    ///
    /// # Errors
    /// As [`with_instructions`](Self::with_instructions).
    pub fn new(shape: Shape, threads: usize) -> Result<Self, AttentionError> {
        Self::with_instructions(shape, threads, InstructionSet::detect())
    }

    /// With certain instructions, or narrower ones where their vectors do not divide the head
    /// dimensions.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] if the processor lacks them or the threads do not start,
    /// [`AttentionError::Arguments`] for 0 or more than 256 threads.
    pub fn with_instructions(
        shape: Shape, threads: usize, set: InstructionSet,
    ) -> Result<Self, AttentionError> {
        if threads == 0 || threads > THREADS_MAX {
            let why = format!("{threads} threads: must be from 1 to {THREADS_MAX}");
            return Err(AttentionError::Arguments(why));
        }
        let kernel = Kernel::new(set, shape.head_dim(), shape.v_head_dim());
        let kernel = kernel.ok_or_else(|| AttentionError::Unsupported(format!("{set:?}")))?;
        let pool = Pool::new(threads)
            .map_err(|error| AttentionError::Unsupported(format!("{threads} threads ({error})")))?;
        let recorders = (0..threads).map(|_| Mutex::default()).collect();
        Ok(Self { shape, kernel, pool, recorders: Mutex::new(recorders) })
    }

    /// The heads.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Attends to the blocks; none is fine. Their order does not matter, except for the mask and
    /// the selection, which count tokens in it.
    ///
    /// # Errors
    /// [`AttentionError::Arguments`] and [`AttentionError::Block`] for what does not fit.
    pub fn run(
        &self, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
    ) -> Result<Partials, AttentionError> {
        let plan = Plan::new(self.shape, self.kernel, queries, blocks, options)?;
        self.attend(&plan, None)
    }

    /// One of `shares` parts of a call, for callers with threads of their own: the calling thread
    /// alone attends. The parts of all shares, merged in order, are what [`run`](Self::run) gives
    /// with as many threads, bit for bit.
    ///
    /// # Errors
    /// As [`run`](Self::run), and [`AttentionError::Arguments`] if there are not more shares than
    /// `share`.
    pub fn run_share(
        &self, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>, share: usize,
        shares: usize,
    ) -> Result<Partials, AttentionError> {
        if share >= shares {
            return Err(AttentionError::Arguments(format!("share {share} of {shares}")));
        }
        let plan = Plan::new(self.shape, self.kernel, queries, blocks, options)?;
        Ok(Worker::new(&plan, None).run(plan.share(share, shares)))
    }

    /// As [`run`](Self::run), and adds to `mass`, `[tokens of all blocks]`, the attention that each
    /// token got: the sum over queries and heads of its weight in the softmax over these blocks.
    ///
    /// Each weight is rounded to eleven bits. Each thread needs 2 bytes for each query, query head and
    /// token of the KV head that it works on, and of all of its KV heads where the rows of a token are
    /// closer than those of a head.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if there is not one mass for each token.
    pub fn run_with_mass(
        &self, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
        mass: &mut [f32],
    ) -> Result<Partials, AttentionError> {
        let plan = Plan::new(self.shape, self.kernel, queries, blocks, options)?;
        if mass.len() != plan.tokens {
            let why = format!("{} values of mass for {} tokens", mass.len(), plan.tokens);
            return Err(AttentionError::Arguments(why));
        }
        let recorders = self.recorders.lock().unwrap_or_else(PoisonError::into_inner);
        let partials = self.attend(&plan, Some(&recorders))?;
        self.pool.run(&|thread| lock(&recorders[thread]).finish(plan.kernel, &partials));
        for recorder in recorders.iter() {
            for (sum, mass) in mass.iter_mut().zip(lock(recorder).mass()) {
                *sum += mass;
            }
        }
        Ok(partials)
    }

    /// Divides the units among the threads, and merges what they gather.
    fn attend(
        &self, plan: &Plan<'_>, recorders: Option<&[Mutex<Recorder>]>,
    ) -> Result<Partials, AttentionError> {
        let threads = self.pool.size();
        let parts: Vec<Mutex<Option<Partials>>> = (0..threads).map(|_| Mutex::default()).collect();
        self.pool.run(&|thread| {
            let mut recorder = recorders.map(|recorders| lock(&recorders[thread]));
            if let Some(recorder) = &mut recorder {
                recorder.begin(plan.tokens);
            }
            let worker = Worker::new(plan, recorder.as_deref_mut());
            *lock(&parts[thread]) = Some(worker.run(plan.share(thread, threads)));
        });
        let mut all = Partials::empty(self.shape, plan.num_queries());
        for part in parts {
            let part = part.into_inner().unwrap_or_else(PoisonError::into_inner);
            all.merge(&part.expect("every thread left its part"))?;
        }
        Ok(all)
    }
}

/// What a panic leaves in there is written anew by the next call.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

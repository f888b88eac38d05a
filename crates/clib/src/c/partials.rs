//! Partial results in memory of the caller.

use std::mem::offset_of;

use super::memory::{Caller, Structure};
use super::status::{Failure, Status, guard};
use crate::attention::{self, Shape};

/// Attention of some queries over some tokens, not normalised: what another thread, machine or
/// GPU computed over other tokens merges with it.
///
/// The memory belongs to the caller. The structure itself is only read, what its pointers point to
/// is written.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Partials {
    /// `sizeof(kvfs_partials)`
    pub size: usize,
    /// `[num_queries, num_qo_heads, v_head_dim]`: the sum of V, each token weighted by
    /// `exp(logit - m)`.
    pub o: *mut f32,
    /// `[num_queries, num_qo_heads]`: the largest logit, natural; -1e30 without tokens.
    pub m: *mut f32,
    /// `[num_queries, num_qo_heads]`: the sum of `exp(logit - m)`; 0 without tokens. The
    /// log-sum-exp is `m + log(l)`.
    pub l: *mut f32,
    /// How many; 0 is fine.
    pub num_queries: u64,
    /// At most 65536.
    pub num_qo_heads: u32,
    /// At most 4096.
    pub v_head_dim: u32,
    /// `[tokens of all blocks]`, or NULL: `kvfs_attention_run` adds the attention that each token
    /// got, the sum over queries and heads of its weight in the softmax over these blocks. Others
    /// do not look at it. It costs 4 bytes of memory for each query, query head and token, which
    /// the attention keeps.
    pub mass: *mut f32,
    /// Values of `mass`.
    pub mass_count: usize,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for Partials {
    const NAME: &'static str = "kvfs_partials";
    const REQUIRED_BYTES: usize = offset_of!(Self, mass);
}

impl Partials {
    /// A shape with these heads; partials have nothing of the others.
    fn shape(&self) -> Result<Shape, Failure> {
        let v_head_dim = self.v_head_dim as usize;
        Ok(Shape::new(self.num_qo_heads as usize, 1, v_head_dim, v_head_dim)?)
    }

    /// Values of `o`, and of `m` and `l`.
    fn counts(&self) -> (usize, usize) {
        let num_queries = usize::try_from(self.num_queries).unwrap_or(usize::MAX);
        let heads = num_queries.saturating_mul(self.num_qo_heads as usize);
        (heads.saturating_mul(self.v_head_dim as usize), heads)
    }

    fn check(&self, caller: &Caller) -> Result<(), Failure> {
        let (values, heads) = self.counts();
        caller.check(self.o, values, "partials.o")?;
        caller.check(self.m, heads, "partials.m")?;
        caller.check(self.l, heads, "partials.l")
    }

    /// Whether a result of that shape fits.
    pub(super) fn check_result(
        &self, caller: &Caller, shape: Shape, num_queries: usize,
    ) -> Result<(), Failure> {
        let found = (self.num_queries, self.num_qo_heads as usize, self.v_head_dim as usize);
        let expected = (num_queries as u64, shape.num_qo_heads(), shape.v_head_dim());
        if found != expected {
            return Err(Failure::argument(format!(
                "partials are of {} queries with {} heads of {}, the result has {}, {} and {}",
                found.0, found.1, found.2, expected.0, expected.1, expected.2
            )));
        }
        self.check(caller)
    }

    fn load(&self, caller: &Caller) -> Result<attention::Partials, Failure> {
        let (values, heads) = self.counts();
        let o = caller.slice(self.o, values, "partials.o")?.to_vec();
        let m = caller.slice(self.m, heads, "partials.m")?.to_vec();
        let l = caller.slice(self.l, heads, "partials.l")?.to_vec();
        Ok(attention::Partials::from_parts(self.shape()?, o, m, l)?)
    }

    pub(super) fn store(
        &self, caller: &Caller, result: &attention::Partials,
    ) -> Result<(), Failure> {
        caller.store(result.o(), self.o, "partials.o")?;
        caller.store(result.m(), self.m, "partials.m")?;
        caller.store(result.l(), self.l, "partials.l")
    }
}

/// Makes partials those of no tokens, to merge others into.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_partials_clear(partials: *mut Partials) -> Status {
    let call = |caller: &Caller| {
        let partials = caller.read(partials)?;
        let shape = partials.shape()?;
        partials.check(caller)?;
        let num_queries = usize::try_from(partials.num_queries).unwrap_or(usize::MAX);
        partials.store(caller, &attention::Partials::empty(shape, num_queries))
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Adds the tokens of `other`, which must not be in `partials` yet. The order of merging changes
/// the result by rounding alone.
///
/// `KVFS_STATUS_ARGUMENT` if the two are of different shapes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_partials_merge(
    partials: *mut Partials, other: *const Partials,
) -> Status {
    let call = |caller: &Caller| {
        let (partials, other) = (caller.read(partials)?, caller.read(other)?);
        let mut all = partials.load(caller)?;
        all.merge(&other.load(caller)?)?;
        partials.store(caller, &all)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Writes the result to `out`, `[num_queries, num_qo_heads, v_head_dim]`: `o / l`, 0 without
/// tokens. `out_count` is the number of its values; it may be `partials->o`.
///
/// `sinks`, `[num_qo_heads]`, are logits that take part in the softmax without a value, as in
/// gpt-oss; NULL for none. `sinks_count` is the number of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_partials_finish(
    partials: *const Partials, sinks: *const f32, sinks_count: usize, out: *mut f32,
    out_count: usize,
) -> Status {
    let call = |caller: &Caller| {
        let partials = caller.read(partials)?;
        let (values, _) = partials.counts();
        if out_count != values {
            let why = format!("out has {out_count} values, the result {values}");
            return Err(Failure::argument(why));
        }
        caller.check(out, out_count, "out")?;
        let sinks = if sinks.is_null() {
            None
        } else {
            Some(caller.slice(sinks, sinks_count, "sinks")?.to_vec())
        };
        let result = partials.load(caller)?.finish(sinks.as_deref())?;
        caller.store(&result, out, "out")
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

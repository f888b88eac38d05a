//! Causal attention over pages and tails, where they lie.
//!
//! [`kvfs::attention`] reads the f16 rows of a cache as they are. A resumed run must continue
//! exactly as an uninterrupted one would, so one thread adds up everything that a query sees, in
//! order: among several, the last bits of a sum would tell how it was divided. Threads divide the
//! queries instead.
//!
//! A sum is taken in tiles of 128 tokens that begin anew at each page. So caches agree to the last
//! bit if their pages have the same size, or multiples of 128 tokens, and otherwise up to rounding.
//! Between processors with other vector instructions the last bits differ as well.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use half::f16;
use kvfs::attention::{Attention, KvBlock, Options, Pairing, Queries, Rotation, Shape};
use kvfs::cuda::{Runtime, Settings, WriteBack};
use kvfs::page::{Manifest, Rope};
use kvfs::reader::Backend;
use serde_json::Map;
use zerocopy::IntoBytes;

use crate::Result;
use crate::matrix::divide_rows;
use crate::weights::Config;

/// Values in the keys (or the values) of one token.
pub(crate) fn kv_width(shape: Shape) -> usize {
    shape.num_kv_heads() * shape.head_dim()
}

/// Values in the queries (or the outputs) of one token.
pub(crate) fn query_width(shape: Shape) -> usize {
    shape.num_qo_heads() * shape.head_dim()
}

/// The rows of a tail, of each token keys, then values; both are `[tokens, kv_heads, head_dim]`.
pub(crate) fn interleave(shape: Shape, keys: &[f16], values: &[f16]) -> Vec<u8> {
    let width = kv_width(shape);
    let tokens = keys.chunks_exact(width).zip(values.chunks_exact(width));
    tokens.flat_map(|(keys, values)| [keys.as_bytes(), values.as_bytes()].concat()).collect()
}

/// Heads of `dim` elements in the order of llama.cpp: what turns together stands side by side. Products of
/// such queries and keys are the same.
pub(crate) fn interleave_halves<T: Copy>(heads: &[T], dim: usize) -> Vec<T> {
    let halves = heads.chunks_exact(dim).map(|head| head.split_at(dim / 2));
    halves.flat_map(|(low, high)| low.iter().zip(high).flat_map(|(a, b)| [*a, *b])).collect()
}

/// Attention of one layer's shape.
#[derive(Debug)]
pub(crate) struct CausalAttention {
    /// With one thread: the caller's.
    attention: Attention,
    /// Instead of it, if a GPU was asked for.
    runtime: Option<Mutex<Runtime>>,
    /// For tokens that have moved.
    rotation: Option<Rotation>,
}

impl CausalAttention {
    pub(crate) fn new(shape: Shape) -> Result<Self> {
        Ok(Self { attention: Attention::new(shape, 1)?, runtime: None, rotation: None })
    }

    /// The same for tokens that may have moved since their K was rotated.
    pub(crate) fn of_model(config: &Config, pairing: Pairing) -> Result<Self> {
        let rope =
            Rope { theta: config.rope_theta, scaling: None, dims: None, other: Map::default() };
        let rotation = Rotation::new(&rope, config.head_dim, pairing)?;
        Ok(Self { rotation: Some(rotation), ..Self::new(config.shape()?)? })
    }

    /// From now on a GPU attends, or if there is none as many threads as there are cores; returns
    /// which. Results then agree with those of one thread up to rounding.
    #[allow(dead_code, reason = "examples/demo has these files too, and asks for no GPU")]
    pub(crate) fn use_gpu(&mut self) -> Result<Backend> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let runtime = Runtime::open(self.shape(), Settings::default(), threads)?;
        let backend = runtime.backend();
        self.runtime = Some(Mutex::new(runtime));
        Ok(backend)
    }

    /// Writes rows to a sequence in the background, beside a GPU; `None` without one.
    pub(crate) fn write_back(
        &self, sequence: &Path, manifest: &Manifest, tokens: usize,
    ) -> Result<Option<WriteBack>> {
        let Some(runtime) = &self.runtime else { return Ok(None) };
        let mut runtime = runtime.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(cuda) = runtime.cuda() else { return Ok(None) };
        Ok(Some(WriteBack::new(cuda, sequence, manifest, tokens as u64)?))
    }

    pub(crate) fn shape(&self) -> Shape {
        self.attention.shape()
    }

    /// Attends from consecutive tokens, the first of them at `first_position`, to everything up to
    /// and including themselves.
    ///
    /// `queries` and `out` are `[tokens, query_heads, head_dim]`; `blocks` hold the keys (after
    /// rotary embedding) and values from position 0 on, in order.
    pub(crate) fn attend(
        &self, blocks: &[KvBlock<'_>], queries: &[f32], first_position: usize, out: &mut [f32],
    ) -> Result<()> {
        let width = query_width(self.shape());
        let end = first_position + queries.len() / width;
        let held: usize = blocks.iter().map(|block| block.tokens).sum();
        if held < end {
            return Err(
                format!("attention up to position {end}, but only {held} are cached").into()
            );
        }
        let positions: Vec<u64> = (first_position as u64..end as u64).collect();
        let options = Options { rotation: self.rotation.as_ref(), ..Options::default() };
        if let Some(runtime) = &self.runtime {
            let mut runtime = runtime.lock().unwrap_or_else(PoisonError::into_inner);
            let queries = Queries { q: queries, positions: &positions };
            let partials = runtime.run(&queries, blocks, &options)?;
            out.copy_from_slice(&partials.finish(None)?);
            return Ok(());
        }
        divide_rows(out, width, |first, out| {
            let queries = Queries {
                q: &queries[first * width..][..out.len()],
                positions: &positions[first..][..out.len() / width],
            };
            let partials = self.attention.run(&queries, blocks, &options)?;
            out.copy_from_slice(&partials.finish(None)?);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use kvfs::attention::Shape;

    use super::{kv_width, query_width};
    use crate::Result;
    use crate::memory_cache::MemoryCache;
    use crate::model::KeyValueCache;
    use crate::reference::{self, Rows, assert_close};
    use crate::tests::{Random, bits};

    fn shape() -> Shape {
        Shape::new(4, 2, 64, 64).unwrap()
    }

    /// A cache of one layer with these rows, `[tokens, kv_heads, head_dim]`.
    fn cache_of(keys: &[f16], values: &[f16], page_tokens: usize) -> Result<MemoryCache> {
        let mut cache = MemoryCache::new(shape(), 1, page_tokens)?;
        cache.append(0, 0, keys, values)?;
        Ok(cache)
    }

    #[test]
    fn tiled_attention_equals_full_attention() -> Result<()> {
        let (shape, mut random) = (shape(), Random(1));
        let (first, tokens) = (250, 60);
        let end = first + tokens;
        let keys = random.halves(end * kv_width(shape));
        let values = random.halves(end * kv_width(shape));
        let queries = random.floats(tokens * query_width(shape), 3.0);
        let rows = Rows::of_halves(&keys, &values);
        let mut expected = Vec::new();
        for (token, query) in queries.chunks_exact(query_width(shape)).enumerate() {
            expected.extend(reference::attend(shape, query, &rows, &|seen| seen <= first + token));
        }
        for page_tokens in [16, 100, 256, 1000] {
            let mut out = vec![0.0; queries.len()];
            cache_of(&keys, &values, page_tokens)?.attend(0, first, &queries, &mut out)?;
            assert_close(&out, &expected);
        }
        Ok(())
    }

    #[test]
    fn paged_attention_equals_monolithic_attention() -> Result<()> {
        let (shape, mut random) = (shape(), Random(2));
        let tokens = 600;
        let keys = random.halves(tokens * kv_width(shape));
        let values = random.halves(tokens * kv_width(shape));
        let query = random.floats(query_width(shape), 2.0);
        let over = |page_tokens| -> Result<Vec<f32>> {
            let mut out = vec![0.0; query.len()];
            cache_of(&keys, &values, page_tokens)?.attend(0, tokens - 1, &query, &mut out)?;
            Ok(out)
        };
        let tail_only = over(tokens + 1)?;
        // One page, pages and a tail: the tiles are the same.
        for page_tokens in [tokens, 128, 256, 512] {
            assert_eq!(bits(&over(page_tokens)?), bits(&tail_only), "pages of {page_tokens}");
        }
        let tail_only: Vec<f64> = tail_only.into_iter().map(f64::from).collect();
        for page_tokens in [1, 16, 100] {
            assert_close(&over(page_tokens)?, &tail_only);
        }
        Ok(())
    }

    #[test]
    fn attention_refuses_positions_that_are_not_cached() -> Result<()> {
        let rows = vec![f16::ZERO; 3 * kv_width(shape())];
        let query = vec![0.0; query_width(shape())];
        let mut out = query.clone();
        let mut cache = cache_of(&rows, &rows, 16)?;
        assert!(cache.attend(0, 2, &query, &mut out).is_ok());
        assert!(cache.attend(0, 3, &query, &mut out).is_err());
        Ok(())
    }
}

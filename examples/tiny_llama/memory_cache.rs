//! A KV cache in memory, in the same pages and tails as a sequence directory.

use half::f16;
use kvfs::attention::{KvBlock, Shape, Tensor, Values};
use kvfs::page::{Dtype, Strides};
use kvfs::reader::Backend;
use zerocopy::IntoBytes;

use crate::Result;
use crate::attention::{CausalAttention, kv_width};
use crate::model::KeyValueCache;

/// A sealed page of one layer; keys and values are each `[kv_heads, page_tokens, head_dim]`.
#[derive(Debug)]
struct Page {
    keys: Vec<f16>,
    values: Vec<f16>,
}

/// One layer: full pages, then the rows of the open one, of each token keys, then values.
#[derive(Debug, Default)]
struct LayerRows {
    pages: Vec<Page>,
    tail: Vec<f16>,
}

/// The reference implementation of [`KeyValueCache`].
#[derive(Debug)]
pub(crate) struct MemoryCache {
    attention: CausalAttention,
    page_tokens: usize,
    layers: Vec<LayerRows>,
}

impl MemoryCache {
    /// An empty cache for `layers` layers that seals a page every `page_tokens` tokens.
    pub(crate) fn new(shape: Shape, layers: usize, page_tokens: usize) -> Result<Self> {
        let layers = (0..layers).map(|_| LayerRows::default()).collect();
        Ok(Self { attention: CausalAttention::new(shape)?, page_tokens, layers })
    }

    /// As [`CausalAttention::use_gpu`].
    #[allow(dead_code, reason = "examples/demo has these files too, and asks for no GPU")]
    pub(crate) fn use_gpu(&mut self) -> Result<Backend> {
        self.attention.use_gpu()
    }

    /// Without a token, and on the CPU.
    #[allow(dead_code, reason = "examples/demo has these files too, and drops no tokens")]
    pub(crate) fn empty_like(&self) -> Result<Self> {
        Self::new(self.shape(), self.layers.len(), self.page_tokens)
    }

    fn shape(&self) -> Shape {
        self.attention.shape()
    }

    /// The rows of a layer, from position 0 on.
    pub(crate) fn blocks(&self, layer: usize) -> Result<Vec<KvBlock<'_>>> {
        let layer = self.layer(layer)?;
        let (dim, width) = (self.shape().head_dim(), kv_width(self.shape()));
        let [row, token] = [dim, 2 * width].map(|values| values * size_of::<f16>());
        let block = |number: usize, k, v, tokens, strides| KvBlock {
            k: Tensor { bytes: k, strides },
            v: Values::Rows(Tensor { bytes: v, strides }),
            dtype: Dtype::F16,
            tokens,
            first_position: (number * self.page_tokens) as u64,
            shift: 0,
        };
        let in_page = Strides { head: self.page_tokens * row, token: row };
        let pages = layer.pages.iter().enumerate().map(|(number, page)| {
            let (k, v) = (page.keys.as_bytes(), page.values.as_bytes());
            block(number, k, v, self.page_tokens, in_page)
        });
        let (k, v) = (&layer.tail[..], layer.tail.get(width..).unwrap_or_default());
        let in_tail = Strides { head: row, token };
        let tokens = layer.tail.len() / (2 * width);
        let tail = block(layer.pages.len(), k.as_bytes(), v.as_bytes(), tokens, in_tail);
        Ok(pages.chain([tail]).collect())
    }

    fn layer(&self, layer: usize) -> Result<&LayerRows> {
        self.layers.get(layer).ok_or_else(|| format!("no layer {layer} in the cache").into())
    }

    /// How many tokens `layer` holds.
    fn tokens(&self, layer: &LayerRows) -> usize {
        layer.pages.len() * self.page_tokens + layer.tail.len() / (2 * kv_width(self.shape()))
    }
}

impl KeyValueCache for MemoryCache {
    fn append(
        &mut self, layer: usize, position: usize, keys: &[f16], values: &[f16],
    ) -> Result<()> {
        let held = self.tokens(self.layer(layer)?);
        let known = held
            .checked_sub(position)
            .ok_or_else(|| format!("append at {position} after {held} tokens"))?;
        let (shape, page_tokens) = (self.shape(), self.page_tokens);
        let width = kv_width(shape);
        let layer = &mut self.layers[layer];
        for (keys, values) in keys.chunks_exact(width).zip(values.chunks_exact(width)).skip(known) {
            layer.tail.extend_from_slice(keys);
            layer.tail.extend_from_slice(values);
            if layer.tail.len() == page_tokens * 2 * width {
                layer.pages.push(seal(shape, &layer.tail));
                layer.tail.clear();
            }
        }
        Ok(())
    }

    fn attend(
        &mut self, layer: usize, position: usize, queries: &[f32], out: &mut [f32],
    ) -> Result<()> {
        self.attention.attend(&self.blocks(layer)?, queries, position, out)
    }
}

/// The page made of the rows of a full tail: token-major becomes head-major.
fn seal(shape: Shape, tail: &[f16]) -> Page {
    let (width, dim) = (kv_width(shape), shape.head_dim());
    let head_major = |offset: usize| {
        let mut out = Vec::with_capacity(tail.len() / 2);
        for head in 0..shape.num_kv_heads() {
            for row in tail.chunks_exact(2 * width) {
                out.extend_from_slice(&row[offset + head * dim..][..dim]);
            }
        }
        out
    };
    Page { keys: head_major(0), values: head_major(width) }
}

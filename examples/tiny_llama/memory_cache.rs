//! A KV cache in memory, in the same pages and tails as a sequence directory.

use half::f16;

use crate::Result;
use crate::attention::{Rows, Shape, attend};
use crate::model::KeyValueCache;

/// A sealed page of one layer; keys and values are each `[kv_heads, page_tokens, head_dim]`.
#[derive(Debug)]
struct Page {
    keys: Vec<f16>,
    values: Vec<f16>,
}

/// One layer: full pages, then the rows of the open one.
#[derive(Debug, Default)]
struct LayerRows {
    pages: Vec<Page>,
    tail: Vec<f16>,
}

/// The reference implementation of [`KeyValueCache`].
#[derive(Debug)]
pub(crate) struct MemoryCache {
    shape: Shape,
    page_tokens: usize,
    layers: Vec<LayerRows>,
}

impl MemoryCache {
    /// An empty cache for `layers` layers that seals a page every `page_tokens` tokens.
    pub(crate) fn new(shape: Shape, layers: usize, page_tokens: usize) -> Self {
        let layers = (0..layers).map(|_| LayerRows::default()).collect();
        Self { shape, page_tokens, layers }
    }

    /// The heads of a layer.
    #[cfg(test)]
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    fn layer(&self, layer: usize) -> Result<&LayerRows> {
        self.layers.get(layer).ok_or_else(|| format!("no layer {layer} in the cache").into())
    }

    /// How many tokens `layer` holds.
    fn tokens(&self, layer: &LayerRows) -> usize {
        layer.pages.len() * self.page_tokens + layer.tail.len() / (2 * self.shape.kv_width())
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
        let (shape, page_tokens) = (self.shape, self.page_tokens);
        let width = shape.kv_width();
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
        let layer = self.layer(layer)?;
        let pages =
            layer.pages.iter().map(|page| Rows::Page { keys: &page.keys, values: &page.values });
        let rows: Vec<Rows<'_>> = pages.chain([Rows::Tail(&layer.tail)]).collect();
        attend(self.shape, &rows, queries, position, out)
    }
}

/// The page made of the rows of a full tail: token-major becomes head-major.
fn seal(shape: Shape, tail: &[f16]) -> Page {
    let (width, dim) = (shape.kv_width(), shape.head_dim);
    let head_major = |offset: usize| {
        let mut out = Vec::with_capacity(tail.len() / 2);
        for head in 0..shape.kv_heads {
            for row in tail.chunks_exact(2 * width) {
                out.extend_from_slice(&row[offset + head * dim..][..dim]);
            }
        }
        out
    };
    Page { keys: head_major(0), values: head_major(width) }
}

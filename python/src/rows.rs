//! K and V of some tokens in arrays of an engine, and as the rows of a tail.

use kvfs_page::{Geometry, Layout};

use crate::element::Element;
use crate::errors::Failure;
use crate::tensor::Tensor;

/// K or V of one layer, where an engine has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plane<'a> {
    bytes: &'a [u8],
    head_stride: usize,
    token_stride: usize,
    row_bytes: usize,
    heads: usize,
    pub(crate) tokens: usize,
}

/// K, and V where the model keeps any.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) k: Plane<'a>,
    pub(crate) v: Option<Plane<'a>>,
}

/// The order of dimensions in an engine's arrays.
pub(crate) fn layout(name: Option<&str>, geometry: &Geometry) -> Result<Layout, Failure> {
    match name {
        None => Ok(geometry.layout()),
        Some("hnd") => Ok(Layout::Hnd),
        Some("nhd") => Ok(Layout::Nhd),
        Some(other) => Err(Failure::argument(format!(
            "layout is {other:?}: hnd ([heads, tokens, dim]) or nhd ([tokens, heads, dim])"
        ))),
    }
}

impl<'a> Plane<'a> {
    /// The planes of one array: itself if it has three dimensions, else one for each of the first.
    pub(crate) fn all_of(
        tensor: &'a Tensor, geometry: &Geometry, is_v: bool, layout: Layout,
    ) -> Result<Vec<Self>, Failure> {
        let what = &tensor.what;
        let dim = if is_v { geometry.v_shape(1) } else { geometry.k_shape(1) }[2];
        let (heads, dim) =
            (geometry.num_kv_heads() as usize, usize::try_from(dim).unwrap_or(usize::MAX));
        let element = Element::of(geometry.dtype());
        if !tensor.element.stands_for(geometry.dtype()) {
            let (name, wanted) = (tensor.element.name(), element.name());
            return Err(Failure::argument(format!(
                "{what} is {name}, the model keeps {wanted}: convert it, or make a model of that dtype"
            )));
        }
        let first = tensor.shape.len().saturating_sub(3);
        let (outer, inner) = tensor.shape.split_at(first);
        let (order, found_heads, tokens) = match (layout, inner) {
            (Layout::Hnd, [heads, tokens, _]) => ("heads, tokens, dim", *heads, *tokens),
            (Layout::Nhd, [tokens, heads, _]) => ("tokens, heads, dim", *heads, *tokens),
            _ => ("", 0, 0),
        };
        if outer.len() > 1 || found_heads != heads || inner.last() != Some(&dim) {
            let (shape, order) =
                (&tensor.shape, if order.is_empty() { "heads, tokens, dim" } else { order });
            return Err(Failure::argument(format!(
                "{what} has shape {shape:?}: [{order}] with {heads} heads of {dim} is needed, or one such \
                 array for each layer"
            )));
        }
        if !tensor.is_contiguous_from(first + 2) {
            return Err(Failure::argument(format!(
                "{what} has rows that are not contiguous: .contiguous() in torch, numpy.ascontiguousarray"
            )));
        }
        let strides = &tensor.strides;
        let (a, b) = (strides[first], strides[first + 1]);
        let (head_stride, token_stride) = if layout == Layout::Hnd { (a, b) } else { (b, a) };
        let row_bytes = dim * element.bytes();
        let count = outer.first().copied().unwrap_or(1);
        let stride = if first == 1 { strides[0] } else { 0 };
        let plane = |index: usize| Self {
            bytes: tensor.bytes().get(index * stride..).unwrap_or_default(),
            head_stride,
            token_stride,
            row_bytes,
            heads,
            tokens,
        };
        Ok((0..count).map(plane).collect())
    }

    fn append_row(&self, token: usize, to: &mut Vec<u8>) {
        let at = token * self.token_stride;
        // All heads of a token in one piece, as an engine without a batch often has them.
        if self.head_stride == self.row_bytes {
            to.extend_from_slice(&self.bytes[at..at + self.heads * self.row_bytes]);
            return;
        }
        for head in 0..self.heads {
            let at = at + head * self.head_stride;
            to.extend_from_slice(&self.bytes[at..at + self.row_bytes]);
        }
    }
}

impl Rows<'_> {
    /// Rows of tokens `first` to `end`, each K and then V.
    pub(crate) fn gather(&self, first: usize, end: usize) -> Vec<u8> {
        let v_bytes = self.v.map_or(0, |v| v.row_bytes * v.heads);
        let row_bytes = self.k.row_bytes * self.k.heads + v_bytes;
        let mut rows = Vec::with_capacity((end - first) * row_bytes);
        for token in first..end {
            self.k.append_row(token, &mut rows);
            if let Some(v) = &self.v {
                v.append_row(token, &mut rows);
            }
        }
        rows
    }
}

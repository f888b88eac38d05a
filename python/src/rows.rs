//! K, V and side rows of some tokens in arrays of an engine, and as the rows of a tail.

use kvfs_page::{Geometry, Layer, Layout, Manifest};

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

/// Side rows of one layer, where an engine has them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SidePlane<'a> {
    bytes: &'a [u8],
    stride: usize,
    row_bytes: usize,
    tokens: usize,
}

/// K, V where the model keeps any, and side rows where the layer does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) k: Plane<'a>,
    pub(crate) v: Option<Plane<'a>>,
    pub(crate) side: Option<SidePlane<'a>>,
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

impl<'a> SidePlane<'a> {
    /// The planes of one array: itself if it is `[tokens, ...]`, else one for each of the first dimension. Elements
    /// may be of any type, since nobody here knows what a row consists of.
    pub(crate) fn all_of(tensor: &'a Tensor) -> Result<Vec<Self>, Failure> {
        let (what, shape) = (&tensor.what, &tensor.shape);
        let first = match shape.len() {
            2 => 0,
            3 => 1,
            _ => {
                return Err(Failure::argument(format!(
                    "{what} has shape {shape:?}: [tokens, elements of a row] is needed, or one such array for each \
                     layer that keeps side rows"
                )));
            }
        };
        if !tensor.is_contiguous_from(first + 1) {
            return Err(Failure::argument(format!(
                "{what} has rows that are not contiguous: .contiguous() in torch, numpy.ascontiguousarray"
            )));
        }
        let count = if first == 1 { shape[0] } else { 1 };
        let between = if first == 1 { tensor.strides[0] } else { 0 };
        let plane = |index: usize| Self {
            bytes: tensor.bytes().get(index * between..).unwrap_or_default(),
            stride: tensor.strides[first],
            row_bytes: shape[first + 1] * tensor.element.bytes(),
            tokens: shape[first],
        };
        Ok((0..count).map(plane).collect())
    }
}

impl Rows<'_> {
    pub(crate) fn side_tokens(&self) -> Option<usize> {
        self.side.map(|side| side.tokens)
    }

    /// Refuses rows that lack what the layer keeps beside K and V, or have something else there.
    pub(crate) fn check_side(&self, layer: Layer, manifest: &Manifest) -> Result<(), Failure> {
        let wanted = manifest.side_rows(layer);
        let line = match (wanted, self.side) {
            (None, None) => return Ok(()),
            (Some(wanted), Some(side)) if side.row_bytes == wanted.row_bytes as usize => {
                return Ok(());
            }
            (Some(wanted), None) => format!(
                "layer {layer} keeps {} of {} bytes beside K and V of each token: give them as side",
                wanted.name, wanted.row_bytes
            ),
            (Some(wanted), Some(side)) => format!(
                "side has rows of {} bytes, layer {layer} keeps {} of {}",
                side.row_bytes, wanted.name, wanted.row_bytes
            ),
            (None, Some(_)) => {
                format!("layer {layer} keeps nothing beside K and V: give no side rows for it")
            }
        };
        Err(Failure::argument(line))
    }

    /// Rows of tokens `first` to `end`, each K, then V, then the side row.
    pub(crate) fn gather(&self, first: usize, end: usize) -> Vec<u8> {
        let v_bytes = self.v.map_or(0, |v| v.row_bytes * v.heads);
        let side_bytes = self.side.map_or(0, |side| side.row_bytes);
        let row_bytes = self.k.row_bytes * self.k.heads + v_bytes + side_bytes;
        let mut rows = Vec::with_capacity((end - first) * row_bytes);
        for token in first..end {
            self.k.append_row(token, &mut rows);
            if let Some(v) = &self.v {
                v.append_row(token, &mut rows);
            }
            if let Some(side) = &self.side {
                let at = token * side.stride;
                rows.extend_from_slice(&side.bytes[at..at + side.row_bytes]);
            }
        }
        rows
    }
}

//! A tensor of the engine, as far as it may be trusted: numbers are checked, bytes are slices.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::slice;

use half::f16;

use super::abi::{DIMS, OPERATION_NONE, RawTensor, types};
use crate::page::Dtype;

/// Reads a tensor that the engine handed over for one call.
#[derive(Clone, Copy)]
pub(super) struct TensorView<'a> {
    /// No reference: while the engine computes, the tensor's operation is another one.
    raw: *const RawTensor,
    shape: [usize; DIMS],
    memory: PhantomData<&'a [u8]>,
}

impl<'a> TensorView<'a> {
    /// # Safety
    /// NULL, or a tensor of the engine that lives as long as `'a`; so do those it points to, and
    /// memory that it has is as long as its shape and strides say.
    pub(super) unsafe fn new(raw: *const RawTensor) -> Option<Self> {
        // SAFETY: the caller promises a tensor.
        let tensor = unsafe { raw.as_ref() }?;
        let mut shape = [0; DIMS];
        for (to, from) in shape.iter_mut().zip(tensor.ne) {
            *to = usize::try_from(from).ok()?;
        }
        Some(Self { raw, shape, memory: PhantomData })
    }

    pub(super) fn source(&self, index: usize) -> Option<Self> {
        // SAFETY: sources live as long as the tensor.
        unsafe { Self::new(self.raw().src[index]) }
    }

    /// The tensor whose memory this is.
    pub(super) fn root(&self) -> Self {
        let mut root = *self;
        // SAFETY: as above.
        while let Some(source) = unsafe { Self::new(root.raw().view_src) } {
            root = source;
        }
        root
    }

    pub(super) fn raw(&self) -> &RawTensor {
        // SAFETY: the promise of `new`; nobody changes a tensor while it is looked at.
        unsafe { &*self.raw }
    }

    /// Elements in each dimension, the contiguous one first.
    pub(super) fn shape(&self) -> [usize; DIMS] {
        self.shape
    }

    /// Bytes from one element (or block) of a dimension to the next.
    pub(super) fn strides(&self) -> [usize; DIMS] {
        self.raw().nb
    }

    pub(super) fn kind(&self) -> i32 {
        self.raw().kind
    }

    pub(super) fn name(&self) -> &str {
        // SAFETY: the name is an array of bytes.
        let bytes = unsafe { slice::from_raw_parts(self.raw().name.as_ptr().cast(), 64) };
        CStr::from_bytes_until_nul(bytes).ok().and_then(|name| name.to_str().ok()).unwrap_or("")
    }

    /// A parameter of the operation.
    pub(super) fn parameter(&self, index: usize) -> f32 {
        f32::from_bits(self.raw().op_params[index].cast_unsigned())
    }

    /// The type, if the attention runtime has it.
    pub(super) fn dtype(&self) -> Option<Dtype> {
        match self.raw().kind {
            types::F16 => Some(Dtype::F16),
            types::BF16 => Some(Dtype::Bf16),
            types::Q8_0 => Some(Dtype::Q8_0),
            types::Q4_0 => Some(Dtype::Q4_0),
            _ => None,
        }
    }

    /// Bytes of one element, or of one block of elements.
    fn unit(&self) -> Option<(usize, usize)> {
        if self.raw().kind == types::F32 {
            return Some((4, 1));
        }
        let dtype = self.dtype()?;
        Some((dtype.block_bytes() as usize, dtype.block_elements() as usize))
    }

    /// Bytes of a row, if rows are contiguous.
    pub(super) fn row_bytes(&self) -> Option<usize> {
        let (bytes, elements) = self.unit()?;
        let whole = self.raw().nb[0] == bytes && self.shape[0].is_multiple_of(elements);
        whole.then(|| (self.shape[0] / elements).checked_mul(bytes))?
    }

    /// Whether the first `dims` dimensions lie behind each other without a gap.
    pub(super) fn is_packed(&self, dims: usize) -> bool {
        let Some(row) = self.row_bytes() else { return false };
        let mut bytes = Some(row);
        (1..dims).all(|dim| {
            let packed = self.shape[dim] <= 1 || bytes == Some(self.raw().nb[dim]);
            bytes = bytes.and_then(|bytes| bytes.checked_mul(self.shape[dim]));
            packed
        })
    }

    /// Bytes from the first to the last that the tensor has.
    fn extent(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        (1..DIMS).try_fold(self.row_bytes()?, |end, dim| {
            (self.shape[dim] - 1).checked_mul(self.raw().nb[dim])?.checked_add(end)
        })
    }

    /// All of its memory, from its first byte on.
    pub(super) fn bytes(&self) -> Option<&'a [u8]> {
        let extent = self.extent().filter(|_| !self.raw().data.is_null())?;
        // SAFETY: the engine's memory has what shape and strides span; nobody writes meanwhile.
        Some(unsafe { slice::from_raw_parts(self.raw().data.cast(), extent) })
    }

    /// The numbers of a vector of indices that is there before anything is computed.
    pub(super) fn leaf_indices(&self) -> Option<Vec<usize>> {
        let (bytes, count) = match self.raw().kind {
            types::I64 => (8, self.shape[0]),
            types::I32 => (4, self.shape[0]),
            _ => return None,
        };
        let is_leaf = self.raw().op == OPERATION_NONE && self.raw().nb[0] == bytes;
        if !is_leaf || self.shape[1..] != [1; DIMS - 1] || self.raw().data.is_null() {
            return None;
        }
        // SAFETY: the engine's memory has what the shape spans; nobody writes meanwhile.
        let all = unsafe { slice::from_raw_parts(self.raw().data.cast::<u8>(), bytes * count) };
        let number = |index: &[u8]| {
            let mut number = [0; 8];
            number[..bytes].copy_from_slice(index);
            usize::from_le_bytes(number)
        };
        Some(all.chunks_exact(bytes).map(number).collect())
    }

    /// `count` numbers from byte `offset` on, to be written.
    ///
    /// # Safety
    /// Nothing else that is used meanwhile shares their memory.
    pub(super) unsafe fn numbers_mut(&self, offset: usize, count: usize) -> Option<&'a mut [f32]> {
        let end = count.checked_mul(size_of::<f32>())?.checked_add(offset)?;
        let inside = self.extent().is_some_and(|extent| end <= extent);
        let start = self.raw().data.wrapping_byte_add(offset).cast::<f32>();
        if !inside || self.raw().data.is_null() || !start.is_aligned() {
            return None;
        }
        // SAFETY: the engine's memory has what shape and strides span; the rest is the caller's.
        Some(unsafe { slice::from_raw_parts_mut(start, count) })
    }
}

/// `count` numbers from `offset` on.
pub(super) fn numbers<T: Number>(bytes: &[u8], offset: usize, count: usize) -> Option<&[T]> {
    let end = count.checked_mul(size_of::<T>())?.checked_add(offset)?;
    let bytes = bytes.get(offset..end)?;
    // SAFETY: every pattern of bits is a number.
    let (before, numbers, after) = unsafe { bytes.align_to::<T>() };
    (before.is_empty() && after.is_empty()).then_some(numbers)
}

/// # Safety
/// Every pattern of bits is a value, without padding.
pub(super) unsafe trait Number: Copy {}
// SAFETY: a number.
unsafe impl Number for f32 {}
// SAFETY: a number, transparent.
unsafe impl Number for f16 {}

//! K and V in memory.

use std::ffi::c_void;
use std::mem::offset_of;

use super::memory::{Caller, Structure};
use super::status::Failure;
use crate::attention::{self, KvBlock, Shape};
use crate::page::{Dtype, Strides};

/// How elements are stored, little endian.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// IEEE half precision.
    F16 = 1,
    /// The upper half of an f32.
    Bf16 = 2,
    /// IEEE single precision.
    F32 = 3,
    /// 8 bits, 4 of exponent and 3 of mantissa, without infinities.
    F8E4m3 = 4,
    /// ggml blocks of 32 elements: an f16 scale, 32 i8.
    Q8_0 = 5,
    /// ggml blocks of 32 elements: an f16 scale, 16 bytes of nibbles.
    Q4_0 = 6,
}

/// Both directions of one table.
const DATA_TYPES: [(DataType, Dtype); 6] = [
    (DataType::F16, Dtype::F16),
    (DataType::Bf16, Dtype::Bf16),
    (DataType::F32, Dtype::F32),
    (DataType::F8E4m3, Dtype::F8E4m3),
    (DataType::Q8_0, Dtype::Q8_0),
    (DataType::Q4_0, Dtype::Q4_0),
];

impl DataType {
    pub(super) fn find(number: u32) -> Result<Dtype, String> {
        let found = DATA_TYPES.iter().find(|(data_type, _)| *data_type as u32 == number);
        found.map(|(_, dtype)| *dtype).ok_or_else(|| format!("dtype {number} is unknown"))
    }

    pub(super) fn number(dtype: Dtype) -> u32 {
        let found = DATA_TYPES.iter().find(|(_, other)| *other == dtype);
        found.map_or(0, |(data_type, _)| *data_type as u32)
    }
}

/// Where the values of a block are.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// In the tensor `v`.
    Rows = 0,
    /// In the first `v_head_dim` elements of the rows of `k` (multi-head latent attention); `v` is
    /// not looked at.
    Latent = 1,
}

/// Rows of all KV heads of some tokens: that of (head, token) starts at byte
/// `head * head_stride + token * token_stride`. This structure does not grow.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// Of any alignment. It belongs to the caller and is only read.
    pub data: *const c_void,
    /// Bytes that may be read from `data` on.
    pub bytes: usize,
    /// From a head to the next, in bytes.
    pub head_stride: usize,
    /// From a token to the next, in bytes.
    pub token_stride: usize,
}

/// Consecutive tokens of one layer. It owns nothing.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// `sizeof(kvfs_block)`, the same in all elements of an array, whose stride it is.
    pub size: usize,
    /// One of `kvfs_dtype`, of K and V.
    pub dtype: u32,
    /// One of `kvfs_values`.
    pub values: u32,
    /// How many, below 2^32; 0 is fine.
    pub tokens: u64,
    /// Rows of `head_dim` elements.
    pub k: Tensor,
    /// Rows of `v_head_dim` elements.
    pub v: Tensor,
    /// Position of the first token in the sequence that the queries belong to.
    pub first_position: u64,
    /// That position less the one for which K was rotated. Other than 0 it needs
    /// `kvfs_options.rotation`.
    pub shift: i64,
}

// SAFETY: numbers and pointers without gaps.
unsafe impl Structure for Block {
    const NAME: &'static str = "kvfs_block";
    const REQUIRED_BYTES: usize = offset_of!(Self, first_position);
}

impl Tensor {
    fn new(tensor: attention::Tensor<'_>) -> Self {
        Self {
            data: tensor.bytes.as_ptr().cast(),
            bytes: tensor.bytes.len(),
            head_stride: tensor.strides.head,
            token_stride: tensor.strides.token,
        }
    }

    fn borrow<'a>(&self, caller: &'a Caller, name: &str) -> Result<attention::Tensor<'a>, Failure> {
        let bytes = caller.slice(self.data.cast::<u8>(), self.bytes, name)?;
        let strides = Strides { head: self.head_stride, token: self.token_stride };
        Ok(attention::Tensor { bytes, strides })
    }
}

impl Block {
    /// What a page or a tail is to a caller.
    pub(super) fn new(block: &KvBlock<'_>) -> Self {
        let (values, v) = match block.v {
            attention::Values::Rows(v) => (Values::Rows, v),
            attention::Values::Latent => (Values::Latent, block.k),
        };
        Self {
            size: size_of::<Self>(),
            dtype: DataType::number(block.dtype),
            values: values as u32,
            tokens: block.tokens as u64,
            k: Tensor::new(block.k),
            v: Tensor::new(v),
            first_position: block.first_position,
            shift: block.shift,
        }
    }

    fn borrow<'a>(&self, caller: &'a Caller) -> Result<KvBlock<'a>, Failure> {
        let v = match self.values {
            0 => attention::Values::Rows(self.v.borrow(caller, "v")?),
            1 => attention::Values::Latent,
            other => return Err(Failure::argument(format!("values {other} are unknown"))),
        };
        Ok(KvBlock {
            k: self.k.borrow(caller, "k")?,
            v,
            dtype: DataType::find(self.dtype).map_err(Failure::argument)?,
            tokens: usize::try_from(self.tokens).unwrap_or(usize::MAX),
            first_position: self.first_position,
            shift: self.shift,
        })
    }
}

/// The blocks, each checked, and the tokens of all.
pub(super) fn borrow_all<'a>(
    caller: &'a Caller, blocks: &[Block], shape: Shape,
) -> Result<(Vec<KvBlock<'a>>, usize), Failure> {
    let mut borrowed = Vec::with_capacity(blocks.len());
    let mut tokens = 0_usize;
    for (index, block) in blocks.iter().enumerate() {
        let block = block.borrow(caller).map_err(|failure| failure.of_block(index))?;
        block.check(shape).map_err(|why| Failure::block(index, &why))?;
        // Fewer than 2^32 of each, so the memory would be full before this overflows.
        tokens = tokens.saturating_add(block.tokens);
        borrowed.push(block);
    }
    Ok((borrowed, tokens))
}

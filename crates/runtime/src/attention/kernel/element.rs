//! How the elements of each dtype become f32 in registers.

use super::simd::Simd;
use crate::page::Dtype;

/// Elements that share a scale in the quantised dtypes.
pub(super) const BLOCK_ELEMENTS: usize = 32;

/// A dtype whose rows the kernel reads.
pub(super) trait Element {
    const DTYPE: Dtype;
    /// Whether blocks of 32 elements share a scale, which `load` leaves out.
    const SCALED: bool = false;

    /// `LANES` elements from `element` on, which is a multiple of `LANES`.
    ///
    /// # Safety
    /// `row` has that many elements.
    unsafe fn load<S: Simd>(simd: S, row: *const u8, element: usize) -> S::Vector;
}

/// Where a row's block starts.
///
/// # Safety
/// `row` has that block.
#[inline(always)]
pub(super) unsafe fn block_of<E: Element>(row: *const u8, block: usize) -> *const u8 {
    // SAFETY: the caller promises the block.
    unsafe { row.add(block * E::DTYPE.block_bytes() as usize) }
}

/// Bytes of `elements`, whole blocks of them.
#[inline(always)]
pub(super) fn row_bytes<E: Element>(elements: usize) -> usize {
    elements * E::DTYPE.block_bytes() as usize / E::DTYPE.block_elements() as usize
}

/// # Safety
/// `row` has elements of `BYTES` up to `element`.
#[inline(always)]
unsafe fn at<const BYTES: usize>(row: *const u8, element: usize) -> *const u8 {
    // SAFETY: the caller promises the elements.
    unsafe { row.add(element * BYTES) }
}

#[derive(Debug)]
pub(super) enum F32 {}
#[derive(Debug)]
pub(super) enum F16 {}
#[derive(Debug)]
pub(super) enum Bf16 {}
#[derive(Debug)]
pub(super) enum F8E4m3 {}
#[derive(Debug)]
pub(super) enum Q8_0 {}
#[derive(Debug)]
pub(super) enum Q4_0 {}

impl Element for F32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, element: usize) -> S::Vector {
        // SAFETY: the caller promises the elements.
        let from = unsafe { at::<4>(row, element) };
        // SAFETY: as above.
        unsafe { simd.load_f32(from) }
    }
}

impl Element for F16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, element: usize) -> S::Vector {
        // SAFETY: the caller promises the elements.
        let from = unsafe { at::<2>(row, element) };
        // SAFETY: as above.
        unsafe { simd.load_f16(from) }
    }
}

impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, element: usize) -> S::Vector {
        // SAFETY: the caller promises the elements.
        let from = unsafe { at::<2>(row, element) };
        // SAFETY: as above.
        unsafe { simd.load_bf16(from) }
    }
}

impl Element for F8E4m3 {
    const DTYPE: Dtype = Dtype::F8E4m3;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, element: usize) -> S::Vector {
        // SAFETY: the caller promises the elements.
        let from = unsafe { at::<1>(row, element) };
        // SAFETY: as above.
        unsafe { simd.load_f8_e4m3(from) }
    }
}

impl Element for Q8_0 {
    const DTYPE: Dtype = Dtype::Q8_0;
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, element: usize) -> S::Vector {
        // SAFETY: the caller promises the elements.
        let block = unsafe { block_of::<Self>(row, element / BLOCK_ELEMENTS) };
        // SAFETY: two bytes of scale, then one byte for each element.
        let from = unsafe { block.add(2 + element % BLOCK_ELEMENTS) };
        // SAFETY: as above.
        unsafe { simd.load_i8(from) }
    }
}

impl Element for Q4_0 {
    const DTYPE: Dtype = Dtype::Q4_0;
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, element: usize) -> S::Vector {
        const HALF: usize = BLOCK_ELEMENTS / 2;
        // SAFETY: the caller promises the elements.
        let block = unsafe { block_of::<Self>(row, element / BLOCK_ELEMENTS) };
        // SAFETY: two bytes of scale, then the low nibbles are the first half, the high ones the
        // second.
        let from = unsafe { block.add(2 + element % HALF) };
        // SAFETY: as above.
        unsafe { simd.load_nibbles(from, element % BLOCK_ELEMENTS >= HALF) }
    }
}

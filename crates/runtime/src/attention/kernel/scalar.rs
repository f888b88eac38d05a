//! One value at a time, for processors and head dimensions without vectors.

use half::{bf16, f16};

use super::simd::Simd;
use crate::page::{Dtype, row_f32};

/// Plain Rust.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Scalar;

/// # Safety
/// `from` has `N` bytes.
unsafe fn bytes<const N: usize>(from: *const u8) -> [u8; N] {
    // SAFETY: the caller promises the bytes, and bytes have no alignment.
    unsafe { from.cast::<[u8; N]>().read() }
}

impl Simd for Scalar {
    type Vector = f32;
    const LANES: usize = 1;
    const PARTS: usize = 1;

    fn splat(self, value: f32) -> f32 {
        value
    }

    fn load(self, from: &[f32]) -> f32 {
        from[0]
    }

    fn store(self, to: &mut [f32], vector: f32) {
        to[0] = vector;
    }

    fn store_f16(self, to: &mut [u16], vector: f32) {
        to[0] = f16::from_f32(vector).to_bits();
    }

    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }

    fn sub(self, a: f32, b: f32) -> f32 {
        a - b
    }

    fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }

    fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }

    /// In two roundings: without the instruction `f32::mul_add` is a slow library call.
    fn mul_add(self, a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    fn max(self, a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }

    fn round(self, a: f32) -> f32 {
        a.round_ties_even()
    }

    #[allow(
        clippy::cast_possible_truncation,
        reason = "whole and within i8, or no number and so is the result"
    )]
    fn power_of_two(self, n: f32) -> f32 {
        f32::from_bits(((n as i32).wrapping_add(127) << 23).cast_unsigned())
    }

    fn any_greater(self, a: f32, b: f32) -> bool {
        a > b
    }

    fn largest(self, a: f32) -> f32 {
        a
    }

    fn fold(self, vectors: [f32; 4], parts: &mut [f32]) {
        parts[..4].copy_from_slice(&vectors);
    }

    fn total(self, parts: &[f32]) -> f32 {
        parts[0]
    }

    unsafe fn splat_f16(self, from: *const u8) -> f32 {
        // SAFETY: the caller promises one element.
        unsafe { self.load_f16(from) }
    }

    unsafe fn load_f32(self, from: *const u8) -> f32 {
        // SAFETY: the caller promises one element.
        f32::from_le_bytes(unsafe { bytes(from) })
    }

    unsafe fn load_f16(self, from: *const u8) -> f32 {
        // SAFETY: the caller promises one element.
        f16::from_le_bytes(unsafe { bytes(from) }).to_f32()
    }

    unsafe fn load_bf16(self, from: *const u8) -> f32 {
        // SAFETY: the caller promises one element.
        bf16::from_le_bytes(unsafe { bytes(from) }).to_f32()
    }

    unsafe fn load_f8_e4m3(self, from: *const u8) -> f32 {
        let mut value = [0.0];
        // SAFETY: the caller promises one element.
        row_f32(Dtype::F8E4m3, &unsafe { bytes::<1>(from) }, &mut value);
        value[0]
    }

    unsafe fn load_i8(self, from: *const u8) -> f32 {
        // SAFETY: the caller promises one element.
        f32::from(i8::from_le_bytes(unsafe { bytes(from) }))
    }

    unsafe fn load_nibbles(self, from: *const u8, high: bool) -> f32 {
        // SAFETY: the caller promises one byte.
        let [byte] = unsafe { bytes(from) };
        f32::from(if high { byte >> 4 } else { byte & 15 }) - 8.0
    }

    fn prefetch(self, _address: *const u8) {}
}

//! Values into `q8_0` and `q4_0` blocks and back, to the same bits on every machine.
//!
//! A block is 32 consecutive values of one row; `d` is its scale, stored as f16.
//!
//! ```text
//! q8_0   d = max |x| / 127                 q = round(x / d), -127 to 127     x' = q d
//! q4_0   d = -(the x of largest |x|) / 8   q = round(x / d) + 8, 0 to 15     x' = (q - 8) d
//! ```
//!
//! Everything is f32 arithmetic, one operation at a time: `1 / d` is rounded, then `x` times that,
//! and *round* means to the nearest integer, ties to even. `d` is rounded to f16 only when it is
//! stored (to nearest, ties to even, subnormals kept). `x'` is rounded the same way to the type of
//! the page. This is ggml's quantisation but for ties, which ggml rounds differently in its
//! scalar and its vector code.
//!
//! Rounding `x'` to f16 or bf16 moves the largest value of a block, so quantising `x'` again
//! would give another `d`, and a page would change with each demotion. Hence, before anything
//! else, scales close to the usual one are tried for one that gives back every value of the block
//! as it is. Values that came out of a block always find theirs: `d` moves by as many units of
//! f16 as half a unit of the page's type is worth ([`scale_steps`]), and `q` comes out the same
//! since 127 such halves are less than half a step. So quantising twice is quantising once.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::Quantisation;
use super::filter::Float;
use kvfs_page::row_f32;

/// Values in a block.
pub(super) const BLOCK_VALUES: usize = 32;

/// Values converted at a time: two arrays of them stay on the stack and in the first-level cache.
const BATCH_VALUES: usize = 32 * BLOCK_VALUES;

/// Values that no block can hold: NaN, an infinity, or so large that the scale or a rounded value
/// would be infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotFinite;

/// Quantises `values`, whole blocks in `float`, into `blocks`, and replaces them by what the
/// blocks stand for.
pub(super) fn quantise(
    quantisation: Quantisation, float: Float, values: &mut [u8], blocks: &mut [u8],
) -> Result<(), NotFinite> {
    let block_bytes = quantisation.dtype().block_bytes() as usize;
    let batches = values.chunks_mut(BATCH_VALUES * float.bytes());
    for (values, blocks) in
        batches.zip(blocks.chunks_mut(BATCH_VALUES / BLOCK_VALUES * block_bytes))
    {
        let mut numbers = [0.0; BATCH_VALUES];
        let numbers = &mut numbers[..values.len() / float.bytes()];
        row_f32(float.dtype(), values, numbers);
        if !are_finite(numbers) {
            return Err(NotFinite);
        }
        let (numbers_in_blocks, _) = numbers.as_chunks::<BLOCK_VALUES>();
        for (numbers, block) in numbers_in_blocks.iter().zip(blocks.chunks_exact_mut(block_bytes)) {
            quantise_block(quantisation, float, numbers, block);
        }
        dequantise(quantisation, float, blocks, values);
        row_f32(float.dtype(), values, numbers);
        if !are_finite(numbers) {
            return Err(NotFinite);
        }
    }
    Ok(())
}

/// Writes what `blocks` stand for to `values`, in `float`.
pub(super) fn dequantise(
    quantisation: Quantisation, float: Float, blocks: &[u8], values: &mut [u8],
) {
    let block_bytes = quantisation.dtype().block_bytes() as usize;
    let batches = blocks.chunks(BATCH_VALUES / BLOCK_VALUES * block_bytes);
    for (blocks, values) in batches.zip(values.chunks_mut(BATCH_VALUES * float.bytes())) {
        let mut numbers = [0.0; BATCH_VALUES];
        let numbers = &mut numbers[..values.len() / float.bytes()];
        row_f32(quantisation.dtype(), blocks, numbers);
        store(float, numbers, values);
    }
}

/// Rounds `numbers` to `float`, little endian.
fn store(float: Float, numbers: &[f32], values: &mut [u8]) {
    match float {
        Float::F16 => {
            let mut halves = [f16::ZERO; BATCH_VALUES];
            let halves = &mut halves[..numbers.len()];
            halves.convert_from_f32_slice(numbers);
            for (half, bytes) in halves.iter().zip(values.as_chunks_mut().0) {
                *bytes = half.to_le_bytes();
            }
        }
        Float::Bf16 => {
            for (number, bytes) in numbers.iter().zip(values.as_chunks_mut().0) {
                *bytes = bf16::from_f32(*number).to_le_bytes();
            }
        }
        Float::F32 => {
            for (number, bytes) in numbers.iter().zip(values.as_chunks_mut().0) {
                *bytes = number.to_le_bytes();
            }
        }
    }
}

fn are_finite(numbers: &[f32]) -> bool {
    numbers.iter().fold(true, |finite, number| finite & number.is_finite())
}

fn quantise_block(
    quantisation: Quantisation, float: Float, numbers: &[f32; BLOCK_VALUES], block: &mut [u8],
) {
    let exact = match quantisation {
        Quantisation::Q8_0 => largest(numbers).abs() / 127.0,
        Quantisation::Q4_0 => largest(numbers) / -8.0,
    };
    let scale = f16::from_f32(exact);
    let (scale, inverse) = if scale.to_f32() == 0.0 {
        // Every value becomes zero, of one sign.
        (f16::ZERO, 0.0)
    } else {
        match reproducing_scale(quantisation, float, numbers, scale) {
            Some(scale) => (scale, 1.0 / scale.to_f32()),
            None => (scale, 1.0 / exact),
        }
    };
    let (scale_bytes, quants) = block.split_at_mut(2);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    match quantisation {
        Quantisation::Q8_0 => {
            for (quant, number) in quants.iter_mut().zip(numbers) {
                *quant = low_byte(rounded(*number * inverse, 127.0, 127.0));
            }
        }
        Quantisation::Q4_0 => {
            let (low, high) = numbers.split_at(BLOCK_VALUES / 2);
            let nibble =
                |number: f32| low_byte(rounded(number * inverse, 8.0, 7.0)).wrapping_add(8);
            for ((quants, low), high) in quants.iter_mut().zip(low).zip(high) {
                *quants = nibble(*low) | nibble(*high) << 4;
            }
        }
    }
}

/// The number of largest magnitude, the first of several.
fn largest(numbers: &[f32; BLOCK_VALUES]) -> f32 {
    let magnitude = numbers.iter().fold(0.0_f32, |most, number| most.max(number.abs()));
    let is_largest = |number: &f32| number.abs().to_bits() == magnitude.to_bits();
    numbers.iter().copied().find(is_largest).unwrap_or(0.0)
}

/// 1.5 x 2^23: added to a number below 2^22, it leaves no bits behind the point, and the hardware
/// rounds to nearest, ties to even. `f32::round_ties_even` would be a call of a C function here.
const ROUNDER: f32 = 12_582_912.0;

/// `number` between `-least` and `most`, rounded, plus [`ROUNDER`].
fn rounded(number: f32, least: f32, most: f32) -> f32 {
    number.max(-least).min(most) + ROUNDER
}

/// The lowest byte of the integer in a sum with [`ROUNDER`].
fn low_byte(rounded: f32) -> u8 {
    rounded.to_bits().to_le_bytes()[0]
}

/// How far, in units of f16, rounding to `float` may have moved a scale.
fn scale_steps(float: Float) -> u16 {
    match float {
        // Half a unit of f16 in the largest value: one unit after rounding the scale again.
        Float::F16 => 1,
        // A unit of bf16 is eight of f16, half of it four; twice that where the scale lies high
        // between two powers of two and the largest value low.
        Float::Bf16 => 8,
        // All products are exact; the division by 127 may be off by one f32 unit.
        Float::F32 => 0,
    }
}

/// A scale near `scale` for which every number is exactly one that the block can stand for.
fn reproducing_scale(
    quantisation: Quantisation, float: Float, numbers: &[f32; BLOCK_VALUES], scale: f16,
) -> Option<f16> {
    let sign = scale.to_bits() & 0x8000;
    let magnitude = scale.to_bits() & 0x7fff;
    let steps = 0..=scale_steps(float);
    let candidates = steps.flat_map(|step| {
        let below = magnitude.checked_sub(step);
        let above = magnitude.checked_add(step).filter(|_| step > 0);
        [below, above].into_iter().flatten()
    });
    candidates
        .map(|magnitude| f16::from_bits(sign | magnitude))
        .filter(|scale| scale.is_finite() && scale.to_f32() != 0.0)
        .find(|scale| reproduces(quantisation, float, numbers, scale.to_f32()))
}

#[expect(clippy::float_cmp, reason = "exactly the same value is what is asked for")]
fn reproduces(
    quantisation: Quantisation, float: Float, numbers: &[f32; BLOCK_VALUES], scale: f32,
) -> bool {
    let (least, most) = match quantisation {
        Quantisation::Q8_0 => (127.0, 127.0),
        Quantisation::Q4_0 => (8.0, 7.0),
    };
    let inverse = 1.0 / scale;
    // Numbers that never went through a block fail at one of the first.
    numbers.iter().all(|number| {
        let value = (rounded(number * inverse, least, most) - ROUNDER) * scale;
        let value = match float {
            Float::F16 => f16::from_f32(value).to_f32(),
            Float::Bf16 => bf16::from_f32(value).to_f32(),
            Float::F32 => value,
        };
        value == *number
    })
}

//! Stored elements as f32, for the CPU and for reference results.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::dtype::Dtype;

/// Elements converted at once: enough for the widest vector instructions, still on the stack.
const CHUNK_ELEMENTS: usize = 64;

/// Decodes one row.
///
/// `row` is `[n]` elements in `dtype`, little endian; `out` is `[n]`.
///
/// # Panics
/// If `row` is not exactly as long as `out` needs.
pub fn row_f32(dtype: Dtype, row: &[u8], out: &mut [f32]) {
    let blocks = out.len() / dtype.block_elements() as usize;
    assert!(
        row.len() == blocks * dtype.block_bytes() as usize
            && out.len() == blocks * dtype.block_elements() as usize,
        "a {dtype} row of {} bytes does not hold {} elements",
        row.len(),
        out.len()
    );
    match dtype {
        Dtype::F32 => {
            for (bytes, value) in row.as_chunks().0.iter().zip(out) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Dtype::F16 => {
            let mut halves = [f16::ZERO; CHUNK_ELEMENTS];
            for (bytes, values) in
                row.chunks(2 * CHUNK_ELEMENTS).zip(out.chunks_mut(CHUNK_ELEMENTS))
            {
                let halves = &mut halves[..values.len()];
                for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
                    *half = f16::from_le_bytes(*bytes);
                }
                halves.convert_to_f32_slice(values);
            }
        }
        Dtype::Bf16 => {
            for (bytes, value) in row.as_chunks().0.iter().zip(out) {
                *value = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        Dtype::F8E4m3 => {
            for (byte, value) in row.iter().zip(out) {
                *value = F8_E4M3[usize::from(*byte)];
            }
        }
        Dtype::Q8_0 => decode_blocks(row, out, 34, |quants, scale, values| {
            for (quant, value) in quants.iter().zip(values) {
                *value = f32::from(quant.cast_signed()) * scale;
            }
        }),
        // ggml keeps elements 0..16 in the low nibbles and 16..32 in the high ones.
        Dtype::Q4_0 => decode_blocks(row, out, 18, |quants, scale, values| {
            let (low, high) = values.split_at_mut(16);
            for ((quant, low), high) in quants.iter().zip(low).zip(high) {
                *low = (f32::from(quant & 15) - 8.0) * scale;
                *high = (f32::from(quant >> 4) - 8.0) * scale;
            }
        }),
    }
}

/// Blocks of an f16 scale and the quantised rest, 32 elements each.
fn decode_blocks(
    row: &[u8], out: &mut [f32], block_bytes: usize, decode: impl Fn(&[u8], f32, &mut [f32]),
) {
    for (block, values) in row.chunks_exact(block_bytes).zip(out.chunks_exact_mut(32)) {
        let (scale, quants) = block.split_at(2);
        let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32();
        decode(quants, scale, values);
    }
}

/// Every `F8_E4M3` value, by its byte.
static F8_E4M3: [f32; 256] = f8_e4m3_table();

const fn f8_e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut byte: u8 = 0;
    loop {
        table[byte as usize] = f8_e4m3(byte);
        if byte == u8::MAX {
            return table;
        }
        byte += 1;
    }
}

/// One element: sign, 4 bits of exponent (bias 7), 3 of mantissa. There is no infinity; only
/// S.1111.111 is NaN.
const fn f8_e4m3(byte: u8) -> f32 {
    const F32_BIAS: u32 = 127;
    let sign = (byte as u32 >> 7) << 31;
    let (exponent, mantissa) = ((byte >> 3) & 15, byte & 7);
    if exponent == 15 && mantissa == 7 {
        return f32::from_bits(sign | 0x7fc0_0000);
    }
    let magnitude = if exponent == 0 {
        // Subnormal: mantissa x 2^-9.
        mantissa as f32 * f32::from_bits((F32_BIAS - 9) << 23)
    } else {
        f32::from_bits(((exponent as u32 + F32_BIAS - 7) << 23) | ((mantissa as u32) << 20))
    };
    f32::from_bits(sign | magnitude.to_bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(dtype: Dtype, row: &[u8], elements: usize) -> Vec<f32> {
        let mut out = vec![f32::INFINITY; elements];
        row_f32(dtype, row, &mut out);
        out
    }

    #[test]
    fn f8_values() {
        fn check(byte: u8, expected: f32) {
            let found = decode(Dtype::F8E4m3, &[byte], 1)[0];
            assert_eq!(found.to_bits(), expected.to_bits(), "{byte:#x}: {found}");
        }
        check(0x00, 0.0);
        check(0x80, -0.0);
        check(0x01, 1.0 / 512.0);
        check(0x07, 7.0 / 512.0);
        check(0x08, 1.0 / 64.0);
        check(0x38, 1.0);
        check(0xb8, -1.0);
        check(0x3c, 1.5);
        check(0x7e, 448.0);
        check(0xfe, -448.0);
        check(0x78, 256.0);
        assert!(decode(Dtype::F8E4m3, &[0x7f], 1)[0].is_nan());
        assert!(decode(Dtype::F8E4m3, &[0xff], 1)[0].is_nan());
        let finite = (0..=255u8).filter(|byte| byte & 0x7f != 0x7f);
        assert!(finite.map(|byte| F8_E4M3[usize::from(byte)]).all(f32::is_finite));
    }

    #[test]
    fn float_rows() {
        fn check(dtype: Dtype, encode: impl Fn(f32) -> Vec<u8>) {
            // Lengths around the chunk; integers and eighths are exact in all three types.
            for elements in [0u16, 1, 63, 64, 65, 130] {
                let values: Vec<f32> = (0..elements).map(|i| f32::from(i) / 8.0 - 4.0).collect();
                let row: Vec<u8> = values.iter().flat_map(|value| encode(*value)).collect();
                assert_eq!(decode(dtype, &row, values.len()), values, "{dtype} {elements}");
            }
        }
        check(Dtype::F32, |value| value.to_le_bytes().to_vec());
        check(Dtype::F16, |value| f16::from_f32(value).to_le_bytes().to_vec());
        check(Dtype::Bf16, |value| bf16::from_f32(value).to_le_bytes().to_vec());
    }

    #[test]
    fn block_rows() {
        let scale = f16::from_f32(0.5).to_le_bytes();
        let q8: Vec<u8> = scale.into_iter().chain(240..=255).chain(0..16).collect();
        let expected: Vec<f32> = (-16i8..16).map(|i| f32::from(i) * 0.5).collect();
        assert_eq!(decode(Dtype::Q8_0, &q8.repeat(2), 64), expected.repeat(2));

        let nibbles = (0..16u8).map(|i| (15 - i) << 4 | i);
        let q4: Vec<u8> = scale.into_iter().chain(nibbles).collect();
        let low = (-8i8..8).map(|i| f32::from(i) * 0.5);
        let expected: Vec<f32> = low.clone().chain(low.rev()).collect();
        assert_eq!(decode(Dtype::Q4_0, &q4.repeat(2), 64), expected.repeat(2));
    }

    #[test]
    #[should_panic(expected = "a f16 row of 3 bytes does not hold 2 elements")]
    fn wrong_length() {
        decode(Dtype::F16, &[0; 3], 2);
    }
}

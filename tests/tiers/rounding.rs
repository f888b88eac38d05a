//! Pages of made-up values, and what becomes of them with fewer bits.

use half::f16;
use kvfs::page::{Dtype, pack_page};

use crate::common::Model;

/// Two heads of 128 values for K and for V: a page of f16 is 1 MiB and 4 KiB.
pub(crate) const PAGE_TOKENS: u32 = 1024;

pub(crate) fn model(dtype: Dtype, cold_encoding: Option<&str>) -> Model {
    Model::with(|fields| {
        fields.dtype = dtype;
        fields.page_tokens = PAGE_TOKENS;
        fields.head_dim = 128;
        fields.cold_encoding = cold_encoding.map(str::to_owned);
    })
}

pub(crate) fn eight_bits() -> Model {
    model(Dtype::F16, Some("q8_0"))
}

/// Bell-shaped values that depend on `seed` alone.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let bytes = crate::common::fill(seed, 4 * count);
    let value = |four: &[u8]| four.iter().map(|byte| f32::from(*byte) / 64.0 - 2.0).sum();
    bytes.chunks_exact(4).map(value).collect()
}

pub(crate) fn rows(model: &Model, start: u64) -> Vec<u8> {
    let row = model.row_bytes() / 2;
    let values = values(start, row * PAGE_TOKENS as usize);
    match model.manifest.geometry().dtype() {
        Dtype::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        _ => values[..values.len() / 2].iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

pub(crate) fn page(model: &Model, start: u64) -> Vec<u8> {
    pack_page(&model.place(0, start), &rows(model, start), PAGE_TOKENS).unwrap()
}

/// ggml's definition, written down plainly: what a page of f16 becomes.
pub(crate) fn rounded(page: &[u8], encoding: &str) -> Vec<u8> {
    let mut page = page.to_vec();
    for block in page[4096..].chunks_exact_mut(64) {
        let x: Vec<f32> = block
            .chunks_exact(2)
            .map(|two| f16::from_le_bytes([two[0], two[1]]).to_f32())
            .collect();
        let most = x.iter().copied().reduce(|a, b| if b.abs() > a.abs() { b } else { a }).unwrap();
        let (d, least, most) = match encoding {
            "q8_0" => (most.abs() / 127.0, -127.0, 127.0),
            _ => (most / -8.0, -8.0, 7.0),
        };
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let scale = f16::from_f32(d).to_f32();
        for (two, x) in block.chunks_exact_mut(2).zip(x) {
            // An integer has no negative zero.
            let quant = (x * inverse).round_ties_even().clamp(least, most) + 0.0;
            two.copy_from_slice(&f16::from_f32(quant * scale).to_le_bytes());
        }
    }
    page
}

/// Whether a page is what becomes of another one: its values, and the checksum that it declares.
pub(crate) fn is_rounded(found: &[u8], original: &[u8], encoding: &str) -> bool {
    found[4096..] == rounded(original, encoding)[4096..] && found[..4096] != original[..4096]
}

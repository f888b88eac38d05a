//! Values like those of a key-value cache, for what depends on them: encoding.
//!
//! They are made up: normally distributed, each channel with a spread and a mean of its own, keys
//! changing slowly from token to token. How small real values become depends on the model.

use half::f16;

use super::super::build::{Model, Pages};
use crate::page::{PagePlace, pack_page};

/// How much of a key the next one keeps.
const KEY_MEMORY: f32 = 0.8;

/// A page, and where it belongs.
pub(super) struct Page {
    pub(super) place: PagePlace,
    pub(super) tokens: u32,
    pub(super) bytes: Vec<u8>,
}

/// Pages of 4 MiB; another seed gives other values.
pub(super) fn pages(count: u64, seed: u64) -> Result<Vec<Page>, String> {
    let model = Pages::new(Model::Large)?;
    let page = |index| {
        let (place, tokens) = model.place(index)?;
        let geometry = place.geometry();
        let width = geometry.k_bytes(1) + geometry.v_bytes(1);
        let width = usize::try_from(width / 2).map_err(|error| error.to_string())?;
        let rows = rows(width, tokens as usize, seed * count + index);
        let bytes = pack_page(&place, &rows, tokens).map_err(|error| error.to_string())?;
        Ok(Page { place, tokens, bytes })
    };
    (0..count).map(page).collect()
}

fn rows(width: usize, tokens: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut channels: Vec<(f32, f32, f32)> = (0..width)
        .map(|_| (random.normal().exp2(), random.normal() * 0.5, random.normal()))
        .collect();
    let mut rows = Vec::with_capacity(2 * width * tokens);
    for _ in 0..tokens {
        for (channel, (spread, mean, state)) in channels.iter_mut().enumerate() {
            let fresh = random.normal();
            let is_key = channel < width / 2;
            *state = if is_key {
                KEY_MEMORY * *state + (1.0 - KEY_MEMORY * KEY_MEMORY).sqrt() * fresh
            } else {
                fresh
            };
            rows.extend_from_slice(&f16::from_f32(*mean + *spread * *state).to_le_bytes());
        }
    }
    rows
}

/// Xorshift (Marsaglia 2003).
struct Random(u64);

impl Random {
    /// About normal: the sum of four uniform numbers.
    #[allow(clippy::cast_precision_loss, reason = "16 bits fit a float")]
    fn normal(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let sum: u64 = (0..4).map(|part| self.0 >> (16 * part) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 3_f32.sqrt()
    }
}

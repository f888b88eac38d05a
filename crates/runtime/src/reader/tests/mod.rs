//! Sequences in a plain directory, where pages are read and never mapped. What is particular to a
//! mount is in `tests/reader`.

mod scans;
mod seen;
mod side;
mod tail;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::buffer::Buffers;
use super::page::{LoadedPage, Means};
use super::*;
use crate::attention::{Attention, Shape};
use crate::page::{
    Dtype, Geometry, Layer, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page,
};

/// A sequence of pages of 16 tokens, 2 KV heads x 16 in f32.
pub(super) struct Fixture {
    directory: tempfile::TempDir,
    manifest: Manifest,
}

impl Fixture {
    pub(super) const PAGE_TOKENS: u32 = 16;
    pub(super) const PAGE_BYTES: u64 = 4096 + 16 * 2 * 2 * 16 * 4;

    /// Layers of full pages and a tail with some rows behind them, none where there are 0.
    pub(super) fn new(layers: u32, pages: u64, tail_tokens: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fields = ManifestFields {
            page_tokens: Self::PAGE_TOKENS,
            ..ManifestFields::new("test", Dtype::F32, layers, 2, 16)
        };
        let manifest = Manifest::new(fields).unwrap();
        let fixture = Self { directory, manifest };
        fs::create_dir_all(fixture.sequence()).unwrap();
        fs::write(fixture.model().join(names::MANIFEST), fixture.manifest.to_json()).unwrap();
        for layer in (0..layers).map(Layer) {
            fs::create_dir(fixture.layer(layer)).unwrap();
            for index in 0..pages {
                fixture.write_page(layer, index * u64::from(Self::PAGE_TOKENS), Self::PAGE_TOKENS);
            }
            if tail_tokens > 0 {
                let start = pages * u64::from(Self::PAGE_TOKENS);
                fixture.write_tail(layer, start, tail_tokens);
            }
        }
        fixture
    }

    fn model(&self) -> PathBuf {
        self.directory.path().join("models/m")
    }

    pub(super) fn sequence(&self) -> PathBuf {
        self.model().join("sequences/s")
    }

    fn layer(&self, layer: Layer) -> PathBuf {
        self.sequence().join(names::format_layer(layer))
    }

    fn geometry(&self) -> &Geometry {
        self.manifest.geometry()
    }

    fn page_path(&self, layer: Layer, start: u64) -> PathBuf {
        self.layer(layer).join(names::format_page(TokenStart(start)))
    }

    fn write_page(&self, layer: Layer, start: u64, tokens: u32) {
        let place = self.place(layer, start);
        let rows = self.rows(layer, start, u64::from(tokens));
        let page = pack_page(&place, &rows, tokens).unwrap();
        fs::write(self.page_path(layer, start), page).unwrap();
    }

    fn tail_path(&self, layer: Layer, start: u64) -> PathBuf {
        self.layer(layer).join(names::format_tail(TokenStart(start)))
    }

    fn write_tail(&self, layer: Layer, start: u64, tokens: u64) {
        fs::write(self.tail_path(layer, start), self.rows(layer, start, tokens)).unwrap();
    }

    fn place(&self, layer: Layer, start: u64) -> PagePlace {
        PagePlace::new(&self.manifest, layer, TokenStart(start)).unwrap()
    }

    /// Rows as in a tail, each value from -1 to 1 by its layer, token and place in the row.
    fn rows(&self, layer: Layer, start: u64, tokens: u64) -> Vec<u8> {
        let values = self.geometry().row_bytes() / 4;
        let all = (start..start + tokens).flat_map(|token| (0..values).map(move |i| (token, i)));
        all.flat_map(|(token, i)| value(layer, token, i).to_le_bytes()).collect()
    }

    pub(super) fn load(&self, index: u64) -> LoadedPage {
        let start = index * u64::from(Self::PAGE_TOKENS);
        let buffers = Arc::new(Buffers::new(usize::try_from(Self::PAGE_BYTES).unwrap()));
        let path = self.page_path(Layer(0), start);
        LoadedPage::read(&path, self.place(Layer(0), start), &buffers, Means::Direct).unwrap()
    }

    fn open(&self) -> Result<Sequence, ReadError> {
        self.open_with(10, 10, 0)
    }

    /// With bounds in pages.
    fn open_with(&self, pages: usize, kept: u64, streamed: u64) -> Result<Sequence, ReadError> {
        let limits = Limits { pages, kept_bytes: kept * Self::PAGE_BYTES };
        let settings = Settings {
            residents: Arc::new(Residents::new(limits)),
            stream_bytes: streamed * Self::PAGE_BYTES,
            ..Settings::default()
        };
        Sequence::open_with(&self.sequence(), settings)
    }
}

#[allow(clippy::cast_precision_loss, reason = "24 bits")]
fn value(layer: Layer, token: u64, index: u64) -> f32 {
    let mut z = (u64::from(layer.0) << 48 | token << 16 | index).wrapping_add(0x9e37_79b9);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// K and V of one layer in f64, each row once: `[tokens][k rows, then v rows]`.
fn reference(layer: Layer, tokens: u64, q: &[f32]) -> Vec<f64> {
    let value = |token, index| f64::from(value(layer, token, index));
    let mut out = Vec::new();
    // Two query heads for each KV head.
    for (head, q) in q.chunks_exact(16).enumerate() {
        let kv_head = head as u64 / 2;
        let logits: Vec<f64> = (0..tokens)
            .map(|token| {
                let k = (0..16).map(|i| value(token, kv_head * 16 + i));
                k.zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() / 4.0
            })
            .collect();
        let weights: Vec<f64> = logits.iter().map(|logit| logit.exp()).collect();
        let sum: f64 = weights.iter().sum();
        out.extend((0..16).map(|i| {
            let v =
                weights.iter().zip(0..).map(|(w, token)| w * value(token, 32 + kv_head * 16 + i));
            if sum > 0.0 { v.sum::<f64>() / sum } else { 0.0 }
        }));
    }
    out
}

fn attention() -> Attention {
    Attention::new(Shape::new(4, 2, 16, 16).unwrap(), 2).unwrap()
}

fn query() -> Vec<f32> {
    (0..4 * 16_u8).map(|i| f32::from(i % 7) / 3.0 - 1.0).collect()
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

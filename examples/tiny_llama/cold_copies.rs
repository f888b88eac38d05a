//! What cold copies of a real model's pages take, and what the lossy ones do to attention.

use std::fs;
use std::path::PathBuf;

use half::f16;
use kvfs::attention::Shape;
use kvfs::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, PageView, TokenStart, pack_page, row_f32,
    unpack_rows,
};
use kvfs::tier::encoding::{
    Encoding, Lossless, Quantisation, Quantised, Stored, Subject, ZstdLevel, decode, encode,
    quantise_page,
};
use zerocopy::IntoBytes;

use crate::Result;
use crate::attention::{kv_width, query_width};
use crate::generate::prefill;
use crate::memory_cache::MemoryCache;
use crate::model::{KeyValueCache, Model};
use crate::reference::{self, Rows};
use crate::weights::Weights;

const TOKENS: usize = 1024;

/// Tokens that the benchmark has, and the queries of every so many-th.
const RECORDED_TOKENS: usize = 256;
const RECORDED_QUERY_STEP: usize = 8;

/// Tokens whose attention is compared: every so many-th.
const QUERY_STEP: usize = 32;

/// A cache that also keeps what passes through it, by layer.
struct Recorder {
    shape: Shape,
    inner: MemoryCache,
    layers: Vec<Recorded>,
}

/// Rows as a tail has them, and queries `[tokens, query_heads, head_dim]`.
#[derive(Clone, Default)]
struct Recorded {
    rows: Vec<f16>,
    queries: Vec<f32>,
}

impl KeyValueCache for Recorder {
    fn append(
        &mut self, layer: usize, position: usize, keys: &[f16], values: &[f16],
    ) -> Result<()> {
        let width = kv_width(self.shape);
        for (keys, values) in keys.chunks(width).zip(values.chunks(width)) {
            self.layers[layer].rows.extend_from_slice(keys);
            self.layers[layer].rows.extend_from_slice(values);
        }
        self.inner.append(layer, position, keys, values)
    }

    fn attend(
        &mut self, layer: usize, position: usize, queries: &[f32], out: &mut [f32],
    ) -> Result<()> {
        self.layers[layer].queries.extend_from_slice(queries);
        self.inner.attend(layer, position, queries, out)
    }
}

/// What the tiny model caches for the first tokens of its prompt.
fn record() -> Result<(Shape, Vec<Recorded>)> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
    let model = Model::new(Weights::load(&directory)?);
    let (shape, layers) = (model.config().shape()?, model.config().num_hidden_layers);
    let inner = MemoryCache::new(shape, layers, TOKENS)?;
    let mut cache = Recorder { shape, inner, layers: vec![Recorded::default(); layers] };
    let prompt = fs::read(directory.join("prompt.txt"))?;
    let tokens: Vec<u32> = prompt.iter().take(TOKENS).copied().map(u32::from).collect();
    prefill(&model, &mut cache, 0, &tokens)?;
    Ok((shape, cache.layers))
}

/// The page of each layer.
fn pages(shape: Shape, layers: &[Recorded]) -> Result<Vec<(PagePlace, Vec<u8>)>> {
    let [count, heads, dim] =
        [layers.len(), shape.num_kv_heads(), shape.head_dim()].map(|n| u32::try_from(n).unwrap());
    let manifest = Manifest::new(ManifestFields::new("tiny-llama", Dtype::F16, count, heads, dim))?;
    let places = (0..count).map(|layer| PagePlace::new(&manifest, Layer(layer), TokenStart(0)));
    let tokens = u32::try_from(TOKENS)?;
    places
        .zip(layers)
        .map(|(place, layer)| {
            let place = place?;
            let page = pack_page(&place, layer.rows.as_bytes(), tokens)?;
            Ok((place, page))
        })
        .collect()
}

/// Attention of some tokens over a page and its own past, in f64 from its definition.
fn attention_in_f64(shape: Shape, page: &PageView<'_>, queries: &[f32]) -> Vec<f64> {
    let tail = unpack_rows(page);
    let mut values = vec![0.0; tail.len() / 2];
    row_f32(Dtype::F16, &tail, &mut values);
    let rows = Rows::of_tail(shape, values);
    let queries = queries.chunks_exact(query_width(shape)).enumerate().step_by(QUERY_STEP);
    queries
        .flat_map(|(token, query)| reference::attend(shape, query, &rows, &|seen| seen <= token))
        .collect()
}

/// `|found - expected| / |expected|`, Euclidean.
fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    (difference / squares(&mut expected.iter().copied())).sqrt()
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn ratio(logical: usize, stored: usize) -> f64 {
    logical as f64 / stored as f64
}

/// What `kvfs bench tiers` has of this model; `src/cli/bench/tiers/ratios.rs` tells the layout.
fn recording() -> Result<Vec<u8>> {
    let (shape, layers) = record()?;
    let mut bytes = Vec::new();
    for layer in &layers {
        let rows = RECORDED_TOKENS * 2 * kv_width(shape);
        bytes.extend(layer.rows[..rows].iter().flat_map(|value| value.to_le_bytes()));
        let queries = layer.queries.chunks_exact(query_width(shape)).take(RECORDED_TOKENS);
        let queries = queries.skip(RECORDED_QUERY_STEP - 1).step_by(RECORDED_QUERY_STEP).flatten();
        bytes.extend(queries.flat_map(|value| value.to_le_bytes()));
    }
    Ok(bytes)
}

/// The numbers of a layer: rows in f16, then queries in f32.
fn numbers(layer: &[u8], rows_bytes: usize) -> Vec<f64> {
    let (rows, queries) = layer.split_at(rows_bytes);
    let rows = rows.as_chunks().0.iter().map(|two| f64::from(f16::from_le_bytes(*two)));
    let queries = queries.as_chunks().0.iter().map(|four| f64::from(f32::from_le_bytes(*four)));
    rows.chain(queries).collect()
}

/// After the model was trained anew, `KVFS_RECORD=1` writes the file.
#[test]
fn the_benchmark_has_what_the_model_caches() -> Result<()> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/cli/bench/tiers/recorded.bin");
    let (shape, layers) = record()?;
    let found = recording()?;
    if std::env::var_os("KVFS_RECORD").is_some() {
        fs::write(&path, &found)?;
    }
    let recorded = fs::read(&path)?;
    assert_eq!(recorded.len(), found.len());
    let rows_bytes = RECORDED_TOKENS * 2 * kv_width(shape) * 2;
    let layer_bytes = found.len() / layers.len();
    for (recorded, found) in recorded.chunks(layer_bytes).zip(found.chunks(layer_bytes)) {
        // Another processor adds in another order.
        let error = relative_error(&numbers(found, rows_bytes), &numbers(recorded, rows_bytes));
        assert!(error < 1e-2, "{error}");
    }
    Ok(())
}

#[test]
fn lossless_copies() -> Result<()> {
    let (shape, layers) = record()?;
    let pages = pages(shape, &layers)?;
    let logical: usize = pages.iter().map(|(_, page)| page.len()).sum();
    let check = |name: &str, lossless: Lossless, is_page: bool, expected: Encoding| {
        let mut stored = 0;
        for (place, page) in &pages {
            let identity = place.identity(u32::try_from(TOKENS)?);
            let subject = if is_page { Subject::Page(identity) } else { Subject::File };
            let (length, mut blob) = (page.len() as u64, Vec::new());
            let encoded = encode(&mut page.as_slice(), length, lossless, &subject, &mut blob)?;
            assert_eq!(encoded.encoding, expected);
            let (encoding, stored_bytes) = (encoded.encoding, encoded.stored_bytes);
            let on_record = Stored { encoding, stored_bytes, length };
            let mut back = Vec::new();
            let digest = decode(&mut blob.as_slice(), &on_record, &subject, &mut back)?;
            assert!(back == *page && digest == encoded.digest);
            stored += blob.len();
        }
        let ratio = ratio(logical, stored);
        eprintln!("{name:16} {logical} bytes in {stored}, ratio {ratio:.3}");
        Result::Ok(ratio)
    };
    let zstd = Lossless::Zstd(ZstdLevel::DEFAULT);
    check("raw", Lossless::Raw, true, Encoding::Raw)?;
    let plain = check("zstd:3", zstd, false, Encoding::Zstd)?;
    let shuffled = check("shuffled zstd:3", zstd, true, Encoding::ZstdShuffled)?;
    assert!(shuffled > 1.05 * plain && shuffled > 1.1, "{plain} {shuffled}");
    Ok(())
}

#[test]
fn lossy_copies_and_their_attention() -> Result<()> {
    fn check(quantisation: Quantisation, ratio_min: f64, error_max: f64) -> Result<()> {
        let (shape, layers) = record()?;
        let (mut logical, mut stored, mut worst) = (0, 0, 0.0_f64);
        for ((place, page), layer) in pages(shape, &layers)?.iter().zip(&layers) {
            let Quantised::Version(version) = quantise_page(page, place, quantisation)? else {
                return Err("rows of 64 f16 values are whole blocks".into());
            };
            let view = |file| PageView::parse(file, place.geometry());
            let exact = attention_in_f64(shape, &view(page)?, &layer.queries);
            let found = attention_in_f64(shape, &view(&version.page)?, &layer.queries);
            let error = relative_error(&found, &exact);
            let bytes = version.blob.len();
            let (layer, ratio) = (place.layer(), ratio(page.len(), bytes));
            eprintln!(
                "{quantisation:?} layer {layer}: ratio {ratio:.3}, attention error {error:.2e}"
            );
            worst = worst.max(error);
            logical += page.len();
            stored += bytes;
        }
        let ratio = ratio(logical, stored);
        eprintln!("{quantisation:?}: {logical} bytes in {stored}, ratio {ratio:.3}");
        assert!(worst > 0.0 && worst < error_max, "{worst}");
        assert!(ratio > ratio_min, "{ratio}");
        Ok(())
    }
    check(Quantisation::Q8_0, 16.0 / 8.5 - 0.02, 0.02)?;
    check(Quantisation::Q4_0, 16.0 / 4.5 - 0.05, 0.2)
}

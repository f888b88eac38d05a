//! How much smaller cold copies are, and what rounding does to attention.
//!
//! Besides made-up values there are recorded ones: what the tiny model (`tests/fixtures/tiny-llama`)
//! caches for the first 256 tokens of its prompt, and the queries of every eighth of them. They are
//! part of the program, so that every machine prints the same.
//!
//! ```text
//! recorded.bin    for each of 4 layers, little endian
//!   rows          256 x (K of 2 heads x 64, V of 2 heads x 64), f16
//!   queries       32 x (4 heads x 64), f32; the first is of token 7
//! ```

use crate::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, PageView, TokenStart, pack_page, row_f32,
    unpack_rows,
};
use crate::tier::encoding::{
    Encoding, Lossless, Quantisation, Quantised, Subject, Version, ZstdLevel, encode, quantise_page,
};

use super::super::figure::{Better, Figure, Target};
use super::values::Page;

static RECORDED: &[u8] = include_bytes!("recorded.bin");

const LAYERS: u32 = 4;
const TOKENS: u32 = 256;
const KV_HEADS: usize = 2;
const QUERY_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
/// Of the tokens, every so many-th has its queries recorded.
const QUERY_STEP: usize = 8;
const ROWS_BYTES: usize = TOKENS as usize * 2 * KV_HEADS * HEAD_DIM * 2;
const QUERIES_BYTES: usize = TOKENS as usize / QUERY_STEP * QUERY_HEADS * HEAD_DIM * 4;
const _: () = assert!(RECORDED.len() == LAYERS as usize * (ROWS_BYTES + QUERIES_BYTES));

/// Names of the ratios of raw, zstd, shuffled zstd, `q8_0` and `q4_0`.
type Names = [&'static str; 5];

const MADE_UP: Names =
    ["ratio_raw", "ratio_zstd3", "ratio_shuffled_zstd3", "ratio_q8_0", "ratio_q4_0"];
const REAL: Names = [
    "tiny_model_ratio_raw",
    "tiny_model_ratio_zstd3",
    "tiny_model_ratio_shuffled_zstd3",
    "tiny_model_ratio_q8_0",
    "tiny_model_ratio_q4_0",
];

/// The ratios of made-up pages and of the recorded ones, and the attention error of the latter.
pub(super) fn figures(made_up: &[Page]) -> Result<Vec<Figure>, String> {
    let recorded = recorded()?;
    let mut figures = ratios(made_up, MADE_UP)?;
    let (pages, queries): (Vec<Page>, Vec<Vec<f32>>) = recorded.into_iter().unzip();
    figures.extend(ratios(&pages, REAL)?);
    for (name, quantisation) in [
        ("tiny_model_attention_error_q8_0", Quantisation::Q8_0),
        ("tiny_model_attention_error_q4_0", Quantisation::Q4_0),
    ] {
        let errors = pages.iter().zip(&queries).map(|(page, queries)| {
            let exact = attention(page, &page.bytes, queries)?;
            let found = attention(page, &rounded(page, quantisation)?.page, queries)?;
            Ok(relative_error(&found, &exact))
        });
        let errors = errors.collect::<Result<Vec<f64>, String>>()?;
        let worst = errors.into_iter().fold(0.0, f64::max);
        figures.push(super::alone(name, "relative L2, worst layer", Target::None, vec![worst]));
    }
    Ok(figures)
}

/// The page of each layer, and its queries.
fn recorded() -> Result<Vec<(Page, Vec<f32>)>, String> {
    let heads = u32::try_from(KV_HEADS).map_err(|error| error.to_string())?;
    let dim = u32::try_from(HEAD_DIM).map_err(|error| error.to_string())?;
    let mut fields = ManifestFields::new("tiny-llama", Dtype::F16, LAYERS, heads, dim);
    fields.page_tokens = TOKENS;
    let manifest = Manifest::new(fields).map_err(|error| error.to_string())?;
    let layers = RECORDED.chunks_exact(ROWS_BYTES + QUERIES_BYTES);
    (0..LAYERS)
        .zip(layers)
        .map(|(layer, recorded)| {
            let (rows, queries) = recorded.split_at(ROWS_BYTES);
            let place = PagePlace::new(&manifest, Layer(layer), TokenStart(0));
            let place = place.map_err(|error| error.to_string())?;
            let bytes = pack_page(&place, rows, TOKENS).map_err(|error| error.to_string())?;
            let queries = queries.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four));
            Ok((Page { place, tokens: TOKENS, bytes }, queries.collect()))
        })
        .collect()
}

fn rounded(page: &Page, quantisation: Quantisation) -> Result<Version, String> {
    match quantise_page(&page.bytes, &page.place, quantisation) {
        Ok(Quantised::Version(version)) => Ok(version),
        Ok(Quantised::Unsuitable(why)) => Err(format!("{quantisation:?}: {why:?}")),
        Err(error) => Err(format!("{quantisation:?}: {error}")),
    }
}

/// Logical bytes for each byte stored, by encoding.
fn ratios(pages: &[Page], names: Names) -> Result<Vec<Figure>, String> {
    let logical: usize = pages.iter().map(|page| page.bytes.len()).sum();
    let (mut stored, mut is_shuffled) = ([logical, 0, 0, 0, 0], true);
    for page in pages {
        let (plain, _) = zstd(page, &Subject::File)?;
        let identity = page.place.identity(page.tokens);
        let (shuffled, encoding) = zstd(page, &Subject::Page(identity))?;
        is_shuffled &= encoding == Encoding::ZstdShuffled;
        stored[1] += plain;
        stored[2] += shuffled;
        stored[3] += rounded(page, Quantisation::Q8_0)?.blob.len();
        stored[4] += rounded(page, Quantisation::Q4_0)?.blob.len();
    }
    let figures = names.into_iter().zip(stored).map(|(name, stored)| ratio(name, logical, stored));
    // Where shuffling does not pay, nothing is shuffled.
    let shown = figures.enumerate().filter(|(index, _)| is_shuffled || *index != 2);
    Ok(shown.map(|(_, figure)| figure).collect())
}

/// Bytes of a page as zstd:3 stores it, and how.
fn zstd(page: &Page, subject: &Subject) -> Result<(usize, Encoding), String> {
    let (length, mut blob) = (page.bytes.len() as u64, Vec::new());
    let lossless = Lossless::Zstd(ZstdLevel::DEFAULT);
    let encoded = encode(&mut page.bytes.as_slice(), length, lossless, subject, &mut blob);
    let encoded = encoded.map_err(|error| error.to_string())?;
    Ok((blob.len(), encoded.encoding))
}

#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn ratio(name: &'static str, logical: usize, stored: usize) -> Figure {
    Figure {
        name,
        unit: "times",
        better: Better::Higher,
        target: Target::None,
        values: vec![logical as f64 / stored as f64],
        baselines: Vec::new(),
    }
}

/// Attention of the recorded queries over a page and its own past, in f64 from its definition:
/// `[tokens, query heads, head_dim]`.
fn attention(page: &Page, file: &[u8], queries: &[f32]) -> Result<Vec<f64>, String> {
    let view = PageView::parse(file, page.place.geometry()).map_err(|error| error.to_string())?;
    let tail = unpack_rows(&view);
    let mut rows = vec![0.0; tail.len() / 2];
    row_f32(Dtype::F16, &tail, &mut rows);
    let (width, row) = (KV_HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM);
    let mut out = Vec::with_capacity(queries.len());
    for (index, query) in queries.chunks_exact(HEAD_DIM).enumerate() {
        let last = (index / QUERY_HEADS + 1) * QUERY_STEP;
        let head = index % QUERY_HEADS / (QUERY_HEADS / KV_HEADS) * HEAD_DIM;
        let seen = || rows.chunks_exact(row).take(last);
        let scores: Vec<f64> = seen().map(|row| dot(query, &row[head..][..HEAD_DIM])).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        out.extend((0..HEAD_DIM).map(|at| {
            let values = seen().map(|row| f64::from(row[width + head + at]));
            values.zip(&weights).map(|(value, weight)| value * weight / total).sum::<f64>()
        }));
    }
    Ok(out)
}

/// `q . k / sqrt(head_dim)`
fn dot(query: &[f32], key: &[f32]) -> f64 {
    let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
    #[expect(clippy::cast_precision_loss, reason = "head dimensions are small")]
    let scale = (HEAD_DIM as f64).sqrt();
    products.sum::<f64>() / scale
}

/// `|found - expected| / |expected|`, Euclidean.
fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    let difference: f64 = found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f64 = expected.iter().map(|value| value * value).sum();
    (difference / size).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_the_recorded_values_costs_little_and_fewer_bits_cost_more() {
        let value = |figures: &[Figure], name: &str| {
            figures.iter().find(|figure| figure.name == name).unwrap().values[0]
        };
        let figures = figures(&[]).unwrap_or_else(|why| panic!("{why}"));
        let [eight, four] = ["tiny_model_attention_error_q8_0", "tiny_model_attention_error_q4_0"]
            .map(|name| value(&figures, name));
        assert!(eight > 0.0 && eight < 0.02 && four > eight && four < 0.25, "{eight} {four}");
        assert!(value(&figures, "tiny_model_ratio_q8_0") > 1.8);
        assert!(value(&figures, "tiny_model_ratio_q4_0") > 3.3);
        let [plain, shuffled] = ["tiny_model_ratio_zstd3", "tiny_model_ratio_shuffled_zstd3"]
            .map(|name| value(&figures, name));
        assert!(plain > 1.1 && shuffled > 1.1, "{plain} {shuffled}");
    }
}

//! How long after a page was written who follows the sequence has its bytes.
//!
//! The writer publishes page after page of one layer after the other, as a prefill does, and pauses
//! between them as if it computed. It tells the time at which each rename has returned; the reader,
//! which knows the sequence by its path alone, that at which all rows of the page were in its
//! memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Sizes;
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::measure::at;
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;
use crate::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page,
};
use crate::reader::Sequence;

const LAYERS: u32 = 32;
/// Pages of 1 MiB: 256 tokens of 8 KV heads x 128 in f16.
const PAGE_TOKENS: u32 = 256;
/// What a layer takes for a chunk of that size on a fast device.
const COMPUTING: Duration = Duration::from_millis(3);
/// A page that is not there by then will not come.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("following a writer");
    let model = workplace.mount().join("models/followed");
    let fields = ManifestFields {
        page_tokens: PAGE_TOKENS,
        ..ManifestFields::new("followed", Dtype::F16, LAYERS, 8, 128)
    };
    let manifest = Manifest::new(fields).map_err(|error| error.to_string())?;
    fs::create_dir(&model).map_err(at(&model))?;
    let path = model.join(names::MANIFEST);
    fs::write(&path, manifest.to_json()).map_err(at(&path))?;
    let sequence = model.join(names::SEQUENCES).join("s");
    for layer in (0..LAYERS).map(Layer) {
        let directory = sequence.join(names::format_layer(layer));
        fs::create_dir_all(&directory).map_err(at(&directory))?;
    }
    let count = sizes.followed_pages;
    let (written, seen) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&sequence, count));
        let written = write(&sequence, &manifest, count);
        let seen = reader.join().unwrap_or_else(|_| Err("the reader panicked".to_owned()));
        (written, seen)
    });
    let mut lags: Vec<f64> = written?
        .iter()
        .zip(seen?)
        .map(|(written, seen)| seen.saturating_duration_since(*written).as_secs_f64() * 1e6)
        .collect();
    lags.sort_unstable_by(f64::total_cmp);
    let last = lags[(lags.len() * 99 / 100).min(lags.len() - 1)];
    let figure = |name, values| Figure {
        name,
        unit: "us",
        better: Better::Lower,
        target: Target::None,
        values,
        baselines: Vec::new(),
    };
    Ok(vec![figure("follow_page_lag_median", lags), figure("follow_page_lag_p99", vec![last])])
}

/// The order in which pages are computed.
fn pages(count: usize) -> impl Iterator<Item = (Layer, TokenStart)> {
    let starts = (0_u64..).map(|number| TokenStart(number * u64::from(PAGE_TOKENS)));
    starts.flat_map(|start| (0..LAYERS).map(move |layer| (Layer(layer), start))).take(count)
}

fn write(sequence: &Path, manifest: &Manifest, count: usize) -> Result<Vec<Instant>, String> {
    let row_bytes = usize::try_from(manifest.geometry().row_bytes()).unwrap_or(0);
    let rows = vec![1; row_bytes * PAGE_TOKENS as usize];
    let mut written = Vec::with_capacity(count);
    for (layer, start) in pages(count) {
        std::thread::sleep(COMPUTING);
        let page = PagePlace::new(manifest, layer, start)
            .and_then(|place| pack_page(&place, &rows, PAGE_TOKENS))
            .map_err(|error| error.to_string())?;
        let path = sequence.join(names::format_layer(layer)).join(names::format_page(start));
        publish(&path, &page).map_err(at(&path))?;
        written.push(Instant::now());
    }
    Ok(written)
}

#[allow(clippy::disallowed_methods, reason = "an engine publishes its page by a rename")]
fn publish(path: &PathBuf, page: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, page)?;
    fs::rename(temporary, path)
}

fn read(sequence: &Path, count: usize) -> Result<Vec<Instant>, String> {
    let failed = |error: crate::reader::ReadError| error.to_string();
    let mut sequence = Sequence::open(sequence).map_err(failed)?;
    let mut seen = Vec::with_capacity(count);
    for (layer, start) in pages(count) {
        let tokens = start.0..start.0 + u64::from(PAGE_TOKENS);
        if sequence.wait_for(layer, tokens.end, PATIENCE).map_err(failed)? < tokens.end {
            return Err(format!("layer {layer}: the page at token {start} did not come"));
        }
        let mut stream = sequence.stream_layers(&[layer], tokens).map_err(failed)?;
        while let Some(run) = stream.next_run().map_err(failed)? {
            std::hint::black_box(run.blocks());
        }
        seen.push(Instant::now());
    }
    Ok(seen)
}

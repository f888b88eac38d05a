//! The longest cached prefix of a long prompt, among sequences that begin alike.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::Sizes;
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::measure::{at, timed};
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;
use crate::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page,
};
use crate::reader::longest_prefix;

/// Layers that each have all pages.
const LAYERS: u32 = 4;
/// Tokens of a page, as in serving engines.
const PAGE_TOKENS: u32 = 256;
/// Questions of a round.
const QUESTIONS: usize = 10;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("writing a long sequence");
    let model = workplace.mount().join("models/prompts");
    let tokens = sizes.tokens / PAGE_TOKENS * PAGE_TOKENS;
    write_model(&model, tokens)?;
    // Pages that are written in place appear with the commit at the latest.
    let mount = workplace.mount();
    File::open(&mount).and_then(|file| file.sync_all()).map_err(at(&mount))?;
    note("matching prompts");
    // It goes on otherwise in the middle of the last page.
    let mut prompt: Vec<u32> = (0..tokens).collect();
    let shared = tokens - PAGE_TOKENS / 2;
    for token in &mut prompt[shared as usize..] {
        *token += 1;
    }
    ask(&model, &prompt, shared)?;
    let values = (0..sizes.rounds).map(|_| ask(&model, &prompt, shared));
    Ok(vec![Figure {
        name: "prefix_match_100k_tokens",
        unit: "ms",
        better: Better::Lower,
        target: Target::Absolute(5.0),
        values: values.collect::<Result<_, _>>()?,
        baselines: Vec::new(),
    }])
}

/// Milliseconds of a question whose answer is known.
fn ask(model: &Path, prompt: &[u32], expected: u32) -> Result<f64, String> {
    let duration = timed(|| {
        for _ in 0..QUESTIONS {
            let found = longest_prefix(model, prompt).map_err(|error| error.to_string())?;
            if found.tokens != u64::from(expected) {
                return Err(format!("{} tokens match instead of {expected}", found.tokens));
            }
        }
        Ok(())
    })?;
    #[allow(clippy::cast_precision_loss, reason = "a handful of questions")]
    Ok(duration.as_secs_f64() * 1e3 / QUESTIONS as f64)
}

/// A sequence with the tokens 0, 1, 2 and so on.
fn write_model(model: &Path, tokens: u32) -> Result<(), String> {
    let fields = ManifestFields {
        page_tokens: PAGE_TOKENS,
        ..ManifestFields::new("prompts", Dtype::F16, LAYERS, 1, 16)
    };
    let manifest = Manifest::new(fields).map_err(|error| error.to_string())?;
    let geometry = *manifest.geometry();
    fs::create_dir(model).map_err(at(model))?;
    write(&model.join(names::MANIFEST), manifest.to_json().as_bytes())?;
    let sequence = model.join(names::SEQUENCES).join("s");
    let rows = vec![1; usize::try_from(geometry.row_bytes()).unwrap_or(0) * PAGE_TOKENS as usize];
    for layer in (0..LAYERS).map(Layer) {
        let directory = sequence.join(names::format_layer(layer));
        fs::create_dir_all(&directory).map_err(at(&directory))?;
        for start in (0..tokens).step_by(PAGE_TOKENS as usize) {
            let start = TokenStart(u64::from(start));
            let page = PagePlace::new(&manifest, layer, start)
                .and_then(|place| pack_page(&place, &rows, PAGE_TOKENS))
                .map_err(|error| error.to_string())?;
            write(&directory.join(names::format_page(start)), &page)?;
        }
    }
    let ids: Vec<u8> = (0..tokens).flat_map(u32::to_le_bytes).collect();
    write(&sequence.join(names::TOKENS), &ids)
}

fn write(path: &PathBuf, bytes: &[u8]) -> Result<(), String> {
    fs::write(path, bytes).map_err(at(path))
}

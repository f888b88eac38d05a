//! What seeing less, or with fewer bits, costs the tiny model within the context it was trained
//! for.

use std::fs;
use std::path::PathBuf;

use kvfs::attention::select::PageTopK;
use kvfs::page::Dtype;

use crate::Result;
use crate::model::Model;
use crate::selected_cache::{Policy, SelectedCache};
use crate::tests::small_model;
use crate::weights::Weights;

/// Tokens of the text; the model was trained with up to 2048.
const TOKENS: usize = 512;

/// Small, so that there is a choice among pages within the budget.
const PAGE_TOKENS: usize = 4;

/// Tokens that a token sees at most, under a policy.
const BUDGET: usize = 32;

const POLICIES: [(&str, Policy); 4] = [
    ("sliding window", Policy::Window(BUDGET)),
    ("sinks + window", Policy::SinksAndWindow { sinks: 4, window: BUDGET - 4 }),
    ("heavy hitters", Policy::HeavyHitters { heavy: BUDGET / 2, recent: BUDGET / 2 }),
    ("page top-k", Policy::Pages(PageTopK { pages: BUDGET / PAGE_TOKENS, sinks: 1, recent: 2 })),
];

/// Perplexity per token of a text: `exp` of the mean of `-ln p`.
fn perplexity(model: &Model, cache: &mut SelectedCache, tokens: &[u32]) -> Result<f64> {
    let mut hidden = model.embed(tokens)?;
    for layer in 0..model.config().num_hidden_layers {
        model.layer(layer, 0, &mut hidden, cache)?;
    }
    let mut nats = 0.0;
    for (row, next) in hidden.chunks_exact(model.config().hidden_size).zip(&tokens[1..]) {
        let logits = model.logits(row)?;
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        nats += sum.ln() - f64::from(logits[*next as usize]);
    }
    #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
    let count = (tokens.len() - 1) as f64;
    Ok((nats / count).exp())
}

#[test]
fn selections_equal_full_attention_under_the_same_mask() -> Result<()> {
    let model = small_model();
    let text: Vec<u32> = (0..200).map(|index| index * 7 % 50).collect();
    for (name, policy) in POLICIES.into_iter().chain([("full", Policy::Everything)]) {
        let mut cache = SelectedCache::new(&model, PAGE_TOKENS, policy)?.verified();
        perplexity(&model, &mut cache, &text)?;
        let kept = cache.kept();
        match policy {
            Policy::Everything => assert!((kept - 1.0).abs() < 1e-6, "{name}: {kept}"),
            _ => assert!(kept > 0.3 && kept < 0.999, "{name}: {kept}"),
        }
    }
    Ok(())
}

#[test]
fn perplexity_of_selections_and_of_quantised_pages() -> Result<()> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
    let model = Model::new(Weights::load(&directory)?);
    let prompt = fs::read(directory.join("prompt.txt"))?;
    let tokens: Vec<u32> = prompt.iter().take(TOKENS).copied().map(u32::from).collect();
    let measure = |name: &str, mut cache: SelectedCache| -> Result<(f64, f64)> {
        let found = (perplexity(&model, &mut cache, &tokens)?, cache.kept());
        eprintln!("{name:14}  {:10.4}  {:9.4}", found.0, found.1);
        Ok(found)
    };
    let cache = |policy| SelectedCache::new(&model, PAGE_TOKENS, policy);
    eprintln!("{TOKENS} tokens, a policy sees {BUDGET} of them");
    eprintln!("                perplexity  kept mass");
    let (full, _) = measure("full", cache(Policy::Everything)?)?;
    assert!(full > 2.0 && full < 5.0, "{full}");
    for (name, policy) in POLICIES {
        let (found, kept) = measure(name, cache(policy)?)?;
        assert!((found / full - 1.0).abs() < 0.03, "{name}: {found}, full {full}");
        assert!(kept > 0.9 && kept < 0.999, "{name} keeps {kept}");
    }
    // That there is something to lose.
    let (alone, kept) = measure("itself alone", cache(Policy::Window(1))?)?;
    assert!(alone > 2.0 * full && kept < 0.5, "{alone} {kept}");
    for (name, dtype, most) in [("q8_0", Dtype::Q8_0, 0.002), ("q4_0", Dtype::Q4_0, 0.03)] {
        let (found, _) = measure(name, cache(Policy::Everything)?.quantised(dtype))?;
        assert!((found / full - 1.0).abs() < most, "{name}: {found}, full {full}");
    }
    Ok(())
}

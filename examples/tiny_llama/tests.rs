//! The model against its reference, and its independence of pages, chunks and restarts.

use std::fs;
use std::path::PathBuf;

use half::f16;
use serde::Deserialize;

use crate::Result;
use crate::attention::kv_width;
use crate::generate::{continue_greedily, prefill};
use crate::matrix::{Matrix, dot};
use crate::memory_cache::MemoryCache;
use crate::model::{KeyValueCache, Model};
use crate::sample::greedy;
use crate::weights::{Config, Layer, Weights};

/// A small generator of repeatable values in -1..1.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    #[expect(clippy::cast_precision_loss, reason = "24 bits fit a f32")]
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.next() * scale).collect()
    }

    pub(crate) fn halves(&mut self, count: usize) -> Vec<f16> {
        (0..count).map(|_| f16::from_f32(self.next())).collect()
    }
}

#[test]
fn append_refuses_a_gap() -> Result<()> {
    let shape = small_model().config().shape()?;
    let row = vec![f16::ZERO; kv_width(shape)];
    let mut cache = MemoryCache::new(shape, 1, 4)?;
    assert!(cache.append(0, 1, &row, &row).is_err());
    assert!(cache.append(1, 0, &row, &row).is_err());
    Ok(())
}

#[test]
fn dot_agrees_with_f64_at_every_length() {
    let mut random = Random(3);
    for length in [0, 1, 15, 16, 17, 64, 100] {
        let (a, b) = (random.floats(length, 1.0), random.floats(length, 1.0));
        let expected: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        assert!((f64::from(dot(&a, &b)) - expected).abs() < 1e-5);
    }
}

/// A two-layer model with random weights.
pub(crate) fn small_model() -> Model {
    let (hidden, inner, vocabulary) = (64, 96, 50);
    let (q_width, kv_width) = (64, 32);
    let mut random = Random(4);
    let mut matrix =
        |rows: usize, columns: usize| Matrix::new(columns, random.floats(rows * columns, 0.3));
    let mut layer = || Layer {
        attention_norm: vec![1.0; hidden],
        query: matrix(q_width, hidden),
        key: matrix(kv_width, hidden),
        value: matrix(kv_width, hidden),
        output: matrix(hidden, q_width),
        mlp_norm: vec![1.0; hidden],
        gate: matrix(inner, hidden),
        up: matrix(inner, hidden),
        down: matrix(hidden, inner),
    };
    let layers = vec![layer(), layer()];
    Model::new(Weights {
        config: Config {
            model_type: "llama".into(),
            vocab_size: vocabulary,
            hidden_size: hidden,
            intermediate_size: inner,
            num_hidden_layers: layers.len(),
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            max_position_embeddings: 512,
            rms_norm_eps: 1e-5,
            rope_theta: 10000.0,
            hidden_act: "silu".into(),
            attention_bias: false,
            mlp_bias: false,
            tie_word_embeddings: false,
            rope_scaling: None,
        },
        embedding: matrix(vocabulary, hidden),
        layers,
        norm: vec![1.0; hidden],
        head: matrix(vocabulary, hidden),
    })
}

pub(crate) fn empty_cache(model: &Model, page_tokens: usize) -> MemoryCache {
    let shape = model.config().shape().unwrap();
    MemoryCache::new(shape, model.config().num_hidden_layers, page_tokens).unwrap()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The logits after a prompt that runs through the model in chunks.
fn logits_in_chunks(model: &Model, chunk: usize, page_tokens: usize) -> Result<Vec<f32>> {
    let prompt: Vec<u32> = (0..300).map(|index| index * 7 % 50).collect();
    let mut cache = empty_cache(model, page_tokens);
    let mut logits = Vec::new();
    for (index, tokens) in prompt.chunks(chunk).enumerate() {
        logits = model.forward(tokens, index * chunk, &mut cache)?;
    }
    Ok(logits)
}

#[test]
fn logits_do_not_depend_on_chunks() -> Result<()> {
    let model = small_model();
    for page_tokens in [16, 100, 256] {
        let whole = bits(&logits_in_chunks(&model, 300, page_tokens)?);
        for chunk in [1, 7, 64, 100, 299] {
            let logits = bits(&logits_in_chunks(&model, chunk, page_tokens)?);
            assert_eq!(logits, whole, "chunks of {chunk}, pages of {page_tokens}");
        }
    }
    Ok(())
}

#[test]
fn logits_do_not_depend_on_pages() -> Result<()> {
    let model = small_model();
    let monolithic = logits_in_chunks(&model, 64, 1000)?;
    for page_tokens in [128, 256] {
        let logits = bits(&logits_in_chunks(&model, 64, page_tokens)?);
        assert_eq!(logits, bits(&monolithic), "pages of {page_tokens}");
    }
    for page_tokens in [1, 16, 100] {
        // Sums are cut elsewhere: what differs is their rounding, and here and there that of K and
        // V to f16 in the layer above.
        let logits = logits_in_chunks(&model, 64, page_tokens)?;
        for (logit, expected) in logits.iter().zip(&monolithic) {
            assert!((logit - expected).abs() < 2e-3, "{logit} is not {expected}");
        }
        assert_eq!(greedy(&logits), greedy(&monolithic));
    }
    Ok(())
}

/// Runs `tokens` from `position` on, then continues them by `count`.
fn extend(
    model: &Model, cache: &mut MemoryCache, position: usize, tokens: &mut Vec<u32>, count: usize,
) -> Result<()> {
    let logits = prefill(model, cache, position, &tokens[position..])?;
    continue_greedily(model, cache, tokens.len(), logits, count, &mut |token, _| {
        tokens.push(token);
        Ok(())
    })
}

#[test]
fn a_resumed_run_continues_as_an_uninterrupted_one() -> Result<()> {
    let model = small_model();
    let prompt: Vec<u32> = (0..40).map(|index| index * 11 % 50).collect();
    let mut uninterrupted = prompt.clone();
    extend(&model, &mut empty_cache(&model, 16), 0, &mut uninterrupted, 60)?;

    // The same in two runs: the second has the cache and the tokens that the first one left, and
    // the last token's rows are not among them.
    let mut cache = empty_cache(&model, 16);
    let mut tokens = prompt;
    extend(&model, &mut cache, 0, &mut tokens, 25)?;
    let held = tokens.len() - 1;
    extend(&model, &mut cache, held, &mut tokens, 35)?;
    assert_eq!(tokens, uninterrupted);
    Ok(())
}

#[test]
fn a_repeated_token_finds_its_rows_and_gives_the_same_logits() -> Result<()> {
    let model = small_model();
    let mut cache = empty_cache(&model, 16);
    let prompt: Vec<u32> = (0..32).collect();
    let first = model.forward(&prompt, 0, &mut cache)?;
    let again = model.forward(&prompt[31..], 31, &mut cache)?;
    assert_eq!(bits(&first), bits(&again));
    // Nothing was appended twice: the next token follows at once.
    let next = model.forward(&[7], 32, &mut cache)?;
    let mut fresh = empty_cache(&model, 16);
    model.forward(&prompt, 0, &mut fresh)?;
    assert_eq!(bits(&next), bits(&model.forward(&[7], 32, &mut fresh)?));
    assert!(model.forward(&[7], 34, &mut cache).is_err(), "position 33 is missing");
    Ok(())
}

#[test]
fn refuses_what_the_model_cannot_run() {
    let model = small_model();
    let mut cache = empty_cache(&model, 16);
    assert!(model.forward(&[50], 0, &mut cache).is_err(), "not in the vocabulary");
    assert!(model.forward(&[1; 513], 0, &mut cache).is_err(), "past the last position");
    assert!(model.forward(&[], 0, &mut cache).is_err(), "no tokens");
}

#[test]
fn a_continuation_is_the_same_with_other_pages() -> Result<()> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
    let model = Model::new(Weights::load(&directory)?);
    let prompt = fs::read(directory.join("prompt.txt"))?;
    let prompt: Vec<u32> = prompt.iter().take(300).copied().map(u32::from).collect();
    let continued = |page_tokens| -> Result<Vec<u32>> {
        let mut tokens = prompt.clone();
        extend(&model, &mut empty_cache(&model, page_tokens), 0, &mut tokens, 60)?;
        Ok(tokens)
    };
    let monolithic = continued(1000)?;
    for page_tokens in [16, 100, 256] {
        assert_eq!(continued(page_tokens)?, monolithic, "pages of {page_tokens}");
    }
    Ok(())
}

#[test]
fn agrees_with_the_reference_implementation() -> Result<()> {
    #[derive(Deserialize)]
    struct Reference {
        prompt: String,
        logits: Vec<f32>,
    }
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
    let reference: Reference =
        serde_json::from_slice(&fs::read(directory.join("reference_logits.json"))?)?;
    let model = Model::new(Weights::load(&directory)?);
    let prompt: Vec<u32> = reference.prompt.bytes().map(u32::from).collect();
    let logits = prefill(&model, &mut empty_cache(&model, 16), 0, &prompt)?;
    assert_eq!(logits.len(), reference.logits.len());
    for (byte, (got, expected)) in logits.iter().zip(&reference.logits).enumerate() {
        // Keys and values are rounded to f16 here and not in the reference.
        let allowed = 1e-2 + 1e-3 * expected.abs();
        assert!((got - expected).abs() < allowed, "byte {byte}: {got} is not {expected}");
    }
    Ok(())
}

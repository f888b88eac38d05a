//! The model on a GPU, which is none: the driver of `tests/cuda` runs the kernels on the CPU.

use std::path::{Path, PathBuf};

use kvfs::page::{Dtype, Manifest, ManifestFields};
use kvfs::reader::Backend;

use crate::PAGE_TOKENS;
use crate::fake::{F16_64, Plan, SLOW_COPIES, SLOW_KERNELS, under, without};
use crate::generate::{continue_greedily, prefill};
use crate::memory_cache::MemoryCache;
use crate::model::{KeyValueCache, Model};
use crate::mount_cache::{MountCache, read};
use crate::weights::Weights;

const PROMPT_TOKENS: usize = 300;
const TOKENS: usize = 24;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama")
}

fn prompt() -> Vec<u32> {
    let prompt = std::fs::read(fixture().join("prompt.txt")).unwrap();
    prompt[..PROMPT_TOKENS].iter().copied().map(u32::from).collect()
}

/// The tokens that follow the prompt.
fn generate(model: &Model, cache: &mut dyn KeyValueCache) -> Vec<u32> {
    let logits = prefill(model, cache, 0, &prompt()).unwrap();
    let mut tokens = Vec::new();
    let mut emit = |token, _: &[f32]| {
        tokens.push(token);
        Ok(())
    };
    continue_greedily(model, cache, PROMPT_TOKENS, logits, TOKENS, &mut emit).unwrap();
    tokens
}

fn in_memory(model: &Model) -> MemoryCache {
    let config = model.config();
    MemoryCache::new(config.shape().unwrap(), config.num_hidden_layers, PAGE_TOKENS).unwrap()
}

#[test]
fn tokens_are_those_of_the_cpu() {
    // A launch that fails half way: the CPU goes on from there.
    let fails: Plan<'_> = &[("KVFS_FAKE_FAIL", "cuLaunchKernel:100:719")];
    let plans = [SLOW_COPIES, SLOW_KERNELS, fails];
    under(concat!(module_path!(), "::tokens_are_those_of_the_cpu"), &[F16_64], &plans, || {
        let model = Model::new(Weights::load(&fixture()).unwrap());
        let expected = generate(&model, &mut in_memory(&model));
        let mut cache = in_memory(&model);
        let backend = cache.use_gpu().unwrap();
        assert!(matches!(backend, Backend::Cuda { .. }), "{backend}");
        assert_eq!(generate(&model, &mut cache), expected);

        let directory = tempfile::tempdir().unwrap();
        let mut fields = ManifestFields::new("test/tiny", Dtype::F16, 4, 2, 64);
        // An append may not fill a tail here: that needs a mount.
        fields.page_tokens = 256;
        let manifest = Manifest::new(fields).unwrap();
        std::fs::write(directory.path().join("manifest.json"), manifest.to_json()).unwrap();
        let sequence = directory.path().join("sequences/s");
        let mut cache = MountCache::open(&sequence, model.config()).unwrap();
        cache.use_gpu().unwrap();
        assert_eq!(generate(&model, &mut cache), expected);
        // The rows were written meanwhile: another program goes on with them.
        cache.durable().unwrap();
        drop(cache);
        let mut tokens = prompt();
        tokens.extend(&expected[..TOKENS - 1]);
        let mut cache = MountCache::open(&sequence, model.config()).unwrap();
        assert_eq!(cache.tokens(), tokens);
        let (logits, resumed) = read(&model, &mut cache, &tokens).unwrap();
        assert_eq!(resumed.held, tokens.len());
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        assert_eq!(best, expected[TOKENS - 1] as usize);
    });
}

#[test]
fn without_a_gpu_it_says_so() {
    without(concat!(module_path!(), "::without_a_gpu_it_says_so"), || {
        let model = Model::new(Weights::load(&fixture()).unwrap());
        let mut cache = in_memory(&model);
        match cache.use_gpu().unwrap() {
            Backend::Cpu { why, .. } => assert!(why.unwrap().contains("driver")),
            Backend::Cuda { device, .. } => eprintln!("skipped: this machine has {device}"),
        }
    });
}

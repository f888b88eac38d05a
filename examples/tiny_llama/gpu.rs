//! The model on a GPU, which is none: the driver of `tests/cuda` runs the kernels on the CPU.

use std::path::{Path, PathBuf};

use half::f16;
use kvfs::attention::Shape;
use kvfs::attention::select::PageTopK;
use kvfs::cuda::WriteBack;
use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, TokenStart, names};
use kvfs::reader::Backend;

use crate::attention::interleave;
use crate::engine::Engine;
use crate::fake::{F16_64, Plan, SLOW_COPIES, SLOW_KERNELS, under, without};
use crate::generate::{continue_greedily, prefill};
use crate::memory_cache::MemoryCache;
use crate::model::{KeyValueCache, Model};
use crate::mount_cache::{MountCache, read};
use crate::selected_cache::{Policy, SelectedCache};
use crate::weights::Weights;
use crate::{PAGE_TOKENS, Result};

const PROMPT_TOKENS: usize = 300;
const TOKENS: usize = 24;
/// Of the prompt where tokens are selected: their masses take this driver a while.
const SHORT_PROMPT_TOKENS: usize = 120;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama")
}

fn prompt(tokens: usize) -> Vec<u32> {
    let prompt = std::fs::read(fixture().join("prompt.txt")).unwrap();
    prompt[..tokens].iter().copied().map(u32::from).collect()
}

/// The tokens that follow the prompt.
fn generate(model: &Model, cache: &mut dyn KeyValueCache, prompt: &[u32]) -> Vec<u32> {
    let logits = prefill(model, cache, 0, prompt).unwrap();
    let mut tokens = Vec::new();
    let mut emit = |token, _: &[f32]| {
        tokens.push(token);
        Ok(())
    };
    continue_greedily(model, cache, prompt.len(), logits, TOKENS, &mut emit).unwrap();
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
        let prompt = prompt(PROMPT_TOKENS);
        let expected = generate(&model, &mut in_memory(&model), &prompt);
        let mut cache = in_memory(&model);
        let backend = cache.use_gpu().unwrap();
        assert!(matches!(backend, Backend::Cuda { .. }), "{backend}");
        assert_eq!(generate(&model, &mut cache, &prompt), expected);

        let directory = tempfile::tempdir().unwrap();
        let mut fields = ManifestFields::new("test/tiny", Dtype::F16, 4, 2, 64);
        // An append may not fill a tail here: that needs a mount.
        fields.page_tokens = 256;
        let manifest = Manifest::new(fields).unwrap();
        std::fs::write(directory.path().join("manifest.json"), manifest.to_json()).unwrap();
        let sequence = directory.path().join("sequences/s");
        let mut cache = MountCache::open(&sequence, model.config()).unwrap();
        cache.use_gpu().unwrap();
        assert_eq!(generate(&model, &mut cache, &prompt), expected);
        // The rows were written meanwhile: another program goes on with them.
        cache.durable().unwrap();
        drop(cache);
        let mut tokens = prompt;
        tokens.extend(&expected[..TOKENS - 1]);
        let mut cache = MountCache::open(&sequence, model.config()).unwrap();
        assert_eq!(cache.tokens(), tokens);
        let (logits, resumed) = read(&model, &mut cache, &tokens).unwrap();
        assert_eq!(resumed.held, tokens.len());
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        assert_eq!(best, expected[TOKENS - 1] as usize);
    });
}

/// A cache whose new rows are made on the device, which also brings them to a sequence.
struct WrittenBack {
    inner: SelectedCache,
    engine: Engine,
    write_back: WriteBack,
    /// `[layers]`, of each token keys, then values.
    rows: Vec<Vec<u8>>,
    shape: Shape,
}

impl WrittenBack {
    fn new(mut inner: SelectedCache, sequence: &Path, manifest: &Manifest) -> Self {
        let geometry = manifest.geometry();
        let layers = geometry.num_layers();
        for layer in (0..layers).map(Layer) {
            std::fs::create_dir_all(sequence.join(names::format_layer(layer))).unwrap();
        }
        let cuda = inner.cuda().expect("the driver has one");
        let write_back = WriteBack::new(cuda, sequence, manifest, 0).unwrap();
        let row_bytes = usize::try_from(geometry.row_bytes()).unwrap();
        let engine = Engine::new(layers, SHORT_PROMPT_TOKENS * row_bytes);
        let (rows, shape) = (vec![Vec::new(); layers as usize], cuda.shape());
        Self { inner, engine, write_back, rows, shape }
    }
}

impl KeyValueCache for WrittenBack {
    fn append(
        &mut self, layer: usize, position: usize, keys: &[f16], values: &[f16],
    ) -> Result<()> {
        self.inner.append(layer, position, keys, values)?;
        let rows = interleave(self.shape, keys, values);
        self.rows[layer].extend_from_slice(&rows);
        Ok(self.engine.give(&mut self.write_back, u32::try_from(layer)?, &rows)?)
    }

    fn attend(
        &mut self, layer: usize, position: usize, queries: &[f32], out: &mut [f32],
    ) -> Result<()> {
        self.inner.attend(layer, position, queries, out)
    }

    fn complete(&mut self, _position: usize, tokens: &[u32]) -> Result<()> {
        Ok(self.write_back.complete(tokens)?)
    }
}

/// Heavy hitters and pages by their bounds, chosen on the device, while it writes the rows.
#[test]
fn selected_tokens_are_those_of_the_cpu() {
    let name = concat!(module_path!(), "::selected_tokens_are_those_of_the_cpu");
    under(name, &[F16_64], &[SLOW_COPIES, SLOW_KERNELS], || {
        let model = Model::new(Weights::load(&fixture()).unwrap());
        let policies = [
            Policy::HeavyHitters { heavy: 16, recent: 16 },
            Policy::Pages(PageTopK { pages: 8, sinks: 1, recent: 2 }),
        ];
        let prompt = prompt(SHORT_PROMPT_TOKENS);
        for policy in policies {
            let cache = || SelectedCache::new(&model, 4, policy).unwrap().after_the_prompt();
            let expected = generate(&model, &mut cache(), &prompt);
            let mut fields = ManifestFields::new("test/tiny", Dtype::F16, 4, 2, 64);
            // An append may not fill a tail here: that needs a mount.
            fields.page_tokens = 512;
            let manifest = Manifest::new(fields).unwrap();
            let directory = tempfile::tempdir().unwrap();
            std::fs::write(directory.path().join("manifest.json"), manifest.to_json()).unwrap();
            let sequence = directory.path().join("sequences/s");
            let mut cache = WrittenBack::new(cache().on_gpu().unwrap(), &sequence, &manifest);
            assert_eq!(generate(&model, &mut cache, &prompt), expected, "{policy:?}");
            assert!(cache.inner.cuda().is_some(), "it did not fail");
            let kept = cache.inner.kept();
            assert!(kept < 1.0 - 1e-6, "{policy:?} leaves out nothing: {kept}");
            cache.write_back.sync().unwrap();
            for (layer, rows) in (0..).map(Layer).zip(&cache.rows) {
                let tail = names::format_tail(TokenStart(0));
                let written = sequence.join(names::format_layer(layer)).join(tail);
                assert!(std::fs::read(written).unwrap() == *rows, "layer {layer}");
            }
            let tokens = [&prompt[..], &expected[..TOKENS - 1]].concat();
            let written = MountCache::open(&sequence, model.config()).unwrap();
            assert_eq!(written.tokens(), tokens);
        }
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

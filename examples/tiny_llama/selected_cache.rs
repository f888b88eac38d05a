//! A cache whose tokens see less than everything before them, or blocks of fewer bits, to measure
//! what that costs a real model.

use half::f16;
use kvfs::attention::select::{HeavyHitters, PageTopK, TokenSet, kept_mass, sinks_and_window};
use kvfs::attention::{
    Attention, KvBlock, Mask, Options, PageSummary, Partials, Queries, Shape, Tensor, Values,
};
use kvfs::cuda::{CudaAttention, DeviceSummaries, Runtime, Settings};
use kvfs::page::{Dtype, Strides};

use crate::Result;
use crate::attention::query_width;
use crate::memory_cache::MemoryCache;
use crate::model::{KeyValueCache, Model};
use crate::reference::{self, Rows, assert_close};
use crate::tests::empty_cache;

/// Values in a block of `q8_0` and `q4_0`.
const BLOCK_VALUES: usize = 32;

/// Which tokens a token sees.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Policy {
    Everything,
    Window(usize),
    SinksAndWindow { sinks: usize, window: usize },
    HeavyHitters { heavy: usize, recent: usize },
    Pages(PageTopK),
}

/// A cache in memory that attends one token at a time, as decoding does.
#[derive(Debug)]
pub(crate) struct SelectedCache {
    inner: MemoryCache,
    attention: Attention,
    /// Instead of it, if a GPU was asked for.
    runtime: Option<Runtime>,
    page_tokens: usize,
    policy: Policy,
    layers: Vec<LayerState>,
    /// What full pages are quantised to.
    quantised: Option<Dtype>,
    /// Whether the tokens of a prompt, which come several at a time, see everything.
    sees_prompt: bool,
    /// Whether every result is compared with attention under a mask, and with f64.
    is_verified: bool,
    /// The share of attention kept, of each token, layer and query head.
    kept: Vec<f32>,
}

/// What a policy remembers of a layer.
#[derive(Debug, Default)]
struct LayerState {
    hitters: HeavyHitters,
    summaries: Vec<PageSummary>,
    on_device: Option<DeviceSummaries>,
    pages: Vec<QuantisedPage>,
}

impl SelectedCache {
    pub(crate) fn new(model: &Model, page_tokens: usize, policy: Policy) -> Result<Self> {
        let layers = (0..model.config().num_hidden_layers).map(|_| LayerState::default());
        Ok(Self {
            inner: empty_cache(model, page_tokens),
            attention: Attention::new(model.config().shape()?, 1)?,
            runtime: None,
            page_tokens,
            policy,
            layers: layers.collect(),
            quantised: None,
            sees_prompt: false,
            is_verified: false,
            kept: Vec::new(),
        })
    }

    pub(crate) fn quantised(mut self, dtype: Dtype) -> Self {
        self.quantised = Some(dtype);
        self
    }

    /// The policy is for the tokens that follow a prompt.
    pub(crate) fn after_the_prompt(mut self) -> Self {
        self.sees_prompt = true;
        self
    }

    /// A GPU attends and selects.
    pub(crate) fn on_gpu(mut self) -> Result<Self> {
        let settings = Settings { slot_bytes: 64 << 10, ..Settings::default() };
        self.runtime = Some(Runtime::open(self.attention.shape(), settings, 1)?);
        Ok(self)
    }

    /// The GPU, as long as there is one.
    pub(crate) fn cuda(&mut self) -> Option<&mut CudaAttention> {
        self.runtime.as_mut().and_then(Runtime::cuda)
    }

    pub(crate) fn verified(mut self) -> Self {
        self.is_verified = true;
        self
    }

    /// The mean share of attention that was kept.
    pub(crate) fn kept(&self) -> f64 {
        let sum: f64 = self.kept.iter().copied().map(f64::from).sum();
        #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
        let count = self.kept.len() as f64;
        sum / count
    }
}

impl KeyValueCache for SelectedCache {
    fn append(
        &mut self, layer: usize, position: usize, keys: &[f16], values: &[f16],
    ) -> Result<()> {
        self.inner.append(layer, position, keys, values)
    }

    fn attend(
        &mut self, layer: usize, position: usize, queries: &[f32], out: &mut [f32],
    ) -> Result<()> {
        let shape = self.attention.shape();
        let (width, state) = (query_width(shape), &mut self.layers[layer]);
        let held = self.inner.blocks(layer)?;
        if self.sees_prompt && queries.len() > width {
            let end = position + queries.len() / width;
            let positions: Vec<u64> = (position as u64..end as u64).collect();
            let queries = Queries { q: queries, positions: &positions };
            let mut mass = vec![0.0; end];
            let blocks = first_tokens(&held, end);
            let attends = (&self.attention, &mut self.runtime);
            let seen = with_mass(attends, &queries, &blocks, &Options::default(), &mut mass)?;
            state.hitters.observe(&mass);
            out.copy_from_slice(&seen.finish(None)?);
            return Ok(());
        }
        let rows = queries.chunks_exact(width).zip(out.chunks_exact_mut(width));
        for (end, (q, out)) in (position + 1..).zip(rows) {
            let mut blocks = first_tokens(&held, end);
            let cuda = self.runtime.as_mut().and_then(Runtime::cuda);
            let tokens = match (self.policy, cuda) {
                (Policy::Pages(pages), Some(cuda)) => state.select_on(cuda, pages, q, &blocks)?,
                _ => state.select(self.policy, shape, q, &blocks)?,
            };
            if let Some(dtype) = self.quantised {
                for page in &blocks[state.pages.len()..end / self.page_tokens] {
                    state.pages.push(QuantisedPage::new(page, dtype));
                }
                for (block, page) in blocks.iter_mut().zip(&state.pages) {
                    *block = page.block(shape, block);
                }
            }
            let queries = Queries { q, positions: &[end as u64 - 1] };
            let options = match self.policy {
                Policy::Window(window) => {
                    Options { window: Some(window as u64), ..Options::default() }
                }
                _ => Options { selection: Some(&tokens), ..Options::default() },
            };
            let mut mass = vec![0.0; end];
            let attends = (&self.attention, &mut self.runtime);
            let seen = with_mass(attends, &queries, &blocks, &options, &mut mass)?;
            state.hitters.observe(&mass);
            let all = self.attention.run(&queries, &blocks, &Options::default())?;
            self.kept.extend(kept_mass(&seen, &all)?);
            if self.is_verified {
                verify(&self.attention, &queries, &blocks, &tokens, &seen)?;
            }
            out.copy_from_slice(&seen.finish(None)?);
        }
        Ok(())
    }
}

impl LayerState {
    /// The tokens of `blocks` that the last of them sees.
    fn select(
        &mut self, policy: Policy, shape: Shape, q: &[f32], blocks: &[KvBlock<'_>],
    ) -> Result<TokenSet> {
        let tokens = blocks.iter().map(|block| block.tokens).sum();
        Ok(match policy {
            Policy::Everything => TokenSet::all(tokens),
            Policy::Window(window) => sinks_and_window(tokens, 0, window),
            Policy::SinksAndWindow { sinks, window } => sinks_and_window(tokens, sinks, window),
            Policy::HeavyHitters { heavy, recent } => self.hitters.select(tokens, heavy, recent),
            Policy::Pages(pages) => {
                // The last block grows; those before it are full.
                while self.summaries.len() + 1 < blocks.len() {
                    let page = &blocks[self.summaries.len()];
                    self.summaries.push(PageSummary::new(shape, page)?);
                }
                let last = PageSummary::new(shape, &blocks[blocks.len() - 1])?;
                let summaries: Vec<_> = self.summaries.iter().cloned().chain([last]).collect();
                let queries = Queries { q, positions: &[tokens as u64 - 1] };
                pages.select(shape, &queries, blocks, &summaries, &Options::default())?.tokens
            }
        })
    }

    /// The pages that a GPU selects, by summaries that it keeps.
    fn select_on(
        &mut self, cuda: &mut CudaAttention, pages: PageTopK, q: &[f32], blocks: &[KvBlock<'_>],
    ) -> Result<TokenSet> {
        match &mut self.on_device {
            // The last block grows, and a new one may have come behind it.
            Some(summaries) => {
                let known = summaries.len().min(blocks.len()).saturating_sub(1);
                cuda.summarise_from(summaries, blocks, known)?;
            }
            none => *none = Some(cuda.summarise(blocks)?),
        }
        let Some(summaries) = &self.on_device else { unreachable!("they were made") };
        let tokens: usize = blocks.iter().map(|block| block.tokens).sum();
        let queries = Queries { q, positions: &[tokens as u64 - 1] };
        let options = Options::default();
        Ok(cuda.select_pages(&pages, &queries, blocks, summaries, &options)?.tokens)
    }
}

fn with_mass(
    (cpu, runtime): (&Attention, &mut Option<Runtime>), queries: &Queries<'_>,
    blocks: &[KvBlock<'_>], options: &Options<'_>, mass: &mut [f32],
) -> Result<Partials> {
    Ok(match runtime {
        Some(runtime) => runtime.run_with_mass(queries, blocks, options, mass)?,
        None => cpu.run_with_mass(queries, blocks, options, mass)?,
    })
}

/// What a selection gives is to the last bit what full attention gives under the same mask, and up
/// to rounding what the definition gives.
fn verify(
    attention: &Attention, queries: &Queries<'_>, blocks: &[KvBlock<'_>], tokens: &TokenSet,
    seen: &Partials,
) -> Result<()> {
    let mask = |token| if tokens.contains(token) { 0.0 } else { f32::NEG_INFINITY };
    let mask: Vec<f32> = (0..tokens.len()).map(mask).collect();
    let options = Options { mask: Some(Mask::F32(&mask)), ..Options::default() };
    assert_eq!(&attention.run(queries, blocks, &options)?, seen);
    let rows = Rows::of_blocks(attention.shape(), blocks);
    let visible = |token| tokens.contains(token);
    let expected = reference::attend(attention.shape(), queries.q, &rows, &visible);
    assert_close(&seen.clone().finish(None)?, &expected);
    Ok(())
}

/// The blocks of the tokens before `end`.
fn first_tokens<'a>(blocks: &[KvBlock<'a>], end: usize) -> Vec<KvBlock<'a>> {
    let mut left = end;
    let shortened = blocks.iter().map(|block| {
        let tokens = block.tokens.min(left);
        left -= tokens;
        KvBlock { tokens, ..*block }
    });
    shortened.filter(|block| block.tokens > 0).collect()
}

/// A page in blocks of 32 values with a scale, as ggml has them.
#[derive(Debug)]
struct QuantisedPage {
    dtype: Dtype,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl QuantisedPage {
    /// Of a page in f16, `[kv_heads, tokens, head_dim]`.
    fn new(page: &KvBlock<'_>, dtype: Dtype) -> Self {
        let Values::Rows(v) = page.v else { panic!("a Llama has values") };
        let [k, v] = [page.k.bytes, v.bytes].map(|bytes| quantise(dtype, bytes));
        Self { dtype, k, v }
    }

    fn block<'a>(&'a self, shape: Shape, page: &KvBlock<'a>) -> KvBlock<'a> {
        let block_bytes = self.dtype.block_bytes() as usize;
        let token = shape.head_dim() / BLOCK_VALUES * block_bytes;
        let strides = Strides { head: page.tokens * token, token };
        KvBlock {
            k: Tensor { bytes: &self.k, strides },
            v: Values::Rows(Tensor { bytes: &self.v, strides }),
            dtype: self.dtype,
            ..*page
        }
    }
}

/// Whole blocks of f16 to `q8_0` or `q4_0`.
fn quantise(dtype: Dtype, halves: &[u8]) -> Vec<u8> {
    let (pairs, _) = halves.as_chunks::<2>();
    let numbers: Vec<f32> = pairs.iter().map(|pair| f16::from_le_bytes(*pair).to_f32()).collect();
    let mut out = Vec::new();
    for block in numbers.chunks_exact(BLOCK_VALUES) {
        let largest = block.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs()));
        let divisor = if dtype == Dtype::Q8_0 { 127.0 } else { -8.0 };
        let scale = f16::from_f32(largest.unwrap_or(0.0) / divisor);
        let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
        out.extend(scale.to_le_bytes());
        let steps = |number: &f32, most: f32| (number * inverse).round().clamp(-128.0, most);
        #[expect(clippy::cast_possible_truncation, reason = "rounded and clamped")]
        let byte = |steps: f32| (steps as i8).cast_unsigned();
        if dtype == Dtype::Q8_0 {
            out.extend(block.iter().map(|number| byte(steps(number, 127.0))));
        } else {
            let (low, high) = block.split_at(BLOCK_VALUES / 2);
            let nibble = |number| byte(steps(number, 7.0) + 8.0);
            out.extend(low.iter().zip(high).map(|(low, high)| nibble(low) | nibble(high) << 4));
        }
    }
    out
}

//! How close attention comes to reading memory, and whether memory or arithmetic keeps it from there.
//!
//! K and V lie in private memory on huge pages, as pages of 1024 tokens in order of heads. Each
//! round reads the memory as fast as possible, then attends to every layer in it, for one dtype
//! after the other, so that whatever else the machine does meets all of them alike. Then it attends
//! to one head of so few tokens that they stay in the second-level cache: that is the arithmetic
//! alone.

use std::hint::black_box;
use std::io;
use std::time::Instant;

use memmap2::{Advice, MmapMut};

use super::kernel::sum_words;
use super::pool::Pool;
use super::{Attention, AttentionError, KvBlock, Options, Queries, Shape, Tensor, Values};
use crate::page::{Dtype, Strides};

/// Tokens of a page.
const PAGE_TOKENS: usize = 1024;
/// K and V of each thread that stay in a second-level cache, which holds 1 MiB at least on the
/// processors that have AVX-512.
const CACHED_BYTES: usize = 512 << 10;
/// Calls that are timed together, as one takes microseconds.
const CACHED_CALLS: usize = 64;
/// A piece of one page and head, at the sizes that are usual.
const ALIGNMENT: usize = 4096;

/// What is measured.
#[derive(Debug, Clone)]
pub struct Setting {
    /// The heads of a layer.
    pub shape: Shape,
    /// There are rows of K alone, and V is their beginning (multi-head latent attention).
    pub is_latent: bool,
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Threads that read or attend.
    pub threads: usize,
    /// Dtypes of K and V, in turns.
    pub dtypes: Vec<Dtype>,
    /// Repetitions.
    pub rounds: usize,
    /// Memory of each dtype, to be far more than the caches; at least one layer is made.
    pub memory_bytes: usize,
}

/// One dtype's figures, a value for each round.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    /// Of K and V.
    pub dtype: Dtype,
    /// K and V of one layer.
    pub layer_bytes: usize,
    /// To attend to one layer, in seconds.
    pub layer_seconds: Vec<f64>,
    /// To read as many bytes, in seconds.
    pub stream_seconds: Vec<f64>,
    /// To attend to as many bytes that lie in the second-level caches, in seconds.
    pub cached_seconds: Vec<f64>,
}

impl Figures {
    /// The middle of the rounds' shares of the bandwidth of reading.
    pub fn stream_ratio(&self) -> f64 {
        let ratios = self.stream_seconds.iter().zip(&self.layer_seconds).map(|(s, l)| s / l);
        median(ratios.collect())
    }

    /// The share of the bandwidth of reading that the arithmetic alone would reach: what
    /// [`stream_ratio`](Self::stream_ratio) can be at most, if it is below 1.
    pub fn arithmetic_ratio(&self) -> f64 {
        let ratios = self.stream_seconds.iter().zip(&self.cached_seconds).map(|(s, c)| s / c);
        median(ratios.collect())
    }

    /// The middle of the rounds' times for a layer, in seconds.
    pub fn seconds(&self) -> f64 {
        median(self.layer_seconds.clone())
    }
}

/// The middle value, 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Measures.
///
/// # Errors
/// [`AttentionError::Unsupported`] if there is not enough memory, otherwise as
/// [`Attention::run`].
#[allow(clippy::cast_precision_loss, reason = "bytes of a layer")]
pub fn measure(setting: &Setting) -> Result<Vec<Figures>, AttentionError> {
    let attention = Attention::new(setting.shape, setting.threads)?;
    let no_memory =
        |error: io::Error| AttentionError::Unsupported(format!("so much memory ({error})"));
    let readers = Pool::new(setting.threads).map_err(no_memory)?;
    let small = cached_setting(setting)?;
    let small_attention = Attention::new(small.shape, setting.threads)?;
    let pair = |dtype: &Dtype| Ok((Cache::new(setting, *dtype)?, Cache::cached(&small, *dtype)?));
    let caches: Vec<(Cache, Cache)> =
        setting.dtypes.iter().map(pair).collect::<io::Result<_>>().map_err(no_memory)?;
    let mut figures: Vec<Figures> = caches
        .iter()
        .map(|(cache, _)| Figures {
            dtype: cache.dtype,
            layer_bytes: cache.layer_bytes,
            layer_seconds: Vec::new(),
            stream_seconds: Vec::new(),
            cached_seconds: Vec::new(),
        })
        .collect();
    // The first round is not counted: it wakes what sleeps.
    for round in 0..=setting.rounds {
        for ((cache, small), figures) in caches.iter().zip(&mut figures) {
            let stream = cache.read(&readers);
            let layer = cache.attend(&attention, 1)?;
            let seconds = small.attend(&small_attention, CACHED_CALLS)?;
            if round > 0 {
                figures.stream_seconds.push(stream);
                figures.layer_seconds.push(layer);
                figures
                    .cached_seconds
                    .push(seconds * cache.layer_bytes as f64 / small.layer_bytes as f64);
            }
        }
    }
    Ok(figures)
}

/// One KV head, with the same group of query heads.
fn cached_setting(setting: &Setting) -> Result<Setting, AttentionError> {
    let shape = setting.shape;
    let shape = Shape::new(shape.group(), 1, shape.head_dim(), shape.v_head_dim())?;
    let memory_bytes = CACHED_BYTES * setting.threads;
    Ok(Setting { shape, memory_bytes, ..setting.clone() })
}

/// K and V of some layers.
#[derive(Debug)]
struct Cache {
    dtype: Dtype,
    memory: MmapMut,
    layers: usize,
    tokens: usize,
    layer_bytes: usize,
    /// K and V of a whole page.
    page_bytes: [usize; 2],
    shape: Shape,
    is_latent: bool,
}

impl Cache {
    fn new(setting: &Setting, dtype: Dtype) -> io::Result<Self> {
        let shape = setting.shape;
        let v_dim = if setting.is_latent { 0 } else { shape.v_head_dim() };
        let page_bytes = [shape.head_dim(), v_dim]
            .map(|dim| shape.num_kv_heads() * PAGE_TOKENS * row_bytes(dtype, dim));
        let pages = setting.tokens.div_ceil(PAGE_TOKENS);
        let page_stride: usize = page_bytes.iter().sum::<usize>().next_multiple_of(ALIGNMENT);
        let layer_bytes = pages * page_stride;
        let layers = (setting.memory_bytes / layer_bytes).max(1);
        let mut memory = MmapMut::map_anon(layers * layer_bytes)?;
        memory.advise(Advice::HugePage)?;
        fill(dtype, &mut memory);
        let (tokens, is_latent) = (setting.tokens, setting.is_latent);
        Ok(Self { dtype, memory, layers, tokens, layer_bytes, page_bytes, shape, is_latent })
    }

    /// Seconds for as many bytes as a layer has.
    fn read(&self, readers: &Pool) -> f64 {
        let start = Instant::now();
        readers.run(&|thread| {
            let share = |thread: usize| self.memory.len() / readers.size() * thread;
            black_box(sum_words(&self.memory[share(thread)..share(thread + 1)]));
        });
        self.of_one(start)
    }

    /// One layer of as many pages as stay in the second-level caches, one at least.
    fn cached(setting: &Setting, dtype: Dtype) -> io::Result<Self> {
        let page =
            Self::new(&Setting { tokens: PAGE_TOKENS, ..setting.clone() }, dtype)?.layer_bytes;
        let pages = (setting.memory_bytes / page).max(1);
        Self::new(
            &Setting { tokens: pages * PAGE_TOKENS, memory_bytes: 0, ..setting.clone() },
            dtype,
        )
    }

    /// Seconds for a layer, of so many calls for each.
    fn attend(&self, attention: &Attention, calls: usize) -> Result<f64, AttentionError> {
        let q = query(self.shape);
        let positions = [self.tokens as u64 - 1];
        let queries = Queries { q: &q, positions: &positions };
        let layers: Vec<Vec<KvBlock<'_>>> =
            (0..self.layers).map(|layer| self.blocks(layer)).collect();
        let start = Instant::now();
        for _ in 0..calls {
            for blocks in &layers {
                black_box(attention.run(&queries, blocks, &Options::default())?);
            }
        }
        #[allow(clippy::cast_precision_loss, reason = "a few calls")]
        Ok(self.of_one(start) / calls as f64)
    }

    #[allow(clippy::cast_precision_loss, reason = "a few layers")]
    fn of_one(&self, start: Instant) -> f64 {
        start.elapsed().as_secs_f64() / self.layers as f64
    }

    fn blocks(&self, layer: usize) -> Vec<KvBlock<'_>> {
        let tokens = self.tokens;
        let layer = &self.memory[layer * self.layer_bytes..][..self.layer_bytes];
        let page_stride = self.layer_bytes / tokens.div_ceil(PAGE_TOKENS);
        let [k_bytes, v_bytes] = self.page_bytes;
        let strides = |dim| {
            let token = row_bytes(self.dtype, dim);
            Strides { head: PAGE_TOKENS * token, token }
        };
        let pages = layer.chunks_exact(page_stride).enumerate();
        let blocks = pages.map(|(index, page)| {
            let (k, v) = page.split_at(k_bytes);
            let v = Tensor { bytes: &v[..v_bytes], strides: strides(self.shape.v_head_dim()) };
            KvBlock {
                k: Tensor { bytes: k, strides: strides(self.shape.head_dim()) },
                v: if self.is_latent { Values::Latent } else { Values::Rows(v) },
                dtype: self.dtype,
                tokens: PAGE_TOKENS.min(tokens - index * PAGE_TOKENS),
                first_position: (index * PAGE_TOKENS) as u64,
                shift: 0,
            }
        });
        blocks.collect()
    }
}

/// The memory that [`measure`] uses, for whoever compares something else with it.
#[derive(Debug)]
pub struct PrivateMemory {
    cache: Cache,
    readers: Pool,
}

impl PrivateMemory {
    /// Of the first dtype of the setting.
    pub fn new(setting: &Setting) -> io::Result<Self> {
        let dtype = setting.dtypes.first().copied().unwrap_or(Dtype::F16);
        let (cache, readers) = (Cache::new(setting, dtype)?, Pool::new(setting.threads)?);
        Ok(Self { cache, readers })
    }

    /// Seconds to read as many bytes as a layer has.
    pub fn read(&self) -> f64 {
        self.cache.read(&self.readers)
    }

    /// Seconds to attend to a layer.
    pub fn attend(&self, attention: &Attention) -> Result<f64, AttentionError> {
        self.cache.attend(attention, 1)
    }
}

/// `[num_qo_heads, head_dim]` values of an ordinary size.
pub fn query(shape: Shape) -> Vec<f32> {
    noise(1).map(unit).take(shape.num_qo_heads() * shape.head_dim()).collect()
}

fn row_bytes(dtype: Dtype, dim: usize) -> usize {
    dim / dtype.block_elements() as usize * dtype.block_bytes() as usize
}

/// Values of an ordinary size, the same again after some megabytes.
fn fill(dtype: Dtype, memory: &mut [u8]) {
    let pattern = pattern(dtype, 2);
    for chunk in memory.chunks_mut(pattern.len()) {
        chunk.copy_from_slice(&pattern[..chunk.len()]);
    }
}

/// Some megabytes of values of an ordinary size.
pub fn pattern(dtype: Dtype, seed: u64) -> Vec<u8> {
    let mut random = noise(seed);
    let mut bits = || random.next().unwrap_or_default();
    let mut pattern = Vec::new();
    while pattern.len() < 4 << 20 {
        match dtype {
            Dtype::F32 => pattern.extend(unit(bits()).to_le_bytes()),
            Dtype::F16 => pattern.extend(half::f16::from_f32(unit(bits())).to_le_bytes()),
            Dtype::Bf16 => pattern.extend(half::bf16::from_f32(unit(bits())).to_le_bytes()),
            // Exponents below that of 2, so no NaN.
            Dtype::F8E4m3 => pattern.push(bits().to_le_bytes()[7] & 0xbf),
            Dtype::Q8_0 | Dtype::Q4_0 => {
                let unit_scale = if dtype == Dtype::Q8_0 { 127.0 } else { 8.0 };
                pattern.extend(half::f16::from_f32(1.0 / unit_scale).to_le_bytes());
                let bytes = dtype.block_bytes() as usize - 2;
                pattern.extend((0..bytes).map(|_| bits().to_le_bytes()[7]));
            }
        }
    }
    pattern
}

/// Splitmix64.
fn noise(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// From -1 to 1.
#[allow(clippy::cast_precision_loss, reason = "24 bits")]
fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
}

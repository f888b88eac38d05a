//! A program in C gets what Rust gets, to the last bit.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;

use half::f16;
use kvfs::attention::select::TokenSet;
use kvfs::attention::{
    Attention, KvBlock, Mask, Options, Pairing, Partials, Queries, Rotation, Shape, Tensor, Values,
};
use kvfs::page::{Dtype, Rope, Strides};

use crate::common::mount::scratch_directory;
use crate::program::{Link, build, run};

/// Seeded numbers, the same as in `agree.c`.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    #[allow(clippy::cast_precision_loss, clippy::cast_possible_wrap, reason = "24 bits")]
    fn uniform(&mut self) -> f32 {
        ((self.bits() >> 40) as i64 - (1 << 23)) as f32 / (1 << 23) as f32
    }

    fn uniforms(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.uniform()).collect()
    }

    fn half(&mut self, mantissa_bits: u32, exponent: u64) -> u16 {
        let random = self.bits();
        let mantissa = random & (0x8000 | ((1 << mantissa_bits) - 1));
        u16::try_from(mantissa | ((exponent + (random >> 32) % 4) << mantissa_bits)).unwrap()
    }

    fn byte(&mut self) -> u8 {
        self.bits().to_le_bytes()[0]
    }

    fn stored(&mut self, dtype: Dtype, bytes: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < bytes {
            match dtype {
                Dtype::F16 => all.extend(self.half(10, 12).to_le_bytes()),
                Dtype::Bf16 => all.extend(self.half(7, 124).to_le_bytes()),
                Dtype::F32 => all.extend(self.uniform().to_le_bytes()),
                Dtype::F8E4m3 => all.push(self.byte() & 0xbf),
                Dtype::Q8_0 | Dtype::Q4_0 => {
                    all.extend(self.half(10, 6).to_le_bytes());
                    all.extend((2..dtype.block_bytes()).map(|_| self.byte()));
                }
            }
        }
        all
    }
}

/// The arguments of `agree.c`: `name=value`, what is not named is 0.
struct Arguments(HashMap<String, f32>);

impl Arguments {
    fn new(text: &str) -> Self {
        let defaults = "dtype=1 num_qo_heads=6 num_kv_heads=2 head_dim=64 v_head_dim=64 threads=1 \
                        blocks=3 tokens=70 queries=1";
        let pairs = defaults.split_whitespace().chain(text.split_whitespace());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap());
        Self(pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect())
    }

    fn real(&self, name: &str) -> Option<f32> {
        self.0.get(name).copied()
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small numbers")]
    fn number(&self, name: &str) -> usize {
        self.real(name).unwrap_or(0.0) as usize
    }

    fn has(&self, name: &str) -> bool {
        self.number(name) != 0
    }

    fn dtype(&self) -> Dtype {
        Dtype::ALL[self.number("dtype") - 1]
    }
}

type Stored = (Vec<u8>, Strides);

/// What the arguments describe.
struct Case {
    arguments: Arguments,
    shape: Shape,
    q: Vec<f32>,
    positions: Vec<u64>,
    blocks: Vec<(Stored, Option<Stored>)>,
    slopes: Option<Vec<f32>>,
    mask_f16: Option<Vec<f16>>,
    mask_f32: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    selection: Option<TokenSet>,
    rotation: Option<Rotation>,
}

fn tensor(arguments: &Arguments, dim: usize, random: &mut Random) -> Stored {
    let dtype = arguments.dtype();
    let row = usize::try_from(dtype.row_bytes(u32::try_from(dim).unwrap())).unwrap();
    let (heads, tokens) = (arguments.number("num_kv_heads"), arguments.number("tokens"));
    let bytes = random.stored(dtype, row * heads * tokens);
    let strides = if arguments.has("nhd") {
        Strides { head: row, token: row * heads }
    } else {
        Strides { head: row * tokens, token: row }
    };
    (bytes, strides)
}

impl Case {
    /// Draws in the same order as `agree.c`.
    fn new(arguments: Arguments) -> Self {
        let mut random = Random(7);
        let number = |name| arguments.number(name);
        let [heads, dim, v_dim] = ["num_qo_heads", "head_dim", "v_head_dim"].map(number);
        let (num_blocks, in_block, count) = (number("blocks"), number("tokens"), number("queries"));
        let tokens = num_blocks * in_block;
        let end = num_blocks * (in_block + number("shift"));
        let q = random.uniforms(count * heads * dim);
        let mut blocks = Vec::new();
        for _ in 0..num_blocks {
            let k = tensor(&arguments, dim, &mut random);
            let v = (!arguments.has("latent")).then(|| tensor(&arguments, v_dim, &mut random));
            blocks.push((k, v));
        }
        let slopes = arguments.has("alibi").then(|| random.uniforms(heads));
        let mask_f16 = (number("mask_dtype") == 1).then(|| mask_f16(count * tokens, &mut random));
        let mask_f32 = (number("mask_dtype") == 3).then(|| mask_f32(count * tokens, &mut random));
        let sinks = arguments.has("sinks").then(|| random.uniforms(heads));
        let selection = arguments.has("select").then(|| {
            let mut set = TokenSet::none(tokens);
            set.insert(0..3);
            set.insert(tokens / 2..tokens);
            set
        });
        let pairing = [Pairing::Halves, Pairing::Interleaved][number("pairing")];
        let rope =
            Rope { theta: 10_000.0, scaling: None, dims: None, other: serde_json::Map::new() };
        let rotation = arguments.has("shift").then(|| Rotation::new(&rope, dim, pairing).unwrap());
        let shape = Shape::new(heads, number("num_kv_heads"), dim, v_dim).unwrap();
        let positions = (end - count..end).map(|position| position as u64).collect();
        Self {
            arguments,
            shape,
            q,
            positions,
            blocks,
            slopes,
            mask_f16,
            mask_f32,
            sinks,
            selection,
            rotation,
        }
    }

    fn blocks(&self) -> Vec<KvBlock<'_>> {
        fn tensor((bytes, strides): &Stored) -> Tensor<'_> {
            Tensor { bytes, strides: *strides }
        }
        let (tokens, shift) = (self.arguments.number("tokens"), self.arguments.number("shift"));
        let mut blocks = Vec::new();
        for (index, (k, v)) in self.blocks.iter().enumerate() {
            blocks.push(KvBlock {
                k: tensor(k),
                v: v.as_ref().map_or(Values::Latent, |v| Values::Rows(tensor(v))),
                dtype: self.arguments.dtype(),
                tokens,
                first_position: (index * (tokens + shift)) as u64,
                shift: i64::try_from(index * shift).unwrap(),
            });
        }
        blocks
    }

    fn options(&self) -> Options<'_> {
        let mask = self.mask_f16.as_deref().map(Mask::F16);
        Options {
            sm_scale: self.arguments.real("sm_scale"),
            causal: !self.arguments.has("bidirectional"),
            window: self.arguments.real("window").map(|_| self.arguments.number("window") as u64),
            soft_cap: self.arguments.real("soft_cap"),
            alibi_slopes: self.slopes.as_deref(),
            mask: mask.or(self.mask_f32.as_deref().map(Mask::F32)),
            selection: self.selection.as_ref(),
            rotation: self.rotation.as_ref(),
        }
    }

    /// What `agree.c` writes.
    fn expected(&self) -> Vec<f32> {
        let attention = Attention::new(self.shape, self.arguments.number("threads")).unwrap();
        let queries = Queries { q: &self.q, positions: &self.positions };
        let (blocks, options) = (self.blocks(), self.options());
        let mut mass = Vec::new();
        let partials = if self.arguments.has("merge") {
            let mut all = Partials::empty(self.shape, self.positions.len());
            for block in &blocks {
                all.merge(&attention.run(&queries, &[*block], &options).unwrap()).unwrap();
            }
            all
        } else if self.arguments.has("mass") {
            mass = vec![0.0; blocks.iter().map(|block| block.tokens).sum()];
            attention.run_with_mass(&queries, &blocks, &options, &mut mass).unwrap()
        } else {
            attention.run(&queries, &blocks, &options).unwrap()
        };
        let out = partials.clone().finish(self.sinks.as_deref()).unwrap();
        [partials.o(), partials.m(), partials.l(), &out, &mass].concat()
    }
}

fn mask_f16(count: usize, random: &mut Random) -> Vec<f16> {
    let value = |random: &mut Random| {
        let value = f16::from_bits(random.half(10, 12));
        if random.bits().is_multiple_of(3) { f16::NEG_INFINITY } else { value }
    };
    (0..count).map(|_| value(random)).collect()
}

fn mask_f32(count: usize, random: &mut Random) -> Vec<f32> {
    let value = |random: &mut Random| {
        let value = random.uniform();
        if random.bits().is_multiple_of(3) { f32::NEG_INFINITY } else { value }
    };
    (0..count).map(|_| value(random)).collect()
}

#[track_caller]
fn check(programs: &[PathBuf], text: &str) {
    let arguments = Arguments::new(text);
    let pairs: Vec<String> =
        arguments.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let expected: Vec<u32> = Case::new(arguments).expected().iter().map(|f| f.to_bits()).collect();
    assert!(expected.iter().any(|bits| *bits != 0), "{text}: nothing was attended to");
    for program in programs {
        let output = run(Command::new(program).args(&pairs)).stdout;
        let found: Vec<u32> = output.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        assert!(found == expected, "{text}: {found:x?}\n{expected:x?}");
    }
}

/// Every dtype and option, with the shared library and with the archive.
#[test]
fn bit_for_bit() {
    require!(cc);
    let directory = scratch_directory();
    let links = [Link::Shared, Link::Static];
    let programs = links.map(|link| build("tests/c_abi/agree.c", link, directory.path()));
    for dtype in 1..=6 {
        check(&programs, &format!("dtype={dtype}"));
        check(&programs, &format!("dtype={dtype} nhd=1 queries=5 threads=2 v_head_dim=32"));
    }
    for case in [
        "window=33 soft_cap=2.5 sm_scale=0.5 queries=9",
        "bidirectional=1 queries=100 threads=3",
        "alibi=1 mask_dtype=3 queries=3",
        "mask_dtype=1 bidirectional=1 queries=2",
        "sinks=1",
        "select=1 mass=1 threads=2 queries=4",
        "latent=1 num_kv_heads=1 head_dim=96 v_head_dim=80 queries=2",
        "shift=11 queries=2",
        "shift=11 pairing=1 merge=1 sinks=1",
        "merge=1 threads=2 num_qo_heads=10 head_dim=128 v_head_dim=256",
        "num_qo_heads=3 num_kv_heads=3 head_dim=20 v_head_dim=7",
    ] {
        check(&programs, case);
    }
}

#[test]
fn several_threads_use_one_handle() {
    require!(cc);
    let directory = scratch_directory();
    let programs = [build("tests/c_abi/agree.c", Link::Shared, directory.path())];
    check(&programs, "callers=4 threads=2 queries=3");
    check(&programs, "callers=8 threads=1 shift=5");
}

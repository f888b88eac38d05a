//! Blocks in host memory through the ring give what f64 gives, whatever takes long.

use kvfs::attention::select::TokenSet;
use kvfs::attention::{Attention, KvBlock, Options, Pairing, Queries, Rotation, Shape};
use kvfs::cuda::{CudaAttention, Settings};
use kvfs::page::{Dtype, Rope};

use crate::fake::{F16_64, Plan, SLOW_COPIES, SLOW_KERNELS, under};
use crate::fixture::{Memory, Order, Random, assert_close, reference};

const PLANS: &[Plan<'_>] = &[SLOW_COPIES, SLOW_KERNELS, &[]];

/// Slots of two or three blocks of 40 tokens.
const SMALL: Settings = Settings {
    slot_bytes: 48 << 10,
    copy_threads: 2,
    hot_bytes: 0,
    registered_bytes: 0,
    device: 0,
};

fn shape() -> Shape {
    Shape::new(6, 2, 64, 32).unwrap()
}

struct Case<'a> {
    blocks: Vec<KvBlock<'a>>,
    positions: Vec<u64>,
    options: Options<'a>,
    what: &'a str,
}

/// Compares with f64, and with the runtime for the CPU.
#[track_caller]
fn check(cuda: &mut CudaAttention, case: &Case<'_>, random: &mut Random) {
    let shape = cuda.shape();
    let count = case.positions.len() * shape.num_qo_heads() * shape.head_dim();
    let q = random.floats(count, 2.0);
    let queries = Queries { q: &q, positions: &case.positions };
    let partials = cuda.run(&queries, &case.blocks, &case.options).unwrap();
    let on_cpu = Attention::new(shape, 1).unwrap();
    let expected = on_cpu.run(&queries, &case.blocks, &case.options).unwrap();
    for (found, expected) in partials.lse().iter().zip(expected.lse()) {
        let is_close = (found - expected).abs() <= 1e-5 * (1.0 + expected.abs());
        assert!(
            is_close || found.to_bits() == expected.to_bits(),
            "{}: lse {found}, {expected}",
            case.what
        );
    }
    let expected = reference(shape, &queries, &case.blocks, &case.options);
    assert_close(&partials.finish(None).unwrap(), &expected, case.what);
}

fn options() -> Options<'static> {
    Options { sm_scale: Some(0.2), ..Options::default() }
}

/// Blocks one after the other.
fn in_order(memory: &[Memory]) -> Vec<KvBlock<'_>> {
    let starts = memory.iter().scan(0, |end, memory| {
        let start = *end;
        *end += memory.block(0).tokens as u64;
        Some(start)
    });
    memory.iter().zip(starts).map(|(memory, start)| memory.block(start)).collect()
}

fn memories(dtype: Dtype, tokens: &[usize], order: Order, random: &mut Random) -> Vec<Memory> {
    tokens.iter().map(|tokens| Memory::new(shape(), dtype, *tokens, order, random)).collect()
}

#[test]
fn of_every_option() {
    let name = concat!(module_path!(), "::of_every_option");
    under(name, &[F16_64], PLANS, || {
        let mut cuda = CudaAttention::new(shape(), SMALL).unwrap();
        let mut random = Random(7);
        for order in [Order::Hnd, Order::Nhd, Order::Tail, Order::Latent] {
            // Nine slots at least, and a last page that is short.
            let memory = memories(Dtype::F16, &[40; 11], order, &mut random);
            let short = memories(Dtype::F16, &[40, 40, 1, 0, 17], order, &mut random);
            let of = |options, positions: &[u64], what| Case {
                blocks: in_order(&memory),
                positions: positions.to_vec(),
                options,
                what,
            };
            check(&mut cuda, &of(options(), &[439], "a decode step"), &mut random);
            check(&mut cuda, &of(options(), &[101], "an earlier position"), &mut random);
            let window = Options { window: Some(90), ..options() };
            check(&mut cuda, &of(window, &[439], "a window"), &mut random);
            check(&mut cuda, &of(window, &[300, 301, 302], "a chunk in a window"), &mut random);
            let capped = Options { soft_cap: Some(2.0), ..options() };
            check(&mut cuda, &of(capped, &[439], "a soft cap"), &mut random);
            check(&mut cuda, &of(options(), &[200, 201, 5], "a chunk"), &mut random);
            let all = Options { causal: false, ..options() };
            check(&mut cuda, &of(all, &[3, 4], "not causal"), &mut random);
            let blocks = in_order(&short);
            let case = Case { blocks, positions: vec![97], options: options(), what: "short" };
            check(&mut cuda, &case, &mut random);
            let case = Case { blocks: vec![], ..case };
            check(&mut cuda, &case, &mut random);
        }
    });
}

#[test]
fn of_selections_and_shifts() {
    let name = concat!(module_path!(), "::of_selections_and_shifts");
    under(name, &[F16_64], PLANS, || {
        let mut cuda = CudaAttention::new(shape(), SMALL).unwrap();
        let mut random = Random(8);
        let memory = memories(Dtype::F16, &[40; 9], Order::Hnd, &mut random);
        let mut selection = TokenSet::none(360);
        for tokens in [0..4, 77..123, 200..201, 300..360] {
            selection.insert(tokens);
        }
        let options = Options { selection: Some(&selection), ..options() };
        let blocks = in_order(&memory);
        let case = Case { blocks, positions: vec![359], options, what: "a selection" };
        check(&mut cuda, &case, &mut random);
        // More runs than the first table has room for.
        let mut selection = TokenSet::none(360);
        (0..360).step_by(2).for_each(|token| selection.insert(token..token + 1));
        let options = Options { selection: Some(&selection), ..options };
        check(&mut cuda, &Case { options, what: "every other token", ..case }, &mut random);

        let rope =
            Rope { theta: 10_000.0, scaling: None, dims: None, other: serde_json::Map::new() };
        for pairing in [Pairing::Halves, Pairing::Interleaved] {
            let rotation = Rotation::new(&rope, 64, pairing).unwrap();
            let options = Options { rotation: Some(&rotation), selection: None, ..options };
            let mut blocks = in_order(&memory);
            for block in &mut blocks[4..] {
                *block = block.shifted(-30);
            }
            blocks[8] = blocks[8].shifted(11);
            let case = Case { blocks, positions: vec![400], options, what: "shifted" };
            check(&mut cuda, &case, &mut random);
        }
    });
}

#[test]
fn of_blocks_that_are_larger_than_a_slot() {
    let name = concat!(module_path!(), "::of_blocks_that_are_larger_than_a_slot");
    under(name, &[F16_64, ("Q8_0", "q8_0", 64)], PLANS, || {
        let mut random = Random(9);
        let settings = Settings { slot_bytes: 10 << 10, ..SMALL };
        let mut cuda = CudaAttention::new(shape(), settings).unwrap();
        for order in [Order::Hnd, Order::Nhd, Order::Tail] {
            let f16 = memories(Dtype::F16, &[333, 10], order, &mut random);
            // Another dtype beside it.
            let q8_0 = memories(Dtype::Q8_0, &[111], order, &mut random);
            let mut blocks = in_order(&f16);
            blocks.push(q8_0[0].block(343));
            let case = Case { blocks, positions: vec![453], options: options(), what: "large" };
            check(&mut cuda, &case, &mut random);
        }
    });
}

/// Two calls at a time on one device, in threads of their own.
#[test]
fn of_two_threads() {
    let name = concat!(module_path!(), "::of_two_threads");
    under(name, &[F16_64], PLANS, || {
        std::thread::scope(|scope| {
            for seed in [10, 11] {
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let mut cuda = CudaAttention::new(shape(), SMALL).unwrap();
                    let memory = memories(Dtype::F16, &[40; 5], Order::Hnd, &mut random);
                    let blocks = in_order(&memory);
                    let what = "threads";
                    let case = Case { blocks, positions: vec![199], options: options(), what };
                    for _ in 0..5 {
                        check(&mut cuda, &case, &mut random);
                    }
                });
            }
        });
    });
}

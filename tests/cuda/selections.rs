//! Selections on a GPU are those of the CPU: by the attention that tokens got, by what pages can be worth
//! at most, and by position.

use kvfs::attention::select::{HeavyHitters, PageTopK, TokenSet, sinks_and_window};
use kvfs::attention::{
    Attention, KvBlock, Options, PageSummary, Pairing, Queries, Rotation, Shape,
};
use kvfs::cuda::{CudaAttention, CudaError, Settings};
use kvfs::page::{Dtype, Rope};

use crate::fake::{F16_64, Plan, SLOW_COPIES, SLOW_KERNELS, under};
use crate::fixture::{Memory, Order, Random, assert_close, reference};

const PLANS: &[Plan<'_>] = &[SLOW_COPIES, SLOW_KERNELS];

/// Slots of two or three pages of 40 tokens.
const SETTINGS: Settings = Settings {
    slot_bytes: 48 << 10,
    copy_threads: 1,
    hot_bytes: 0,
    registered_bytes: 0,
    device: 0,
};

fn shape() -> Shape {
    Shape::new(6, 2, 64, 32).unwrap()
}

fn memories(tokens: &[usize], order: Order, random: &mut Random) -> Vec<Memory> {
    tokens.iter().map(|count| Memory::new(shape(), Dtype::F16, *count, order, random)).collect()
}

fn in_order(memory: &[Memory]) -> Vec<KvBlock<'_>> {
    let mut start = 0;
    let place = |memory| {
        let block = Memory::block(memory, start);
        start += block.tokens as u64;
        block
    };
    memory.iter().map(place).collect()
}

/// The softmax of each token by its definition, summed over queries and heads: attention over values
/// that are 1 for one token is what that token gets, so a token's mass is what is missing without it.
fn mass_in_f64(queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>) -> Vec<f64> {
    let tokens: usize = blocks.iter().map(|block| block.tokens).sum();
    let on_cpu = Attention::new(shape(), 1).unwrap();
    let lse = |selection: &TokenSet| {
        let options = Options { selection: Some(selection), ..*options };
        on_cpu.run(queries, blocks, &options).unwrap().lse()
    };
    let seen = |token| options.selection.is_none_or(|selection| selection.contains(token));
    let all = on_cpu.run(queries, blocks, options).unwrap().lse();
    let of_token = |token: usize| {
        let mut alone = TokenSet::none(tokens);
        if seen(token) {
            alone.insert(token..token + 1);
        }
        let share = |(one, all): (f32, f32)| f64::from(one - all).exp();
        lse(&alone).into_iter().zip(all.iter().copied()).map(share).sum()
    };
    (0..tokens).map(of_token).collect()
}

#[track_caller]
fn check_mass(
    cuda: &mut CudaAttention, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
    what: &str,
) {
    let tokens = blocks.iter().map(|block| block.tokens).sum();
    // Added to what is there.
    let mut mass = vec![1.0; tokens];
    let partials = cuda.run_with_mass(queries, blocks, options, &mut mass).unwrap();
    let expected = reference(shape(), queries, blocks, options);
    assert_close(&partials.finish(None).unwrap(), &expected, what);
    for (token, expected) in mass_in_f64(queries, blocks, options).into_iter().enumerate() {
        let found = f64::from(mass[token]) - 1.0;
        assert!(
            (found - expected).abs() < 2e-5,
            "{what}: token {token} got {found}, not {expected}"
        );
    }
}

fn options() -> Options<'static> {
    Options { sm_scale: Some(0.2), ..Options::default() }
}

#[test]
fn mass_of_every_token() {
    under(concat!(module_path!(), "::mass_of_every_token"), &[F16_64], PLANS, || {
        let mut cuda = CudaAttention::new(shape(), SETTINGS).unwrap();
        let mut random = Random(31);
        for order in [Order::Hnd, Order::Tail] {
            // Four slots at least; a page that is short, and one without tokens.
            let memory = memories(&[40, 40, 0, 40, 40, 40, 17], order, &mut random);
            let blocks = in_order(&memory);
            let q = random.floats(2 * 6 * 64, 2.0);
            let one = Queries { q: &q[..6 * 64], positions: &[216] };
            let two = Queries { q: &q, positions: &[100, 216] };
            check_mass(&mut cuda, &one, &blocks, &options(), "a decode step");
            check_mass(&mut cuda, &two, &blocks, &options(), "two queries");
            let window = Options { window: Some(90), soft_cap: Some(3.0), ..options() };
            check_mass(&mut cuda, &one, &blocks, &window, "a window");
            let all = Options { causal: false, ..options() };
            check_mass(&mut cuda, &two, &blocks, &all, "not causal");
            let selection = sinks_and_window(217, 5, 60);
            let selected = Options { selection: Some(&selection), ..options() };
            check_mass(&mut cuda, &one, &blocks, &selected, "sinks and a window");
        }
        let q = [0.0; 6 * 64];
        let short =
            cuda.run_with_mass(&Queries { q: &q, positions: &[0] }, &[], &options(), &mut [0.0]);
        assert!(matches!(short, Err(CudaError::Attention(_))));
    });
}

/// Twenty decode steps, each of which sees the tokens that got most until then.
#[test]
fn heavy_hitters_step_by_step() {
    under(concat!(module_path!(), "::heavy_hitters_step_by_step"), &[F16_64], PLANS, || {
        let mut cuda = CudaAttention::new(shape(), SETTINGS).unwrap();
        let on_cpu = Attention::new(shape(), 1).unwrap();
        let mut random = Random(32);
        let memory = memories(&[40; 6], Order::Hnd, &mut random);
        let blocks = in_order(&memory);
        let (mut here, mut there) = (HeavyHitters::default(), HeavyHitters::default());
        for step in 0..20 {
            let q = random.floats(6 * 64, 2.0);
            let queries = Queries { q: &q, positions: &[220 + step] };
            let (seen, expected) = (here.select(240, 40, 30), there.select(240, 40, 30));
            assert_eq!(seen, expected, "step {step}");
            let options = Options { selection: Some(&seen), ..options() };
            let (mut mass, mut expected_mass) = (vec![0.0; 240], vec![0.0; 240]);
            let found = cuda.run_with_mass(&queries, &blocks, &options, &mut mass).unwrap();
            on_cpu.run_with_mass(&queries, &blocks, &options, &mut expected_mass).unwrap();
            let expected = reference(shape(), &queries, &blocks, &options);
            assert_close(&found.finish(None).unwrap(), &expected, "heavy hitters");
            here.observe(&mass);
            there.observe(&expected_mass);
        }
    });
}

/// Pages come one by one, and the last of them grows: what is before it is not read again.
#[test]
fn bounds_of_pages_that_come_later() {
    under(concat!(module_path!(), "::bounds_of_pages_that_come_later"), &[F16_64], PLANS, || {
        let mut cuda = CudaAttention::new(shape(), SETTINGS).unwrap();
        let mut random = Random(34);
        let memory = memories(&[40; 9], Order::Hnd, &mut random);
        let whole = in_order(&memory);
        let mut summaries = cuda.summarise(&whole[..2]).unwrap();
        let q = random.floats(6 * 64, 2.0);
        let policy = PageTopK { pages: 3, sinks: 0, recent: 1 };
        for count in 3..=whole.len() {
            for tokens in [1, 23, 40] {
                let mut blocks = whole[..count].to_vec();
                blocks[count - 1].tokens = tokens;
                // If those before were read, they would have no keys.
                let mut hidden = blocks.clone();
                for block in &mut hidden[..count - 1] {
                    block.tokens = 0;
                }
                let known = summaries.len().min(count - 1);
                cuda.summarise_from(&mut summaries, &hidden, known).unwrap();
                let end = blocks[count - 1].first_position + tokens as u64;
                let queries = Queries { q: &q, positions: &[end - 1] };
                let found =
                    cuda.select_pages(&policy, &queries, &blocks, &summaries, &options()).unwrap();
                let on_host: Vec<PageSummary> =
                    blocks.iter().map(|block| PageSummary::new(shape(), block).unwrap()).collect();
                let expected =
                    policy.select(shape(), &queries, &blocks, &on_host, &options()).unwrap();
                assert_eq!(found, expected, "{count} pages, {tokens} tokens");
            }
        }
    });
}

#[test]
fn pages_by_their_bounds() {
    under(concat!(module_path!(), "::pages_by_their_bounds"), &[F16_64], PLANS, || {
        let mut cuda = CudaAttention::new(shape(), SETTINGS).unwrap();
        let mut random = Random(33);
        let memory = memories(&[40, 40, 40, 40, 40, 40, 40, 9], Order::Hnd, &mut random);
        let mut blocks = in_order(&memory);
        let rope =
            Rope { theta: 10_000.0, scaling: None, dims: None, other: serde_json::Map::new() };
        let rotation = Rotation::new(&rope, 64, Pairing::Halves).unwrap();
        for has_moved in [false, true] {
            if has_moved {
                blocks[4] = blocks[4].shifted(-30);
                blocks[5] = blocks[5].shifted(7);
            }
            let on_host: Vec<PageSummary> =
                blocks.iter().map(|block| PageSummary::new(shape(), block).unwrap()).collect();
            let on_device = cuda.summarise(&blocks).unwrap();
            assert_eq!(on_device.len(), blocks.len());
            for pages in 2..7 {
                let q = random.floats(6 * 64, 2.0);
                let queries = Queries { q: &q, positions: &[288] };
                let options = Options { rotation: Some(&rotation), ..options() };
                let policy = PageTopK { pages, sinks: 1, recent: 1 };
                let found =
                    cuda.select_pages(&policy, &queries, &blocks, &on_device, &options).unwrap();
                let expected =
                    policy.select(shape(), &queries, &blocks, &on_host, &options).unwrap();
                assert_eq!(found, expected, "{pages} pages");
                let options = Options { selection: Some(&found.tokens), ..options };
                let partials = cuda.run(&queries, &blocks, &options).unwrap();
                let expected = reference(shape(), &queries, &blocks, &options);
                assert_close(&partials.finish(None).unwrap(), &expected, "selected pages");
            }
        }
        let queries = Queries { q: &[0.0; 6 * 64], positions: &[0] };
        let policy = PageTopK { pages: 1, sinks: 0, recent: 0 };
        let mut none = cuda.summarise(&[]).unwrap();
        let short = cuda.select_pages(&policy, &queries, &blocks, &none, &options());
        assert!(none.is_empty() && matches!(short, Err(CudaError::Attention(_))));
        let beyond = cuda.summarise_from(&mut none, &blocks, 1);
        assert!(matches!(beyond, Err(CudaError::Attention(_))));
    });
}

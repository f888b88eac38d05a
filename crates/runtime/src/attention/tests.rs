//! Against attention by its definition.

mod fixture;
mod options;
mod reference;
mod selection;

use fixture::{Cache, Place, Random};
use reference::relative_l2;

use super::*;
use crate::page::{Dtype, Layout};

/// What every dtype must reach; quantised ones against their dequantised values.
const RELATIVE_L2_MAX: f64 = 1e-5;

fn supported() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.into_iter().filter(|set| set.is_supported())
}

/// Compares all instruction sets, on one thread and on three, with the reference.
fn check(cache: &Cache, positions: &[u64], options: &Options<'_>, sinks: Option<&[f32]>) {
    let shape = cache.shape;
    let q = Random(7).normals(positions.len() * shape.num_qo_heads() * shape.head_dim());
    check_queries(cache, &Queries { q: &q, positions }, options, sinks);
}

fn check_queries(
    cache: &Cache, queries: &Queries<'_>, options: &Options<'_>, sinks: Option<&[f32]>,
) {
    let shape = cache.shape;
    let expected = reference::attend(cache, queries, options, sinks);
    for set in supported() {
        for threads in [1, 3] {
            let attention = Attention::with_instructions(shape, threads, set).unwrap();
            let partials = attention.run(queries, &cache.blocks(), options).unwrap();
            let error = relative_l2(&partials.finish(sinks).unwrap(), &expected);
            assert!(
                error <= RELATIVE_L2_MAX,
                "{error:.1e} off: {set:?}, {threads} threads, {shape:?}, {}, {options:?}",
                cache.dtype
            );
        }
    }
}

fn shape(heads: (usize, usize), dims: (usize, usize)) -> Shape {
    Shape::new(heads.0, heads.1, dims.0, dims.1).unwrap()
}

#[test]
fn head_dimensions_groups_dtypes_and_layouts() {
    let dims =
        [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24), (12, 20)];
    let groups = [(5, 1), (8, 2), (3, 3), (7, 1), (12, 1), (4, 2)];
    let places = [Place::Page(Layout::Hnd), Place::Page(Layout::Nhd), Place::Tail, Place::Gaps];
    let mut seed = 0;
    for dtype in Dtype::ALL {
        for dims in dims {
            let block = dtype.block_elements() as usize;
            if dims.0 % block != 0 || dims.1 % block != 0 {
                continue;
            }
            for place in places {
                seed += 1;
                let heads = groups[usize::try_from(seed).unwrap() % groups.len()];
                // Whole pages, a short one, and none.
                let cache =
                    Cache::new(shape(heads, dims), dtype, place, &[64, 37, 0, 1], false, seed);
                check(&cache, &[101], &Options::default(), None);
            }
        }
    }
}

#[test]
fn quantised_values_of_any_distribution() {
    for dtype in [Dtype::Q8_0, Dtype::Q4_0] {
        for (v_outlier, q_outlier) in [(false, false), (true, false), (false, true)] {
            let shape = shape((5, 1), (128, 96));
            let mut cache = Cache::new(shape, dtype, Place::Page(Layout::Hnd), &[300], false, 21);
            if v_outlier {
                cache.amplify_values(1, 64.0);
            }
            let mut q = Random(9).normals(5 * 128);
            // Not more: f32 does not hold logits of hundreds to 1e-5.
            if q_outlier {
                q.iter_mut().skip(70).step_by(128).for_each(|value| *value *= 10.0);
            }
            // All weights alike, nearly so, ordinary ones, one that outweighs all others, and far
            // larger ones.
            for (scale, size) in [(0.0, 1.0), (0.01, 1.0), (0.1, 1.0), (1.0, 1.0), (1e-4, 1e4)] {
                let q: Vec<f32> = q.iter().map(|value| value * size).collect();
                let options = Options { sm_scale: Some(scale), ..Options::default() };
                check_queries(&cache, &Queries { q: &q, positions: &[299] }, &options, None);
            }
            // Nothing to weigh tokens by, which is no reason for NaN.
            let none = Queries { q: &[0.0; 5 * 128], positions: &[299] };
            check_queries(&cache, &none, &Options::default(), None);
        }
    }
}

#[test]
fn latent_attention() {
    for dtype in [Dtype::F16, Dtype::Q8_0, Dtype::F8E4m3] {
        for place in [Place::Page(Layout::Hnd), Place::Tail] {
            let cache = Cache::new(shape((16, 1), (576, 512)), dtype, place, &[40, 3], true, 3);
            check(&cache, &[43], &Options::default(), None);
        }
    }
}

#[test]
fn a_causal_chunk_of_queries() {
    for (heads, dtype) in [((5, 1), Dtype::F16), ((4, 4), Dtype::Q4_0), ((6, 2), Dtype::Bf16)] {
        let cache = Cache::new(
            shape(heads, (64, 64)),
            dtype,
            Place::Page(Layout::Hnd),
            &[64, 30],
            false,
            5,
        );
        let chunk: Vec<u64> = (60..94).collect();
        check(&cache, &chunk, &Options::default(), None);
        // In any order, and one that sees nothing of the future.
        check(&cache, &[93, 0, 31, 32, 500], &Options::default(), None);
        check(&cache, &[3, 40], &Options { causal: false, ..Options::default() }, None);
    }
}

#[test]
fn pages_equal_one_block() {
    let shape = shape((10, 2), (128, 128));
    let q = Random(1).normals(10 * 128);
    let queries = Queries { q: &q, positions: &[999] };
    let whole = Cache::new(shape, Dtype::F16, Place::Page(Layout::Hnd), &[1000], false, 9);
    let paged =
        Cache::new(shape, Dtype::F16, Place::Page(Layout::Nhd), &[256, 256, 256, 232], false, 9);
    assert_eq!(whole.k, paged.k);
    let attention = Attention::new(shape, 2).unwrap();
    let run =
        |cache: &Cache| attention.run(&queries, &cache.blocks(), &Options::default()).unwrap();
    let whole: Vec<f64> = run(&whole).finish(None).unwrap().into_iter().map(f64::from).collect();
    assert!(relative_l2(&run(&paged).finish(None).unwrap(), &whole) < 1e-6);

    // Parts that were computed apart merge to the same.
    let blocks = paged.blocks();
    let mut merged = Partials::empty(shape, 1);
    for block in blocks.iter().rev() {
        let part = attention.run(&queries, &[*block], &Options::default()).unwrap();
        merged.merge(&part).unwrap();
    }
    assert!(relative_l2(&merged.finish(None).unwrap(), &whole) < 1e-6);
}

#[test]
fn shares_merge_to_the_whole() {
    let shape = shape((4, 2), (64, 64));
    let cache = Cache::new(shape, Dtype::F16, Place::Page(Layout::Nhd), &[500, 100], false, 3);
    let q = Random(7).normals(2 * shape.num_qo_heads() * shape.head_dim());
    let (queries, options) = (Queries { q: &q, positions: &[599, 300] }, Options::default());
    let blocks = cache.blocks();
    let expected = Attention::new(shape, 3).unwrap().run(&queries, &blocks, &options).unwrap();
    let attention = Attention::new(shape, 1).unwrap();
    let part = |index| attention.run_share(&queries, &blocks, &options, index, 3);
    let mut whole = part(0).unwrap();
    whole.merge(&part(1).unwrap()).unwrap();
    assert_ne!(whole, expected);
    whole.merge(&part(2).unwrap()).unwrap();
    assert_eq!(whole, expected);
    assert!(part(3).is_err());
}

#[test]
fn nothing_to_attend_to() {
    let shape = shape((4, 2), (64, 64));
    let attention = Attention::new(shape, 2).unwrap();
    let q = vec![1.0; 4 * 64];
    let one = Queries { q: &q, positions: &[0] };
    let partials = attention.run(&one, &[], &Options::default()).unwrap();
    assert_eq!(partials, Partials::empty(shape, 1));
    let none = Queries { q: &[], positions: &[] };
    let cache = Cache::new(shape, Dtype::F16, Place::Tail, &[5], false, 1);
    let partials = attention.run(&none, &cache.blocks(), &Options::default()).unwrap();
    assert_eq!(partials.o(), &[0.0; 0]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let shape = shape((4, 2), (64, 64));
    let attention = Attention::new(shape, 1).unwrap();
    let cache = Cache::new(shape, Dtype::F16, Place::Tail, &[5], false, 1);
    let blocks = cache.blocks();
    let check = |q: usize, block: KvBlock<'_>, options: Options<'_>, expected: &str| {
        let q = vec![0.0; q];
        let queries = Queries { q: &q, positions: &[4] };
        let error = attention.run(&queries, &[blocks[0], block], &options).unwrap_err();
        assert_eq!(error.to_string(), format!("attention: {expected}"));
    };
    let (block, plain) = (blocks[0], Options::default());
    check(255, block, plain, "q has 255 values, 1 queries of 4 heads of 64 are 256");
    let long = KvBlock { tokens: 6, ..block };
    check(256, long, plain, "block 1: k has 2304 bytes, 2 heads and 6 tokens need 2816");
    let strides = crate::page::Strides { head: usize::MAX, token: 2 };
    let wild = KvBlock { k: Tensor { strides, ..block.k }, ..block };
    check(256, wild, plain, "block 1: strides of k overflow");
    let moved = KvBlock { shift: 3, ..block };
    check(256, moved, plain, "block 1: shifted by 3, without a rotation");
    let mask = Options { mask: Some(Mask::F32(&[0.0; 9])), ..plain };
    check(256, block, mask, "mask has 9 values for 1 queries and 10 tokens");
    let slopes = Options { alibi_slopes: Some(&[1.0]), ..plain };
    check(256, block, slopes, "1 ALiBi slopes for 4 query heads");
    let cap = Options { soft_cap: Some(0.0), ..plain };
    check(256, block, cap, "soft cap 0: must be finite and above 0");
    let odd = Shape::new(1, 1, 48, 48).unwrap();
    let q8 = KvBlock { dtype: Dtype::Q8_0, ..block };
    let queries = Queries { q: &[0.0; 48], positions: &[4] };
    let error = Attention::new(odd, 1).unwrap().run(&queries, &[q8], &plain).unwrap_err();
    assert_eq!(
        error.to_string(),
        "attention: block 0: rows of k have 48 elements, q8_0 needs a multiple of 32"
    );
}

#[test]
fn damaged_values_propagate_to_who_sees_them() {
    let shape = shape((4, 2), (64, 64));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for in_k in [true, false] {
            let mut cache =
                Cache::new(shape, Dtype::F32, Place::Page(Layout::Hnd), &[50], false, 1);
            let run = &mut cache.runs[0];
            let stored = if in_k { &mut run.k } else { run.v.as_mut().unwrap() };
            // Element 5 of token 40 of KV head 1.
            let at = stored.strides.head + 40 * stored.strides.token + 5 * 4;
            stored.bytes[at..at + 4].copy_from_slice(&bad.to_le_bytes());
            let q = vec![0.5; 2 * 4 * 64];
            let queries = Queries { q: &q, positions: &[39, 40] };
            for set in supported() {
                let attention = Attention::with_instructions(shape, 1, set).unwrap();
                let out = attention.run(&queries, &cache.blocks(), &Options::default());
                let out = out.unwrap().finish(None).unwrap();
                let (before, after) = out.split_at(4 * 64);
                assert!(before.iter().all(|value| value.is_finite()), "{set:?} {bad} {in_k}");
                let (first, second) = after.split_at(2 * 64);
                assert!(first.iter().all(|value| value.is_finite()), "{set:?} {bad} {in_k}");
                if in_k && bad == f32::NEG_INFINITY {
                    // A logit of -infinity is a weight of 0.
                    assert!(second.iter().all(|value| value.is_finite()), "{set:?}");
                } else if in_k {
                    assert!(second.iter().all(|value| value.is_nan()), "{set:?} {bad}");
                } else {
                    let bad = |i: usize| !second[i].is_finite();
                    assert!((0..128).all(|i| bad(i) == (i % 64 == 5)), "{set:?}");
                }
            }
        }
    }
}

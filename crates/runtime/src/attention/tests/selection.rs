//! Attention under a selection, and what it kept.

use super::fixture::{Cache, Place, Random};
use super::{reference, shape};
use crate::attention::select::{HeavyHitters, PageTopK, TokenSet, kept_mass, sinks_and_window};
use crate::attention::{Attention, KvBlock, Mask, Options, PageSummary, Queries, Rotation, Shape};
use crate::page::{Dtype, Layout, Rope};

const PAGES: [usize; 4] = [64, 64, 64, 20];

fn cache(shape: Shape) -> Cache {
    Cache::new(shape, Dtype::F16, Place::Page(Layout::Hnd), &PAGES, false, 11)
}

/// To the last bit the same as with a mask, and the same as the blocks alone.
fn check(selection: &TokenSet, blocks_alone: Option<&[usize]>) {
    let shape = shape((10, 2), (64, 64));
    let cache = cache(shape);
    let q = Random(2).normals(10 * 64);
    let queries = Queries { q: &q, positions: &[211] };
    let mask = |token| if selection.contains(token) { 0.0 } else { f32::NEG_INFINITY };
    let mask: Vec<f32> = (0..212).map(mask).collect();
    for threads in [1, 2] {
        let attention = Attention::new(shape, threads).unwrap();
        let run = |blocks: &[KvBlock<'_>], options: &Options<'_>| {
            attention.run(&queries, blocks, options).unwrap()
        };
        let blocks = cache.blocks();
        let plain = Options::default();
        let selected = run(&blocks, &Options { selection: Some(selection), ..plain });
        assert_eq!(selected, run(&blocks, &Options { mask: Some(Mask::F32(&mask)), ..plain }));
        if let Some(alone) = blocks_alone {
            let alone: Vec<KvBlock<'_>> = alone.iter().map(|index| blocks[*index]).collect();
            assert_eq!(selected, run(&alone, &plain));
        }

        // What it kept, by the reference.
        let kept = kept_mass(&selected, &run(&blocks, &plain)).unwrap();
        for (head, kept) in kept.into_iter().enumerate() {
            let logits = reference::weights(&cache, &queries, &plain, (0, head));
            let sum = |seen: &dyn Fn(usize) -> bool| -> f64 {
                logits.iter().enumerate().filter(|(t, _)| seen(*t)).map(|(_, l)| l.exp()).sum()
            };
            let expected = sum(&|token| selection.contains(token)) / sum(&|_| true);
            assert!((f64::from(kept) - expected).abs() < 1e-5, "{kept} is not {expected}");
        }
    }
}

#[test]
fn sinks_and_a_window() {
    check(&sinks_and_window(212, 4, 50), None);
    check(&sinks_and_window(212, 64, 20), Some(&[0, 3]));
    check(&sinks_and_window(212, 0, 0), Some(&[]));
}

#[test]
fn the_mass_of_each_token() {
    let shape = shape((10, 2), (64, 64));
    let cache = cache(shape);
    let q = Random(2).normals(3 * 10 * 64);
    let queries = Queries { q: &q, positions: &[211, 150, 20] };
    let selection = sinks_and_window(212, 30, 180);
    for selection in [None, Some(&selection)] {
        let options = Options { selection, ..Options::default() };
        let mut expected = vec![0.0; 212];
        for row in 0..30 {
            let logits = reference::weights(&cache, &queries, &options, (row / 10, row % 10));
            let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
            for (mass, logit) in expected.iter_mut().zip(logits) {
                *mass += logit.exp() / sum;
            }
        }
        for threads in [1, 2, 3] {
            let attention = Attention::new(shape, threads).unwrap();
            let mut mass = vec![1.0; 212];
            for _ in 0..2 {
                mass.fill(1.0);
                let blocks = cache.blocks();
                let partials =
                    attention.run_with_mass(&queries, &blocks, &options, &mut mass).unwrap();
                assert_eq!(partials, attention.run(&queries, &blocks, &options).unwrap());
            }
            for (found, expected) in mass.iter().zip(&expected) {
                let found = f64::from(*found) - 1.0;
                // Weights have eleven bits: each is off by 2^-12 of it at most.
                let margin = expected / 4096.0 + 1e-5;
                assert!((found - expected).abs() < margin, "{found} is not {expected}");
            }
        }
    }
}

#[test]
fn heavy_hitters() {
    let shape = shape((10, 2), (64, 64));
    let cache = cache(shape);
    let q = Random(2).normals(10 * 64);
    let queries = Queries { q: &q, positions: &[211] };
    let mut mass = vec![0.0; 212];
    let attention = Attention::new(shape, 1).unwrap();
    attention.run_with_mass(&queries, &cache.blocks(), &Options::default(), &mut mass).unwrap();
    let mut hitters = HeavyHitters::default();
    hitters.observe(&mass);
    let set = hitters.select(212, 42, 10);
    assert_eq!(set.count(), 52);
    // A quarter of the tokens, chosen by mass, have half as much again as their share.
    assert!(set.kept(&mass) > 0.36, "{}", set.kept(&mass));
    check(&set, None);
}

#[test]
fn page_bounds_hold() {
    let shape = shape((10, 2), (64, 64));
    let cache = cache(shape);
    let blocks = cache.blocks();
    let summaries: Vec<PageSummary> =
        blocks.iter().map(|block| PageSummary::new(shape, block).unwrap()).collect();
    let q = Random(2).normals(10 * 64);
    let queries = Queries { q: &q, positions: &[211] };
    let plain = Options::default();
    for head in 0..10 {
        let logits = reference::weights(&cache, &queries, &plain, (0, head));
        let mut start = 0;
        for (summary, tokens) in summaries.iter().zip(PAGES) {
            let bound = summary.upper_bound(head / 5, &q[head * 64..][..64]) / 8.0;
            let most = logits[start..start + tokens].iter().copied().fold(f64::MIN, f64::max);
            assert!(f64::from(bound) >= most, "{bound} bounds {most}");
            start += tokens;
        }
    }
}

#[test]
fn the_best_pages_are_kept() {
    let shape = shape((10, 2), (64, 64));
    let plain = Options::default();
    // Page 1 has the longest keys, and the query points where one of them does.
    let mut cache = Cache::new(shape, Dtype::F32, Place::Page(Layout::Hnd), &PAGES, false, 11);
    for index in [0, 2] {
        for bytes in cache.runs[index].k.bytes.as_chunks_mut().0 {
            *bytes = (f32::from_le_bytes(*bytes) / 4.0).to_le_bytes();
        }
    }
    let blocks = cache.blocks();
    let summaries: Vec<PageSummary> =
        blocks.iter().map(|block| PageSummary::new(shape, block).unwrap()).collect();
    let policy = PageTopK { pages: 2, sinks: 0, recent: 1 };
    let key = &cache.k[(64 + 9) * 2 * 64..][..128];
    let q: Vec<f32> = (0..10).flat_map(|head| key[head / 5 * 64..][..64].to_vec()).collect();
    let queries = Queries { q: &q, positions: &[211] };
    let selected = policy.select(shape, &queries, &blocks, &summaries, &plain).unwrap();
    assert_eq!(selected.blocks, [1, 3]);
    check(&selected.tokens, Some(&[1, 3]));
    let refused = policy.select(shape, &queries, &blocks, &summaries[1..], &plain);
    assert!(refused.is_err());

    // Where the page stands elsewhere, the query must be turned to find it.
    let moved: Vec<KvBlock<'_>> = blocks.iter().map(|block| block.shifted(100)).collect();
    assert!(policy.select(shape, &queries, &moved, &summaries, &plain).is_err());
    let rope = Rope { theta: 100.0, scaling: None, dims: None, other: serde_json::Map::new() };
    let rotation = Rotation::new(&rope, 64, crate::attention::Pairing::Halves).unwrap();
    let mut turned = q.clone();
    turned.chunks_exact_mut(64).for_each(|row| rotation.rotate(row, 100));
    let queries = Queries { q: &turned, positions: &[311] };
    let options = Options { rotation: Some(&rotation), ..plain };
    let selected = policy.select(shape, &queries, &moved, &summaries, &options).unwrap();
    assert_eq!(selected.blocks, [1, 3]);
}

/// Worth of each page by the definition (Quest, equation 2, summed over heads by `exp`), in f64.
fn worth_of_pages(cache: &Cache, q: &[f32], pages: &[usize]) -> Vec<f64> {
    let (shape, dim) = (cache.shape, cache.shape.head_dim());
    let rows: Vec<&[f32]> = cache.k.chunks_exact(dim).collect();
    let mut worth = vec![0.0; pages.len()];
    for (head, q) in q.chunks_exact(dim).enumerate() {
        let mut first = 0;
        let bounds = pages.iter().map(|tokens| {
            let page = first..first + tokens;
            first = page.end;
            let of_dim = |d: usize| {
                let product = |token: usize| {
                    f64::from(rows[token * shape.num_kv_heads() + head / shape.group()][d])
                        * f64::from(q[d])
                };
                page.clone().map(product).fold(f64::NEG_INFINITY, f64::max)
            };
            (0..dim).map(of_dim).sum::<f64>() / f64::from(u32::try_from(dim).unwrap()).sqrt()
        });
        let bounds: Vec<f64> = bounds.collect();
        let best = bounds.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        for (worth, bound) in worth.iter_mut().zip(bounds) {
            *worth += (bound - best).exp();
        }
    }
    worth
}

#[test]
fn pages_are_ranked_by_their_bounds() {
    let shape = shape((10, 2), (64, 64));
    let pages = [16, 3, 16, 16, 1, 16, 16, 9, 16, 2];
    for seed in 0..20 {
        let cache =
            Cache::new(shape, Dtype::F16, Place::Page(Layout::Nhd), &pages, false, 100 + seed);
        let blocks = cache.blocks();
        let summaries: Vec<PageSummary> =
            blocks.iter().map(|block| PageSummary::new(shape, block).unwrap()).collect();
        let q = Random(200 + seed).normals(10 * 64);
        let queries = Queries { q: &q, positions: &[110] };
        let worth = worth_of_pages(&cache, &q, &pages);
        for (count, sinks, recent) in [(1, 0, 0), (3, 0, 0), (5, 1, 0), (6, 1, 2), (9, 0, 1)] {
            let mut expected: Vec<usize> = (0..pages.len()).collect();
            let always = |page: usize| page < sinks || page >= pages.len() - recent;
            expected
                .sort_by(|a, b| always(*b).cmp(&always(*a)).then(worth[*b].total_cmp(&worth[*a])));
            expected.truncate(count);
            expected.sort_unstable();
            let policy = PageTopK { pages: count, sinks, recent };
            let selected =
                policy.select(shape, &queries, &blocks, &summaries, &Options::default()).unwrap();
            assert_eq!(selected.blocks, expected, "seed {seed}, {policy:?}");
        }
    }
}

#[test]
fn what_may_be_nan_bounds_nothing() {
    fn check(keys: [f32; 2], q: [f32; 2], expected: f32) {
        let shape = shape((1, 1), (64, 64));
        let mut cache = Cache::new(shape, Dtype::F32, Place::Tail, &[1], false, 1);
        let (elements, _) = cache.runs[0].k.bytes.as_chunks_mut::<4>();
        elements.fill([0; 4]);
        for (element, key) in elements.iter_mut().zip(keys) {
            *element = key.to_le_bytes();
        }
        let summary = PageSummary::new(shape, &cache.blocks()[0]).unwrap();
        let mut query = [0.0; 64];
        query[..2].copy_from_slice(&q);
        let bound = summary.upper_bound(0, &query);
        assert!(bound.to_bits() == expected.to_bits(), "{keys:?} . {q:?}: {bound}");
    }
    let infinity = f32::INFINITY;
    check([2.0, 3.0], [1.0, 2.0], 8.0);
    check([f32::NAN, 3.0], [1.0, 1.0], infinity);
    check([f32::NAN, 3.0], [0.0, 0.0], infinity);
    check([infinity, 3.0], [0.0, 1.0], infinity);
    check([infinity, 3.0], [1.0, 1.0], infinity);
    check([infinity, infinity], [1.0, -1.0], infinity);
    check([infinity, 3.0], [-1.0, 1.0], -infinity);
    check([2.0, 3.0], [f32::NAN, 1.0], infinity);
}

#[test]
fn a_page_with_nan_is_not_hidden() {
    for q in [[1.0; 64], [0.0; 64]] {
        let shape = shape((1, 1), (64, 64));
        let mut cache = Cache::new(shape, Dtype::F32, Place::Tail, &[3, 3], false, 1);
        cache.runs[1].k.bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
        let blocks = cache.blocks();
        let summaries: Vec<PageSummary> =
            blocks.iter().map(|block| PageSummary::new(shape, block).unwrap()).collect();
        let queries = Queries { q: &q, positions: &[5] };
        let policy = PageTopK { pages: 1, sinks: 0, recent: 0 };
        let selected = policy.select(shape, &queries, &blocks, &summaries, &Options::default());
        assert_eq!(selected.unwrap().blocks, [1]);
    }
}

//! Windows, masks and selections over streams: the same result as in memory, and pages that nobody
//! sees are not read, which shows by their not being there any more.

use half::f16;

use super::{Fixture, attention, query, remove};
use crate::attention::select::{PageTopK, TokenSet, sinks_and_window};
use crate::attention::{Mask, Options, PageSummary, Partials, Queries};
use crate::page::Layer;
use crate::reader::{Run, Sequence};

const PAGES: u64 = 9;
/// Pages of 16 tokens, and 5 rows behind them.
const TOKENS: usize = 9 * 16 + 5;
const LAYERS: u32 = 3;

/// A layer of a sequence, in memory as a whole.
fn in_memory(sequence: &Sequence, layer: Layer) -> Vec<Run> {
    let mut stream = sequence.stream_layers(&[layer], 0..TOKENS as u64).unwrap();
    let mut runs = Vec::new();
    while let Some(run) = stream.next_run().unwrap() {
        runs.push(run);
    }
    runs
}

/// Attention of a layer with all blocks at once.
fn expected(
    sequence: &Sequence, layer: Layer, queries: &Queries<'_>, options: &Options<'_>,
) -> Partials {
    let runs = in_memory(sequence, layer);
    let blocks: Vec<_> = runs.iter().flat_map(Run::blocks).collect();
    attention().run(queries, &blocks, options).unwrap()
}

#[track_caller]
fn compare(found: &Partials, expected: &Partials) {
    let pairs = found.lse().into_iter().zip(expected.lse());
    for (found, expected) in pairs {
        let is_same = found.to_bits() == expected.to_bits() || (found - expected).abs() < 1e-5;
        assert!(is_same, "{found} is not {expected}");
    }
    let (found, expected) = [found, expected].map(|part| part.clone().finish(None).unwrap()).into();
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
    }
}

/// Pages that have to be read; the tail is the one behind them.
fn check(positions: &[u64], options: &Options<'_>, expected_pages: &[u64]) {
    let fixture = Fixture::new(LAYERS, PAGES, 5);
    let q: Vec<f32> = query().into_iter().cycle().take(64 * positions.len()).collect();
    let queries = Queries { q: &q, positions };
    let whole = fixture.open_with(100, 100, 0).unwrap();
    let expected: Vec<Partials> = whole
        .layers()
        .into_iter()
        .map(|layer| expected(&whole, layer, &queries, options))
        .collect();
    let sequence = fixture.open_with(0, 0, 6).unwrap();
    for layer in (0..LAYERS).map(Layer) {
        for index in (0..PAGES).filter(|index| !expected_pages.contains(index)) {
            remove(&fixture.page_path(layer, index * 16));
        }
        if !expected_pages.contains(&PAGES) {
            remove(&fixture.tail_path(layer, PAGES * 16));
        }
    }
    let mut stream = sequence.stream(0..TOKENS as u64).unwrap();
    for expected in &expected {
        compare(&stream.attend(&attention(), &queries, options).unwrap(), expected);
    }
    assert!(stream.layer().is_none());
    let pages = expected_pages.iter().filter(|page| **page < PAGES).count() as u64;
    let bytes = u64::from(LAYERS) * pages * Fixture::PAGE_BYTES;
    assert_eq!(sequence.counts().streamed_bytes, bytes);
}

const ALL: [u64; 10] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

#[test]
fn a_window_reads_the_pages_that_it_covers() {
    check(&[148], &Options::default(), &ALL);
    check(&[40], &Options::default(), &ALL[..3]);
    for (window, first) in [(1, 9), (5, 9), (6, 8), (30, 7), (149, 0), (9999, 0)] {
        check(&[148], &Options { window: Some(window), ..Options::default() }, &ALL[first..]);
    }
    // A chunk sees what one of its queries sees.
    let window = Options { window: Some(20), ..Options::default() };
    check(&[70, 71, 80, 81], &window, &[3, 4, 5]);
    check(&[148, 20], &window, &[0, 1, 8, 9]);
    check(&[], &Options::default(), &[]);
}

#[test]
fn a_selection_reads_the_pages_that_it_names() {
    let with = |selection: &TokenSet, pages: &[u64]| {
        check(&[148], &Options { selection: Some(selection), ..Options::default() }, pages);
    };
    with(&sinks_and_window(TOKENS, 4, 20), &[0, 8, 9]);
    with(&sinks_and_window(TOKENS, 17, 3), &[0, 1, 9]);
    with(&TokenSet::none(TOKENS), &[]);
    let mut single = TokenSet::none(TOKENS);
    single.insert(80..81);
    with(&single, &[5]);
    check(&[79], &Options { selection: Some(&single), ..Options::default() }, &[]);
}

#[test]
fn a_mask_reads_the_pages_that_it_leaves() {
    let seen = |query: usize, token: usize| match query {
        0 => token.is_multiple_of(7) && token < 60,
        _ => (100..103).contains(&token),
    };
    let row = |query| {
        (0..TOKENS).map(move |token| {
            let bias = [0.0, -1.5, 0.25][token % 3];
            if seen(query, token) { bias } else { f32::NEG_INFINITY }
        })
    };
    let mask: Vec<f32> = (0..2).flat_map(row).collect();
    check(
        &[148, 148],
        &Options { mask: Some(Mask::F32(&mask)), ..Options::default() },
        &[0, 1, 2, 3, 6],
    );
    let halves: Vec<f16> = mask.iter().map(|value| f16::from_f32(*value)).collect();
    let options = Options { mask: Some(Mask::F16(&halves)), ..Options::default() };
    check(&[148, 148], &options, &[0, 1, 2, 3, 6]);
    // What the mask leaves and the window does not.
    check(&[50, 101], &Options { window: Some(20), ..options }, &[2, 3, 6]);
}

#[test]
fn ranked_pages_are_the_only_ones_to_be_read() {
    let fixture = Fixture::new(1, PAGES, 5);
    let sequence = fixture.open_with(100, 100, 0).unwrap();
    let shape = attention().shape();
    let runs = in_memory(&sequence, Layer(0));
    let blocks = runs.iter().flat_map(Run::blocks);
    let summaries: Vec<_> = blocks.map(|block| PageSummary::new(shape, &block).unwrap()).collect();
    let q = query();
    let queries = Queries { q: &q, positions: &[148] };
    let outline = sequence.stream(0..TOKENS as u64).unwrap().outline();
    let ranking = PageTopK { pages: 4, sinks: 1, recent: 1 };
    let selected =
        ranking.select(shape, &queries, &outline, &summaries, &Options::default()).unwrap();
    let pages: Vec<u64> = selected.blocks.iter().map(|index| *index as u64).collect();
    assert_eq!((pages.len(), pages[0], pages[3]), (4, 0, 9));
    check(&[148], &Options { selection: Some(&selected.tokens), ..Options::default() }, &pages);
}

#[test]
fn every_layer_has_its_own_rule() {
    let fixture = Fixture::new(LAYERS, PAGES, 5);
    let sequence = fixture.open_with(0, 0, 9).unwrap();
    let q = query();
    let queries = Queries { q: &q, positions: &[148] };
    let sinks = sinks_and_window(TOKENS, 40, 3);
    let rules = [
        Options::default(),
        Options { window: Some(33), ..Options::default() },
        Options { selection: Some(&sinks), ..Options::default() },
    ];
    for order in [[0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 1, 0], [2, 2, 2]] {
        let mut stream = sequence.stream(0..TOKENS as u64).unwrap();
        for (layer, rule) in (0..LAYERS).map(Layer).zip(order) {
            let found = stream.attend(&attention(), &queries, &rules[rule]).unwrap();
            compare(&found, &expected(&sequence, layer, &queries, &rules[rule]));
        }
    }
    // Some runs by hand, and the rest of the layer under a rule.
    let mut stream = sequence.stream(0..TOKENS as u64).unwrap();
    let first = stream.next_run().unwrap().unwrap();
    let mut all = attention().run(&queries, &first.blocks(), &Options::default()).unwrap();
    let window = Options { window: Some(TOKENS as u64 - first.tokens()), ..Options::default() };
    all.merge(&stream.attend(&attention(), &queries, &window).unwrap()).unwrap();
    compare(&all, &expected(&sequence, Layer(0), &queries, &Options::default()));
    assert_eq!(stream.next_run().unwrap().unwrap().blocks()[0].first_position, 0);
}

//! What scans hand out, and what they refuse.

use std::fs;
use std::io::Write;
use std::path::Path;

use super::{Fixture, attention, query, reference, remove};
use crate::attention::select::TokenSet;
use crate::attention::{Attention, AttentionError, Mask, Options, Queries, Shape};
use crate::page::{Layer, TokenStart, names};
use crate::reader::{Backend, Counts, Rates, ReadError, Sequence};

/// Attends to every layer and compares with f64.
fn check(sequence: &Sequence, tokens: u64) {
    let (attention, q) = (attention(), query());
    let queries = Queries { q: &q, positions: &[tokens.saturating_sub(1)] };
    let mut stream = sequence.stream(0..tokens).unwrap();
    while let Some(layer) = stream.layer() {
        let partials = stream.attend(&attention, &queries, &Options::default()).unwrap();
        let found = partials.finish(None).unwrap();
        let expected = reference(layer, tokens, &q);
        for (found, expected) in found.iter().zip(&expected) {
            let error = (f64::from(*found) - expected).abs();
            assert!(error < 1e-6, "layer {layer}, {tokens} tokens: {found} is not {expected}");
        }
    }
    assert!(stream.attend(&attention, &queries, &Options::default()).is_err());
}

fn missing(sequence: &Sequence, tokens: u64) -> (u32, u64) {
    let mut stream = match sequence.stream(0..tokens) {
        Ok(stream) => stream,
        Err(ReadError::Missing { layer, start }) => return (layer.0, start.0),
        Err(error) => panic!("{error}"),
    };
    loop {
        match stream.next_run() {
            Err(ReadError::Missing { layer, start }) => {
                // It does not go on as if nothing had happened.
                assert!(matches!(stream.next_run(), Err(ReadError::Arguments(_))));
                return (layer.0, start.0);
            }
            outcome => assert!(outcome.unwrap().is_some() || stream.layer().is_some()),
        }
    }
}

#[test]
fn every_split_of_resident_and_streamed_pages_attends_to_the_same() {
    let fixture = Fixture::new(3, 9, 5);
    for (pages, kept, streamed) in [(100, 100, 0), (0, 0, 0), (0, 0, 100), (10, 5, 12), (2, 100, 9)]
    {
        let sequence = fixture.open_with(pages, kept, streamed).unwrap();
        assert_eq!(sequence.valid_tokens().unwrap(), 149);
        for tokens in [149, 149, 145, 144, 143, 16, 1, 0] {
            check(&sequence, tokens);
        }
    }
}

#[test]
fn a_range_begins_with_its_first_page() {
    let fixture = Fixture::new(1, 4, 3);
    let sequence = fixture.open().unwrap();
    let mut stream = sequence.stream(20..66).unwrap();
    let mut tokens = Vec::new();
    while let Some(run) = stream.next_run().unwrap() {
        let blocks = run.blocks();
        tokens.extend(blocks.iter().map(|block| (block.first_position, block.tokens)));
        assert_eq!(run.tokens(), blocks.iter().map(|block| block.tokens as u64).sum::<u64>());
    }
    assert_eq!(tokens, [(16, 16), (32, 16), (48, 16), (64, 2)]);
    assert!(stream.layer().is_none() && stream.next_run().unwrap().is_none());
}

#[test]
fn without_tokens_there_is_nothing_to_attend_to() {
    let fixture = Fixture::new(2, 0, 0);
    let sequence = fixture.open().unwrap();
    assert_eq!((sequence.valid_tokens().unwrap(), sequence.token_ids().unwrap()), (0, vec![]));
    check(&sequence, 0);
    // A layer that was never written has no directory.
    fs::remove_dir(fixture.layer(Layer(1))).unwrap();
    check(&fixture.open().unwrap(), 0);
    assert_eq!(sequence.counts(), Counts::default());
    assert_eq!(missing(&sequence, 1), (0, 0));
}

#[test]
fn ids_say_how_many_tokens_are_valid() {
    let fixture = Fixture::new(2, 2, 3);
    let path = fixture.sequence().join(names::TOKENS);
    fs::write(&path, [1, 0, 0, 0, 2, 1, 0, 0, 3]).unwrap();
    let sequence = fixture.open().unwrap();
    assert_eq!(sequence.token_ids().unwrap(), [1, 258]);
    assert_eq!(sequence.valid_tokens().unwrap(), 2);
    fs::write(&path, [0; 400]).unwrap();
    assert_eq!(sequence.valid_tokens().unwrap(), 35);
}

#[test]
fn rows_that_are_appended_are_seen_by_the_next_scan() {
    let fixture = Fixture::new(1, 1, 2);
    let sequence = fixture.open().unwrap();
    check(&sequence, 18);
    let path = fixture.layer(Layer(0)).join(names::format_tail(TokenStart(16)));
    let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(&fixture.rows(Layer(0), 18, 4)).unwrap();
    check(&sequence, 22);
    check(&sequence, 17);
    assert_eq!(missing(&sequence, 23), (0, 22));
    assert_eq!(missing(&sequence, 33), (0, 32));
}

#[test]
fn a_page_that_is_missing_is_named() {
    let fixture = Fixture::new(3, 4, 0);
    remove(&fixture.page_path(Layer(1), 32));
    let sequence = fixture.open().unwrap();
    assert_eq!(missing(&sequence, 64), (1, 32));
    check(&sequence, 32);
    // After it was listed; what is in memory stays.
    let other = fixture.open_with(0, 0, 0).unwrap();
    remove(&fixture.page_path(Layer(2), 16));
    assert_eq!(missing(&other, 32), (2, 16));
    check(&sequence, 32);
    // A short page in the middle, and at the end.
    fixture.write_page(Layer(1), 32, 5);
    fixture.write_page(Layer(2), 16, 16);
    fixture.write_page(Layer(2), 48, 5);
    let sequence = fixture.open().unwrap();
    assert_eq!(missing(&sequence, 64), (1, 37));
    assert_eq!(sequence.layer_tokens(Layer(2)).unwrap(), 53);
    check(&sequence, 37);
    let error = sequence.layer_tokens(Layer(3)).unwrap_err();
    assert_eq!(error.to_string(), "sequence: layer 3 does not exist or keeps no pages");
}

#[test]
fn what_is_no_page_is_refused() {
    let fixture = Fixture::new(1, 3, 0);
    let path = fixture.page_path(Layer(0), 16);
    let whole = fs::read(&path).unwrap();
    let mut elsewhere = fs::read(fixture.page_path(Layer(0), 32)).unwrap();
    elsewhere.truncate(whole.len() - 4096);
    let long = [&whole[..], &[0; 4096]].concat();
    for bytes in [&elsewhere[..], &long, &whole[..4095], &[]] {
        fs::write(&path, bytes).unwrap();
        let sequence = fixture.open().unwrap();
        let mut stream = sequence.stream(0..48).unwrap();
        let refused = loop {
            match stream.next_run() {
                Ok(Some(_)) => {}
                outcome => break outcome,
            }
        };
        assert!(matches!(refused, Err(ReadError::Refused { .. })), "{refused:?}");
    }
}

#[test]
fn what_is_no_sequence_is_refused() {
    let fixture = Fixture::new(1, 1, 0);
    let refused = |path: &Path| match Sequence::open(path) {
        Err(ReadError::Manifest { why, .. }) => why,
        outcome => panic!("{outcome:?}"),
    };
    let model = fixture.model();
    assert_eq!(refused(&model.join("x")), "missing: this is no model");
    assert_eq!(
        refused(Path::new("/")),
        "not in a model: name MOUNT/models/NAME/sequences/SEQUENCE"
    );
    fs::write(model.join(names::MANIFEST), "{").unwrap();
    assert!(refused(&fixture.sequence()).starts_with("manifest cannot be read"));
}

#[test]
fn shapes_and_options_that_do_not_fit_are_refused() {
    let fixture = Fixture::new(1, 2, 0);
    let sequence = fixture.open().unwrap();
    let (wide, q) = (Attention::new(Shape::new(4, 2, 32, 32).unwrap(), 1).unwrap(), [0.0; 128]);
    let queries = Queries { q: &q, positions: &[31] };
    let mut stream = sequence.stream(0..32).unwrap();
    let error = stream.attend(&wide, &queries, &Options::default()).unwrap_err();
    assert!(matches!(error, ReadError::Attention(_)), "{error}");
    let q = query();
    let queries = Queries { q: &q, positions: &[31] };
    let refused = |options: &Options<'_>| {
        let mut stream = sequence.stream(0..32).unwrap();
        match stream.attend(&attention(), &queries, options) {
            Err(ReadError::Attention(AttentionError::Arguments(why))) => why,
            outcome => panic!("{outcome:?}"),
        }
    };
    let plain = Options::default();
    let mask = Options { mask: Some(Mask::F32(&[0.0; 31])), ..plain };
    assert_eq!(refused(&mask), "mask has 31 values for 1 queries and 32 tokens");
    let selection = Options { selection: Some(&TokenSet::all(33)), ..plain };
    assert_eq!(refused(&selection), "selection is of 33 tokens, the blocks have 32");
    let outline = sequence.stream(0..32).unwrap().outline();
    assert!(attention().run(&queries, &outline, &plain).is_err(), "there are no bytes");
}

#[test]
fn a_dtype_that_nobody_knows_is_refused() {
    let fixture = Fixture::new(1, 1, 0);
    let path = fixture.model().join(names::MANIFEST);
    let manifest = fs::read_to_string(&path).unwrap().replace("f32", "f64");
    fs::write(&path, manifest).unwrap();
    let error = Sequence::open(&fixture.sequence()).unwrap_err();
    assert!(matches!(&error, ReadError::Manifest { why, .. } if why.contains("f64")), "{error}");
}

#[test]
fn counts_and_plans_agree() {
    let fixture = Fixture::new(2, 8, 3);
    let sequence = fixture.open_with(100, 5, 9).unwrap();
    let instructions = crate::attention::InstructionSet::Scalar;
    let backend = Backend::Cpu { instructions, threads: 2, why: Some("no driver".to_owned()) };
    let rates = Rates { memory: 1e12, ssd: 1e6, remote: 1e6, pcie: 1e5 };
    let plan = sequence.plan(0..131, backend.clone(), &rates).unwrap();
    let bytes = |pages: u64| pages * Fixture::PAGE_BYTES;
    assert_eq!((plan.layers, plan.pages, plan.tokens), (2, 16, 131));
    assert_eq!((plan.mapped_bytes, plan.kept_bytes, plan.streamed_bytes), (0, bytes(5), bytes(11)));
    assert_eq!((plan.tiers.ram, plan.tiers.ssd, plan.tail_bytes), (0, bytes(16), 2 * 3 * 256));
    assert_eq!(plan.first.as_millis(), u128::from(bytes(16) / 1000));
    assert_eq!(plan.each.as_millis(), u128::from(bytes(11) / 1000));
    assert_eq!(plan.to_string().lines().count(), 5);
    assert!(plan.to_string().contains("cpu (scalar, 2 threads), no GPU: no driver"), "{plan}");
    let cuda = Backend::Cuda { device: "GPU".to_owned(), hot_bytes: bytes(4) };
    let on_gpu = sequence.plan(0..131, cuda, &rates).unwrap();
    // The link is the slowest; what stays crosses it once.
    let rows = plan.tail_bytes;
    assert_eq!(on_gpu.first.as_millis(), u128::from((bytes(16) + rows) / 100));
    assert_eq!(on_gpu.each.as_millis(), u128::from((bytes(12) + rows) / 100));
    assert!(on_gpu.to_string().contains("cuda (GPU), up to"), "{on_gpu}");
    check(&sequence, 131);
    let first = sequence.counts();
    assert_eq!((first.resident_bytes, first.streamed_bytes), (0, bytes(16)));
    check(&sequence, 131);
    let second = sequence.counts().since(&first);
    assert_eq!((second.resident_bytes, second.streamed_bytes), (bytes(5), bytes(11)));
    assert_eq!(second.prefetched_bytes + second.stalled_bytes, bytes(11));
    assert_eq!(sequence.plan(0..131, backend, &rates).unwrap().kept_bytes, bytes(5));
}

#[test]
fn streams_may_be_left_in_the_middle() {
    let fixture = Fixture::new(2, 9, 0);
    let sequence = fixture.open_with(0, 0, 9).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let mut stream = sequence.stream(0..144).unwrap();
                    assert!(stream.next_run().unwrap().is_some());
                }
                check(&sequence, 144);
            });
        }
    });
}

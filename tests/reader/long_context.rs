//! A context of 200,000 tokens, several times larger than the memory that may be used for it, in
//! all three tiers.

use std::time::Duration;

use kvfs::attention::select::{HeavyHitters, PageTopK, TokenSet, sinks_and_window};
use kvfs::attention::{InstructionSet, Mask, Options, PageSummary, Partials, Queries};
use kvfs::page::Layer;
use kvfs::reader::{Backend, Limits, Rates, Sequence, TierBytes};

use crate::common::mount::scratch_directory;
use crate::common::sys::getxattr;
use crate::common::{Mode, within};
use crate::prepared::{Prepared, compare};

in_both_modes!(two_hundred_thousand_tokens_attend_within_a_memory_budget);

const MIB: u64 = 1 << 20;

/// What may come to lie in memory beyond what was there: the mount's RAM tier where it is mapped,
/// what the reader keeps, what it streams, and 8 MiB for everything else.
const RESIDENT_BYTES_MAX: u64 = (32 + 16 + 8 + 8) * MIB;

/// Of the mount's disk: less than half of the pages.
const SSD_BYTES: u64 = 96 * MIB;

/// The tiny model's heads and half of its layers: 205 MB.
const DIMENSIONS: [u32; 4] = [2, 2, 64, 1024];

/// Pages of each layer, and rows behind them.
const PAGES: u64 = 195;
const TAIL: u64 = 320;
const TOKENS: u64 = PAGES * 1024 + TAIL;
const _: () = assert!(TOKENS == 200_000);

fn two_hundred_thousand_tokens_attend_within_a_memory_budget(mode: Mode) {
    let remote = scratch_directory();
    let ssd = SSD_BYTES.to_string();
    let remote = ["--remote", remote.path().to_str().unwrap(), "--commit-interval", "0.2"];
    let options = [&["--ram", "32M", "--ssd", &ssd], &remote[..]].concat();
    let prepared = Prepared::new(mode, &options, DIMENSIONS);
    prepared.fill(PAGES, TAIL);
    prepared.commit();
    // Names are published every ten seconds.
    within(Duration::from_secs(90), "the disk to hold no more than it should", || {
        let used = prepared.mount.status_number("ssd_used_bytes");
        let waiting = prepared.mount.status_number("remote_waiting_files");
        (used <= SSD_BYTES && waiting == 0).then_some(())
    });
    let before = resident_bytes();
    let limits = Limits { pages: 10_000, kept_bytes: 16 * MIB };
    let sequence = prepared.open(limits, 8 * MIB);
    let backend = Backend::Cpu { instructions: InstructionSet::detect(), threads: 2, why: None };
    let plan = sequence.plan(0..TOKENS, backend, &Rates::default()).unwrap();
    let TierBytes { ram, ssd, remote } = plan.tiers;
    assert!(ram > 16 * MIB && ssd > 32 * MIB && remote > 64 * MIB, "{plan}");
    let bytes = ram + ssd + remote;
    assert!(bytes > 3 * RESIDENT_BYTES_MAX);
    ends_of_the_context_leave_the_rest_where_it_is(&prepared, &sequence);

    let first = sequence.counts();
    let (attention, q) = (prepared.attention(), prepared.query());
    let queries = Queries { q: &q, positions: &[TOKENS - 1] };
    let expected = sequence.layers().into_iter().map(|l| prepared.reference(l, TOKENS, |_| 0));
    let expected: Vec<Vec<f64>> = expected.collect();
    let mut most = 0;
    for _ in 0..2 {
        let mut stream = sequence.stream(0..TOKENS).unwrap();
        while let Some(layer) = stream.layer() {
            let mut all = Partials::empty(attention.shape(), 1);
            while let Some(run) = stream.next_run().unwrap() {
                let part = attention.run(&queries, &run.blocks(), &Options::default()).unwrap();
                all.merge(&part).unwrap();
                most = most.max(resident_bytes().saturating_sub(before));
            }
            compare(&all.finish(None).unwrap(), &expected[layer.0 as usize]);
        }
    }
    assert!(most <= RESIDENT_BYTES_MAX, "{} MiB", most / MIB);
    let counts = sequence.counts().since(&first);
    assert_eq!(counts.resident_bytes + counts.streamed_bytes, 2 * bytes);
    // What is mapped may change its tier between two looks at it.
    assert!(counts.resident_bytes >= plan.kept_bytes, "{counts}");
    what_is_not_selected_is_not_read(&prepared, &sequence);
    assert_eq!(prepared.mount.status("errors"), "0");
}

/// Sinks and a window attend to the first page, the last one and the rows behind it; whatever else
/// the remote has, it keeps.
fn ends_of_the_context_leave_the_rest_where_it_is(prepared: &Prepared, sequence: &Sequence) {
    let remote_pages = || -> Vec<(u32, u64)> {
        let pages = (0..2).flat_map(|layer| (1..PAGES - 1).map(move |index| (layer, index)));
        let is_remote = |(layer, index): &(u32, u64)| {
            let path = prepared.page_path(*layer, index * 1024);
            getxattr(path, "user.kvfs.tier").unwrap() == "remote"
        };
        pages.filter(is_remote).collect()
    };
    let (there, counts) = (remote_pages(), sequence.counts());
    assert!(there.len() > 100, "{there:?}");
    let (attention, q) = (prepared.attention(), prepared.query());
    let queries = Queries { q: &q, positions: &[TOKENS - 1] };
    let seen = sinks_and_window(200_000, 4, 1000);
    let options = Options { selection: Some(&seen), ..Options::default() };
    let mut stream = sequence.stream(0..TOKENS).unwrap();
    while let Some(layer) = stream.layer() {
        let found = stream.attend(&attention, &queries, &options).unwrap();
        let is_seen = |token: u64| !(4..TOKENS - 1000).contains(&token);
        compare(&found.finish(None).unwrap(), &prepared.reference_of(layer, TOKENS, is_seen));
    }
    let counts = sequence.counts().since(&counts);
    let read = counts.resident_bytes + counts.streamed_bytes;
    assert_eq!(read, 2 * 2 * prepared.page_bytes(), "two pages of each layer");
    let left = remote_pages();
    let fetched: Vec<_> = there.iter().filter(|page| !left.contains(page)).collect();
    // Whoever opens the first page may begin a scan: the one behind it is fetched. The second opening
    // shows another order.
    assert!(fetched.iter().all(|page| **page == (0, 1)), "{fetched:?}");
}

/// What heavy hitters, ranked pages and a mask leave is read, from whatever tier has it, and nothing
/// else; the result is that of the same tokens in f64.
fn what_is_not_selected_is_not_read(prepared: &Prepared, sequence: &Sequence) {
    let (attention, q) = (prepared.attention(), prepared.query());
    let queries = Queries { q: &q, positions: &[TOKENS - 1] };
    let plain = Options::default();
    let layer = Layer(0);
    let mut stream = sequence.stream_layers(&[layer], 0..TOKENS).unwrap();
    let (mut mass, mut summaries) = (Vec::new(), Vec::new());
    let mut all = Partials::empty(attention.shape(), 1);
    // One scan tells what the policies want to know of tokens and pages.
    while let Some(run) = stream.next_run().unwrap() {
        let blocks = run.blocks();
        let mut part = vec![0.0; usize::try_from(run.tokens()).unwrap()];
        let partials = attention.run_with_mass(&queries, &blocks, &plain, &mut part).unwrap();
        // A share of what the run has; the largest of a run stays the largest.
        mass.append(&mut part);
        all.merge(&partials).unwrap();
        let summary = |block| PageSummary::new(attention.shape(), block).unwrap();
        summaries.extend(blocks.iter().map(summary));
    }
    let mut hitters = HeavyHitters::default();
    hitters.observe(&mass);
    let heavy = hitters.select(200_000, 40, 300);
    let outline = sequence.stream_layers(&[layer], 0..TOKENS).unwrap().outline();
    let ranking = PageTopK { pages: 24, sinks: 1, recent: 1 };
    let ranked = ranking.select(attention.shape(), &queries, &outline, &summaries, &plain).unwrap();
    let tokens: Vec<f32> = (0..200_000)
        .map(|token| if token % 30_000 < 3 { 0.0 } else { f32::NEG_INFINITY })
        .collect();
    let mut masked = TokenSet::none(tokens.len());
    (0..tokens.len()).filter(|token| token % 30_000 < 3).for_each(|token| {
        masked.insert(token..token + 1);
    });
    let selecting = |selection| Options { selection: Some(selection), ..plain };
    let masking = Options { mask: Some(Mask::F32(&tokens)), ..plain };
    let cases = [
        (selecting(&heavy), &heavy),
        (selecting(&ranked.tokens), &ranked.tokens),
        (masking, &masked),
    ];
    for (options, seen) in cases {
        let is_seen = |token: u64| seen.contains(usize::try_from(token).unwrap());
        let pages = (0..PAGES).filter(|page| (page * 1024..(page + 1) * 1024).any(is_seen)).count();
        let before = sequence.counts();
        let mut stream = sequence.stream_layers(&[layer], 0..TOKENS).unwrap();
        let found = stream.attend(&attention, &queries, &options).unwrap();
        compare(&found.finish(None).unwrap(), &prepared.reference_of(layer, TOKENS, is_seen));
        let counts = sequence.counts().since(&before);
        let read = counts.resident_bytes + counts.streamed_bytes;
        assert_eq!(read, pages as u64 * prepared.page_bytes(), "{pages} pages");
        assert!(pages < 64 && counts.streamed_bytes > 0, "{counts}");
    }
}

/// Of this process, the mount's memory that it has mapped included.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let os_pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    os_pages * 4096
}

//! A context of 200,000 tokens, several times larger than the memory that may be used for it.

use kvfs::attention::{InstructionSet, Options, Partials, Queries};
use kvfs::reader::{Backend, Limits, Rates};

use crate::common::Mode;
use crate::prepared::{Prepared, compare};

in_both_modes!(two_hundred_thousand_tokens_attend_within_a_memory_budget);

const MIB: u64 = 1 << 20;

/// What may come to lie in memory beyond what was there: the mount's RAM tier where it is mapped,
/// what the reader keeps, what it streams, and 8 MiB for everything else.
const RESIDENT_BYTES_MAX: u64 = (32 + 16 + 8 + 8) * MIB;

/// The tiny model's heads and half of its layers: 205 MB.
const DIMENSIONS: [u32; 4] = [2, 2, 64, 1024];

fn two_hundred_thousand_tokens_attend_within_a_memory_budget(mode: Mode) {
    let prepared = Prepared::new(mode, &["--ram", "32M"], DIMENSIONS);
    let (pages, tail) = (195, 320);
    let tokens = pages * 1024 + tail;
    assert_eq!(tokens, 200_000);
    prepared.fill(pages, tail);
    prepared.commit();
    let before = resident_bytes();
    let limits = Limits { pages: 10_000, kept_bytes: 16 * MIB };
    let sequence = prepared.open(limits, 8 * MIB);
    let backend = Backend::Cpu { instructions: InstructionSet::detect(), threads: 2 };
    let plan = sequence.plan(0..tokens, backend, &Rates::default()).unwrap();
    assert!(plan.tiers.ram > 16 * MIB && plan.tiers.ssd > 100 * MIB, "{plan}");
    let bytes = plan.tiers.ram + plan.tiers.ssd;
    assert!(bytes > 3 * RESIDENT_BYTES_MAX);

    let (attention, q) = (prepared.attention(), prepared.query());
    let queries = Queries { q: &q, positions: &[tokens - 1] };
    let expected = sequence.layers().into_iter().map(|l| prepared.reference(l, tokens, |_| 0));
    let expected: Vec<Vec<f64>> = expected.collect();
    let mut most = 0;
    for _ in 0..2 {
        let mut stream = sequence.stream(0..tokens).unwrap();
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
    let counts = sequence.counts();
    assert_eq!(counts.resident_bytes + counts.streamed_bytes, 2 * bytes);
    assert!(counts.resident_bytes >= plan.mapped_bytes + plan.kept_bytes, "{counts}");
}

/// Of this process, the mount's memory that it has mapped included.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let os_pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    os_pages * 4096
}

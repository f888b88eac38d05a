//! What is told of another budget, against the same uses replayed with that budget.

mod bounds;
mod exact;

use kvfs_page::Dtype;

use super::record::spread;
use super::{Happened, Play, Played, Sample, Seen};
use crate::store::record::{ObjectId, PageRecord, Role};

const PAGE_BYTES: u64 = 1 << 20;
const LAYERS: u32 = 4;
const PAGE_TOKENS: u32 = 128;

/// A page of the one model that there is.
fn page(object: u64) -> Role {
    Role::Page(PageRecord {
        model: [7; 16],
        layer: u32::try_from(object % u64::from(LAYERS)).unwrap(),
        start: 0,
        tokens: PAGE_TOKENS,
        dtype: Dtype::F16,
        checksum: [0; 16],
    })
}

/// Notes uses of pages, each of which is new when it is used first.
fn note(sample: &Sample, uses: &[u64], bytes: impl Fn(u64) -> u64) {
    let mut known = std::collections::HashSet::new();
    for &object in uses {
        if known.insert(object) {
            sample.came_to_be(ObjectId(object), page(object), bytes(object));
        } else {
            sample.used(ObjectId(object), Some(page(object)), bytes(object), false);
        }
    }
}

fn seen(sample: &Sample) -> Seen {
    Seen::parse(&sample.to_bytes()).unwrap()
}

/// Whether an estimate is this number.
fn close(estimate: f64, number: u64) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let number = number as f64;
    (estimate - number).abs() < 0.5
}

/// Repeatable numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 += 1;
        spread(self.0 ^ 0x5555) % bound
    }
}

fn rounds_of(length: u64, rounds: u64) -> Vec<u64> {
    (0..rounds).flat_map(|_| 0..length).collect()
}

/// Draws objects, the nth with a share of about 1/n.
fn zipf(objects: u32, count: usize) -> Vec<u64> {
    let mut sums = Vec::new();
    let mut sum = 0.0;
    for object in 1..=objects {
        sum += 1.0 / f64::from(object).powf(0.8);
        sums.push(sum);
    }
    let mut random = Random(1);
    let mut draw = || {
        let at = f64::from(u32::try_from(random.below(1 << 31)).unwrap()) / 2_f64.powi(31) * sum;
        // Which is used often says nothing of its number.
        spread(sums.partition_point(|sum| *sum < at) as u64) >> 20
    };
    (0..count).map(|_| draw()).collect()
}

/// Conversations that begin alike, each turn of which reads what it has so far and adds to it; old ones end.
fn conversations(turns: u64) -> Vec<u64> {
    let mut random = Random(9);
    let mut running: Vec<(u64, u64)> = (0..200).map(|number| (number, 0)).collect();
    let mut uses = Vec::new();
    for next in 200..200 + turns {
        let at = usize::try_from(random.below(200)).unwrap();
        if running[at].1 >= 24 {
            running[at] = (next, 0);
        }
        let (conversation, length) = &mut running[at];
        *length += 1 + random.below(3);
        let system = 0..4 + *conversation % 3;
        uses.extend(system.map(|page| (*conversation % 3) << 8 | page));
        uses.extend((0..*length).map(|page| (*conversation + 16) << 8 | page));
    }
    uses
}

//! Hit rates against plain LRU and against what no policy can beat, over uses of equal objects.

use std::collections::{BTreeSet, HashMap};

use super::use_object;
use crate::tier::replacement::{Access, Replacement};

/// Objects that fit.
const BUDGET: u64 = 1000;

/// A pattern of uses. Rates count from `warm` on.
struct Trace {
    name: &'static str,
    uses: Vec<u64>,
    warm: usize,
}

#[derive(Clone, Copy, Debug)]
struct Rates {
    lirs: f64,
    lru: f64,
    optimal: f64,
    /// Objects moved in per use.
    moved: f64,
    lru_moved: f64,
}

#[test]
fn hit_rates() {
    eprintln!(
        "budget {BUDGET} objects           LIRS    LRU  optimal  moved in per use: LIRS    LRU"
    );
    let traces = [
        loop_of("loop of 0.9 x budget", 900, 20),
        loop_of("loop of 1.5 x budget", 1500, 20),
        loop_of("loop of 2 x budget", 2000, 20),
        loop_of("loop of 8 x budget", 8000, 20),
        zipf("zipf 0.8 of 10 x budget", 0.8, 10_000),
        zipf("zipf 1.0 of 10 x budget", 1.0, 10_000),
        zipf("zipf 1.2 of 10 x budget", 1.2, 10_000),
        zipf_and_scans(),
        two_loops(),
        loop_that_moves("loop of 0.8, then another", 800),
        loop_that_moves("loop of 2, then another", 2000),
        zipf_that_drifts(),
    ];
    let rates = traces.map(|trace| measure(&trace));
    let [
        below,
        half,
        double,
        eight,
        zipf_08,
        zipf_10,
        zipf_12,
        scans,
        two,
        short_shift,
        long_shift,
        drift,
    ] = rates;
    // A loop that fits is hit, whatever the policy.
    assert!(below.lirs > 0.999);
    // In a longer one, what fits stays: the optimum, but for what waits among the cold.
    for (rates, fits) in [(half, 1000.0 / 1500.0), (double, 0.5), (eight, 0.125)] {
        assert!(rates.lru < 0.001);
        assert!(rates.lirs > 0.95 * fits, "{rates:?}");
        assert!(rates.moved < 0.001, "{rates:?}");
    }
    for rates in [zipf_08, zipf_10, zipf_12, scans, two] {
        assert!(rates.lirs > rates.lru - 0.01, "{rates:?}");
        assert!(rates.moved < rates.lru_moved, "{rates:?}");
    }
    assert!(scans.lirs > scans.lru + 0.05, "{scans:?}");
    // After a shift the new loop is learnt within a few rounds of it.
    assert!(short_shift.lirs > 0.85, "{short_shift:?}");
    assert!(long_shift.lirs > 0.8 * long_shift.optimal, "{long_shift:?}");
    assert!(drift.lirs > drift.lru - 0.03, "{drift:?}");
}

#[test]
fn uses_further_apart_than_the_memory_are_learnt_too() {
    // 8 x the budget, with a memory of 2 x: no object is still known at its second use.
    let mut tier = Replacement::with_memory(BUDGET, 2 * 1000);
    let mut hits = Vec::new();
    for round in 0..60 {
        let first = if round < 10 { 0 } else { 100_000 };
        let hit = (first..first + 8 * BUDGET)
            .filter(|object| use_object(&mut tier, *object, 1) == Access::Hit)
            .count();
        hits.push(hit);
    }
    eprintln!("hits per round, the loop moves at round 10: {hits:?}");
    assert!(hits[9] > 700, "stable in spite of the samples: {}", hits[9]);
    assert_eq!(hits[10], 0);
    assert!(hits[59] > 700, "learnt: {}", hits[59]);
}

fn measure(trace: &Trace) -> Rates {
    let counted = trace.uses.len() - trace.warm;
    let rate = |events: usize| {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let rate = events as f64 / counted as f64;
        rate
    };
    let mut tier = Replacement::new(BUDGET);
    let answers: Vec<Access> =
        trace.uses.iter().map(|object| use_object(&mut tier, *object, 1)).collect();
    let count = |access| answers[trace.warm..].iter().filter(|answer| **answer == access).count();
    let lru = hits(&trace.uses, trace.warm, recency);
    let rates = Rates {
        lirs: rate(count(Access::Hit)),
        moved: rate(count(Access::Admit)),
        lru: rate(lru),
        lru_moved: 1.0 - rate(lru),
        optimal: rate(hits(&trace.uses, trace.warm, next_use)),
    };
    let Rates { lirs, lru, optimal, moved, lru_moved } = rates;
    eprintln!(
        "{:27} {lirs:6.3} {lru:6.3}   {optimal:6.3}                   {moved:6.3} {lru_moved:6.3}",
        trace.name
    );
    rates
}

/// When each use's object is used next.
fn next_use(uses: &[u64]) -> Vec<u64> {
    let mut next = HashMap::new();
    let mut times: Vec<u64> = (0_u64..)
        .zip(uses)
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .map(|(time, object)| next.insert(*object, time).unwrap_or(u64::MAX - time))
        .collect();
    times.reverse();
    times
}

/// As if what was used last were used next: the furthest use is then the one longest ago, and
/// [`hits`] is LRU.
fn recency(uses: &[u64]) -> Vec<u64> {
    (0..uses.len() as u64).map(|time| u64::MAX - time).collect()
}

/// Hits of a policy that evicts the resident object whose next use is furthest away, or with
/// [`next_use`], bypasses the new one if that is it (Belady's optimum).
fn hits(uses: &[u64], warm: usize, next: fn(&[u64]) -> Vec<u64>) -> usize {
    let next = next(uses);
    let mut resident: HashMap<u64, u64> = HashMap::new();
    let mut by_next = BTreeSet::new();
    let mut hits = 0;
    for (time, (object, next)) in uses.iter().zip(next).enumerate() {
        if let Some(old) = resident.insert(*object, next) {
            by_next.remove(&(old, *object));
            hits += usize::from(time >= warm);
        }
        by_next.insert((next, *object));
        if resident.len() as u64 > BUDGET
            && let Some((_, victim)) = by_next.pop_last()
        {
            resident.remove(&victim);
        }
    }
    hits
}

fn loop_of(name: &'static str, length: u64, rounds: usize) -> Trace {
    let uses: Vec<u64> = (0..rounds).flat_map(|_| 0..length).collect();
    let warm = uses.len() / rounds;
    Trace { name, uses, warm }
}

/// Repeatable numbers from 0 to below 1.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let high = u32::try_from(self.0 >> 32).expect("32 bits");
        f64::from(high) / 4_294_967_296.0
    }
}

/// Draws ranks: rank `r` (from 1) with a weight of `r` to the minus `exponent`.
pub(super) struct Zipf(Vec<f64>);

impl Zipf {
    pub(super) fn new(exponent: f64, objects: u32) -> Zipf {
        let mut total = 0.0;
        let sums = (1..=objects).map(|rank| {
            total += f64::from(rank).powf(-exponent);
            total
        });
        Zipf(sums.collect())
    }

    pub(super) fn draw(&self, random: &mut Random) -> u64 {
        let point = random.next() * self.0.last().copied().unwrap_or(0.0);
        self.0.partition_point(|sum| *sum <= point) as u64
    }
}

const DRAWS: usize = 200_000;

fn zipf(name: &'static str, exponent: f64, objects: u32) -> Trace {
    let (zipf, mut random) = (Zipf::new(exponent, objects), Random(11));
    let uses = (0..DRAWS).map(|_| zipf.draw(&mut random)).collect();
    Trace { name, uses, warm: DRAWS / 4 }
}

/// Every 10,000 uses somebody reads 3000 objects once.
fn zipf_and_scans() -> Trace {
    let (zipf, mut random) = (Zipf::new(1.0, 5000), Random(13));
    let mut uses = Vec::new();
    for scan in 0..20_u64 {
        uses.extend((0..10_000).map(|_| zipf.draw(&mut random)));
        let first = 1_000_000 * (scan + 1);
        uses.extend(first..first + 3000);
    }
    let warm = uses.len() / 4;
    Trace { name: "zipf and one-off scans", uses, warm }
}

/// Two sequences of 0.75 of the budget each, read by turns.
fn two_loops() -> Trace {
    let round = || (0..750_u64).flat_map(|page| [page, 10_000 + page]);
    Trace {
        name: "two loops of 0.75 in turns",
        uses: (0..20).flat_map(|_| round()).collect(),
        warm: 1500,
    }
}

/// 20 rounds of one loop, then 20 of another one; counted from the shift on.
fn loop_that_moves(name: &'static str, length: u64) -> Trace {
    let rounds = |first: u64| (0..20).flat_map(move |_| first..first + length);
    let uses: Vec<u64> = rounds(0).chain(rounds(1_000_000)).collect();
    let warm = uses.len() / 2;
    Trace { name, uses, warm }
}

/// The favourites change: every 100 uses each object moves one rank down, and a new one is first.
fn zipf_that_drifts() -> Trace {
    let (zipf, mut random) = (Zipf::new(1.0, 5000), Random(17));
    let uses =
        (0..DRAWS as u64).map(|time| 1_000_000 + time / 100 - zipf.draw(&mut random)).collect();
    Trace { name: "zipf whose ranks drift", uses, warm: DRAWS / 4 }
}

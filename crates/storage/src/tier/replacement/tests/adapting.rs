//! The rule that is followed is about as good as the best one would have been from the beginning.

use super::hit_rates::{Random, Zipf};
use super::use_object;
use crate::store::record::ObjectId;
use crate::tier::replacement::cache::{Cache, Rule};
use crate::tier::replacement::runs::Runs;
use crate::tier::replacement::shadows::RULES;
use crate::tier::replacement::{Access, Replacement};

/// Objects that fit.
const BUDGET: u64 = 1000;

/// Hits that choosing may cost, as a share of all uses.
const PRICE_MAX: f64 = 0.01;

/// Hits of a tier that follows one rule.
fn hits_under(rule: Rule, uses: &[u64]) -> usize {
    let mut cache = Cache::new(BUDGET, 1 << 18);
    let mut runs = Runs::new(BUDGET);
    let mut hits = 0;
    for object in uses.iter().map(|object| ObjectId(*object)) {
        let use_now = runs.note(&cache.names, object, 1);
        match cache.access(rule, use_now) {
            Access::Hit => hits += 1,
            Access::Admit => {
                cache.make_room(rule, 1);
                cache.insert(use_now);
            }
            Access::Bypass => {}
        }
        runs.noted(&mut cache.names, object);
    }
    hits
}

/// The share of hits of the policy, and of each rule.
fn rates(uses: &[u64]) -> (f64, Vec<f64>) {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let rate = |hits: usize| hits as f64 / uses.len() as f64;
    let mut tier = Replacement::new(BUDGET);
    let hits =
        uses.iter().filter(|object| use_object(&mut tier, **object, 1) == Access::Hit).count();
    (rate(hits), RULES.iter().map(|rule| rate(hits_under(*rule, uses))).collect())
}

fn check(name: &str, uses: &[u64]) {
    let (adapting, fixed) = rates(uses);
    eprintln!("{name}: {adapting:.3}, {fixed:.3?}");
    let best = fixed.iter().copied().fold(0.0, f64::max);
    assert!(adapting > best - PRICE_MAX, "{name}: {adapting:.3} where {best:.3} was possible");
}

fn zipf(exponent: f64, seed: u64, count: usize) -> Vec<u64> {
    let (zipf, mut random) = (Zipf::new(exponent, 10_000), Random(seed));
    (0..count).map(|_| zipf.draw(&mut random)).collect()
}

fn rounds_of(first: u64, length: u64, rounds: u64) -> Vec<u64> {
    (0..rounds).flat_map(|_| first..first + length).collect()
}

#[test]
fn loops_longer_than_the_budget() {
    for length in [1100, 1500, 3000, 8000] {
        check("a loop", &rounds_of(0, length, 30));
    }
    let turns: Vec<u64> =
        (0..20).flat_map(|_| (0..800).flat_map(|page| [page, 10_000 + page])).collect();
    check("two loops in turns", &turns);
}

#[test]
fn zipf_alone_and_with_scans() {
    for exponent in [0.6, 0.9, 1.2] {
        check("zipf", &zipf(exponent, 3, 200_000));
    }
    let mut scans = Vec::new();
    for (scan, uses) in (1..).zip(zipf(0.9, 5, 200_000).chunks(5000)) {
        scans.extend_from_slice(uses);
        scans.extend(scan * 1_000_000..scan * 1_000_000 + 2500);
    }
    check("zipf and scans", &scans);
}

#[test]
fn what_is_asked_shifts() {
    let mut uses = rounds_of(100_000, 2000, 30);
    uses.extend(zipf(1.0, 7, 100_000));
    uses.extend(rounds_of(200_000, 900, 60));
    uses.extend(rounds_of(300_000, 4000, 30));
    check("a loop, zipf, a loop that fits, a loop", &uses);
}

/// Conversations that share a beginning of 20 pages, grow by 5 pages at each turn and are gone
/// after some turns; which one goes on is drawn.
#[test]
fn conversations() {
    for open in [20, 100, 400] {
        let mut random = Random(19);
        let mut turns = vec![(0_u64, 0_u64); open];
        let mut uses = Vec::new();
        let mut next = 1;
        for _ in 0..5000 {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "below the number of conversations"
            )]
            let (conversation, turn) = &mut turns[(random.next() * open as f64) as usize];
            if *turn == 0 || random.next() < 0.1 {
                (*conversation, *turn) = (next, 0);
                next += 1;
            }
            *turn += 1;
            uses.extend(0..20);
            uses.extend((0..*turn * 5).map(|page| *conversation * 10_000 + page));
        }
        check("conversations", &uses);
    }
}

#[test]
fn names_of_a_million_pages_take_less_than_64_mib() {
    let mut tier = Replacement::with_memory(1000, 1 << 20);
    for object in 0..1_100_000 {
        use_object(&mut tier, object, 1);
    }
    let bytes = tier.cache.names.memory_bytes() + tier.shadows.memory_bytes();
    assert!(tier.cache.names.length() >= 1_000_000);
    assert!(bytes <= 64 << 20, "{bytes}");
}

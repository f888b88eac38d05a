//! How exact the answers are.

use std::collections::HashSet;

use super::*;
use crate::store::record::InodeId;
use crate::tier::counters::Tier;
use crate::tier::replacement::Replacement;
use crate::tier::ssd::SsdTier;

/// What a sample's answer may be wrong, of the share that is found.
const ERROR_MAX: f64 = 0.03;

/// The same uses through the policy itself, in memory.
fn replay_in_memory(uses: &[u64], budget: u64) -> u64 {
    let (mut tier, mut known, mut found) = (Replacement::new(budget), HashSet::new(), 0);
    for &number in uses {
        let object = ObjectId(number);
        if known.insert(number) {
            for victim in tier.victims(PAGE_BYTES, |_| false) {
                tier.evicted(victim.object);
            }
            tier.insert(object, PAGE_BYTES);
            tier.access(object, PAGE_BYTES);
        } else if tier.is_resident(object) {
            tier.access(object, PAGE_BYTES);
            found += 1;
        }
    }
    found
}

/// The same uses through the tier of the disk.
fn replay_on_disk(uses: &[u64], budget: u64) -> u64 {
    let tier = SsdTier::new(Some(budget));
    let (mut known, mut here, mut found) = (HashSet::new(), HashSet::new(), 0);
    let owner = InodeId(1);
    for &number in uses {
        let object = ObjectId(number);
        let is_new = known.insert(number);
        if here.insert(number) {
            tier.allow_leaving(object, owner, PAGE_BYTES);
        } else {
            found += 1;
        }
        let excess = tier.excess_bytes(here.len() as u64 * PAGE_BYTES);
        for (object, _) in tier.next_to_leave(excess, usize::MAX, &HashSet::new()) {
            tier.record_leaving(object, PAGE_BYTES);
            here.remove(&object.0);
        }
        if !is_new {
            tier.used(object, PAGE_BYTES);
        }
    }
    found
}

/// A sample that remembers all of them, and one with room for 32,768 records.
fn samples(uses: &[u64], bytes: impl Fn(u64) -> u64 + Copy) -> [Seen; 2] {
    [Sample::default(), Sample::with_room(8, 1000)].map(|sample| {
        note(&sample, uses, bytes);
        seen(&sample)
    })
}

fn workloads() -> [(&'static str, Vec<u64>, u64); 3] {
    [
        ("a loop", rounds_of(7000, 12), 1500),
        ("zipf", zipf(20_000, 100_000), 2000),
        ("conversations", conversations(8000), 3000),
    ]
}

#[test]
fn until_the_room_is_used_up_the_answer_is_a_replay() {
    for (name, uses, pages) in workloads() {
        let [all, _] = samples(&uses, |_| PAGE_BYTES);
        assert_eq!(all.sampling_bits, 0, "{name}");
        for budget in [pages / 4, pages, 4 * pages] {
            let budget = budget * PAGE_BYTES;
            let memory = Play::Memory(budget).on(&all);
            assert!(close(memory.found, replay_in_memory(&uses, budget)), "{name}: {memory:?}");
            let disk = Play::Disk(budget).on(&all);
            assert!(close(disk.found, replay_on_disk(&uses, budget)), "{name}: {disk:?}");
            assert!(!memory.is_rough && !disk.is_rough);
        }
    }
}

#[test]
fn a_sample_tells_about_the_same() {
    for (name, uses, pages) in workloads() {
        let [all, sample] = samples(&uses, |_| PAGE_BYTES);
        assert!(sample.sampling_bits > 0 && sample.is_whole, "{name}");
        assert_eq!(sample.uses, all.uses, "{name}");
        for budget in [pages / 4, pages / 2, pages, 2 * pages, 4 * pages] {
            for play in [Play::Memory(budget * PAGE_BYTES), Play::Disk(budget * PAGE_BYTES)] {
                check(name, play, (play.on(&all), play.on(&sample)));
            }
        }
        eprintln!("{name}: one object in {} is sampled", 1 << sample.sampling_bits);
    }
}

fn check(name: &str, play: Play, (exact, told): (Played, Played)) {
    let (expected, found) = (exact.found_share(), told.found_share());
    eprintln!("{name}, {play:?}: {found:.3}, replayed {expected:.3}");
    assert!((found - expected).abs() < ERROR_MAX, "{name}, {play:?}: {found}, not {expected}");
    let tokens = (told.found_tokens - exact.found_tokens).abs() / exact.tokens;
    assert!(tokens < 2.0 * ERROR_MAX, "{name}, {play:?}: tokens {told:?}, not {exact:?}");
    let bytes = (told.loaded_bytes - exact.loaded_bytes).abs() / exact.bytes;
    assert!(bytes < 2.0 * ERROR_MAX, "{name}, {play:?}: bytes {told:?}, not {exact:?}");
}

#[test]
fn pages_of_different_sizes_are_told_as_well() {
    let bytes = |object: u64| (64 << 10) << (spread(object) % 6);
    let uses = zipf(20_000, 200_000);
    let [all, sample] = samples(&uses, bytes);
    for budget in [500, 1000, 2000, 4000] {
        let play = Play::Disk(budget * PAGE_BYTES);
        check("sizes", play, (play.on(&all), play.on(&sample)));
    }
}

#[test]
fn tokens_are_those_of_all_layers_together() {
    let sample = Sample::default();
    // Two positions of four layers, read twice.
    note(&sample, &rounds_of(8, 3), |_| PAGE_BYTES);
    let told = Play::Memory(u64::MAX).on(&seen(&sample));
    assert!(close(told.uses, 16) && close(told.found, 16), "{told:?}");
    assert!(close(told.tokens, 512) && close(told.found_tokens, 512), "{told:?}");
    assert!(close(told.loaded_bytes, 0), "{told:?}");
    let none = Play::Memory(0).on(&seen(&sample));
    assert!(close(none.found, 0) && close(none.found_tokens, 0), "{none:?}");
    assert!(close(none.loaded_bytes, 16 * PAGE_BYTES), "{none:?}");
}

#[test]
fn what_was_there_before_the_mount_counts_as_it_was() {
    let (sample, [old, away]) = (Sample::default(), [ObjectId(1), ObjectId(2)]);
    sample.used(old, Some(page(1)), PAGE_BYTES, false);
    sample.note(away, Happened::Fetched, PAGE_BYTES);
    sample.used(away, Some(page(2)), PAGE_BYTES, false);
    sample.used(old, Some(page(1)), PAGE_BYTES, false);
    sample.used(away, None, PAGE_BYTES, false);
    let seen = seen(&sample);
    for play in [Play::Disk(u64::MAX), Play::Counted(Tier::Ssd)] {
        assert!(close(play.on(&seen).found, 3), "{play:?}");
    }
    assert!(close(Play::Disk(0).on(&seen).found, 1));
    for play in [Play::Memory(u64::MAX), Play::Counted(Tier::Ram)] {
        assert!(close(play.on(&seen).found, 0), "{play:?}");
    }
}

#[test]
fn what_came_into_memory_to_be_read_was_not_there() {
    let (sample, object) = (Sample::default(), ObjectId(1));
    let use_in_memory = || sample.used(object, Some(page(1)), PAGE_BYTES, true);
    sample.note(object, Happened::Landed, PAGE_BYTES);
    use_in_memory();
    sample.note(ObjectId(2), Happened::Promoted, PAGE_BYTES);
    use_in_memory();
    sample.used(ObjectId(2), Some(page(2)), PAGE_BYTES, true);
    let told = seen(&sample);
    for play in [Play::Memory(u64::MAX), Play::Counted(Tier::Ram)] {
        assert!(close(play.on(&told).found, 2), "{play:?}");
    }
    assert!(close(Play::Memory(PAGE_BYTES).on(&told).found, 1));
    sample.note(object, Happened::Gone, 0);
    use_in_memory();
    assert!(close(Play::Memory(u64::MAX).on(&seen(&sample)).found, 2));
}

//! What it costs, and whom it does not stand still for.

use std::time::Instant;

use super::super::record::RECORD_BYTES;
use super::*;
use crate::tier::counters::Tier;

#[test]
fn memory_is_bounded_whatever_comes() {
    let sample = Sample::default();
    let (count, begun) = (3_000_000_u64, Instant::now());
    for number in 0..count {
        let object = spread(number) % 1_000_000;
        sample.used(ObjectId(object), Some(page(object)), PAGE_BYTES, false);
    }
    let nanoseconds = begun.elapsed().as_nanos() / u128::from(count);
    let (memory, answer) = (sample.memory_bytes(), sample.to_bytes());
    let told = Seen::parse(&answer).unwrap();
    eprintln!(
        "{nanoseconds} ns a use, {memory} bytes, {} records of one object in {}",
        told.steps.len(),
        1 << told.sampling_bits
    );
    assert!(memory <= (5 << 20) + (64 << 10), "{memory}");
    assert!(answer.len() <= (5 << 20) + 4096, "{}", answer.len());
    assert!(told.steps.len() * RECORD_BYTES >= 2 << 20, "{}", told.steps.len());
    assert_eq!((told.uses, told.used_bytes), (count, count * PAGE_BYTES));
    assert!(told.is_whole);
    let all = told.all_bytes() / PAGE_BYTES;
    assert!(all.abs_diff(1_000_000) < 100_000, "{all}");
}

#[test]
fn a_file_that_is_read_without_end_takes_no_room() {
    let sample = Sample::default();
    for _ in 0..1_000_000 {
        sample.used(ObjectId(1), Some(Role::Plain), 3 << 30, false);
    }
    let told = seen(&sample);
    assert_eq!((told.steps.len(), told.uses), (2, 1_000_000));
    assert!(sample.memory_bytes() < 1 << 20);
    // It fits nowhere but on a disk that is larger.
    for play in [Play::Memory(u64::MAX), Play::Disk(3 << 30), Play::Counted(Tier::Ram)] {
        let played = play.on(&told);
        assert!(played.found <= 1.0, "{play:?}: {played:?}");
    }
    for play in [Play::Disk(4 << 30), Play::Counted(Tier::Ssd)] {
        assert!(close(play.on(&told).found, 1_000_000), "{play:?}");
    }
    // One that no remote gets stays.
    sample.used(ObjectId(2), Some(Role::Plain), 5 << 40, false);
    sample.used(ObjectId(1), None, 3 << 30, false);
    sample.used(ObjectId(2), None, 5 << 40, false);
    assert!(Play::Disk(1 << 30).on(&seen(&sample)).found > 1.5);
}

#[test]
fn of_few_files_the_last_uses_are_remembered() {
    let sample = Sample::with_room(8, 1000);
    for _ in 0..500 {
        note(&sample, &rounds_of(100, 2), |_| PAGE_BYTES);
    }
    let told = seen(&sample);
    assert_eq!((told.sampling_bits, told.is_whole, told.objects()), (0, false, 100));
    assert!(told.uses >= 7000 && told.uses <= 8 * 4096, "{}", told.uses);
    assert!(close(Play::Disk(u64::MAX).on(&told).found, told.uses));
    // What they found in memory before is not forgotten with how it came there.
    let sample = Sample::with_room(8, 1000);
    note(&sample, &rounds_of(100, 1), |_| PAGE_BYTES);
    for object in rounds_of(100, 1000) {
        sample.used(ObjectId(object), Some(page(object)), PAGE_BYTES, true);
    }
    let told = seen(&sample);
    assert!(!told.is_whole);
    for play in [Play::Memory(100 * PAGE_BYTES), Play::Counted(Tier::Ram)] {
        assert!(close(play.on(&told).found, told.uses), "{play:?}");
    }
}

#[test]
fn an_answer_is_right_while_objects_are_being_forgotten() {
    let sample = Sample::with_room(4, 500);
    let mut bits = 0;
    for at in 0..100_000 {
        let object = spread(at) % 5000;
        sample.used(ObjectId(object), Some(page(object)), PAGE_BYTES, false);
        if at % 499 == 0 {
            let told = seen(&sample);
            assert_eq!(told.uses, at + 1);
            let uses: u64 = told.steps.iter().map(|step| u64::from(step.times)).sum();
            let all = uses << told.sampling_bits;
            assert!(all.abs_diff(told.uses) <= told.uses / 5 + 5, "{all} of {}", told.uses);
            bits = told.sampling_bits;
        }
    }
    assert!(bits >= 3, "{bits}");
}

#[test]
fn a_budget_below_what_a_sample_tells_is_called_rough() {
    let sample = Sample::with_room(8, 1000);
    note(&sample, &zipf(20_000, 200_000), |object| {
        if object == spread(1) >> 20 { 1 << 40 } else { PAGE_BYTES }
    });
    let told = seen(&sample);
    let largest = told.objects.iter().map(|object| object.bytes).max().unwrap();
    let enough = (largest * 64) << told.sampling_bits;
    assert!(!Play::Disk(enough).on(&told).is_rough);
    assert!(Play::Disk(enough - (1 << told.sampling_bits)).on(&told).is_rough);
    assert!(Play::Memory(PAGE_BYTES).on(&told).is_rough);
}

#[test]
fn what_is_no_answer_is_one_line() {
    fn check(answer: &[u8], expected: &str) {
        let error = Seen::parse(answer).unwrap_err();
        assert!(error.contains(expected) && !error.contains('\n'), "{error:?}");
    }
    check(b"", "no end of its head");
    check(b"kvfs uses 2\nuses: 1\n\n", "another form, \"kvfs uses 2\"");
    check(b"kvfs uses 1\nuses: many\n\n", "uses: \"many\" is no number");
    check(b"kvfs uses 1\nuses: \xff\n\n", "utf-8");
    let mut answer = Sample::default().to_bytes();
    assert_eq!(Seen::parse(&answer).unwrap().uses, 0);
    // A part of a record, and one of a kind that a newer version has.
    answer.extend([0xff; RECORD_BYTES]);
    answer.extend([0; 5]);
    assert_eq!(Seen::parse(&answer).unwrap().objects(), 0);
}

#[test]
fn many_may_use_and_ask_at_a_time() {
    let sample = Sample::with_room(4, 500);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let sample = &sample;
            scope.spawn(move || {
                for number in 0..20_000 {
                    let object = spread(number * 4 + thread) % 5000;
                    sample.used(ObjectId(object), None, PAGE_BYTES, false);
                }
            });
        }
        for _ in 0..20 {
            seen(&sample);
        }
    });
    assert_eq!(seen(&sample).uses, 80_000);
}

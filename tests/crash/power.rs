//! The power is cut before every step that a workload has the disk do, in four modes.

use std::fmt::Write as _;

use crate::check::{Bounds, check};
use crate::common::random::Random;
use crate::cut::{Mode, Tracker};
use crate::driver::{Driver, Recording, WentWrong};
use crate::log::Step;
use crate::mounted::{Berth, Setup};
use crate::workloads::{self, ALL, Workload};

/// States of all workloads together, unless `KVFS_SIM_STATES` says otherwise.
const STATES: usize = 10_000;
/// Operations of a random workload.
const OPERATIONS: usize = 60;

/// A number from the environment.
pub(crate) fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// What the random choices begin with; printed, so that a failure can be repeated.
pub(crate) fn seed() -> u64 {
    setting("KVFS_SIM_SEED", 1) as u64
}

pub(crate) fn record(berth: &Berth, workload: &Workload, went_wrong: &WentWrong) -> Recording {
    let mut driver = Driver::new(berth, workload.setup, went_wrong);
    (workload.run)(&mut driver);
    driver.into_recording()
}

/// Where power can be cut so that something new may be found, and in which ways.
#[derive(Clone, Copy, Debug)]
struct Moment {
    step: usize,
    /// More of the disk, or of what is known of it, is durable than at the step before.
    is_firmer: bool,
    is_settled: bool,
}

fn moments(recording: &Recording) -> Vec<Moment> {
    let mut tracker = Tracker::of(&recording.base);
    let mut moments = vec![Moment { step: 0, is_firmer: true, is_settled: true }];
    for (number, step) in (1..).zip(&recording.steps) {
        tracker.apply(step);
        let is_firmer = matches!(
            step,
            Step::Sync(_) | Step::SyncDirectory(_) | Step::Remote(_) | Step::Acknowledge(_)
        );
        if is_firmer || step.is_of_disk() {
            let is_settled = tracker.is_settled();
            moments.push(Moment { step: number, is_firmer, is_settled });
        }
    }
    moments
}

/// Modes and seeds at a moment, `random_states` of each random mode.
fn cuts(moment: Moment, random_states: usize) -> Vec<(Mode, usize)> {
    let mut cuts = Vec::new();
    cuts.extend(moment.is_firmer.then_some((Mode::Drop, 0)));
    if !moment.is_settled {
        cuts.push((Mode::Keep, 0));
        for number in 0..random_states {
            cuts.extend([(Mode::Subset, number), (Mode::Torn, number)]);
        }
    }
    cuts
}

/// Checks that many states of a recording at least, and returns how many; or what is wrong with the
/// first that is.
pub(crate) fn cut_everywhere(
    recording: &Recording, states: usize, seed: u64,
) -> Result<usize, String> {
    let moments = moments(recording);
    let count = |random| moments.iter().map(|moment| cuts(*moment, random).len()).sum::<usize>();
    let each = count(1) - count(0);
    let missing = states.saturating_sub(count(0));
    let random_states = if each == 0 { 0 } else { missing.div_ceil(each) };
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let work = |part: usize| -> Result<usize, String> {
        let berth = Berth::new();
        let mut tracker = Tracker::of(&recording.base);
        let mut applied = 0;
        let mut checked = 0;
        for moment in moments.iter().skip(part).step_by(threads) {
            while applied < moment.step {
                tracker.apply(&recording.steps[applied]);
                applied += 1;
            }
            for (mode, number) in cuts(*moment, random_states) {
                let of_state = (moment.step as u64) << 20 | (number as u64) << 2 | mode as u64;
                let mut random = Random::of(seed.wrapping_mul(0x9e37_79b9) ^ of_state);
                let image = tracker.image(mode, &mut random);
                let (acknowledged, begun) = (tracker.acknowledged, tracker.begun);
                let bounds = Bounds { acknowledged, begun };
                check(&berth, &image, recording, bounds, &mut random).map_err(|why| {
                    describe(
                        recording,
                        moment.step,
                        &format!("{mode:?} {number}, seed {seed}: {why}"),
                    )
                })?;
                checked += 1;
            }
        }
        Ok(checked)
    };
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads).map(|part| scope.spawn(move || work(part))).collect();
        parts.into_iter().map(|part| part.join().expect("a check panicked")).sum()
    })
}

/// The last steps before a cut, and what is wrong after it.
fn describe(recording: &Recording, step: usize, why: &str) -> String {
    let mut text = format!("cut after step {step} of {}: {why}", recording.steps.len());
    for done in &recording.steps[step.saturating_sub(6)..step] {
        let line: String = format!("{done:?}").chars().take(160).collect();
        let _ = write!(text, "\n  {line}");
    }
    text
}

#[test]
fn whatever_was_acknowledged_is_there_after_a_cut_at_any_step() {
    let (states, seed) = (setting("KVFS_SIM_STATES", STATES), seed());
    let (mut checked, mut wrong) = (0, Vec::new());
    let berth = Berth::new();
    for workload in ALL {
        let recording = record(&berth, &workload, &WentWrong::default());
        let part = states / (ALL.len() + 1);
        let steps = recording.steps.len();
        match cut_everywhere(&recording, part, seed) {
            Ok(count) => {
                println!("{}: {steps} steps, {count} states, seed {seed}", workload.name);
                assert!(count >= part.min(steps / 2), "{}: {count} states", workload.name);
                checked += count;
            }
            Err(why) => wrong.push(format!("{} (KVFS_SIM_SEED={seed}): {why}", workload.name)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for seed in seed.. {
        let mut random = Random::of(seed);
        let mut driver = Driver::new(&berth, Setup::PLAIN, &WentWrong::default());
        workloads::random(&mut driver, &mut random, OPERATIONS);
        let recording = driver.into_recording();
        let count = cut_everywhere(&recording, 1, seed).unwrap_or_else(|why| {
            panic!("random operations (KVFS_SIM_SEED={seed}): {why}");
        });
        checked += count;
        if checked >= states {
            println!("random operations: seeds up to {seed}");
            break;
        }
    }
    println!("{checked} states");
}

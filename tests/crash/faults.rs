//! Each operation of the disk fails, once or from then on. Whatever was acknowledged before and after
//! is there, nothing is seen in part, and what could not be done was refused.

use kvfs::store::disk::DiskPath;

use crate::check::{Bounds, check};
use crate::common::random::Random;
use crate::cut::{Mode, Tracker};
use crate::driver::{Driver, WentWrong};
use crate::fault::{Fault, Kind};
use crate::lie::named;
use crate::log::Step;
use crate::mounted::Berth;
use crate::power::{seed, setting};
use crate::workloads::{ALL, Workload};

/// Runs with a failing disk, unless `KVFS_SIM_FAULTS` says otherwise.
const RUNS: usize = 1000;

const KINDS: [Kind; 5] = [
    Kind::Errno(libc::EIO),
    Kind::Errno(libc::ESTALE),
    Kind::Full,
    Kind::Short,
    Kind::Sync(libc::EIO),
];

/// Workloads in which every sync belongs to a commit.
const COMMITTED: [&str; 6] =
    ["files", "pages", "pages-in-memory", "rows", "short-packs", "hollow-packs"];

/// Whether the fault happened; or what was wrong afterwards.
fn run(
    berth: &Berth, workload: &Workload, fault: Fault, random: &mut Random,
) -> Result<bool, String> {
    let went_wrong = WentWrong { fault: Some(fault), lie: None };
    let mut driver = Driver::new(berth, workload.setup, &went_wrong);
    (workload.run)(&mut driver);
    let has_happened = driver.has_failed();
    let recording = driver.into_recording();
    let mut tracker = Tracker::of(&recording.base);
    recording.steps.iter().for_each(|step| tracker.apply(step));
    for mode in [Mode::Drop, Mode::Keep, Mode::Subset] {
        let image = tracker.image(mode, random);
        let (acknowledged, begun) = (tracker.acknowledged, tracker.begun);
        check(berth, &image, &recording, Bounds { acknowledged, begun }, random)
            .map_err(|why| format!("{mode:?}: {why}"))?;
    }
    Ok(has_happened)
}

/// Fails one sync and goes on. How many syncs of objects and their directories failed; or what was
/// promised after that.
fn fail_sync(
    berth: &Berth, workload: &Workload, errno: i32, after: u64,
) -> Result<Option<usize>, String> {
    let fault = Fault::new(Kind::Sync(errno), after, false);
    let went_wrong = WentWrong { fault: Some(fault), lie: None };
    let mut driver = Driver::new(berth, workload.setup, &went_wrong);
    (workload.run)(&mut driver);
    let steps = driver.into_recording().steps;
    let Some(failed) = steps.iter().position(|step| matches!(step, Step::FailedSync(_))) else {
        return Ok(None);
    };
    let is_of_objects = match steps[failed] {
        Step::FailedSync(Some(node)) => {
            named(&steps, node, |path| matches!(path, DiskPath::Staging(_) | DiskPath::Pack(_)))
        }
        _ => true,
    };
    // The database judges its own syncs; what it cannot sync when it is closed, nobody needs.
    if !is_of_objects {
        return Ok(Some(0));
    }
    let acknowledged = |step: &Step| match step {
        Step::Acknowledge(version) => Some(*version),
        _ => None,
    };
    // A commit without changes promises nothing new.
    let before = steps[..failed].iter().rev().find_map(acknowledged);
    let later = steps[failed..].iter().find(|step| acknowledged(step) > before);
    later.map_or(Ok(Some(1)), |step| Err(format!("{}, sync {after}: {step:?}", workload.name)))
}

/// Every n-th operation of a workload fails, so that there are about so many runs.
fn fail_everywhere(
    workload: &Workload, (kind, is_sticky): (Kind, bool), runs: usize, seed: u64,
) -> Result<usize, String> {
    let berth = Berth::new();
    // As many as it has when nothing fails.
    let whole = crate::power::record(&berth, workload, &WentWrong::default()).steps.len();
    let stride = whole.div_ceil(runs).max(1) as u64;
    let mut random = Random::of(seed);
    let mut failed = 0;
    let mut after = random.next() % stride;
    loop {
        let fault = Fault::new(kind, after, is_sticky);
        let what = || format!("{}, {kind:?}, sticky {is_sticky}, after {after}", workload.name);
        match run(&berth, workload, fault, &mut random) {
            Ok(true) => failed += 1,
            // Of the steps that can fail in this way there are not as many.
            Ok(false) if failed == 0 && after > 0 => {
                after /= 2;
                continue;
            }
            Ok(false) => return Ok(failed),
            Err(why) => return Err(format!("{}: {why}", what())),
        }
        after += stride;
    }
}

#[test]
fn a_failing_disk_loses_nothing_that_was_acknowledged() {
    let (runs, seed) = (setting("KVFS_SIM_FAULTS", RUNS), seed());
    let cases: Vec<(Workload, Kind, bool)> = ALL
        .iter()
        .flat_map(|workload| KINDS.iter().map(move |kind| (*workload, *kind)))
        .flat_map(|(workload, kind)| [false, true].map(|sticky| (workload, kind, sticky)))
        .collect();
    let each = runs.div_ceil(cases.len());
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let work = |part: usize| {
        let (mut failed, mut wrong) = (0, Vec::new());
        for (workload, kind, sticky) in cases.iter().skip(part).step_by(threads) {
            match fail_everywhere(workload, (*kind, *sticky), each, seed) {
                Ok(count) => {
                    assert!(count > 0, "{}: {kind:?} never happened", workload.name);
                    failed += count;
                }
                Err(why) => wrong.push(why),
            }
        }
        (failed, wrong)
    };
    let (mut failed, mut wrong) = (0, Vec::new());
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads).map(|part| scope.spawn(move || work(part))).collect();
        for part in parts {
            let (count, errors) = part.join().expect("a run panicked");
            failed += count;
            wrong.extend(errors);
        }
    });
    println!("{failed} runs with a failing disk, seed {seed}");
    assert!(wrong.is_empty(), "KVFS_SIM_SEED={seed}: {}", wrong.join("\n"));
}

/// The next sync of a file whose sync failed succeeds, and does not bring back what the kernel gave
/// up: so nothing may count as durable any more until the store is mounted again. A full disk is no exception.
#[test]
fn after_a_failed_sync_nothing_is_promised() {
    let berth = Berth::new();
    let workloads = ALL.iter().filter(|workload| COMMITTED.contains(&workload.name));
    for (workload, errno) in workloads.flat_map(|one| [(one, libc::EIO), (one, libc::ENOSPC)]) {
        // What memory has goes to another file when there is room.
        if errno == libc::ENOSPC && workload.name == "pages-in-memory" {
            continue;
        }
        let outcomes =
            (0..).map_while(|after| fail_sync(&berth, workload, errno, after).transpose());
        let failed: usize =
            outcomes.map(|outcome| outcome.unwrap_or_else(|why| panic!("{why}"))).sum();
        println!("{}: each of {failed} syncs of objects failed once ({errno})", workload.name);
        assert!(failed > 4, "{}: only {failed} syncs", workload.name);
    }
}

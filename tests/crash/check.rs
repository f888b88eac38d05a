//! What must hold whenever the power comes back: `fsck` finds nothing, the store mounts, shows a
//! state that may be, goes on working, and is in good order after that.

use std::sync::Arc;

use kvfs::store::disk::{Disk, DiskDirectory};
use kvfs::store::fsck::{self, FsckOptions};

use crate::common::Model;
use crate::common::random::Random;
use crate::cut::{Image, Mode, Tracker};
use crate::disk::SimulatedDisk;
use crate::driver::Recording;
use crate::model::What;
use crate::mounted::{Berth, Mounted};
use crate::remote::Blobs;
use crate::workloads::SIDE_ROW_BYTES;

/// One in so many states is cut again while it is being recovered.
const CUT_AGAIN: usize = 16;
/// One in so many is mounted a second time.
const MOUNTED_AGAIN: usize = 8;

/// What a crash may have left of a recording.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) acknowledged: usize,
    pub(crate) begun: usize,
}

/// Mounts what a power cut left, and says what is wrong.
pub(crate) fn check(
    berth: &Berth, image: &Image, recording: &Recording, bounds: Bounds, random: &mut Random,
) -> Result<(), String> {
    let disk = SimulatedDisk::holding(image);
    let blobs = check_mount(berth, &disk, &image.remote, recording, bounds, random)
        .map_err(|why| format!("first mount: {why}"))?;
    if random.below(CUT_AGAIN) == 0 {
        let log = disk.take_log();
        let mut tracker = Tracker::of(image);
        for step in &log[..random.below(log.len() + 1)] {
            tracker.apply(step);
        }
        let modes = [Mode::Drop, Mode::Keep, Mode::Subset, Mode::Torn];
        let mode = modes[random.below(modes.len())];
        let again = tracker.image(mode, random);
        let disk = SimulatedDisk::holding(&again);
        check_mount(berth, &disk, &again.remote, recording, bounds, random)
            .map_err(|why| format!("cut again while it was recovered ({mode:?}): {why}"))?;
    }
    if random.below(MOUNTED_AGAIN) == 0 {
        check_mount(berth, &disk, &blobs, recording, bounds, random)
            .map_err(|why| format!("second mount: {why}"))?;
    }
    rows_go_on(berth, &disk, &blobs, recording).map_err(|why| format!("going on: {why}"))
}

/// Whoever appended rows goes on, wherever the last append ended.
fn rows_go_on(
    berth: &Berth, disk: &SimulatedDisk, blobs: &Arc<Blobs>, recording: &Recording,
) -> Result<(), String> {
    let is_tail = |path: &&String| {
        std::path::Path::new(path).extension().is_some_and(|extension| extension == "tail")
    };
    if recording.history.tree().keys().find(is_tail).is_none() {
        return Ok(());
    }
    let setup = crate::mounted::Setup { ram_bytes: None, ..recording.setup };
    let mut mounted =
        Mounted::open(berth, disk, blobs, setup).map_err(|error| error.to_string())?;
    for (path, named) in mounted.walk()?.iter().filter(|(path, _)| is_tail(path)) {
        let What::File(rows) = &named.what else { continue };
        // Only the workload with side rows has tails in the second layer.
        let row_bytes = if path.contains("/001/") {
            Model::with_side_rows(SIDE_ROW_BYTES).layer_rows(1, 0, 1).len()
        } else {
            Model::small().row_bytes()
        };
        // To the end of the row that a cut may have left in part.
        let rest = vec![1; row_bytes - rows.len() % row_bytes];
        mounted
            .append(path, &rest)
            .map_err(|error| format!("{path}, {} bytes: {error}", rows.len()))?;
    }
    mounted.commit_and_close().map_err(|error| format!("unmounting: {error}"))?;
    drop(mounted);
    check_fsck(berth, disk, "after rows were appended")
}

fn check_mount(
    berth: &Berth, disk: &SimulatedDisk, blobs: &Arc<Blobs>, recording: &Recording, bounds: Bounds,
    random: &mut Random,
) -> Result<Arc<Blobs>, String> {
    check_fsck(berth, disk, "before the mount")?;
    let setup = crate::mounted::Setup { ram_bytes: None, ..recording.setup };
    let mut mounted =
        Mounted::open(berth, disk, blobs, setup).map_err(|error| error.to_string())?;
    let left = disk.list(DiskDirectory::Staging).map_err(|error| error.to_string())?;
    if !left.is_empty() {
        return Err(format!("what was being made is still there: {left:?}"));
    }
    let survey = || kvfs::fs::survey(&mounted.fs).map_err(|error| format!("survey: {error}"));
    let is_surveyed = random.is_true();
    if is_surveyed {
        survey()?;
    }
    let seen = mounted.walk()?;
    recording.history.check(&seen, bounds.acknowledged, bounds.begun)?;
    if !is_surveyed {
        survey()?;
    }
    kvfs::fs::sweep_after_crash(&mounted.fs).map_err(|error| format!("sweep: {error}"))?;
    mounted.write("files/afterwards", b"works").map_err(|error| format!("a write: {error}"))?;
    mounted.unlink("files/afterwards").map_err(|error| format!("a removal: {error}"))?;
    mounted.commit_and_close().map_err(|error| format!("unmounting: {error}"))?;
    let blobs = mounted.blobs();
    drop(mounted);
    check_fsck(berth, disk, "after the mount")?;
    Ok(blobs)
}

fn check_fsck(berth: &Berth, disk: &SimulatedDisk, when: &str) -> Result<(), String> {
    let store = berth.store(disk);
    let report = fsck::run(&store, &FsckOptions::default(), &|_, _| {})
        .map_err(|error| format!("fsck {when}: {error}"))?;
    // What comes back from its encoded or remote copy is not synced: where it is not whole, that
    // copy takes its place again.
    let found = report.findings.iter().map(|finding| finding.what.as_str());
    let found: Vec<&str> = found.filter(|what| !what.ends_with("takes its place")).collect();
    if found.is_empty() { Ok(()) } else { Err(format!("fsck {when}: {}", found.join("; "))) }
}

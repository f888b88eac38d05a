//! Pages of the remote are fetched before a scan reaches them, those of the disk are read into the
//! page cache, and hardly any others.

use std::path::PathBuf;
use std::process::Command;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::common::sys::{assert_errno, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, forks};
use crate::place::{Place, kvfs, printed, tier};

in_both_modes!(
    a_full_scan_finds_its_pages_here,
    a_scan_of_a_part_fetches_little_more,
    opens_without_an_order_fetch_nothing_else,
    a_scan_goes_on_after_pages_could_not_be_fetched,
    a_scan_of_the_disk_is_read_ahead_until_it_stops,
);

/// A page of 8 KiB takes 4 ms.
const BANDWIDTH: [&str; 2] = ["--remote-bandwidth", "2M"];
const LAYERS: u32 = 2;

/// A sequence that only the remote has.
struct Sequence {
    place: Place,
    model: Model,
    ranges: u64,
    /// By layer, then by range.
    pages: Vec<(PathBuf, Vec<u8>)>,
}

impl Sequence {
    fn new(mode: Mode, ranges: u64) -> Sequence {
        let place = Place::new(mode, &BANDWIDTH);
        let model = Model::small();
        model.install(&place.mount);
        let mut pages = Vec::new();
        for (layer, range) in (0..LAYERS).flat_map(|layer| (0..ranges).map(move |r| (layer, r))) {
            let start = range * u64::from(model.page_tokens());
            let path = model.page_path(&place.mount, "a", layer, start);
            let bytes = model.page(layer, start, start + u64::from(layer));
            write_and_close(&path, &bytes).unwrap();
            pages.push((path, bytes));
        }
        let sequence = Sequence { place, model, ranges, pages };
        let directory = sequence.model.sequence(&sequence.place.mount, "a");
        printed(&kvfs(&["evict"], &[&directory]));
        assert!(sequence.pages.iter().all(|(path, _)| tier(path) == "remote"));
        // The records say so a moment before the files go.
        let pages = sequence.pages.len().to_string();
        eventually("the files to go", || {
            (sequence.place.mount.status("remote_only_objects") == pages).then_some(())
        });
        sequence
    }

    fn read(&self, layer: u64, range: u64) {
        let index = usize::try_from(layer * self.ranges + range).unwrap();
        let (path, bytes) = &self.pages[index];
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }

    fn fetched(&self) -> u64 {
        self.place.mount.metric("kvfs_moves_total{from=\"remote\",to=\"ssd\"}")
    }

    fn outcome(&self, outcome: &str) -> u64 {
        let name = format!("kvfs_prefetch_pages_total{{outcome=\"{outcome}\"}}");
        self.place.mount.metric(&name)
    }
}

/// Lets everything come that was asked for: longer than sixteen pages take.
fn let_arrive() {
    std::thread::sleep(std::time::Duration::from_millis(300));
}

fn a_full_scan_finds_its_pages_here(mode: Mode) {
    let sequence = Sequence::new(mode, 60);
    for (layer, range) in (0..2).flat_map(|layer| (0..60).map(move |range| (layer, range))) {
        sequence.read(layer, range);
    }
    assert_eq!(sequence.fetched(), 120, "each page is fetched once");
    let [used, late] = ["used", "late"].map(|outcome| sequence.outcome(outcome));
    let vain = ["unused", "failed"].map(|outcome| sequence.outcome(outcome)).iter().sum::<u64>();
    eprintln!("{mode:?}: {used} used, {late} late, {vain} in vain");
    assert!(used + late >= 60, "{used} used, {late} late");
    assert!((used + late) * 100 >= (used + late + vain) * 95, "{vain} in vain");
    assert_eq!(sequence.place.mount.status("errors"), "0");
}

fn a_scan_of_a_part_fetches_little_more(mode: Mode) {
    let sequence = Sequence::new(mode, 100);
    for range in 0..10 {
        sequence.read(0, range);
    }
    let_arrive();
    let fetched = sequence.fetched();
    assert!((11..=12).contains(&fetched), "{fetched} pages fetched for 10");
    // As many of the next layer: there nothing beyond is fetched.
    for range in 0..10 {
        sequence.read(1, range);
    }
    let_arrive();
    assert!(sequence.fetched() <= fetched + 10 + 1, "{} pages fetched", sequence.fetched());
}

fn opens_without_an_order_fetch_nothing_else(mode: Mode) {
    let sequence = Sequence::new(mode, 50);
    for range in [30, 7, 44, 21, 2] {
        sequence.read(0, range);
    }
    let_arrive();
    assert_eq!(sequence.fetched(), 5);
}

fn a_scan_goes_on_after_pages_could_not_be_fetched(mode: Mode) {
    let sequence = Sequence::new(mode, 30);
    for range in 0..10 {
        sequence.read(0, range);
    }
    let blobs = sequence.place.remote.join("blobs");
    let hidden = sequence.place.remote.join("hidden");
    rename(&blobs, &hidden).unwrap();
    let path = &sequence.pages[25].0;
    assert_errno(std::fs::read(path), libc::EIO);
    for range in 15..20 {
        assert_errno(std::fs::read(&sequence.pages[range].0), libc::EIO);
    }
    rename(&hidden, &blobs).unwrap();
    for range in 10..30 {
        sequence.read(0, range);
    }
    assert_eq!(tier(path), "ssd");
}

/// How many of the store's objects are in the page cache, as far as they can be.
fn cached(mount: &Mount) -> usize {
    let mut fincore = Command::new("fincore");
    fincore.args(["--noheadings", "--raw", "--bytes", "--output", "RES"]).args(mount.objects());
    let output = forks::output(&mut fincore);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter(|line| line.trim() != "0").count()
}

fn a_scan_of_the_disk_is_read_ahead_until_it_stops(mode: Mode) {
    crate::require!(fincore);
    let mut mount = Mount::with_own_files(mode, &["--ram", "16M"]);
    let model = Model::small();
    model.install(&mount);
    let paths: Vec<PathBuf> = (0..60)
        .map(|range| {
            let start = range * u64::from(model.page_tokens());
            let path = model.page_path(&mount, "a", 0, start);
            write_and_close(&path, &model.page(0, start, start)).unwrap();
            path
        })
        .collect();
    sync_directory(mount.path()).unwrap();
    mount.remount();
    for object in mount.objects() {
        let file = std::fs::File::open(object).unwrap();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    }
    // It is read at the first open of a page, to know which layer stands for all.
    std::fs::read(model.directory(&mount).join("manifest.json")).unwrap();
    let before = cached(&mount);
    let outcome = |outcome: &str| {
        mount.metric(&format!("kvfs_readahead_pages_total{{outcome=\"{outcome}\"}}"))
    };
    // A fifth of what was opened is ahead, and nothing more once the reader has stopped.
    for path in &paths[..30] {
        std::fs::read(path).unwrap();
    }
    eventually("six pages to be ahead", || (cached(&mount) >= before + 36).then_some(()));
    let_arrive();
    assert_eq!(cached(&mount), before + 36);
    for path in &paths[30..] {
        std::fs::read(path).unwrap();
    }
    let [used, late, dropped, failed] = ["used", "late", "dropped", "failed"].map(outcome);
    assert!(used + late + dropped == 59 && failed == 0, "{used} {late} {dropped} {failed}");
    assert!(used >= 6, "{used} of 59");
    assert_eq!(mount.metric("kvfs_prefetch_pages_total{outcome=\"used\"}"), 0);
}

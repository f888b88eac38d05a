//! Load for as long as one likes: writers, appenders of rows, a directory with a limit, engines that save slots and
//! register blocks, readers, mappings, moves between tiers, collections of garbage and kills of the daemon, all at
//! once on a store far smaller than what is written.
//!
//! After each kill everything is compared with what the writers know ([`ledger`], [`rows`], [`limits`], [`slots`],
//! [`blocks`]), readers compare what they read at any time ([`content`]), and at the end nothing may be left over:
//! descriptors, memory, copies in the RAM tier, staged files, what was begun and given up. `KVFS_SOAK_SECONDS` (40) says how long; `mount-scripts/soak.sh`
//! runs an hour.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "what was done is part of the result")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod blocks;
mod content;
mod leaks;
mod ledger;
mod limits;
mod rows;
mod slots;
mod work;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blocks::Blocks;
use common::mount::scratch_directory;
use common::random::Random;
use common::sys::be_idle;
use common::{Mode, Model, Mount};
use ledger::Ledger;
use limits::Limits;
use rows::Rows;
use slots::Slots;
use work::Worker;

/// A soak of so long comes to everything, however busy the machine is.
const SAYS_ALL: Duration = Duration::from_secs(120);

const WRITERS: usize = 3;
const READERS: usize = 2;
const SAVERS: usize = 2;
/// What one thread does alone.
const ALONE: [fn(Worker); 5] = [
    Worker::append,
    Worker::exceed,
    Worker::lay_out,
    Worker::read_blocks,
    Worker::move_and_collect,
];
/// Time between kills.
const LIFE: Duration = Duration::from_secs(7);

/// What the threads share.
pub(crate) struct Soak {
    /// Held for reading while somebody works; for writing while everything is compared.
    pub(crate) pause: RwLock<()>,
    pub(crate) ledger: Ledger,
    pub(crate) rows: Rows,
    pub(crate) limits: Limits,
    pub(crate) slots: Slots,
    pub(crate) blocks: Blocks,
    pub(crate) is_over: AtomicBool,
    pub(crate) counts: work::Counts,
}

impl Soak {
    /// While nobody works: everything is what the workers know.
    #[track_caller]
    fn compare_all(&self) {
        self.ledger.compare_all();
        self.rows.compare_all();
        self.limits.compare_all();
        self.slots.compare_all();
    }

    fn remove_all(&self) {
        self.ledger.remove_all();
        self.rows.remove_all();
        self.limits.remove_all();
        self.slots.remove_all();
        self.blocks.remove_all();
    }

    /// Nothing was refused but what was given up half-written. Each copy of its descriptor that is closed is
    /// a line, also those that a program gets that starts meanwhile.
    #[track_caller]
    fn assert_no_errors(&self, mount: &Mount) {
        let _everybody_waits = self.pause.write().unwrap();
        let mut errors = mount.errors();
        assert_eq!(mount.status_number("errors"), errors.len() as u64, "there are more than shown");
        let is_half = |line: &String| {
            line.contains("/slots/slot-") && line.contains("ends at byte")
                || line.contains("/blocks/") && line.contains("EOF while parsing")
        };
        errors.retain(|line| !is_half(line));
        assert!(errors.is_empty(), "{errors:?}");
    }
}

#[test]
fn nothing_is_lost_and_nothing_left_over() {
    require!(fuse, root);
    be_idle();
    let seconds = std::env::var("KVFS_SOAK_SECONDS").map_or(40, |text| text.parse().unwrap());
    let seed = std::env::var("KVFS_SEED").map_or(1, |text| text.parse().unwrap());
    let remote = scratch_directory();
    let place = remote.path().to_str().unwrap();
    let mut mount = Mount::with_options(
        Mode::Passthrough,
        &["--remote", place, "--ram", "16M", "--ssd", "16M", "--cold", "zstd:1"],
    );
    mount.may_be_slow("it runs while everything else does, and its daemon at idle priority");
    let model = Model::small();
    model.install(&mount);
    let before = leaks::Held::now(&mount);
    let room = leaks::Room::now(&mount, &model);
    let soak = Arc::new(Soak {
        pause: RwLock::new(()),
        ledger: Ledger::new(&mount, &model),
        rows: Rows::new(&mount, &model),
        limits: Limits::new(&mount),
        slots: Slots::new(&mount, &model),
        blocks: Blocks::new(&mount, &model),
        is_over: AtomicBool::new(false),
        counts: work::Counts::default(),
    });
    let begun = Instant::now();
    let threads = start_workers(&soak, &mount, seed);
    let mut kills = 0;
    let total = Duration::from_secs(seconds);
    // The last life is the longest: it must end with as much as it began with.
    while begun.elapsed() + LIFE * 2 < total {
        std::thread::sleep(LIFE);
        soak.assert_no_errors(&mount);
        // Everybody is at it again.
        std::thread::sleep(Duration::from_millis(20));
        mount.kill();
        // Who works meanwhile gets errors.
        std::thread::sleep(Duration::from_millis(20));
        let everybody_waits = soak.pause.write().unwrap();
        mount.mount();
        soak.compare_all();
        soak.blocks.forget_all();
        kills += 1;
        drop(everybody_waits);
        assert!(threads.iter().all(|thread| !thread.is_finished()), "somebody gave up");
    }
    std::thread::sleep(total.saturating_sub(begun.elapsed()));
    soak.is_over.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    soak.compare_all();
    println!("soak: {} s, {kills} kills, seed {seed}: {}", seconds, soak.counts);
    // It runs while the cores have nothing else to do: beside other tests a short one does not come to what is rare.
    if total >= SAYS_ALL {
        soak.counts.assert_something_of_everything();
    }
    soak.limits.assert_kept(soak.counts.limited.load(Ordering::Relaxed));
    soak.assert_no_errors(&mount);
    soak.remove_all();
    leaks::assert_nothing_left(&mount, &model, &before, &room);
}

fn start_workers(soak: &Arc<Soak>, mount: &Mount, seed: u64) -> Vec<JoinHandle<()>> {
    (0..WRITERS + READERS + SAVERS + ALONE.len())
        .map(|number| {
            let random = Random::of(seed * 1000 + number as u64);
            let worker = Worker { soak: Arc::clone(soak), root: mount.path().to_owned(), random };
            std::thread::Builder::new()
                .name(format!("worker-{number}"))
                .spawn(move || match number {
                    number if number < WRITERS => worker.write(number),
                    number if number < WRITERS + READERS => worker.read(),
                    number if number < WRITERS + READERS + SAVERS => {
                        worker.save(number - WRITERS - READERS);
                    }
                    number => ALONE[number - WRITERS - READERS - SAVERS](worker),
                })
                .unwrap()
        })
        .collect()
}

//! Load for as long as one likes: writers, appenders of rows, a directory with a limit, readers, mappings, moves between tiers, collections of garbage
//! and kills of the daemon, all at once on a store far smaller than what is written.
//!
//! After each kill everything is compared with what the writers know ([`ledger`], [`rows`], [`limits`]), readers compare what
//! they read at any time ([`content`]), and at the end nothing may be left over: descriptors, memory,
//! copies in the RAM tier, staged files. `KVFS_SOAK_SECONDS` (40) says how long; `mount-scripts/soak.sh`
//! runs an hour.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "what was done is part of the result")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod content;
mod leaks;
mod ledger;
mod limits;
mod rows;
mod work;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use common::mount::scratch_directory;
use common::random::Random;
use common::sys::be_idle;
use common::{Mode, Model, Mount};
use ledger::Ledger;
use limits::Limits;
use rows::Rows;
use work::Worker;

const WRITERS: usize = 3;
const READERS: usize = 2;
/// Time between kills.
const LIFE: Duration = Duration::from_secs(7);

/// What the threads share.
pub(crate) struct Soak {
    /// Held for reading while somebody works; for writing while everything is compared.
    pub(crate) pause: RwLock<()>,
    pub(crate) ledger: Ledger,
    pub(crate) rows: Rows,
    pub(crate) limits: Limits,
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
    let soak = Arc::new(Soak {
        pause: RwLock::new(()),
        ledger: Ledger::new(&mount, &model),
        rows: Rows::new(&mount, &model),
        limits: Limits::new(&mount),
        is_over: AtomicBool::new(false),
        counts: work::Counts::default(),
    });
    let begun = Instant::now();
    let threads: Vec<_> = (0..=WRITERS + READERS + 2)
        .map(|number| {
            let random = Random::of(seed * 1000 + number as u64);
            let worker = Worker { soak: Arc::clone(&soak), root: mount.path().to_owned(), random };
            std::thread::Builder::new()
                .name(format!("worker-{number}"))
                .spawn(move || match number {
                    number if number < WRITERS => worker.write(number),
                    number if number < WRITERS + READERS => worker.read(),
                    number if number == WRITERS + READERS => worker.append(),
                    number if number == WRITERS + READERS + 1 => worker.exceed(),
                    _ => worker.move_and_collect(),
                })
                .unwrap()
        })
        .collect();
    let mut kills = 0;
    let total = Duration::from_secs(seconds);
    // The last life is the longest: it must end with as much as it began with.
    while begun.elapsed() + LIFE * 2 < total {
        std::thread::sleep(LIFE);
        assert_eq!(mount.status("errors"), "0", "{:?}", mount.errors());
        mount.kill();
        // Who works meanwhile gets errors.
        std::thread::sleep(Duration::from_millis(20));
        let everybody_waits = soak.pause.write().unwrap();
        mount.mount();
        soak.compare_all();
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
    soak.counts.assert_something_of_everything();
    soak.limits.assert_kept(soak.counts.limited.load(Ordering::Relaxed));
    assert_eq!(mount.status("errors"), "0", "{:?}", mount.errors());
    soak.ledger.remove_all();
    soak.rows.remove_all();
    soak.limits.remove_all();
    leaks::assert_nothing_left(&mount, &before);
}

//! The protocols on which durability rests, as small models of which every interleaving is tried
//! (`stateright`).
//!
//! Each model names its rules. With all of them nothing is lost in any order of steps, crashes
//! included; without any one of them the checker must find a loss, or the model proves nothing. How
//! several stores share a remote that is cleaned up is modelled beside the code that does it
//! (`crates/remote/src/gc/model.rs`).
//!
//! Of two small concurrent cores the code itself is run under `shuttle`, which decides at each lock which
//! thread goes on ([`sharing`], [`leaving`]). `KVFS_INTERLEAVINGS` says how often, `KVFS_SEED` in which orders.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "how many states were visited is part of the result")]

mod adoption;
mod leaving;
mod publish;
mod residency;
mod sharing;
mod tier;

/// What `crates/storage/src/sync.rs` is in the product.
mod sync {
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
}

use kvfs::store;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};
use stateright::{Checker, Model};

/// Points at which another thread goes on that a fault may need: most need two or three.
const CHANGES_OF_THREAD: usize = 4;

/// What must hold in every state.
const PROMISE: &str = "nothing is lost";

/// Visits every state of the model with all rules, and of the models that lack one.
fn check_with_and_without_each_rule<M, R>(name: &str, rules: &[R], model: impl Fn(Option<R>) -> M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + Send + Sync + PartialEq,
    M::Action: Clone + std::fmt::Debug + PartialEq + Send + Sync,
    R: Copy + std::fmt::Debug,
{
    let checker = model(None).checker().spawn_bfs().join();
    checker.assert_properties();
    println!("{name}: {} states, nothing is lost", checker.unique_state_count());
    for &rule in rules {
        let checker = model(Some(rule)).checker().spawn_bfs().join();
        let found = checker.discovery(PROMISE);
        let steps = found.unwrap_or_else(|| panic!("{name}: nothing is lost without {rule:?}"));
        println!("{name} without {rule:?}: {:?}", steps.into_actions());
    }
}

/// Runs something in so many random orders, and in as many with few changes of thread.
fn try_interleavings(name: &str, act: impl Fn() + Send + Sync + Clone + 'static) {
    let setting =
        |name, default| std::env::var(name).map_or(default, |text| text.parse().expect("a number"));
    let (rounds, seed) = (setting("KVFS_INTERLEAVINGS", 1_000), setting("KVFS_SEED", 1));
    let rounds = usize::try_from(rounds).expect("they fit");
    println!("{name}: 2 x {rounds} interleavings, KVFS_SEED={seed}");
    let random = RandomScheduler::new_from_seed(seed, rounds);
    Runner::new(random, Config::default()).run(act.clone());
    let few_changes = PctScheduler::new_from_seed(seed, CHANGES_OF_THREAD, rounds);
    Runner::new(few_changes, Config::default()).run(act);
}

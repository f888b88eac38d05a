//! The protocols on which durability rests, as small models of which every interleaving is tried
//! (`stateright`).
//!
//! Each model names its rules. With all of them nothing is lost in any order of steps, crashes
//! included; without any one of them the checker must find a loss, or the model proves nothing. How
//! several stores share a remote that is cleaned up is modelled beside the code that does it
//! (`src/tier/remote/gc/model.rs`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "how many states were visited is part of the result")]

mod publish;
mod residency;

use stateright::{Checker, Model};

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

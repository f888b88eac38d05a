//! The protocol of [`super`] as a small model, every interleaving of which is tried.
//!
//! One object, old garbage at the start; two stores that may hold and publish it, once each; one
//! collector. Time passes in steps between any two actions. The grace period is 8 steps, so the
//! quarters are 2 each. Without a rule the model must find the loss, or it proves nothing.

use std::collections::HashSet;

const GRACE: u8 = 8;
const QUARTER: u8 = GRACE / 4;
/// Enough for a hold, a publication, a scan and a deletion to be as far apart as the rules allow,
/// and beyond.
const TIME_MAX: u8 = GRACE + 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// An object that is found and older than a quarter is refreshed.
    Refresh,
    /// A manifest follows within a quarter.
    PublishInTime,
    /// Garbage is deleted within a quarter of the scan.
    CollectInTime,
    /// Age is tested at the deletion and not only at the scan.
    TestAtDeletion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Store {
    Idle,
    Held { since: u8 },
    Relies,
    GaveUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Collector {
    Idle,
    /// Will delete the object, if it may.
    Scanned {
        at: u8,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    time: u8,
    /// When the object was modified, in time + `GRACE`; None if it is not there.
    object: Option<u8>,
    stores: [Store; 2],
    collector: Collector,
}

impl World {
    fn age(&self) -> Option<u8> {
        self.object.map(|modified| self.time + GRACE - modified)
    }

    fn is_lost(&self) -> bool {
        self.object.is_none() && self.stores.contains(&Store::Relies)
    }

    fn next(&self, broken: Option<Rule>) -> Vec<World> {
        let mut worlds = Vec::new();
        if self.time < TIME_MAX {
            worlds.push(World { time: self.time + 1, ..*self });
        }
        for index in 0..self.stores.len() {
            let mut world = *self;
            world.stores[index] = match self.stores[index] {
                Store::Idle => {
                    let is_fresh = self
                        .age()
                        .is_some_and(|age| age < QUARTER || broken == Some(Rule::Refresh));
                    if !is_fresh {
                        world.object = Some(self.time + GRACE);
                    }
                    Store::Held { since: self.time }
                }
                Store::Held { since } => {
                    let in_time =
                        self.time - since < QUARTER || broken == Some(Rule::PublishInTime);
                    if in_time { Store::Relies } else { Store::GaveUp }
                }
                done => done,
            };
            worlds.push(world);
        }
        worlds.push(self.collect(broken));
        worlds
    }

    fn collect(&self, broken: Option<Rule>) -> World {
        let mut world = *self;
        let is_old = self.age().is_some_and(|age| age >= GRACE);
        world.collector = match self.collector {
            Collector::Idle => {
                let is_named = self.stores.contains(&Store::Relies);
                if is_old && !is_named {
                    Collector::Scanned { at: self.time }
                } else {
                    Collector::Idle
                }
            }
            Collector::Scanned { at } => {
                let in_time = self.time - at < QUARTER || broken == Some(Rule::CollectInTime);
                if in_time && (is_old || broken == Some(Rule::TestAtDeletion)) {
                    world.object = None;
                }
                Collector::Idle
            }
        };
        world
    }
}

/// Whether some interleaving loses an object that a store relies on.
fn loses(broken: Option<Rule>) -> bool {
    let start =
        World { time: 0, object: Some(0), stores: [Store::Idle; 2], collector: Collector::Idle };
    let (mut seen, mut open) = (HashSet::from([start]), vec![start]);
    while let Some(world) = open.pop() {
        if world.is_lost() {
            return true;
        }
        open.extend(world.next(broken).into_iter().filter(|next| seen.insert(*next)));
    }
    assert!(seen.len() > 1000, "{} worlds are no exploration", seen.len());
    false
}

#[test]
fn no_interleaving_loses_an_object_that_a_store_relies_on() {
    assert!(!loses(None));
}

#[test]
fn each_rule_is_needed() {
    for rule in [Rule::Refresh, Rule::PublishInTime, Rule::CollectInTime, Rule::TestAtDeletion] {
        assert!(loses(Some(rule)), "{rule:?}");
    }
}

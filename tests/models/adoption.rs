//! Two daemons on one remote that a third cleans up: one writes a page, the other takes it over or
//! writes the same bytes, and each drops its own copy once its own manifest of names counts.
//!
//! Times are ages; [`Action::Tick`] makes everything older by an eighth of the grace period. A request to
//! delete may arrive late, but within the tick in which it was sent: that is the time of settling, after
//! which an object that was held is read back.

use stateright::{Model, Property};

use super::{PROMISE, check_with_and_without_each_rule};

const GRACE: u8 = 8;
const QUARTER: u8 = GRACE / 4;
const SETTLING: u8 = 1;
const DAEMONS: usize = 2;
const WRITER: usize = 0;
const OTHER: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// An object that is found and older than a quarter is refreshed.
    Refresh,
    /// It is read back after a request to delete it that was under way has arrived.
    ReadBack,
    /// A manifest that comes more than a quarter after that does not count.
    PublishInTime,
    /// Garbage is deleted within a quarter after the manifests were listed.
    CollectInTime,
    /// Age is tested when the request is sent, and not only when garbage is found.
    TestAtDeletion,
    /// The manifests of all stores are read.
    ReadAll,
    /// A page of another store may leave again after this store's own manifest names it.
    NameItOneself,
    /// What was held and not named before a crash is held again.
    BelieveNothingHeld,
    /// A name that went stays in the manifest until the next one: nobody deletes for his own part.
    LeaveItToTheCollector,
}

const RULES: [Rule; 9] = [
    Rule::Refresh,
    Rule::ReadBack,
    Rule::PublishInTime,
    Rule::CollectInTime,
    Rule::TestAtDeletion,
    Rule::ReadAll,
    Rule::NameItOneself,
    Rule::BelieveNothingHeld,
    Rule::LeaveItToTheCollector,
];

/// How far a daemon relies on the remote's copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Record {
    None,
    /// Told by the other store; the bytes have not come, and the page counts as absent if they do
    /// not.
    Foreign,
    Held {
        age: u8,
        is_read_back: bool,
    },
    Named,
    Only,
}

#[expect(clippy::struct_excessive_bools, reason = "they are independent")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Daemon {
    has_name: bool,
    has_bytes: bool,
    record: Record,
    /// Whether the snapshot that is being published names the object.
    publishing: Option<bool>,
    /// Whether the newest manifest does.
    manifest: bool,
    /// And was in time.
    counts: bool,
}

impl Daemon {
    const WITHOUT: Daemon = Daemon {
        has_name: false,
        has_bytes: false,
        record: Record::None,
        publishing: None,
        manifest: false,
        counts: false,
    };
    const WITH: Daemon = Daemon { has_name: true, has_bytes: true, ..Daemon::WITHOUT };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Collector {
    Idle,
    /// Has listed the manifests, and read those of so many stores.
    Reading {
        age: u8,
        stores: usize,
    },
    /// Will ask for the deletion, if it may.
    Found {
        age: u8,
    },
    /// The request is under way.
    Asked,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// Age of the remote's copy.
    remote: Option<u8>,
    daemons: [Daemon; DAEMONS],
    collector: Collector,
    /// The other store has read a manifest that names the page.
    told: bool,
    crashed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    Adopt,
    Hold(usize),
    ReadBack(usize),
    BeginManifest(usize),
    EndManifest(usize),
    Leave(usize),
    Fetch(usize),
    Unlink(usize),
    Crash(usize),
    Collect,
}

struct Remote {
    without: Option<Rule>,
}

impl Remote {
    fn has(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// Whether the action is possible, and what it does.
    fn act(&self, state: &mut State, action: Action) -> Option<()> {
        match action {
            Action::Tick => tick(state)?,
            Action::Adopt => {
                let daemon = &mut state.daemons[OTHER];
                if !state.told || daemon.has_name {
                    return None;
                }
                (daemon.has_name, daemon.record) = (true, Record::Foreign);
            }
            Action::Hold(number) => self.hold(state, number)?,
            Action::ReadBack(number) => {
                let daemon = &mut state.daemons[number];
                let Record::Held { age, is_read_back: false } = daemon.record else { return None };
                if age < SETTLING && self.has(Rule::ReadBack) {
                    return None;
                }
                let is_there = state.remote.is_some();
                daemon.record =
                    if is_there { Record::Held { age, is_read_back: true } } else { Record::None };
            }
            Action::BeginManifest(number) => {
                let daemon = &mut state.daemons[number];
                let is_named = daemon.has_name && daemon.record != Record::None;
                if daemon.publishing.replace(is_named).is_some() {
                    return None;
                }
            }
            Action::EndManifest(number) => self.end_manifest(state, number)?,
            Action::Leave(number) => {
                let daemon = &mut state.daemons[number];
                if daemon.record != Record::Named || daemon.publishing.is_some() {
                    return None;
                }
                (daemon.has_bytes, daemon.record) = (false, Record::Only);
            }
            Action::Fetch(number) => self.fetch(state, number)?,
            Action::Unlink(number) => {
                let daemon = &mut state.daemons[number];
                if !daemon.has_name {
                    return None;
                }
                let Daemon { publishing, manifest, counts, .. } = *daemon;
                *daemon = Daemon { publishing, manifest, counts, ..Daemon::WITHOUT };
                if !self.has(Rule::LeaveItToTheCollector) {
                    state.remote = None;
                }
            }
            Action::Crash(number) => {
                if std::mem::replace(&mut state.crashed, true) {
                    return None;
                }
                let daemon = &mut state.daemons[number];
                daemon.publishing = None;
                if let Record::Held { is_read_back, .. } = daemon.record {
                    // The moment at which it was held is forgotten.
                    let believed = Record::Held { age: 0, is_read_back };
                    let is_forgotten = self.has(Rule::BelieveNothingHeld);
                    daemon.record = if is_forgotten { Record::None } else { believed };
                }
            }
            Action::Collect => self.collect(state)?,
        }
        Some(())
    }

    fn hold(&self, state: &mut State, number: usize) -> Option<()> {
        let daemon = &mut state.daemons[number];
        let may = daemon.record == Record::None && daemon.publishing.is_none();
        if !may || !daemon.has_bytes {
            return None;
        }
        let is_young = |age: &u8| *age < QUARTER || !self.has(Rule::Refresh);
        state.remote = state.remote.filter(is_young).or(Some(0));
        daemon.record = Record::Held { age: 0, is_read_back: false };
        Some(())
    }

    fn end_manifest(&self, state: &mut State, number: usize) -> Option<()> {
        let daemon = &mut state.daemons[number];
        daemon.manifest = daemon.publishing.take()?;
        state.told |= number == WRITER && daemon.manifest;
        daemon.counts &= daemon.manifest;
        if let Record::Held { age, is_read_back: true } = daemon.record
            && daemon.manifest
        {
            let is_in_time = age < QUARTER || !self.has(Rule::PublishInTime);
            daemon.counts |= is_in_time;
            daemon.record = if is_in_time { Record::Named } else { Record::None };
        }
        Some(())
    }

    /// Opening a page that is not here.
    fn fetch(&self, state: &mut State, number: usize) -> Option<()> {
        let daemon = &mut state.daemons[number];
        state.remote?;
        daemon.record = match daemon.record {
            Record::Foreign if self.has(Rule::NameItOneself) => Record::None,
            Record::Foreign | Record::Only => Record::Named,
            _ => return None,
        };
        daemon.has_bytes = true;
        Some(())
    }

    fn collect(&self, state: &mut State) -> Option<()> {
        let is_old = state.remote? >= GRACE;
        state.collector = match state.collector {
            Collector::Idle => Collector::Reading { age: 0, stores: 0 },
            Collector::Reading { age, stores } => {
                let is_read = self.has(Rule::ReadAll) || stores == WRITER;
                let is_last = stores + 1 == DAEMONS;
                if is_read && state.daemons[stores].manifest {
                    Collector::Idle
                } else if !is_last {
                    Collector::Reading { age, stores: stores + 1 }
                } else if is_old {
                    Collector::Found { age }
                } else {
                    Collector::Idle
                }
            }
            Collector::Found { age } => {
                let is_in_time = age < QUARTER || !self.has(Rule::CollectInTime);
                let may = is_in_time && (is_old || !self.has(Rule::TestAtDeletion));
                if may { Collector::Asked } else { Collector::Idle }
            }
            Collector::Asked => {
                state.remote = None;
                Collector::Idle
            }
        };
        Some(())
    }
}

/// Everything grows older, up to the age from which on it makes no difference.
fn tick(state: &mut State) -> Option<()> {
    if state.collector == Collector::Asked {
        return None;
    }
    state.remote = state.remote.map(|age| GRACE.min(age + 1));
    for daemon in &mut state.daemons {
        if let Record::Held { age, .. } = &mut daemon.record {
            *age = QUARTER.min(*age + 1);
        }
    }
    if let Collector::Reading { age, .. } | Collector::Found { age } = &mut state.collector {
        *age = QUARTER.min(*age + 1);
    }
    Some(())
}

impl Model for Remote {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let start = |other, remote| State {
            remote,
            daemons: [Daemon::WITH, other],
            collector: Collector::Idle,
            told: false,
            crashed: false,
        };
        // The remote may have the bytes from long ago, and nobody needs them.
        [None, Some(GRACE)]
            .into_iter()
            .flat_map(|remote| [start(Daemon::WITHOUT, remote), start(Daemon::WITH, remote)])
            .collect()
    }

    fn actions(&self, _: &State, actions: &mut Vec<Action>) {
        actions.extend([Action::Tick, Action::Adopt, Action::Collect]);
        for number in 0..DAEMONS {
            actions.extend([
                Action::Hold(number),
                Action::ReadBack(number),
                Action::BeginManifest(number),
                Action::EndManifest(number),
                Action::Leave(number),
                Action::Fetch(number),
                Action::Unlink(number),
                Action::Crash(number),
            ]);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        self.act(&mut state, action).map(|()| state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(PROMISE, |_, state: &State| {
                state.daemons.iter().all(|daemon| {
                    let needs_bytes = daemon.has_name && daemon.record != Record::Foreign;
                    let has_a_copy = daemon.has_bytes || state.remote.is_some();
                    (has_a_copy || !needs_bytes) && (state.remote.is_some() || !daemon.counts)
                })
            }),
            Property::sometimes("both rely on one copy", |_, state: &State| {
                state.daemons.iter().all(|daemon| daemon.record == Record::Only)
            }),
            Property::sometimes("a page that did not come is gone", |_, state: &State| {
                state.daemons[OTHER].record == Record::Foreign && state.remote.is_none()
            }),
            Property::sometimes("it lives on where it was taken over", |_, state: &State| {
                let [writer, other] = state.daemons;
                !writer.has_name && !writer.manifest && state.told && other.record == Record::Only
            }),
            Property::sometimes("what nobody needs is collected", |_, state: &State| {
                state.remote.is_none()
                    && state.told
                    && state.daemons.iter().all(|daemon| !daemon.has_name && !daemon.manifest)
            }),
        ]
    }
}

#[test]
fn two_daemons_on_one_remote_lose_nothing() {
    check_with_and_without_each_rule("adoption", &RULES, |without| Remote { without });
}

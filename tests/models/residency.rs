//! A file that leaves for the remote and comes back, while it is opened, changed and the daemon dies:
//! the last verified copy never goes.

use stateright::{Model, Property};

use super::{PROMISE, check_with_and_without_each_rule};

/// Times that the file is changed.
const VERSION_MAX: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// What was uploaded and not named before a crash is uploaded again.
    BelieveNothingHeld,
    /// The disk's copy counts until a manifest of names names the remote's.
    NameFirst,
    /// The disk's copy goes after it is durable that it does not count.
    RecordFirst,
    /// When it goes, the record must still say so: somebody may have come to change it.
    LookAgain,
    /// The first change takes the record of the remote copy back, durably.
    ForgetDurably,
}

const RULES: [Rule; 5] = [
    Rule::BelieveNothingHeld,
    Rule::NameFirst,
    Rule::RecordFirst,
    Rule::LookAgain,
    Rule::ForgetDurably,
];

/// How far the remote copy is relied upon; it is of this version of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Record {
    None,
    Held(u8),
    Named(u8),
    Only(u8),
}

#[expect(clippy::struct_excessive_bools, reason = "they are independent")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// What was written last.
    newest: u8,
    /// The version on the disk.
    disk: Option<u8>,
    /// The version that the remote has.
    remote: Option<u8>,
    /// The version that the store's manifest in the remote names.
    manifest: Option<u8>,
    /// In memory.
    record: Record,
    /// In the database.
    durable: Record,
    /// The upload is from this life of the daemon.
    is_fresh: bool,
    is_open: bool,
    /// The disk's copy is about to go.
    is_leaving: bool,
    crashed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Upload,
    PublishNames,
    Collect,
    Mark,
    Commit,
    Remove,
    Fetch,
    OpenToWrite,
    Write,
    Close,
    Crash,
}

const ACTIONS: [Action; 11] = [
    Action::Upload,
    Action::PublishNames,
    Action::Collect,
    Action::Mark,
    Action::Commit,
    Action::Remove,
    Action::Fetch,
    Action::OpenToWrite,
    Action::Write,
    Action::Close,
    Action::Crash,
];

struct Tiers {
    without: Option<Rule>,
}

impl Tiers {
    fn has(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// Whether the action is possible, and what it does.
    fn act(&self, state: &mut State, action: Action) -> Option<()> {
        match (action, state.record) {
            (Action::Upload, Record::None | Record::Held(_)) if !state.is_open => {
                state.remote = Some(state.disk?);
                (state.record, state.is_fresh) = (Record::Held(state.disk?), true);
            }
            (Action::PublishNames, Record::Held(version))
                if state.is_fresh || !self.has(Rule::BelieveNothingHeld) =>
            {
                (state.manifest, state.record) = (Some(version), Record::Named(version));
            }
            // The grace period is over for what no manifest names; it is not while somebody holds it.
            (Action::Collect, _) if state.manifest != state.remote && !state.is_fresh => {
                state.remote = None;
            }
            (Action::Mark, Record::Named(version)) if !state.is_open => {
                (state.record, state.is_leaving) = (Record::Only(version), true);
            }
            (Action::Mark, Record::Held(version)) if !self.has(Rule::NameFirst) => {
                (state.record, state.is_leaving) = (Record::Only(version), true);
            }
            (Action::Commit, record) => state.durable = record,
            (Action::Remove, record) if state.is_leaving => self.remove(state, record)?,
            (Action::Fetch, Record::Named(version) | Record::Only(version)) => {
                if state.disk.is_some() {
                    return None;
                }
                state.disk = Some(state.remote.filter(|found| *found == version)?);
                (state.record, state.is_leaving) = (Record::Named(version), false);
            }
            (Action::OpenToWrite, _) if state.disk.is_some() && !state.is_open => {
                (state.is_open, state.record) = (true, Record::None);
                if self.has(Rule::ForgetDurably) {
                    state.durable = Record::None;
                }
            }
            (Action::Write, _) if state.is_open && state.newest < VERSION_MAX => {
                state.newest += 1;
                state.disk = Some(state.newest);
            }
            (Action::Close, _) if state.is_open => state.is_open = false,
            (Action::Crash, _) if !state.crashed => crash(state),
            _ => return None,
        }
        Some(())
    }

    fn remove(&self, state: &mut State, record: Record) -> Option<()> {
        let still_counts_not = matches!(record, Record::Only(_));
        let is_durable = matches!(state.durable, Record::Only(_));
        state.is_leaving = false;
        if self.has(Rule::LookAgain) && !still_counts_not {
            return Some(());
        }
        if self.has(Rule::RecordFirst) && self.has(Rule::LookAgain) && !is_durable {
            return None;
        }
        state.disk = None;
        Some(())
    }
}

/// The next mount believes the database: a file of which it says that it does not count is garbage.
fn crash(state: &mut State) {
    state.record = state.durable;
    if matches!(state.record, Record::Only(_)) {
        state.disk = None;
    }
    (state.is_fresh, state.is_open, state.is_leaving) = (false, false, false);
    state.crashed = true;
}

impl Model for Tiers {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            newest: 0,
            disk: Some(0),
            remote: None,
            manifest: None,
            record: Record::None,
            durable: Record::None,
            is_fresh: false,
            is_open: false,
            is_leaving: false,
            crashed: false,
        }]
    }

    fn actions(&self, _: &State, actions: &mut Vec<Action>) {
        actions.extend(ACTIONS);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        self.act(&mut state, action).map(|()| state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(PROMISE, |_, state: &State| match (state.disk, state.record) {
                (Some(version), _) => version == state.newest,
                (None, Record::None) => false,
                (None, Record::Held(version) | Record::Named(version) | Record::Only(version)) => {
                    version == state.newest && state.remote == Some(version)
                }
            }),
            Property::sometimes("a file is in the remote alone", |_, state: &State| {
                state.disk.is_none()
            }),
            Property::sometimes("it came back and was changed", |_, state: &State| {
                state.manifest == Some(0) && state.disk == Some(1)
            }),
            Property::sometimes("the changed file is in the remote alone", |_, state: &State| {
                state.disk.is_none() && state.newest == 1
            }),
        ]
    }
}

#[test]
fn the_last_verified_copy_never_goes() {
    check_with_and_without_each_rule("residency", &RULES, |without| Tiers { without });
}

//! Publishing, sharing and removing on one disk.
//!
//! Two writers make pages of equal bytes. Each looks whether an object with these bytes is there
//! already, and then names that one, or its own. Names live in memory until a commit writes them to
//! the database. The machine may lose its power twice.

use stateright::{Model, Property};

use super::{PROMISE, check_with_and_without_each_rule};

const WRITERS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A commit syncs the bytes before it moves them to `objects/`.
    SyncBytes,
    /// It syncs the directory to which it moved them.
    SyncDirectory,
    /// It writes the names to the database last.
    NamesLast,
    /// An object that was found to have the bytes is looked at again when it gets a name.
    LookAgain,
    /// Files of an object go after the commit that wrote that its last name is gone.
    RemoveAfterCommit,
    /// After a crash only files from before it are swept.
    SweepWhatIsOld,
    /// They are judged by the names that were durable when the machine came back.
    SweepByDurableNames,
}

const CRASHES_MAX: u8 = 2;

const RULES: [Rule; 7] = [
    Rule::SyncBytes,
    Rule::SyncDirectory,
    Rule::NamesLast,
    Rule::LookAgain,
    Rule::RemoveAfterCommit,
    Rule::SweepWhatIsOld,
    Rule::SweepByDurableNames,
];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Place {
    #[default]
    Nowhere,
    Staging,
    Objects,
}

/// An object's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    place: Place,
    bytes_synced: bool,
    place_synced: bool,
    /// A power cut took bytes from it.
    torn: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Writer {
    Idle,
    /// It has looked, and found this object.
    Looked(Option<usize>),
    Named,
    Done,
}

/// The object behind each writer's name.
type Names = [Option<usize>; WRITERS];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    SyncBytes,
    Move,
    SyncDirectory,
    WriteNames,
    Remove,
}

const STEPS: [Step; 5] =
    [Step::SyncBytes, Step::Move, Step::SyncDirectory, Step::WriteNames, Step::Remove];

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    files: [File; WRITERS],
    writers: [Writer; WRITERS],
    /// In memory.
    names: Names,
    /// In the database.
    durable: Names,
    /// The names that a commit froze, and how many of its steps are done.
    commit: Option<(Names, usize)>,
    crashes: u8,
    /// As the machine came back: which objects had a file, and which names the database had.
    found: (Names, [bool; WRITERS]),
    /// For each object whether a sweep that has begun may remove its file.
    sweep: Option<[bool; WRITERS]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Look(usize),
    Name(usize),
    Unlink(usize),
    Commit,
    /// A power cut; whether a move that was not synced is lost.
    Crash(bool),
    BeginSweep,
    Sweep(usize),
}

struct Disk {
    without: Option<Rule>,
}

impl Disk {
    fn has(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    fn commit(&self, state: &mut State) {
        let (frozen, done) = state.commit.unwrap_or((state.names, 0));
        let mut steps = STEPS;
        if !self.has(Rule::NamesLast) {
            steps = [steps[3], steps[0], steps[1], steps[2], steps[4]];
        }
        let named = frozen.into_iter().flatten();
        match steps[done] {
            Step::SyncBytes if self.has(Rule::SyncBytes) => {
                named.for_each(|object| state.files[object].bytes_synced = true);
            }
            Step::Move => named
                .filter(|object| state.files[*object].place == Place::Staging)
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|object| state.files[object].place = Place::Objects),
            Step::SyncDirectory if self.has(Rule::SyncDirectory) => {
                named.for_each(|object| state.files[object].place_synced = true);
            }
            Step::WriteNames => state.durable = frozen,
            Step::Remove => {
                for object in 0..WRITERS {
                    if !is_named(&state.names, object) && !is_named(&state.durable, object) {
                        state.files[object].place = Place::Nowhere;
                    }
                }
            }
            Step::SyncBytes | Step::SyncDirectory => {}
        }
        state.commit = (done + 1 < steps.len()).then_some((frozen, done + 1));
    }
}

fn is_named(names: &Names, object: usize) -> bool {
    names.contains(&Some(object))
}

/// What the disk has afterwards, mounted again.
fn crash(state: &mut State, loses_moves: bool) {
    for file in &mut state.files {
        let is_back = file.place == Place::Objects && !file.place_synced && loses_moves;
        if file.place == Place::Staging || is_back {
            *file = File::default();
        }
        file.torn |= file.place == Place::Objects && !file.bytes_synced;
    }
    state.names = state.durable;
    for (writer, name) in state.writers.iter_mut().zip(state.durable) {
        *writer = match (&writer, name) {
            (_, Some(_)) => Writer::Named,
            (Writer::Idle | Writer::Looked(_), None) => Writer::Idle,
            (_, None) => Writer::Done,
        };
    }
    (state.commit, state.sweep) = (None, None);
    state.crashes += 1;
    state.found = (state.durable, state.files.map(|file| file.place == Place::Objects));
}

impl Model for Disk {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            files: [File::default(); WRITERS],
            writers: [Writer::Idle; WRITERS],
            names: [None; WRITERS],
            durable: [None; WRITERS],
            commit: None,
            crashes: 0,
            found: ([None; WRITERS], [false; WRITERS]),
            sweep: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, writer) in state.writers.iter().enumerate() {
            actions.extend(match writer {
                Writer::Idle => Some(Action::Look(number)),
                Writer::Looked(_) => Some(Action::Name(number)),
                Writer::Named => Some(Action::Unlink(number)),
                Writer::Done => None,
            });
        }
        actions.push(Action::Commit);
        if state.crashes < CRASHES_MAX {
            actions.extend([Action::Crash(false), Action::Crash(true)]);
        }
        if state.sweep.is_some() {
            actions.extend((0..WRITERS).map(Action::Sweep));
        } else if state.crashes > 0 {
            actions.push(Action::BeginSweep);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Look(writer) => {
                let twin = (0..WRITERS).find(|object| is_named(&state.names, *object));
                state.writers[writer] = Writer::Looked(twin);
            }
            Action::Name(writer) => {
                let Writer::Looked(twin) = state.writers[writer] else { return None };
                let is_there = |object: &usize| is_named(&state.names, *object);
                let twin = twin.filter(|object| !self.has(Rule::LookAgain) || is_there(object));
                if twin.is_none() {
                    state.files[writer].place = Place::Staging;
                }
                state.names[writer] = Some(twin.unwrap_or(writer));
                state.writers[writer] = Writer::Named;
            }
            Action::Unlink(writer) => {
                let object = state.names[writer].take()?;
                state.writers[writer] = Writer::Done;
                if !self.has(Rule::RemoveAfterCommit) && !is_named(&state.names, object) {
                    state.files[object].place = Place::Nowhere;
                }
            }
            Action::Commit => self.commit(&mut state),
            Action::Crash(loses_moves) => crash(&mut state, loses_moves),
            Action::BeginSweep => {
                let (durable, was_there) = &state.found;
                let by_durable = self.has(Rule::SweepByDurableNames);
                let names = if by_durable { durable } else { &state.names };
                let may_go = |object: usize| {
                    let counts = was_there[object] || !self.has(Rule::SweepWhatIsOld);
                    counts && !is_named(names, object)
                };
                state.sweep = Some(std::array::from_fn(may_go));
            }
            Action::Sweep(object) => {
                if !state.sweep?[object] || state.files[object].place != Place::Objects {
                    return None;
                }
                state.files[object].place = Place::Nowhere;
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(PROMISE, |_, state: &State| {
                let has_bytes = |object: usize| {
                    let file = state.files[object];
                    file.place != Place::Nowhere && !file.torn
                };
                state.names.into_iter().flatten().all(has_bytes)
            }),
            Property::sometimes("two names share an object", |_, state: &State| {
                state.names[0].is_some() && state.names[0] == state.names[1]
            }),
            Property::sometimes("a name survives a crash", |_, state: &State| {
                state.crashes > 0 && state.durable[0].is_some()
            }),
            Property::sometimes("a crash leaves garbage", |_, state: &State| {
                state.sweep.is_some_and(|may_go| may_go[0])
            }),
        ]
    }
}

#[test]
fn no_name_is_without_its_bytes() {
    check_with_and_without_each_rule("publish", &RULES, |without| Disk { without });
}

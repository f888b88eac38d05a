//! The order by the distance between uses: LIRS.
//!
//! Each object is in one of these states:
//!
//! ```text
//! hot       two uses close together; most of the budget belongs to them
//! cold      resident, but no such uses: first to be evicted
//! absent    not resident; remembered, to see whether it is used again soon
//! ```
//!
//! The *history* holds hot objects and whatever was used since the least recently used hot one,
//! most recent first; its end is always hot. An object that is used while it is in the history was
//! used more recently than some hot one: it becomes hot in that one's place.

use super::list::List;
use super::names::{Names, State};

/// Share of the budget, in per cent, that hot objects leave to cold ones: room in which new pages
/// wait to be flushed and to show whether they are used again. The paper has 1 %, which of a small
/// budget would not be a page.
const COLD_PERCENT: u64 = 5;

/// Objects that one operation moves behind the others, of those that a large one displaces or that come to the
/// history's end at once: the next operations go on, and nobody waits for a million of them.
const MOVED_AT_ONCE: usize = 64;

/// The order. Objects that it does not list are absent, and out of its history.
#[derive(Debug)]
pub(super) struct Lirs {
    pub(super) hot_bytes_max: u64,
    pub(super) hot_bytes: u64,
    pub(super) cold_bytes: u64,
    /// Hot objects, and all that were used since the end of this list.
    pub(super) history: List,
    /// Hot objects in the same order.
    pub(super) hot: List,
    /// Resident cold objects, the next victim last.
    pub(super) cold: List,
}

impl Lirs {
    pub(super) fn new(budget_bytes: u64) -> Lirs {
        let [history, hot, cold] = [0, 1, 1].map(List::over);
        let mut lirs = Lirs { hot_bytes_max: 0, hot_bytes: 0, cold_bytes: 0, history, hot, cold };
        lirs.set_budget(budget_bytes);
        lirs
    }

    pub(super) fn set_budget(&mut self, budget_bytes: u64) {
        self.hot_bytes_max = budget_bytes - budget_bytes / 100 * COLD_PERCENT;
    }

    pub(super) fn start_run(&mut self) {
        for list in [&mut self.history, &mut self.hot, &mut self.cold] {
            list.start_run();
        }
    }

    /// An object is used; whether it was in the history.
    pub(super) fn access(&mut self, names: &mut Names, index: u32) -> bool {
        let was_in_history = self.history.contains(names, index);
        self.history.place(names, index);
        match names[index].state {
            State::Hot => self.hot.place(names, index),
            State::Cold if was_in_history => self.warm(names, index),
            State::Cold => self.cold.place(names, index),
            State::Absent | State::Asked | State::Proven => {}
        }
        self.cool(names);
        self.trim_history(names);
        was_in_history
    }

    /// An object is used by coming in; whether it was in the history.
    pub(super) fn note_absent(&mut self, names: &mut Names, index: u32) -> bool {
        let was_in_history = self.history.contains(names, index);
        self.history.place(names, index);
        was_in_history
    }

    /// A cold object has come in; it is proven if this or its last use was within the history.
    pub(super) fn insert(&mut self, names: &mut Names, index: u32, is_proven: bool) {
        let bytes = names[index].bytes;
        self.cold.place(names, index);
        self.cold_bytes += bytes;
        if !self.history.contains(names, index) {
            self.history.place(names, index);
        }
        // While there is room, everything counts as hot, as in the paper.
        let has_room = self.hot_bytes + bytes <= self.hot_bytes_max || self.hot_bytes == 0;
        if is_proven || has_room {
            self.warm(names, index);
        }
        self.cool(names);
        self.trim_history(names);
    }

    /// An object leaves, and is absent from now on; the history keeps it.
    pub(super) fn leave(&mut self, names: &mut Names, index: u32) {
        let bytes = names[index].bytes;
        match names[index].state {
            State::Hot => {
                self.hot_bytes -= bytes;
                self.hot.remove(names, index);
            }
            State::Cold => {
                self.cold_bytes -= bytes;
                self.cold.remove(names, index);
            }
            State::Absent | State::Asked | State::Proven => {}
        }
        names[index].state = State::Absent;
        self.trim_history(names);
    }

    /// Removes the last trace of an absent object.
    pub(super) fn forget(&mut self, names: &mut Names, index: u32) {
        self.history.remove(names, index);
        self.trim_history(names);
    }

    /// Somebody needs a resident object just now, though nobody opened it.
    pub(super) fn spare(&mut self, names: &mut Names, index: u32) {
        match names[index].state {
            State::Hot => {
                self.hot.move_to_front(names, index);
                self.history.move_to_front(names, index);
                self.trim_history(names);
            }
            State::Cold => self.cold.move_to_front(names, index),
            State::Absent | State::Asked | State::Proven => {}
        }
    }

    /// A cold object in the history becomes hot, in the place of those used longest ago.
    fn warm(&mut self, names: &mut Names, index: u32) {
        let bytes = names[index].bytes;
        names[index].state = State::Hot;
        self.cold.remove(names, index);
        self.hot.place(names, index);
        self.cold_bytes -= bytes;
        self.hot_bytes += bytes;
    }

    /// Takes those that were used longest ago from the hot ones where there are too many.
    fn cool(&mut self, names: &mut Names) {
        for _ in 0..MOVED_AT_ONCE {
            let is_full = self.hot_bytes > self.hot_bytes_max && self.hot.length() > 1;
            let Some(last) = self.hot.last().filter(|_| is_full) else { return };
            self.history.remove(names, last);
            self.hot.remove(names, last);
            self.cold.push_front(names, last);
            names[last].state = State::Cold;
            self.hot_bytes -= names[last].bytes;
            self.cold_bytes += names[last].bytes;
        }
    }

    /// Cuts what was used before every hot object; without one, whoever remembers absent ones
    /// bounds the history.
    fn trim_history(&mut self, names: &mut Names) {
        for _ in 0..MOVED_AT_ONCE {
            let last = self.history.last().filter(|_| self.hot.length() > 0);
            let Some(index) = last.filter(|index| names[*index].state != State::Hot) else {
                return;
            };
            self.history.remove(names, index);
        }
    }
}

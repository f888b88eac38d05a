//! LIRS, with a tenth of the room for what is new.
//!
//! Jiang and Zhang, SIGMETRICS 2002: blocks are hot whose last two uses lie close together; a block
//! that is used while it is in the history takes the place of a hot one. A block that is not here
//! comes in at its second use within the history only.

use super::super::chain::{Chain, Links};
use super::{Policy, Use};

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Hot,
    Cold,
    Absent,
}

pub(super) struct Lirs {
    room: usize,
    hot_max: usize,
    states: Vec<State>,
    /// Hot blocks, and what was used since the first of them.
    history: Chain,
    history_links: Links,
    hot: Chain,
    cold: Chain,
    queue_links: Links,
}

impl Lirs {
    pub(super) fn new(blocks: usize, room: usize) -> Lirs {
        Lirs {
            room,
            hot_max: (room - room / 10).max(1),
            states: vec![State::Absent; blocks],
            history: Chain::new(),
            history_links: Links::new(blocks),
            hot: Chain::new(),
            cold: Chain::new(),
            queue_links: Links::new(blocks),
        }
    }

    fn come_in(&mut self, block: u32, is_proven: bool) {
        if self.hot.length() + self.cold.length() >= self.room {
            if let Some(victim) = self.cold.pop_last(&mut self.queue_links) {
                self.states[victim as usize] = State::Absent;
            } else if let Some(victim) = self.hot.pop_last(&mut self.queue_links) {
                self.states[victim as usize] = State::Absent;
                self.history.remove(&mut self.history_links, victim);
            }
        }
        self.states[block as usize] = State::Cold;
        self.cold.push_front(&mut self.queue_links, block);
        if !self.history_links.is_linked(block) {
            self.history.push_front(&mut self.history_links, block);
        }
        if is_proven || self.hot.length() < self.hot_max {
            self.warm(block);
        }
    }

    fn warm(&mut self, block: u32) {
        self.states[block as usize] = State::Hot;
        self.cold.remove(&mut self.queue_links, block);
        self.hot.push_front(&mut self.queue_links, block);
        if self.hot.length() > self.hot_max
            && let Some(last) = self.hot.pop_last(&mut self.queue_links)
        {
            self.history.remove(&mut self.history_links, last);
            self.states[last as usize] = State::Cold;
            self.cold.push_front(&mut self.queue_links, last);
        }
    }

    /// The end of the history is hot.
    fn trim(&mut self) {
        while self.hot.length() > 0
            && let Some(last) = self.history.last()
            && self.states[last as usize] != State::Hot
        {
            self.history.remove(&mut self.history_links, last);
        }
    }
}

impl Policy for Lirs {
    fn holds(&self, block: u32) -> bool {
        self.states[block as usize] != State::Absent
    }

    fn note(&mut self, Use { block, is_new, .. }: Use) {
        let was_in_history = self.history_links.is_linked(block);
        if was_in_history {
            self.history.remove(&mut self.history_links, block);
        }
        self.history.push_front(&mut self.history_links, block);
        match self.states[block as usize] {
            State::Hot => self.hot.move_to_front(&mut self.queue_links, block),
            State::Cold if was_in_history => self.warm(block),
            State::Cold => self.cold.move_to_front(&mut self.queue_links, block),
            State::Absent if is_new || was_in_history => self.come_in(block, was_in_history),
            State::Absent => {}
        }
        self.trim();
    }
}

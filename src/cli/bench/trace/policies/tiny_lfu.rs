//! W-TinyLFU (Einziger, Friedman and Manes, TOS 2017): a hundredth of the room for what is new; from
//! there a block goes over to the rest in the place of one that was used less often.
//!
//! Uses are counted exactly, where a real cache has a sketch, and halved after ten times the room.

use super::super::chain::{Chain, Links};
use super::{Policy, Use};

const USES_MAX: u8 = 15;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    Window,
    Probation,
    Protected,
}

pub(super) struct TinyLfu {
    room: usize,
    window_room: usize,
    protected_room: usize,
    states: Vec<State>,
    uses: Vec<u8>,
    /// Uses until they are halved.
    left: usize,
    links: Links,
    window: Chain,
    probation: Chain,
    protected: Chain,
}

impl TinyLfu {
    pub(super) fn new(blocks: usize, room: usize) -> TinyLfu {
        let window_room = (room / 100).max(1);
        let [window, probation, protected] = [(); 3].map(|()| Chain::new());
        TinyLfu {
            room,
            window_room,
            protected_room: (room - window_room) * 8 / 10,
            states: vec![State::Absent; blocks],
            uses: vec![0; blocks],
            left: 10 * room,
            links: Links::new(blocks),
            window,
            probation,
            protected,
        }
    }

    fn count(&mut self, block: u32) {
        let uses = &mut self.uses[block as usize];
        *uses = (*uses + 1).min(USES_MAX);
        self.left -= 1;
        if self.left == 0 {
            self.left = 10 * self.room;
            for uses in &mut self.uses {
                *uses /= 2;
            }
        }
    }

    /// A block of probation was used.
    fn protect(&mut self, block: u32) {
        self.probation.remove(&mut self.links, block);
        self.protected.push_front(&mut self.links, block);
        self.states[block as usize] = State::Protected;
        if self.protected.length() > self.protected_room
            && let Some(last) = self.protected.pop_last(&mut self.links)
        {
            self.probation.push_front(&mut self.links, last);
            self.states[last as usize] = State::Probation;
        }
    }

    fn come_in(&mut self, block: u32) {
        self.window.push_front(&mut self.links, block);
        self.states[block as usize] = State::Window;
        if self.window.length() <= self.window_room {
            return;
        }
        let Some(candidate) = self.window.pop_last(&mut self.links) else {
            return;
        };
        self.states[candidate as usize] = State::Absent;
        if self.window.length() + self.probation.length() + self.protected.length() >= self.room {
            let victim = self.probation.last().or(self.protected.last());
            let Some(victim) =
                victim.filter(|victim| self.uses[candidate as usize] > self.uses[*victim as usize])
            else {
                return;
            };
            let chain = match self.states[victim as usize] {
                State::Protected => &mut self.protected,
                _ => &mut self.probation,
            };
            chain.remove(&mut self.links, victim);
            self.states[victim as usize] = State::Absent;
        }
        self.probation.push_front(&mut self.links, candidate);
        self.states[candidate as usize] = State::Probation;
    }
}

impl Policy for TinyLfu {
    fn holds(&self, block: u32) -> bool {
        self.states[block as usize] != State::Absent
    }

    fn note(&mut self, Use { block, .. }: Use) {
        self.count(block);
        match self.states[block as usize] {
            State::Absent => self.come_in(block),
            State::Window => self.window.move_to_front(&mut self.links, block),
            State::Probation => self.protect(block),
            State::Protected => self.protected.move_to_front(&mut self.links, block),
        }
    }
}

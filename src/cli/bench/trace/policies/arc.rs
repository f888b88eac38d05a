//! ARC (Megiddo and Modha, FAST 2003): what was used once and what was used again share the room, and
//! what each of them has just lost says who needs more of it.

use super::super::chain::{Chain, Links};
use super::{Policy, Use};

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Unknown,
    Once,
    Again,
    LostOnce,
    LostAgain,
}

pub(super) struct Arc {
    room: usize,
    /// Room that blocks used once should have.
    once_room: usize,
    states: Vec<State>,
    links: Links,
    once: Chain,
    again: Chain,
    lost_once: Chain,
    lost_again: Chain,
}

impl Arc {
    pub(super) fn new(blocks: usize, room: usize) -> Arc {
        let [once, again, lost_once, lost_again] = [(); 4].map(|()| Chain::new());
        let (states, links) = (vec![State::Unknown; blocks], Links::new(blocks));
        Arc { room, once_room: 0, states, links, once, again, lost_once, lost_again }
    }

    /// One block leaves, and is remembered.
    fn replace(&mut self, was_lost_again: bool) {
        let once = self.once.length();
        let is_once =
            once > 0 && (once > self.once_room || (was_lost_again && once == self.once_room));
        let (from, to, state) = if is_once || self.again.length() == 0 {
            (&mut self.once, &mut self.lost_once, State::LostOnce)
        } else {
            (&mut self.again, &mut self.lost_again, State::LostAgain)
        };
        if let Some(victim) = from.pop_last(&mut self.links) {
            to.push_front(&mut self.links, victim);
            self.states[victim as usize] = state;
        }
    }

    /// A block that nothing is known of comes in.
    fn come_in(&mut self) {
        let of_once = self.once.length() + self.lost_once.length();
        let total = of_once + self.again.length() + self.lost_again.length();
        let forgotten = if of_once == self.room {
            if self.once.length() < self.room {
                let forgotten = self.lost_once.pop_last(&mut self.links);
                self.replace(false);
                forgotten
            } else {
                self.once.pop_last(&mut self.links)
            }
        } else if total >= self.room {
            let is_full = total == 2 * self.room;
            let forgotten = is_full.then(|| self.lost_again.pop_last(&mut self.links)).flatten();
            self.replace(false);
            forgotten
        } else {
            None
        };
        if let Some(forgotten) = forgotten {
            self.states[forgotten as usize] = State::Unknown;
        }
    }
}

impl Policy for Arc {
    fn holds(&self, block: u32) -> bool {
        matches!(self.states[block as usize], State::Once | State::Again)
    }

    fn note(&mut self, Use { block, .. }: Use) {
        let (once, again) = (self.lost_once.length(), self.lost_again.length());
        match self.states[block as usize] {
            State::Once => self.once.remove(&mut self.links, block),
            State::Again => self.again.remove(&mut self.links, block),
            State::LostOnce => {
                self.once_room = (self.once_room + (again / once).max(1)).min(self.room);
                self.replace(false);
                self.lost_once.remove(&mut self.links, block);
            }
            State::LostAgain => {
                self.once_room = self.once_room.saturating_sub((once / again).max(1));
                self.replace(true);
                self.lost_again.remove(&mut self.links, block);
            }
            State::Unknown => {
                self.come_in();
                self.once.push_front(&mut self.links, block);
                self.states[block as usize] = State::Once;
                return;
            }
        }
        self.again.push_front(&mut self.links, block);
        self.states[block as usize] = State::Again;
    }
}

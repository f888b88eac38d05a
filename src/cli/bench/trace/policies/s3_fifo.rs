//! S3-FIFO (Yang et al., SOSP 2023): a tenth of the room for what is new, from which only what was used
//! meanwhile goes over to the rest; what went is remembered.

use super::super::chain::{Chain, Links};
use super::{Policy, Use};

const USES_MAX: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Unknown,
    Small,
    Main,
    Gone,
}

pub(super) struct S3Fifo {
    room: usize,
    small_room: usize,
    states: Vec<State>,
    /// Since it came in, up to the largest that counts.
    uses: Vec<u8>,
    links: Links,
    small: Chain,
    main: Chain,
    gone: Chain,
}

impl S3Fifo {
    pub(super) fn new(blocks: usize, room: usize) -> S3Fifo {
        let [small, main, gone] = [(); 3].map(|()| Chain::new());
        let (states, uses) = (vec![State::Unknown; blocks], vec![0; blocks]);
        let (links, small_room) = (Links::new(blocks), (room / 10).max(1));
        S3Fifo { room, small_room, states, uses, links, small, main, gone }
    }

    /// One block leaves.
    fn evict(&mut self) {
        while self.small.length() >= self.small_room || self.main.length() == 0 {
            let Some(block) = self.small.pop_last(&mut self.links) else {
                return;
            };
            if self.uses[block as usize] > 1 {
                self.uses[block as usize] = 0;
                self.main.push_front(&mut self.links, block);
                self.states[block as usize] = State::Main;
                continue;
            }
            self.gone.push_front(&mut self.links, block);
            self.states[block as usize] = State::Gone;
            if self.gone.length() > self.room - self.small_room
                && let Some(forgotten) = self.gone.pop_last(&mut self.links)
            {
                self.states[forgotten as usize] = State::Unknown;
            }
            return;
        }
        while let Some(block) = self.main.pop_last(&mut self.links) {
            if self.uses[block as usize] == 0 {
                self.states[block as usize] = State::Unknown;
                return;
            }
            self.uses[block as usize] -= 1;
            self.main.push_front(&mut self.links, block);
        }
    }
}

impl Policy for S3Fifo {
    fn holds(&self, block: u32) -> bool {
        matches!(self.states[block as usize], State::Small | State::Main)
    }

    fn note(&mut self, Use { block, .. }: Use) {
        if self.holds(block) {
            let uses = &mut self.uses[block as usize];
            *uses = (*uses + 1).min(USES_MAX);
            return;
        }
        let was_gone = self.states[block as usize] == State::Gone;
        if was_gone {
            self.gone.remove(&mut self.links, block);
        }
        if self.small.length() + self.main.length() >= self.room {
            self.evict();
        }
        self.uses[block as usize] = 0;
        let (chain, state) =
            if was_gone { (&mut self.main, State::Main) } else { (&mut self.small, State::Small) };
        chain.push_front(&mut self.links, block);
        self.states[block as usize] = state;
    }
}

//! Which objects deserve the RAM tier: LIRS with bypass.
//!
//! Engines read a sequence from front to back for every token, over and over. When it is longer
//! than the budget, LRU drops each page just before it is needed again: it hits nothing. LIRS
//! (Jiang and Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy",
//! SIGMETRICS 2002) ranks objects by the distance between their last two uses instead of the time
//! since the last one. In a loop all distances are equal, so what came first stays, and the hit
//! rate is what fits; with ordinary locality it is as good as LRU or better (`tests/hit_rates.rs`
//! measures both, and the optimum).
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
//!
//! Two things differ from the paper. An object that is not resident need not come in: the disk
//! serves it just as well, and a copy for one use is wasted. So at its first use it is bypassed
//! once the budget is full; at a second one within the history it is admitted. And where uses lie
//! further apart than the history reaches, every 32nd of them is admitted without proof
//! (as in BIP: Qureshi et al., "Adaptive Insertion Policies for High Performance Caching", ISCA
//! 2007). Otherwise hot objects that nobody uses any more would stay forever.
//!
//! Every operation takes constant time (trimming the history is paid for by what was added to it).
//! This module knows nothing of files: the caller moves bytes and reports what it did.

mod list;

use std::collections::HashMap;

use self::list::{List, Node, Nodes, State};
use crate::store::record::ObjectId;

/// Share of the budget, in per cent, that hot objects leave to cold ones: room in which new pages
/// wait to be flushed and to show whether they are used again. The paper has 1 %, which of a small
/// budget would not be a page.
const COLD_PERCENT: u64 = 10;

/// Absent objects that are remembered. At some 80 bytes each this is 10 MiB; with pages of 4 MiB
/// it reaches back 512 GiB, eight times a large budget.
const ABSENT_MAX: usize = 1 << 17;

/// Uses beyond the reach of the history per object that is admitted all the same.
const SAMPLING: u32 = 32;

/// Pinned objects that one search for victims passes over, among the cold and again among the hot:
/// a probe of each costs a few microseconds.
const PINNED_SKIPPED_MAX: usize = 64;

/// What to do about an object that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is resident.
    Hit,
    /// Bring it in: make room, move the bytes, then call [`Replacement::insert`].
    Admit,
    /// Serve it from where it is.
    Bypass,
}

/// An object that should leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Which.
    pub object: ObjectId,
    /// What its leaving frees.
    pub bytes: u64,
}

/// What is resident in a tier of a fixed size, and what should be.
#[derive(Debug)]
pub struct Replacement {
    budget_bytes: u64,
    hot_bytes: u64,
    cold_bytes: u64,
    by_object: HashMap<ObjectId, u32>,
    nodes: Nodes,
    /// Hot objects, and all that were used since the end of this list.
    history: List,
    /// Hot objects in the same order.
    hot: List,
    /// Resident cold objects, the next victim last.
    cold: List,
    /// Absent objects of the history, the next to be forgotten last.
    absent: List,
    absent_max: usize,
    /// Absent objects forgotten since one was last admitted without proof.
    forgotten: u32,
}

impl Replacement {
    /// An empty tier of `budget_bytes`.
    pub fn new(budget_bytes: u64) -> Replacement {
        Replacement::with_memory(budget_bytes, ABSENT_MAX)
    }

    /// One that remembers at most `absent_max` absent objects.
    fn with_memory(budget_bytes: u64, absent_max: usize) -> Replacement {
        Replacement {
            budget_bytes,
            hot_bytes: 0,
            cold_bytes: 0,
            by_object: HashMap::new(),
            nodes: Nodes::default(),
            history: List::history(),
            hot: List::queue(),
            cold: List::queue(),
            absent: List::queue(),
            absent_max,
            forgotten: 0,
        }
    }

    /// Bytes of all resident objects.
    pub fn resident_bytes(&self) -> u64 {
        self.hot_bytes + self.cold_bytes
    }

    /// Whether an object is resident.
    pub fn is_resident(&self, object: ObjectId) -> bool {
        self.find(object).is_some_and(|index| self.nodes[index].state != State::Absent)
    }

    /// An object of `bytes` is used.
    ///
    /// The answer [`Access::Admit`] reserves nothing; a caller that cannot follow it may ignore it.
    pub fn access(&mut self, object: ObjectId, bytes: u64) -> Access {
        let Some(index) = self.find(object) else {
            return self.first_access(object, bytes);
        };
        let was_in_history = self.history.contains(&self.nodes, index);
        self.history.move_to_front(&mut self.nodes, index);
        let answer = match self.nodes[index].state {
            State::Hot => {
                self.hot.move_to_front(&mut self.nodes, index);
                Access::Hit
            }
            State::Cold => {
                if was_in_history {
                    self.warm(index);
                } else {
                    self.cold.move_to_front(&mut self.nodes, index);
                }
                Access::Hit
            }
            State::Absent => {
                self.absent.move_to_front(&mut self.nodes, index);
                self.prove(index, bytes)
            }
        };
        self.trim_history();
        answer
    }

    /// An object has come in: a new page was written, or bytes were moved here.
    ///
    /// The budget is the caller's affair: see [`victims`](Self::victims).
    pub fn insert(&mut self, object: ObjectId, bytes: u64) {
        if self.is_resident(object) {
            self.remove(object);
        }
        let known = self.find(object);
        let index = known.unwrap_or_else(|| self.add(object, bytes));
        self.absent.remove(&mut self.nodes, index);
        let node = &mut self.nodes[index];
        let is_proven = std::mem::take(&mut node.is_proven);
        (node.state, node.bytes) = (State::Cold, bytes);
        self.cold.push_front(&mut self.nodes, index);
        self.cold_bytes += bytes;
        if !self.history.contains(&self.nodes, index) {
            self.history.push_front(&mut self.nodes, index);
        }
        // While there is room, everything counts as hot, as in the paper.
        let has_room = self.hot_bytes + bytes <= self.hot_bytes_max() || self.hot_bytes == 0;
        if is_proven || has_room {
            self.warm(index);
        }
        self.trim_history();
    }

    /// An object is gone for good: deleted, or changed.
    pub fn remove(&mut self, object: ObjectId) {
        if let Some(index) = self.find(object) {
            self.leave(index);
            self.forget(index);
            self.trim_history();
        }
    }

    /// An object was evicted; it is remembered for as long as the history reaches.
    pub fn evicted(&mut self, object: ObjectId) {
        let Some(index) = self.find(object) else {
            return;
        };
        let state = self.nodes[index].state;
        if state == State::Absent {
            return;
        }
        self.leave(index);
        // A hot victim was the end of the history, which goes with it.
        if state == State::Cold && self.history.contains(&self.nodes, index) {
            self.nodes[index].state = State::Absent;
            self.absent.push_front(&mut self.nodes, index);
            self.bound_absent();
        } else {
            self.forget(index);
        }
        self.trim_history();
    }

    /// The objects that should leave so that `bytes` more fit into the budget, in this order.
    ///
    /// They stay resident until [`evicted`](Self::evicted) is called. Those for which `is_pinned`
    /// says so are passed over and count as used now, so that the next search does not begin with
    /// them. The answer frees too little when too many are: serve the object from elsewhere.
    pub fn victims(&mut self, bytes: u64, is_pinned: impl FnMut(ObjectId) -> bool) -> Vec<Victim> {
        let wanted = self.resident_bytes().saturating_add(bytes).saturating_sub(self.budget_bytes);
        self.first_to_leave(wanted, is_pinned)
    }

    /// The objects that should leave first, `wanted` bytes together; as [`victims`](Self::victims).
    pub fn first_to_leave(
        &mut self, wanted: u64, mut is_pinned: impl FnMut(ObjectId) -> bool,
    ) -> Vec<Victim> {
        let (mut victims, mut freed) = (Vec::new(), 0);
        let mut pinned = Vec::new();
        for list in [&self.cold, &self.hot] {
            let pinned_max = pinned.len() + PINNED_SKIPPED_MAX;
            let mut next = list.last();
            while let Some(index) = next
                && freed < wanted
                && pinned.len() < pinned_max
            {
                next = list.before(&self.nodes, index);
                let Node { object, bytes, .. } = self.nodes[index];
                if is_pinned(object) {
                    pinned.push(index);
                } else {
                    freed += bytes;
                    victims.push(Victim { object, bytes });
                }
            }
        }
        for index in pinned {
            self.spare(index);
        }
        victims
    }

    fn find(&self, object: ObjectId) -> Option<u32> {
        self.by_object.get(&object).copied()
    }

    fn add(&mut self, object: ObjectId, bytes: u64) -> u32 {
        let index = self.nodes.add(object, bytes);
        self.by_object.insert(object, index);
        index
    }

    fn hot_bytes_max(&self) -> u64 {
        self.budget_bytes - self.budget_bytes / 100 * COLD_PERCENT
    }

    /// A use of an object that is not in the history.
    fn first_access(&mut self, object: ObjectId, bytes: u64) -> Access {
        let index = self.add(object, bytes);
        self.history.push_front(&mut self.nodes, index);
        self.absent.push_front(&mut self.nodes, index);
        self.forgotten += self.bound_absent();
        if self.resident_bytes().saturating_add(bytes) <= self.budget_bytes {
            return Access::Admit;
        }
        if self.forgotten >= SAMPLING && self.find(object).is_some() {
            self.forgotten = 0;
            return self.prove(index, bytes);
        }
        Access::Bypass
    }

    /// An absent object shall be hot once it is here.
    fn prove(&mut self, index: u32, bytes: u64) -> Access {
        let node = &mut self.nodes[index];
        node.bytes = bytes;
        node.is_proven = bytes <= self.budget_bytes;
        if node.is_proven { Access::Admit } else { Access::Bypass }
    }

    /// A cold object in the history becomes hot, in the place of those used longest ago.
    fn warm(&mut self, index: u32) {
        let bytes = self.nodes[index].bytes;
        self.nodes[index].state = State::Hot;
        self.cold.remove(&mut self.nodes, index);
        self.hot.push_front(&mut self.nodes, index);
        self.cold_bytes -= bytes;
        self.hot_bytes += bytes;
        while self.hot_bytes > self.hot_bytes_max()
            && let Some(last) = self.hot.last()
            && last != index
        {
            self.history.remove(&mut self.nodes, last);
            self.hot.remove(&mut self.nodes, last);
            self.cold.push_front(&mut self.nodes, last);
            let node = &mut self.nodes[last];
            node.state = State::Cold;
            self.hot_bytes -= node.bytes;
            self.cold_bytes += node.bytes;
        }
    }

    /// Somebody needs a resident object just now, though nobody opened it.
    fn spare(&mut self, index: u32) {
        match self.nodes[index].state {
            State::Hot => {
                self.hot.move_to_front(&mut self.nodes, index);
                self.history.move_to_front(&mut self.nodes, index);
                self.trim_history();
            }
            State::Cold => self.cold.move_to_front(&mut self.nodes, index),
            State::Absent => {}
        }
    }

    /// Takes an object out of the list of its state.
    fn leave(&mut self, index: u32) {
        let Node { state, bytes, .. } = self.nodes[index];
        let list = match state {
            State::Hot => {
                self.hot_bytes -= bytes;
                &mut self.hot
            }
            State::Cold => {
                self.cold_bytes -= bytes;
                &mut self.cold
            }
            State::Absent => &mut self.absent,
        };
        list.remove(&mut self.nodes, index);
    }

    /// Removes the last trace of an object that left its list.
    fn forget(&mut self, index: u32) {
        self.history.remove(&mut self.nodes, index);
        self.by_object.remove(&self.nodes[index].object);
        self.nodes.free(index);
    }

    /// Forgets absent objects beyond the bound; returns how many.
    fn bound_absent(&mut self) -> u32 {
        let mut forgotten = 0;
        while self.absent.length() > self.absent_max
            && let Some(index) = self.absent.last()
        {
            self.absent.remove(&mut self.nodes, index);
            self.forget(index);
            forgotten += 1;
        }
        forgotten
    }

    /// Cuts what was used before every hot object; without one, the history is only bounded.
    fn trim_history(&mut self) {
        while self.hot.length() > 0
            && let Some(index) = self.history.last()
        {
            match self.nodes[index].state {
                State::Hot => return,
                State::Cold => self.history.remove(&mut self.nodes, index),
                State::Absent => {
                    self.absent.remove(&mut self.nodes, index);
                    self.forget(index);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;

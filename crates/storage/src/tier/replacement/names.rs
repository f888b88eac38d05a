//! The objects that a policy knows, and where each is.
//!
//! Nodes lie in parts of a fixed size and the index grows by one bucket at a time (linear hashing:
//! Litwin, VLDB 1980). Nothing is ever copied as a whole, so that no caller waits for it: a table
//! that doubles under the lock of a tier holds its users up for tens of milliseconds.

use std::ops::{Index, IndexMut};

use super::list::{Links, UNLISTED};
use crate::store::record::ObjectId;

/// No node.
pub(super) const NONE: u32 = u32::MAX;

const PART_BITS: u32 = 10;
const PART: usize = 1 << PART_BITS;

/// How an object is known; [`super::lirs`] has the difference between the first two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Hot,
    Cold,
    Absent,
    /// Absent, and its last use is counted: its coming in is no other one.
    Asked,
    /// The same, and used again within the history: it will be hot when it comes in.
    Proven,
}

impl State {
    pub(super) fn is_resident(self) -> bool {
        matches!(self, State::Hot | State::Cold)
    }

    pub(super) fn is_asked(self) -> bool {
        matches!(self, State::Asked | State::Proven)
    }
}

/// An object that is resident or remembered.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) object: ObjectId,
    pub(super) bytes: u64,
    pub(super) links: [Links; 3],
    /// The run of its last use.
    pub(super) run: u32,
    /// What was used before it.
    pub(super) follows: u32,
    /// The next one in its bucket, or on the list of free nodes.
    next: u32,
    pub(super) uses: u16,
    pub(super) state: State,
    /// The queue that holds it, among those of [`super::frequency`].
    pub(super) queue: u8,
}

// With the index, that is 64 bytes for each remembered object, or less.
const _: () = assert!(size_of::<Node>() + size_of::<u32>() <= 64);

/// The nodes, and the index over them.
#[derive(Debug)]
pub(super) struct Names {
    nodes: Parts<Node>,
    free: u32,
    buckets: Parts<u32>,
    length: u32,
}

impl Names {
    pub(super) fn new() -> Names {
        let mut buckets = Parts::default();
        buckets.push(NONE);
        Names { nodes: Parts::default(), free: NONE, buckets, length: 0 }
    }

    /// Objects that are known.
    pub(super) fn length(&self) -> usize {
        self.length as usize
    }

    /// Nodes that take memory, in use or not.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.nodes.length as usize
    }

    /// What it takes.
    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> usize {
        self.nodes.memory_bytes() + self.buckets.memory_bytes()
    }

    pub(super) fn find(&self, object: ObjectId) -> Option<u32> {
        let mut index = self.buckets[self.bucket(object)];
        while index != NONE {
            if self[index].object == object {
                return Some(index);
            }
            index = self[index].next;
        }
        None
    }

    /// A new absent node, in no list, of an object that is not known.
    pub(super) fn add(&mut self, object: ObjectId, bytes: u64) -> u32 {
        if self.length >= self.buckets.length {
            self.split();
        }
        let bucket = self.bucket(object);
        let node = Node {
            object,
            bytes,
            links: [UNLISTED; 3],
            run: 0,
            follows: NONE,
            next: self.buckets[bucket],
            uses: 0,
            state: State::Absent,
            queue: 0,
        };
        let index = if self.free == NONE {
            self.nodes.push(node)
        } else {
            let index = self.free;
            self.free = self[index].next;
            self[index] = node;
            index
        };
        self.buckets[bucket] = index;
        self.length += 1;
        index
    }

    /// Gives back a node that is in no list.
    pub(super) fn free(&mut self, index: u32) {
        debug_assert!(self[index].links.iter().all(|links| !links.is_listed()));
        let bucket = self.bucket(self[index].object);
        let next = self[index].next;
        let mut before = self.buckets[bucket];
        if before == index {
            self.buckets[bucket] = next;
        } else {
            while self[before].next != index {
                before = self[before].next;
            }
            self[before].next = next;
        }
        self[index].next = self.free;
        self.free = index;
        self.length -= 1;
    }

    /// All that are known.
    pub(super) fn objects(&self) -> Vec<ObjectId> {
        let mut objects = Vec::with_capacity(self.length());
        for bucket in 0..self.buckets.length {
            let mut index = self.buckets[bucket];
            while index != NONE {
                objects.push(self[index].object);
                index = self[index].next;
            }
        }
        objects
    }

    /// One bucket more: it takes its part of the one that served for both.
    fn split(&mut self) {
        let new = self.buckets.push(NONE);
        let half = (self.buckets.length.next_power_of_two()) / 2;
        let old = new & (half - 1);
        let mut index = std::mem::replace(&mut self.buckets[old], NONE);
        while index != NONE {
            let next = self[index].next;
            let bucket = self.bucket(self[index].object);
            self[index].next = self.buckets[bucket];
            self.buckets[bucket] = index;
            index = next;
        }
    }

    fn bucket(&self, object: ObjectId) -> u32 {
        let wide = self.buckets.length.next_power_of_two();
        #[expect(clippy::cast_possible_truncation, reason = "the low half of a hash is one")]
        let bucket = mix(object) as u32 & (wide - 1);
        if bucket < self.buckets.length { bucket } else { bucket & (wide / 2 - 1) }
    }
}

/// Spreads the numbers of objects (the end of `SplitMix64`). Nobody outside chooses them.
pub(super) fn mix(object: ObjectId) -> u64 {
    let mut bits = object.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl Index<u32> for Names {
    type Output = Node;

    fn index(&self, index: u32) -> &Node {
        &self.nodes[index]
    }
}

impl IndexMut<u32> for Names {
    fn index_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index]
    }
}

/// An array that grows without moving what it has.
#[derive(Debug)]
struct Parts<T> {
    parts: Vec<Vec<T>>,
    length: u32,
}

impl<T> Default for Parts<T> {
    fn default() -> Parts<T> {
        Parts { parts: Vec::new(), length: 0 }
    }
}

impl<T> Parts<T> {
    fn push(&mut self, value: T) -> u32 {
        if (self.length as usize).is_multiple_of(PART) {
            self.parts.push(Vec::with_capacity(PART));
        }
        let index = self.length;
        self.parts[(index >> PART_BITS) as usize].push(value);
        self.length = index.checked_add(1).expect("fewer than four billion objects");
        index
    }
}

#[cfg(test)]
impl<T> Parts<T> {
    fn memory_bytes(&self) -> usize {
        self.parts.len() * PART * size_of::<T>() + self.parts.capacity() * size_of::<Vec<T>>()
    }
}

impl<T> Index<u32> for Parts<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        &self.parts[(index >> PART_BITS) as usize][index as usize & (PART - 1)]
    }
}

impl<T> IndexMut<u32> for Parts<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.parts[(index >> PART_BITS) as usize][index as usize & (PART - 1)]
    }
}

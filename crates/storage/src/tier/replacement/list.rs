//! Linked lists over one arena: an object moves between them in constant time and without
//! allocation.

use std::ops::{Index, IndexMut};

use crate::store::record::ObjectId;

/// No node.
const NONE: u32 = u32::MAX;

/// How an object is known; see the module above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Hot,
    Cold,
    Absent,
}

/// An object that is resident or remembered.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) object: ObjectId,
    pub(super) bytes: u64,
    pub(super) state: State,
    /// Absent, and used again within the history: it will be hot when it comes in.
    pub(super) is_proven: bool,
    links: [Links; 2],
}

#[derive(Clone, Copy, Debug)]
struct Links {
    is_listed: bool,
    before: u32,
    after: u32,
}

const UNLISTED: Links = Links { is_listed: false, before: NONE, after: NONE };

// `ABSENT_MAX` of them are kept; the map's entry comes on top.
const _: () = assert!(size_of::<Node>() <= 48);

/// The arena.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    nodes: Vec<Node>,
    free: Vec<u32>,
}

impl Nodes {
    /// A new absent node, in no list.
    pub(super) fn add(&mut self, object: ObjectId, bytes: u64) -> u32 {
        let links = [UNLISTED; 2];
        let node = Node { object, bytes, state: State::Absent, is_proven: false, links };
        if let Some(index) = self.free.pop() {
            self[index] = node;
            return index;
        }
        let index = u32::try_from(self.nodes.len()).expect("fewer than four billion objects");
        self.nodes.push(node);
        index
    }

    /// Nodes that take memory, in use or not.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.nodes.len()
    }

    /// Gives back a node that is in no list.
    pub(super) fn free(&mut self, index: u32) {
        debug_assert!(self[index].links.iter().all(|links| !links.is_listed));
        self.free.push(index);
    }
}

impl Index<u32> for Nodes {
    type Output = Node;

    fn index(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }
}

impl IndexMut<u32> for Nodes {
    fn index_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }
}

/// A doubly linked list; which of a node's two pairs of links it uses is fixed.
#[derive(Debug)]
pub(super) struct List {
    links: usize,
    first: u32,
    last: u32,
    length: usize,
}

impl List {
    /// A list over the first pair of links: every node may be in it beside one [`queue`].
    ///
    /// [`queue`]: Self::queue
    pub(super) fn history() -> List {
        List { links: 0, first: NONE, last: NONE, length: 0 }
    }

    /// A list over the second pair; a node is in one of these at most.
    pub(super) fn queue() -> List {
        List { links: 1, ..List::history() }
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    pub(super) fn last(&self) -> Option<u32> {
        (self.last != NONE).then_some(self.last)
    }

    /// The node before one that is in this list.
    pub(super) fn before(&self, nodes: &Nodes, index: u32) -> Option<u32> {
        let before = nodes[index].links[self.links].before;
        (before != NONE).then_some(before)
    }

    /// Whether a node is in this list; of queues, whether it is in any.
    pub(super) fn contains(&self, nodes: &Nodes, index: u32) -> bool {
        nodes[index].links[self.links].is_listed
    }

    /// Adds a node that is in no list over these links.
    pub(super) fn push_front(&mut self, nodes: &mut Nodes, index: u32) {
        debug_assert!(!self.contains(nodes, index));
        let after = self.first;
        nodes[index].links[self.links] = Links { is_listed: true, before: NONE, after };
        match after {
            NONE => self.last = index,
            after => nodes[after].links[self.links].before = index,
        }
        self.first = index;
        self.length += 1;
    }

    /// Takes a node out, if it is in.
    pub(super) fn remove(&mut self, nodes: &mut Nodes, index: u32) {
        let Links { is_listed, before, after } = nodes[index].links[self.links];
        if !is_listed {
            return;
        }
        match before {
            NONE => self.first = after,
            before => nodes[before].links[self.links].after = after,
        }
        match after {
            NONE => self.last = before,
            after => nodes[after].links[self.links].before = before,
        }
        nodes[index].links[self.links] = UNLISTED;
        self.length -= 1;
    }

    /// Makes a node the first one, whether it is in or not.
    pub(super) fn move_to_front(&mut self, nodes: &mut Nodes, index: u32) {
        self.remove(nodes, index);
        self.push_front(nodes, index);
    }
}

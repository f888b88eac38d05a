//! Linked lists over the nodes: an object moves between them in constant time and without
//! allocation.

use super::names::{NONE, Names};

/// In place of the node before one that is in no list.
const NOWHERE: u32 = NONE - 1;

/// What is beside a node in a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    before: u32,
    after: u32,
}

/// Of a node that is in no list.
pub(super) const UNLISTED: Links = Links { before: NOWHERE, after: NONE };

impl Links {
    pub(super) fn is_listed(self) -> bool {
        self.before != NOWHERE
    }
}

/// A doubly linked list; which of a node's pairs of links it uses is fixed.
#[derive(Debug)]
pub(super) struct List {
    links: usize,
    first: u32,
    last: u32,
    length: usize,
    /// The one that was [placed](Self::place) last in this run.
    placed: u32,
}

impl List {
    /// A list over these links. A node may be in one list for each of its pairs.
    pub(super) fn over(links: usize) -> List {
        List { links, first: NONE, last: NONE, length: 0, placed: NONE }
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    pub(super) fn last(&self) -> Option<u32> {
        (self.last != NONE).then_some(self.last)
    }

    /// The node before one that is in this list.
    pub(super) fn before(&self, names: &Names, index: u32) -> Option<u32> {
        let before = names[index].links[self.links].before;
        (before != NONE).then_some(before)
    }

    /// Whether a node is in this list, or in any other over these links.
    pub(super) fn contains(&self, names: &Names, index: u32) -> bool {
        names[index].links[self.links].is_listed()
    }

    /// What comes next is used first of its run: it goes to the front.
    pub(super) fn start_run(&mut self) {
        self.placed = NONE;
    }

    /// Whether [`place`](Self::place) would put a node at the end of what is there.
    pub(super) fn is_placed_last(&self) -> bool {
        self.placed != NONE && self.placed == self.last
    }

    /// Puts a node behind the one that was used before it in this run, so that the end of a run
    /// leaves before its beginning; all of it before whatever was used earlier.
    pub(super) fn place(&mut self, names: &mut Names, index: u32) {
        self.remove(names, index);
        let before = self.placed;
        let after = if before == NONE { self.first } else { names[before].links[self.links].after };
        self.insert(names, index, Links { before, after });
        self.placed = index;
    }

    /// Adds a node that is in no list over these links.
    pub(super) fn push_front(&mut self, names: &mut Names, index: u32) {
        self.insert(names, index, Links { before: NONE, after: self.first });
    }

    fn insert(&mut self, names: &mut Names, index: u32, links: Links) {
        debug_assert!(!self.contains(names, index));
        names[index].links[self.links] = links;
        match links.before {
            NONE => self.first = index,
            before => names[before].links[self.links].after = index,
        }
        match links.after {
            NONE => self.last = index,
            after => names[after].links[self.links].before = index,
        }
        self.length += 1;
    }

    /// Takes a node out, if it is in.
    pub(super) fn remove(&mut self, names: &mut Names, index: u32) {
        if !self.contains(names, index) {
            return;
        }
        let Links { before, after } = names[index].links[self.links];
        match before {
            NONE => self.first = after,
            before => names[before].links[self.links].after = after,
        }
        match after {
            NONE => self.last = before,
            after => names[after].links[self.links].before = before,
        }
        if self.placed == index {
            self.placed = before;
        }
        names[index].links[self.links] = UNLISTED;
        self.length -= 1;
    }

    /// Makes a node the first one, whether it is in or not.
    pub(super) fn move_to_front(&mut self, names: &mut Names, index: u32) {
        self.remove(names, index);
        self.push_front(names, index);
    }
}

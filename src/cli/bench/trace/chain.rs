//! Lists of numbered blocks: for policies that are measured, where every block has a place.

/// No block.
const NONE: u32 = u32::MAX;
/// In place of the block before one that is in no list.
const NOWHERE: u32 = NONE - 1;

/// The links of all blocks. A block is in one of the [chains](Chain) over them at most.
#[derive(Clone, Debug)]
pub(super) struct Links(Vec<(u32, u32)>);

/// A doubly linked list.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    first: u32,
    last: u32,
    length: usize,
}

impl Links {
    pub(super) fn new(blocks: usize) -> Links {
        Links(vec![(NOWHERE, NONE); blocks])
    }

    pub(super) fn is_linked(&self, block: u32) -> bool {
        self.0[block as usize].0 != NOWHERE
    }

    fn at(&mut self, block: u32) -> &mut (u32, u32) {
        &mut self.0[block as usize]
    }
}

impl Chain {
    pub(super) fn new() -> Chain {
        Chain { first: NONE, last: NONE, length: 0 }
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    pub(super) fn last(&self) -> Option<u32> {
        (self.last != NONE).then_some(self.last)
    }

    pub(super) fn push_front(&mut self, links: &mut Links, block: u32) {
        self.insert(links, block, NONE);
    }

    /// Puts a block behind one that is in this chain.
    pub(super) fn insert_behind(&mut self, links: &mut Links, block: u32, before: u32) {
        self.insert(links, block, before);
    }

    fn insert(&mut self, links: &mut Links, block: u32, before: u32) {
        let after = if before == NONE { self.first } else { links.at(before).1 };
        *links.at(block) = (before, after);
        match before {
            NONE => self.first = block,
            before => links.at(before).1 = block,
        }
        match after {
            NONE => self.last = block,
            after => links.at(after).0 = block,
        }
        self.length += 1;
    }

    /// Takes out a block that is in this chain.
    pub(super) fn remove(&mut self, links: &mut Links, block: u32) {
        let (before, after) = std::mem::replace(links.at(block), (NOWHERE, NONE));
        match before {
            NONE => self.first = after,
            before => links.at(before).1 = after,
        }
        match after {
            NONE => self.last = before,
            after => links.at(after).0 = before,
        }
        self.length -= 1;
    }

    pub(super) fn pop_last(&mut self, links: &mut Links) -> Option<u32> {
        let last = self.last()?;
        self.remove(links, last);
        Some(last)
    }

    pub(super) fn move_to_front(&mut self, links: &mut Links, block: u32) {
        self.remove(links, block);
        self.push_front(links, block);
    }
}

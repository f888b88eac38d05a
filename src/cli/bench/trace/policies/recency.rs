//! LRU; and LRU in which the blocks of a request leave from its end.

use super::super::chain::{Chain, Links};
use super::{Policy, Use};

pub(super) struct Recency {
    room: usize,
    links: Links,
    chain: Chain,
    is_end_first: bool,
    request: u32,
    /// The block before this one of the request, if it is still here.
    placed: Option<u32>,
}

impl Recency {
    pub(super) fn new(blocks: usize, room: usize, is_end_first: bool) -> Recency {
        let (links, chain) = (Links::new(blocks), Chain::new());
        Recency { room, links, chain, is_end_first, request: 0, placed: None }
    }
}

impl Policy for Recency {
    fn holds(&self, block: u32) -> bool {
        self.links.is_linked(block)
    }

    fn note(&mut self, Use { block, request, .. }: Use) {
        if self.request != request || !self.is_end_first {
            (self.request, self.placed) = (request, None);
        }
        let Recency { links, chain, .. } = self;
        if links.is_linked(block) {
            // A request that uses a block twice goes on before it.
            self.placed = self.placed.filter(|placed| *placed != block);
            chain.remove(links, block);
        }
        match self.placed {
            Some(placed) => chain.insert_behind(links, block, placed),
            None => chain.push_front(links, block),
        }
        // Of a request that fills everything, what came last is the first to leave.
        let is_lost = chain.length() > self.room && chain.pop_last(links) == Some(block);
        if !is_lost {
            self.placed = Some(block);
        }
    }
}

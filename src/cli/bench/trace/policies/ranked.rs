//! Policies that give each block a rank: the lowest leaves, be it the one that has just come.

use std::collections::{BTreeSet, HashMap};

use super::{Policy, Use};

/// Requests that a use by another factor of e is worth.
const USES_WORTH: f64 = 300.0;

/// Blocks by rank.
struct Ranks {
    room: usize,
    of_blocks: Vec<Option<(i64, i64)>>,
    ordered: BTreeSet<((i64, i64), u32)>,
}

impl Ranks {
    fn new(blocks: usize, room: usize) -> Ranks {
        Ranks { room, of_blocks: vec![None; blocks], ordered: BTreeSet::new() }
    }

    fn holds(&self, block: u32) -> bool {
        self.of_blocks[block as usize].is_some()
    }

    fn set(&mut self, block: u32, rank: (i64, i64)) {
        if let Some(before) = self.of_blocks[block as usize].replace(rank) {
            self.ordered.remove(&(before, block));
        }
        self.ordered.insert((rank, block));
        if self.ordered.len() > self.room
            && let Some((_, lowest)) = self.ordered.pop_first()
        {
            self.of_blocks[lowest as usize] = None;
        }
    }
}

/// LFU with decay: the number of the request, and 300 times the logarithm of the uses so far. Of one
/// request the end leaves first.
pub(super) struct Decayed {
    ranks: Ranks,
    uses: Vec<u32>,
}

impl Decayed {
    pub(super) fn new(blocks: usize, room: usize) -> Decayed {
        Decayed { ranks: Ranks::new(blocks, room), uses: vec![0; blocks] }
    }
}

impl Policy for Decayed {
    fn holds(&self, block: u32) -> bool {
        self.ranks.holds(block)
    }

    #[expect(clippy::cast_possible_truncation, reason = "thousandths of a request")]
    fn note(&mut self, Use { block, request, place, .. }: Use) {
        let uses = &mut self.uses[block as usize];
        *uses += 1;
        let rank = f64::from(request) + USES_WORTH * f64::from(*uses).ln();
        self.ranks.set(block, ((rank * 1000.0) as i64, -i64::from(place)));
    }
}

/// The optimum: the block leaves whose next use is furthest away.
pub(super) struct Belady {
    ranks: Ranks,
    /// When each use's block is used next.
    next: Vec<u32>,
    time: usize,
}

impl Belady {
    pub(super) fn new(uses: &[u32], blocks: usize, room: usize) -> Belady {
        let mut last = HashMap::new();
        let mut next = vec![u32::MAX; uses.len()];
        for (time, block) in uses.iter().enumerate().rev() {
            let now = u32::try_from(time).expect("the uses of a trace are bounded");
            next[time] = last.insert(*block, now).unwrap_or(u32::MAX);
        }
        Belady { ranks: Ranks::new(blocks, room), next, time: 0 }
    }
}

impl Policy for Belady {
    fn holds(&self, block: u32) -> bool {
        self.ranks.holds(block)
    }

    fn note(&mut self, used: Use) {
        let next = self.next[self.time];
        self.time += 1;
        self.ranks.set(used.block, (-i64::from(next), 0));
    }
}

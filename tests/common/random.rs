//! Seeded choices, or choices that somebody else made.

use std::collections::VecDeque;

/// splitmix64, or given bytes until they are spent.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
    /// One byte for a choice among up to 256, two for any other.
    given: Option<VecDeque<u8>>,
}

impl Random {
    pub(crate) fn of(seed: u64) -> Random {
        Random { state: seed, given: None }
    }

    /// Choices that these bytes make; the rest is the first of what there is to choose from.
    pub(crate) fn given(choices: &[u8]) -> Random {
        Random { state: 0, given: Some(choices.iter().copied().collect()) }
    }

    /// The given bytes are used up.
    pub(crate) fn is_spent(&self) -> bool {
        self.given.as_ref().is_some_and(VecDeque::is_empty)
    }

    pub(crate) fn next(&mut self) -> u64 {
        if let Some(given) = &mut self.given {
            let [low, high] = [(); 2].map(|()| given.pop_front().unwrap_or(0));
            return u64::from(u16::from_le_bytes([low, high]));
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        match &mut self.given {
            Some(given) if end <= 256 => usize::from(given.pop_front().unwrap_or(0)) % end.max(1),
            _ => usize::try_from(self.next() % end.max(1) as u64).unwrap(),
        }
    }

    pub(crate) fn is_true(&mut self) -> bool {
        self.next() & 1 == 1
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        crate::common::fill(self.next(), length)
    }
}

/// The seeds of a test: those given, or `KVFS_SEED` alone.
pub(crate) fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("KVFS_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..=count).collect(),
    }
}

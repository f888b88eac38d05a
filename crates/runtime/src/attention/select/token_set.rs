//! A set of tokens of a list of blocks.

use std::ops::Range;

/// Tokens, counted over all blocks in order, from 0 to `len() - 1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet {
    len: usize,
    words: Vec<u64>,
}

impl TokenSet {
    /// None of `len` tokens.
    pub fn none(len: usize) -> Self {
        Self { len, words: vec![0; len.div_ceil(64)] }
    }

    /// All of `len` tokens.
    pub fn all(len: usize) -> Self {
        let mut set = Self::none(len);
        set.insert(0..len);
        set
    }

    /// Tokens of the blocks, in the set or not.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no tokens that could be in the set.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Adds tokens; those beyond the end are ignored.
    pub fn insert(&mut self, tokens: Range<usize>) {
        for token in tokens.start..tokens.end.min(self.len) {
            self.words[token / 64] |= 1 << (token % 64);
        }
    }

    /// Whether a token is in the set.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn contains(&self, token: usize) -> bool {
        self.words[token / 64] >> (token % 64) & 1 == 1
    }

    /// The set of the tokens in these ranges alone, which are counted from 0 in their order.
    ///
    /// # Panics
    /// If there is no such token.
    pub(crate) fn gather(&self, ranges: &[Range<usize>]) -> Self {
        let mut set = Self::none(ranges.iter().map(ExactSizeIterator::len).sum());
        for (to, from) in ranges.iter().cloned().flatten().enumerate() {
            if self.contains(from) {
                set.insert(to..to + 1);
            }
        }
        set
    }

    /// The share of `mass`, `[len]`, that the tokens of the set have; 1 where there is none.
    ///
    /// # Panics
    /// If there is not one mass for each token.
    pub fn kept(&self, mass: &[f32]) -> f64 {
        assert_eq!(mass.len(), self.len, "one mass for each token");
        let all: f64 = mass.iter().copied().map(f64::from).sum();
        let kept = mass.iter().enumerate().filter(|(token, _)| self.contains(*token));
        let kept: f64 = kept.map(|(_, mass)| f64::from(*mass)).sum();
        if all > 0.0 { kept / all } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members() {
        let mut set = TokenSet::none(130);
        set.insert(0..1);
        set.insert(63..66);
        set.insert(129..1000);
        let found: Vec<usize> = (0..130).filter(|token| set.contains(*token)).collect();
        assert_eq!(found, [0, 63, 64, 65, 129]);
        assert_eq!((set.count(), set.len()), (5, 130));
        assert_eq!(TokenSet::all(130).count(), 130);
    }

    #[test]
    fn kept_mass() {
        let mut set = TokenSet::none(3);
        set.insert(1..2);
        assert!((set.kept(&[1.0, 2.0, 5.0]) - 0.25).abs() < 1e-9);
        assert!((set.kept(&[0.0; 3]) - 1.0).abs() < 1e-9);
    }
}

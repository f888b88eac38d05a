//! Tokens that got much attention so far (H2O, Zhang et al. 2023).

use super::TokenSet;

/// Attention mass of each token, added up over decode steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeavyHitters {
    mass: Vec<f32>,
}

impl HeavyHitters {
    /// Adds the mass of one step, as
    /// [`Attention::run_with_mass`](crate::attention::Attention::run_with_mass) gives it. Tokens
    /// that came since the last step are new.
    pub fn observe(&mut self, mass: &[f32]) {
        if self.mass.len() < mass.len() {
            self.mass.resize(mass.len(), 0.0);
        }
        for (sum, mass) in self.mass.iter_mut().zip(mass) {
            *sum += mass;
        }
    }

    /// `[tokens]`
    pub fn mass(&self) -> &[f32] {
        &self.mass
    }

    /// The last `recent` of `tokens` and, of those before, the `heavy` with the most mass; of
    /// equals the earlier. NaN counts as the most.
    pub fn select(&self, tokens: usize, heavy: usize, recent: usize) -> TokenSet {
        let mut set = TokenSet::none(tokens);
        let older = tokens.saturating_sub(recent);
        set.insert(older..tokens);
        let mass = |token: usize| self.mass.get(token).copied().unwrap_or(0.0).abs();
        let mut ranked: Vec<usize> = (0..older).collect();
        let heaviest_first = |a: &usize, b: &usize| mass(*b).total_cmp(&mass(*a)).then(a.cmp(b));
        if heavy < older {
            ranked.select_nth_unstable_by(heavy, heaviest_first);
        }
        for token in &ranked[..heavy.min(older)] {
            set.insert(*token..token + 1);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heaviest_and_the_most_recent() {
        let mut hitters = HeavyHitters::default();
        hitters.observe(&[0.1, 0.5, 0.1, 0.3]);
        hitters.observe(&[0.2, 0.1, 0.0, 0.0, 0.7]);
        let check = |tokens, heavy, recent, expected: &[usize]| {
            let set = hitters.select(tokens, heavy, recent);
            let found: Vec<usize> = (0..tokens).filter(|token| set.contains(*token)).collect();
            assert_eq!(found, expected);
        };
        check(6, 2, 1, &[1, 4, 5]);
        check(6, 3, 2, &[0, 1, 3, 4, 5]);
        check(6, 0, 0, &[]);
        check(6, 9, 9, &[0, 1, 2, 3, 4, 5]);
    }
}

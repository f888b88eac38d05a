//! Which rule is best for what is asked here: each is tried on a sample of the objects.
//!
//! A shadow is a tier of names under one rule, with the share of the budget that the sample is of
//! all objects. Objects are sampled by their hash, so every use of one counts or none does, and what
//! is left of a run keeps its order. The rule under which the shadow had to bring in the fewest
//! bytes lately is the one that the tier follows.

use super::Access;
use super::cache::{Cache, Rule, Use};
use super::names::mix;
use crate::store::record::ObjectId;

/// What is tried, from nothing but recency to nearly nothing but frequency.
pub(super) const RULES: [Rule; 6] = [
    Rule::Distance,
    Rule::Frequency(0.0),
    Rule::Frequency(0.25),
    Rule::Frequency(1.0),
    Rule::Frequency(4.0),
    Rule::Frequency(16.0),
];

/// Resident objects of a shadow, at most; with more the sample becomes smaller, with a quarter of them larger.
pub(super) const RESIDENT_MAX: usize = 768;

/// Absent objects that a shadow remembers.
const ABSENT_MAX: usize = 8 * RESIDENT_MAX;

/// Sampled uses that count, about. One request of an agent uses hundreds of pages: with a tenth of them, chance decides, and what is lost
/// by going from rule to rule is more than the best of them wins (docs/policy.md).
const WINDOW: f64 = 8000.0;

/// What another rule may miss of what the present one does: changing has a price as well, since what
/// is resident was chosen by the other.
const ADVANTAGE: f64 = 0.995;

/// The rules on trial.
#[derive(Debug)]
pub(super) struct Shadows {
    candidates: [Shadow; RULES.len()],
    budget_bytes: u64,
    /// One of so many objects is in the sample, as a power of two.
    sampling_bits: u32,
    chosen: Option<usize>,
}

#[derive(Debug)]
struct Shadow {
    rule: Rule,
    cache: Cache,
    /// What had to come in again; what lies back counts less.
    missed_bytes: f64,
}

impl Shadows {
    pub(super) fn new(budget_bytes: u64) -> Shadows {
        let shadow = |rule| {
            let cache = Cache::under(rule, budget_bytes, ABSENT_MAX);
            Shadow { rule, cache, missed_bytes: 0.0 }
        };
        Shadows { candidates: RULES.map(shadow), budget_bytes, sampling_bits: 0, chosen: None }
    }

    /// The budget changes, and with it what each shadow holds: at once, since a shadow is small.
    pub(super) fn set_budget(&mut self, budget_bytes: u64) {
        self.budget_bytes = budget_bytes;
        for shadow in &mut self.candidates {
            shadow.cache.set_budget(budget_bytes >> self.sampling_bits);
            shadow.cache.make_room(shadow.rule, 0);
        }
    }

    /// What the tier should follow.
    pub(super) fn rule(&self) -> Rule {
        self.chosen.map_or(Rule::Untried, |chosen| RULES[chosen])
    }

    /// An object is used, or with `is_new` has come in whatever the rule says. The tier holds `in_tier`
    /// objects.
    pub(super) fn note(&mut self, used: Use, is_new: bool, in_tier: usize) {
        let is_thin = self.resident_max() < RESIDENT_MAX / 4;
        if self.sampling_bits > 0
            && is_thin
            && in_tier >> (self.sampling_bits - 1) < RESIDENT_MAX / 2
        {
            self.sample(self.sampling_bits - 1);
        }
        if !is_sampled(used.object, self.sampling_bits) {
            return;
        }
        if self.resident_max() > RESIDENT_MAX {
            self.sample(self.sampling_bits + 1);
        }
        for shadow in &mut self.candidates {
            shadow.note(used, is_new);
        }
        self.choose();
    }

    /// An object is gone for good.
    pub(super) fn remove(&mut self, object: ObjectId) {
        if is_sampled(object, self.sampling_bits) {
            for shadow in &mut self.candidates {
                shadow.cache.remove(object);
            }
        }
    }

    /// What its names take.
    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> usize {
        self.candidates.iter().map(|shadow| shadow.cache.names.memory_bytes()).sum()
    }

    /// Objects of the largest shadow.
    pub(super) fn resident_max(&self) -> usize {
        self.candidates.iter().map(|shadow| shadow.cache.resident()).max().unwrap_or(0)
    }

    /// Fewer objects form the sample where a tier holds many, more where it holds few: those come in as they
    /// are used.
    fn sample(&mut self, bits: u32) {
        self.sampling_bits = bits;
        for shadow in &mut self.candidates {
            shadow.cache.set_budget(self.budget_bytes >> bits);
            shadow.cache.retain(|object| is_sampled(object, bits));
        }
    }

    fn choose(&mut self) {
        let missed = |candidate: &usize| self.candidates[*candidate].missed_bytes;
        let by_missed = |a: &usize, b: &usize| missed(a).total_cmp(&missed(b));
        let best = (0..RULES.len()).min_by(by_missed);
        // Without a choice, anything is better than the worst.
        let present = self.chosen.or((0..RULES.len()).max_by(by_missed));
        if let (Some(best), Some(present)) = (best, present)
            && missed(&best) < ADVANTAGE * missed(&present)
        {
            self.chosen = Some(best);
        }
    }
}

impl Shadow {
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    fn note(&mut self, used: Use, is_new: bool) {
        let Shadow { rule, cache, missed_bytes } = self;
        let mut answer = Access::Admit;
        if !is_new || cache.is_resident(used.object) {
            answer = cache.access(*rule, used);
        }
        // What is new had to come in under any rule.
        if !is_new || used.uses > 1 {
            *missed_bytes *= 1.0 - 1.0 / WINDOW;
            if answer != Access::Hit {
                *missed_bytes += used.bytes as f64;
            }
        }
        if answer == Access::Admit {
            cache.make_room(*rule, used.bytes);
            cache.insert(used);
        }
    }
}

fn is_sampled(object: ObjectId, bits: u32) -> bool {
    // The index uses the low bits.
    (mix(object) >> 32) & ((1 << bits) - 1) == 0
}

//! A tier of names: what is resident under a rule, and what leaves next.
//!
//! The tier itself keeps both orders up to date, so that it can follow another rule at any time; a
//! shadow keeps the one of its rule.

use std::collections::BTreeSet;

use super::frequency::{Cursor, Frequency};
use super::lirs::Lirs;
use super::list::List;
use super::names::{Names, Node, State};
use super::{Access, Victim};
use crate::store::record::ObjectId;

/// Uses beyond the reach of the history per object that is admitted all the same.
const SAMPLING: u32 = 32;

/// Pinned objects that one search for victims passes over, in each of its lists. Who has to ask somebody
/// else whether an object is pinned bounds that by itself.
pub(super) const PINNED_SKIPPED_MAX: usize = 1024;

/// Who stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    /// Nothing is known yet: what is new replaces what was used longest ago, and what is not here
    /// comes in when it is proven, as with [`Rule::Distance`].
    Untried,
    /// [`Lirs`].
    Distance,
    /// [`Frequency`], with the worth of a doubled number of uses.
    Frequency(f32),
}

impl Rule {
    /// Of the order in which it lets objects go, if that is [`Frequency`].
    fn weight(self) -> Option<f32> {
        match self {
            Rule::Untried => Some(0.0),
            Rule::Distance => None,
            Rule::Frequency(weight) => Some(weight),
        }
    }
}

/// A use, as it is seen by the tier and its shadows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) object: ObjectId,
    pub(super) bytes: u64,
    /// Uses of the object, this one included.
    pub(super) uses: u16,
    pub(super) run: u32,
}

/// The tier.
#[derive(Debug)]
pub(super) struct Cache {
    budget_bytes: u64,
    resident_bytes: u64,
    resident: usize,
    pub(super) names: Names,
    pub(super) lirs: Option<Lirs>,
    pub(super) frequency: Option<Frequency>,
    /// Absent objects that are remembered, the next to be forgotten last.
    pub(super) absent: List,
    pub(super) absent_max: usize,
    /// Absent objects forgotten since one was last admitted without proof.
    forgotten: u32,
    run: u32,
}

impl Cache {
    /// A tier that can follow any rule.
    pub(super) fn new(budget_bytes: u64, absent_max: usize) -> Cache {
        Cache {
            budget_bytes,
            resident_bytes: 0,
            resident: 0,
            names: Names::new(),
            lirs: Some(Lirs::new(budget_bytes)),
            frequency: Some(Frequency::new()),
            absent: List::over(1),
            absent_max,
            forgotten: 0,
            run: 0,
        }
    }

    /// One that follows this rule only.
    pub(super) fn under(rule: Rule, budget_bytes: u64, absent_max: usize) -> Cache {
        let mut cache = Cache::new(budget_bytes, absent_max);
        match rule {
            Rule::Untried => {}
            Rule::Distance => cache.frequency = None,
            Rule::Frequency(_) => (cache.lirs, cache.absent_max) = (None, 0),
        }
        cache
    }

    pub(super) fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    pub(super) fn resident(&self) -> usize {
        self.resident
    }

    pub(super) fn is_resident(&self, object: ObjectId) -> bool {
        self.names.find(object).is_some_and(|index| self.names[index].state.is_resident())
    }

    /// The budget changes; the next search for victims says what does not fit any more.
    pub(super) fn set_budget(&mut self, budget_bytes: u64) {
        self.budget_bytes = budget_bytes;
        if let Some(lirs) = &mut self.lirs {
            lirs.set_budget(budget_bytes);
        }
    }

    /// An object is used.
    pub(super) fn access(&mut self, rule: Rule, used: Use) -> Access {
        self.start_run(used.run);
        let names = &mut self.names;
        let index = match names.find(used.object) {
            // Nothing is remembered, so there is nothing to note.
            None if self.absent_max == 0 => return self.judge(rule, used, false),
            None => names.add(used.object, used.bytes),
            Some(index) => index,
        };
        let node = &mut names[index];
        (node.uses, node.run) = (used.uses, used.run);
        let is_resident = node.state.is_resident();
        let was_in_history = self.lirs.as_mut().is_some_and(|lirs| lirs.access(names, index));
        if is_resident {
            if let Some(frequency) = &mut self.frequency {
                frequency.place(names, index);
            }
            return Access::Hit;
        }
        self.absent.move_to_front(names, index);
        self.forgotten += self.bound_absent();
        let fits = used.bytes <= self.budget_bytes;
        let is_proven = fits && (was_in_history || self.is_sample(rule, used));
        let node = &mut self.names[index];
        node.state = if is_proven { State::Proven } else { State::Asked };
        node.bytes = used.bytes;
        self.judge(rule, used, is_proven)
    }

    /// Whether an object that nothing speaks for is admitted all the same.
    fn is_sample(&mut self, rule: Rule, used: Use) -> bool {
        let is_due = rule == Rule::Distance && self.forgotten >= SAMPLING && !self.has_room(used);
        if is_due {
            self.forgotten = 0;
        }
        is_due
    }

    /// What to do about an object that is not resident.
    fn judge(&self, rule: Rule, used: Use, is_proven: bool) -> Access {
        let is_admitted = self.has_room(used)
            || match (rule, &self.frequency) {
                (Rule::Frequency(weight), Some(frequency)) => {
                    used.bytes <= self.budget_bytes
                        && !frequency.is_next(&self.names, used.uses, weight, used.run)
                }
                _ => is_proven,
            };
        if is_admitted { Access::Admit } else { Access::Bypass }
    }

    fn has_room(&self, used: Use) -> bool {
        self.resident_bytes.saturating_add(used.bytes) <= self.budget_bytes
    }

    /// An object has come in.
    pub(super) fn insert(&mut self, used: Use) {
        self.start_run(used.run);
        let mut known = self.names.find(used.object);
        if known.is_some_and(|index| self.names[index].state.is_resident()) {
            self.remove(used.object);
            known = None;
        }
        let names = &mut self.names;
        let index = known.unwrap_or_else(|| names.add(used.object, used.bytes));
        self.absent.remove(names, index);
        let node = &mut names[index];
        (node.bytes, node.uses, node.run) = (used.bytes, used.uses, used.run);
        let state = std::mem::replace(&mut node.state, State::Cold);
        if let Some(lirs) = &mut self.lirs {
            let is_proven = match state {
                State::Absent => lirs.note_absent(names, index) && used.bytes <= self.budget_bytes,
                state => state == State::Proven,
            };
            lirs.insert(names, index, is_proven);
        }
        if let Some(frequency) = &mut self.frequency {
            frequency.place(names, index);
        }
        self.resident_bytes += used.bytes;
        self.resident += 1;
    }

    /// An object is gone for good: deleted, or changed.
    pub(super) fn remove(&mut self, object: ObjectId) {
        let Some(index) = self.names.find(object) else {
            return;
        };
        if self.names[index].state.is_resident() {
            if let Some(frequency) = &mut self.frequency {
                frequency.remove(&mut self.names, index);
            }
            self.leave(index);
        } else {
            self.absent.remove(&mut self.names, index);
        }
        self.forget(index);
    }

    /// A resident object was evicted, and is remembered.
    pub(super) fn evicted(&mut self, object: ObjectId) {
        let known = self.names.find(object);
        if let Some(index) = known.filter(|index| self.names[*index].state.is_resident()) {
            self.evict(index);
        }
    }

    /// Evicts what should leave so that `bytes` more fit into the budget.
    pub(super) fn make_room(&mut self, rule: Rule, bytes: u64) {
        while self.resident_bytes.saturating_add(bytes) > self.budget_bytes {
            let first = match (rule.weight(), &self.lirs, &self.frequency) {
                (Some(weight), _, Some(frequency)) => {
                    frequency.next(&self.names, &mut frequency.search(weight, self.run))
                }
                (_, Some(lirs), _) => lirs.cold.last().or(lirs.hot.last()),
                _ => None,
            };
            let Some(index) = first else {
                return;
            };
            self.evict(index);
        }
    }

    fn evict(&mut self, index: u32) {
        if let Some(frequency) = &mut self.frequency {
            frequency.evict(&mut self.names, index, self.run);
        }
        self.leave(index);
        if self.absent_max == 0 {
            return self.forget(index);
        }
        self.absent.push_front(&mut self.names, index);
        self.bound_absent();
    }

    /// Bytes that must leave for `bytes` more to fit into the budget.
    pub(super) fn excess_bytes(&self, bytes: u64) -> u64 {
        self.resident_bytes.saturating_add(bytes).saturating_sub(self.budget_bytes)
    }

    /// What the leaving of an object frees.
    pub(super) fn bytes_of(&self, object: ObjectId) -> u64 {
        self.names.find(object).map_or(0, |index| self.names[index].bytes)
    }

    /// The objects that should leave first, `wanted` bytes together, and so many at most, without those that were
    /// looked at before. Where `is_pinned` does not say, the search ends.
    pub(super) fn first_to_leave(
        &mut self, rule: Rule, (wanted, most): (u64, usize), looked_at: &BTreeSet<ObjectId>,
        mut is_pinned: impl FnMut(ObjectId) -> Option<bool>,
    ) -> Vec<Victim> {
        let (mut victims, mut freed) = (Vec::new(), 0);
        let mut pinned = Vec::new();
        'searches: for mut search in self.searches(rule) {
            let pinned_max = pinned.len() + PINNED_SKIPPED_MAX;
            while freed < wanted
                && victims.len() < most
                && pinned.len() < pinned_max
                && let Some(index) = self.next(&mut search)
            {
                let Node { object, bytes, .. } = self.names[index];
                if looked_at.contains(&object) {
                    continue;
                }
                match is_pinned(object) {
                    Some(true) => pinned.push(index),
                    Some(false) => {
                        freed += bytes;
                        victims.push(Victim { object, bytes });
                    }
                    None => break 'searches,
                }
            }
        }
        for index in pinned {
            if let Some(lirs) = &mut self.lirs {
                lirs.spare(&mut self.names, index);
            }
            if let Some(frequency) = &mut self.frequency {
                frequency.spare(&mut self.names, index, self.run);
            }
        }
        victims
    }

    /// Forgets every object but those that `keeps` says.
    pub(super) fn retain(&mut self, keeps: impl Fn(ObjectId) -> bool) {
        for object in self.names.objects().into_iter().filter(|object| !keeps(*object)) {
            self.remove(object);
        }
    }

    /// Where to look for victims, one place after the other.
    fn searches(&self, rule: Rule) -> Vec<Search> {
        match (rule.weight(), &self.lirs, &self.frequency) {
            (Some(weight), _, Some(frequency)) => {
                vec![Search::Frequency(frequency.search(weight, self.run))]
            }
            (_, Some(lirs), _) => {
                vec![Search::Cold(lirs.cold.last()), Search::Hot(lirs.hot.last())]
            }
            _ => Vec::new(),
        }
    }

    /// What is resident, from what should leave first on.
    pub(super) fn in_order(&self, rule: Rule) -> impl Iterator<Item = (ObjectId, u64)> {
        self.searches(rule).into_iter().flat_map(move |mut search| {
            std::iter::from_fn(move || {
                let Node { object, bytes, .. } = self.names[self.next(&mut search)?];
                Some((object, bytes))
            })
        })
    }

    fn next(&self, search: &mut Search) -> Option<u32> {
        let (list, next) = match (search, &self.lirs, &self.frequency) {
            (Search::Frequency(cursor), _, Some(frequency)) => {
                return frequency.next(&self.names, cursor);
            }
            (Search::Cold(next), Some(lirs), _) => (&lirs.cold, next),
            (Search::Hot(next), Some(lirs), _) => (&lirs.hot, next),
            _ => return None,
        };
        let index = (*next)?;
        *next = list.before(&self.names, index);
        Some(index)
    }

    fn start_run(&mut self, run: u32) {
        // An object that comes in late brings the run of its use. The count may have gone around.
        if run.wrapping_sub(self.run).cast_signed() <= 0 {
            return;
        }
        self.run = run;
        if let Some(lirs) = &mut self.lirs {
            lirs.start_run();
        }
        if let Some(frequency) = &mut self.frequency {
            frequency.start_run();
        }
    }

    /// Takes a resident object out of what is resident.
    fn leave(&mut self, index: u32) {
        self.resident_bytes -= self.names[index].bytes;
        self.resident -= 1;
        match &mut self.lirs {
            Some(lirs) => lirs.leave(&mut self.names, index),
            None => self.names[index].state = State::Absent,
        }
    }

    /// Removes the last trace of an object that is in no list of those that are there.
    fn forget(&mut self, index: u32) {
        if let Some(lirs) = &mut self.lirs {
            lirs.forget(&mut self.names, index);
        }
        self.names.free(index);
    }

    /// Forgets absent objects beyond the bound; returns how many.
    fn bound_absent(&mut self) -> u32 {
        let mut forgotten = 0;
        while self.absent.length() > self.absent_max
            && let Some(index) = self.absent.last()
        {
            self.absent.remove(&mut self.names, index);
            self.forget(index);
            forgotten += 1;
        }
        forgotten
    }
}

/// A place to look for victims, and how far the search has come.
enum Search {
    Frequency(Cursor),
    Cold(Option<u32>),
    Hot(Option<u32>),
}

//! The same uses in the same order, through the same policy, with bytes that exist in its books only.
//!
//! What clients found, what they made, and when the daemon died is written down as it happens. The simulated
//! tiers are told of all that and of nothing else but how many pages the remote did not have yet, how many had left the disk
//! by then, whether the disk had room for a page when it came from the remote, and what there was when a daemon began: moving
//! takes its time, and when it has come so far is no affair of the policy. Which pages leave is.

use std::collections::{BTreeSet, HashSet, VecDeque};

use crate::store::record::ObjectId;
use crate::tier::replacement::Replacement;
use crate::tier::ssd::excess_bytes;

/// Where a page is when a request comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tier {
    Ram,
    Ssd,
    Remote,
}

/// All of them, in the order of counts.
pub(super) const TIERS: [(Tier, &str); 3] =
    [(Tier::Ram, "ram"), (Tier::Ssd, "ssd"), (Tier::Remote, "remote")];

/// What happened.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A client loads a page, and this is where it was.
    Found(u32, Tier),
    /// A page that the remote had was loaded, and this is where it came to.
    Landed(u32, Tier),
    /// A client has made a page.
    Made(u32),
    /// Pages that were made are durable.
    Durable(Vec<u32>),
    /// So many pages wait for the remote, and the others may leave the disk; so many left since the last time, and
    /// so many bytes are there.
    Moved { waiting: usize, left: u64, used: u64 },
    /// The daemon was killed, and another one came, with these pages on the disk, so many of which wait for the remote, and
    /// in the remote alone: memory is empty, and what was used is forgotten.
    Killed { on_disk: Vec<u32>, waiting: usize, in_remote: Vec<u32> },
}

/// What decides when pages leave the simulated disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// As many may and do leave as of the real one, when they do.
    AsObserved,
    /// What is made may leave, and does as soon as the budget asks for it, as if moving took no time.
    AtOnce,
}

/// Budgets, and the size of every page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) ram: u64,
    pub(super) ssd: u64,
    pub(super) page: u64,
}

/// Uses by the tier that served them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Comparison {
    pub(super) observed: [u64; 3],
    pub(super) simulated: [u64; 3],
    /// Uses for which both say the same.
    pub(super) same: u64,
}

impl Comparison {
    /// Shares of all uses, of a tier, observed and simulated.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(super) fn shares(&self, tier: Tier) -> (f64, f64) {
        let all = self.observed.iter().sum::<u64>().max(1) as f64;
        let at = tier as usize;
        (self.observed[at] as f64 / all, self.simulated[at] as f64 / all)
    }

    /// The largest difference of these shares.
    pub(super) fn disagreement(&self) -> f64 {
        let differences = TIERS.iter().map(|(tier, _)| {
            let (observed, simulated) = self.shares(*tier);
            (observed - simulated).abs()
        });
        differences.fold(0.0, f64::max)
    }
}

/// The tiers in the books.
struct Tiers {
    sizes: Sizes,
    ram: Replacement,
    ssd: Replacement,
    known: HashSet<u32>,
    /// Pages are made in the order of their numbers, more or less.
    on_disk: BTreeSet<u32>,
    /// Of them, those that the remote does not have: the policy of the disk does not know them yet.
    waiting: VecDeque<u32>,
    /// Pages that waited, in the order in which they came to the remote. A kill takes back the last ones: that they are
    /// there was not durable.
    uploaded: Vec<u32>,
    /// Pages that are not durable: they cannot leave memory, and a kill takes them away.
    fresh: HashSet<u32>,
    /// Pages that left before that was counted.
    left_ahead: u64,
    leaving: Leaving,
}

/// What the simulated tiers make of what happened.
pub(super) fn simulate(events: &[Event], sizes: Sizes, leaving: Leaving) -> Comparison {
    let mut tiers = Tiers::new(sizes, leaving);
    let mut comparison = Comparison::default();
    for event in events {
        match event {
            Event::Found(page, tier) => tiers.find(*page, *tier, &mut comparison),
            Event::Landed(page, tier) => tiers.land(*page, *tier),
            Event::Made(page) => tiers.make(*page),
            Event::Durable(pages) => pages.iter().for_each(|page| {
                tiers.fresh.remove(page);
            }),
            Event::Moved { waiting, left, used } if leaving == Leaving::AsObserved => {
                tiers.upload(*waiting);
                tiers.leave_as_observed(*left, *used);
            }
            Event::Moved { .. } => {}
            Event::Killed { on_disk, waiting, in_remote } => {
                tiers.begin_anew(on_disk, *waiting, in_remote);
            }
        }
        if leaving == Leaving::AtOnce {
            tiers.make_room();
        }
    }
    comparison
}

fn object(page: u32) -> ObjectId {
    ObjectId(page.into())
}

fn page_of(object: ObjectId) -> u32 {
    u32::try_from(object.0).expect("it was made of a page's number")
}

impl Tiers {
    fn new(sizes: Sizes, leaving: Leaving) -> Tiers {
        let (ram, ssd) = (Replacement::new(sizes.ram), Replacement::new(sizes.ssd));
        let (known, on_disk, waiting) = (HashSet::new(), BTreeSet::new(), VecDeque::new());
        let (uploaded, fresh) = (Vec::new(), HashSet::new());
        Tiers { sizes, ram, ssd, known, on_disk, waiting, uploaded, fresh, left_ahead: 0, leaving }
    }

    fn find(&mut self, page: u32, observed: Tier, comparison: &mut Comparison) {
        let Some(simulated) = self.tier(page) else {
            // Nobody was told that it is durable, and a kill left it all the same.
            self.known.insert(page);
            return self.come_new(page);
        };
        comparison.observed[observed as usize] += 1;
        comparison.simulated[simulated as usize] += 1;
        comparison.same += u64::from(observed == simulated);
        match (simulated, self.leaving) {
            (Tier::Remote, Leaving::AsObserved) => self.come_to(page, observed),
            (Tier::Remote, Leaving::AtOnce) => {
                let has_room = self.page_bytes() + self.sizes.page <= self.sizes.ssd;
                self.come_to(page, if has_room { Tier::Ssd } else { Tier::Ram });
            }
            (Tier::Ram | Tier::Ssd, _) => self.use_here(page),
        }
    }

    fn tier(&self, page: u32) -> Option<Tier> {
        if !self.known.contains(&page) {
            None
        } else if self.ram.is_resident(object(page)) {
            Some(Tier::Ram)
        } else if self.on_disk.contains(&page) {
            Some(Tier::Ssd)
        } else {
            Some(Tier::Remote)
        }
    }

    fn use_here(&mut self, page: u32) {
        if self.ram.is_resident(object(page)) {
            self.ram.access(object(page), self.sizes.page);
        }
        if self.ssd.is_resident(object(page)) {
            self.ssd.access(object(page), self.sizes.page);
        }
    }

    /// What comes from the remote is kept where it is in the mount: the disk takes it while it has room, then memory.
    fn come_to(&mut self, page: u32, tier: Tier) {
        match tier {
            // Where it comes to will be told.
            Tier::Remote => {}
            Tier::Ram if self.come_to_memory(page) => {}
            Tier::Ram | Tier::Ssd => self.come_to_disk(page),
        }
    }

    fn land(&mut self, page: u32, tier: Tier) {
        if self.leaving == Leaving::AsObserved && self.tier(page) == Some(Tier::Remote) {
            self.come_to(page, tier);
        }
    }

    fn make(&mut self, page: u32) {
        // Two may compute the same: it is stored once, and memory has made room for both.
        if !self.known.insert(page) {
            self.make_room_in_memory();
            return;
        }
        self.fresh.insert(page);
        self.come_to_memory(page);
        self.come_new(page);
    }

    /// Nothing else has it yet.
    fn come_new(&mut self, page: u32) {
        self.on_disk.insert(page);
        self.waiting.push_back(page);
        if self.leaving == Leaving::AtOnce {
            self.upload(0);
        }
    }

    fn upload(&mut self, waiting: usize) {
        while self.waiting.len() > waiting
            && let Some(page) = self.waiting.pop_front()
        {
            self.uploaded.push(page);
            self.come_to_disk(page);
        }
    }

    fn come_to_memory(&mut self, page: u32) -> bool {
        let has_room = self.make_room_in_memory();
        if has_room {
            self.ram.insert(object(page), self.sizes.page);
        }
        has_room
    }

    fn make_room_in_memory(&mut self) -> bool {
        let bytes = self.sizes.page;
        let fresh = &self.fresh;
        for victim in self.ram.victims(bytes, |object| fresh.contains(&page_of(object))) {
            self.ram.evicted(victim.object);
        }
        self.ram.resident_bytes() + bytes <= self.sizes.ram
    }

    fn come_to_disk(&mut self, page: u32) {
        self.on_disk.insert(page);
        self.ssd.insert(object(page), self.sizes.page);
    }

    /// Of the pages on the disk.
    fn page_bytes(&self) -> u64 {
        self.on_disk.len() as u64 * self.sizes.page
    }

    fn leave(&mut self, count: u64) {
        let most = usize::try_from(count).unwrap_or(usize::MAX);
        for victim in self.ssd.first_to_leave(count * self.sizes.page, most, |_| false) {
            self.ssd.evicted(victim.object);
            self.on_disk.remove(&page_of(victim.object));
        }
    }

    /// Bytes are gone a moment before their leaving is counted.
    fn leave_as_observed(&mut self, left: u64, used: u64) {
        let counted = left.saturating_sub(self.left_ahead);
        let fresh = self.fresh.len() as u64 * self.sizes.page;
        let excess = self.page_bytes().saturating_sub(used + fresh) / self.sizes.page;
        let leaving = counted.max(excess);
        self.left_ahead = (self.left_ahead + leaving).saturating_sub(left);
        self.leave(leaving);
    }

    fn make_room(&mut self) {
        let excess = excess_bytes(self.sizes.ssd, self.page_bytes());
        self.leave(excess.div_ceil(self.sizes.page));
    }

    /// Each daemon begins with what the one before it left, so a difference ends with the one that made it.
    fn begin_anew(&mut self, on_disk: &[u32], waiting: usize, in_remote: &[u32]) {
        self.ram = Replacement::new(self.sizes.ram);
        self.ssd = Replacement::new(self.sizes.ssd);
        self.fresh.clear();
        self.left_ahead = 0;
        self.known = on_disk.iter().chain(in_remote).copied().collect();
        self.on_disk = on_disk.iter().copied().collect();
        let on_disk = &self.on_disk;
        self.waiting.retain(|page| on_disk.contains(page));
        while self.leaving == Leaving::AsObserved
            && self.waiting.len() < waiting
            && let Some(page) = self.uploaded.pop()
        {
            if on_disk.contains(&page) {
                self.waiting.push_front(page);
            }
        }
        self.uploaded.clear();
        let waiting: HashSet<u32> = self.waiting.iter().copied().collect();
        for page in self.on_disk.iter().filter(|page| !waiting.contains(page)) {
            self.ssd.insert(object(*page), self.sizes.page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { ram: 2, ssd: 4, page: 1 };

    fn check(events: &[Vec<Event>], leaving: Leaving, expected: [u64; 3]) {
        let comparison = simulate(&events.concat(), SIZES, leaving);
        assert_eq!(comparison.simulated, expected, "{events:?}");
    }

    fn found(pages: &[u32]) -> Vec<Event> {
        pages.iter().map(|page| Event::Found(*page, Tier::Ram)).collect()
    }

    fn made(count: u32) -> Vec<Event> {
        (0..count).flat_map(|page| [Event::Made(page), Event::Durable(vec![page])]).collect()
    }

    fn moved(waiting: usize, left: u64, used: u64) -> Vec<Event> {
        vec![Event::Moved { waiting, left, used }]
    }

    fn killed(on_disk: &[u32], waiting: usize, in_remote: &[u32]) -> Vec<Event> {
        let (on_disk, in_remote) = (on_disk.to_vec(), in_remote.to_vec());
        vec![Event::Killed { on_disk, waiting, in_remote }]
    }

    #[test]
    fn pages_are_where_the_policy_leaves_them() {
        check(&[made(4), found(&[0, 1, 2, 3])], Leaving::AsObserved, [2, 2, 0]);
        let all = killed(&[0, 1, 2, 3], 4, &[]);
        let events = [made(4), all.clone(), found(&[0, 1, 2, 3])];
        check(&events, Leaving::AsObserved, [0, 4, 0]);
        // What the remote served is here afterwards.
        let loads = (0..3)
            .flat_map(|page| [Event::Found(page, Tier::Remote), Event::Landed(page, Tier::Ssd)]);
        let events = [made(4), all, moved(0, 3, 1), loads.collect(), found(&[3, 0, 1, 2, 3])];
        check(&events, Leaving::AsObserved, [0, 5, 3]);
        check(&events[..2], Leaving::AtOnce, [0; 3]);
        // A daemon begins with what the one before left.
        let events = [made(4), killed(&[3], 1, &[0, 1, 2]), found(&[0, 1, 2, 3])];
        check(&events, Leaving::AsObserved, [0, 1, 3]);
    }

    #[test]
    fn the_disk_is_full_and_memory_takes_what_comes() {
        let all = killed(&[0, 1, 2, 3, 4], 5, &[]);
        let events = [made(5), all, moved(0, 1, 4), found(&[4, 0, 1, 2, 3, 4, 0, 1, 2, 3])];
        let comparison = simulate(&events.concat(), SIZES, Leaving::AsObserved);
        assert_eq!(comparison.simulated, [1, 8, 1]);
        assert_eq!(comparison.observed, [10, 0, 0]);
    }

    #[test]
    fn what_the_disk_has_no_bytes_for_has_left_before_that_is_counted() {
        let all = killed(&[0, 1, 2, 3], 0, &[]);
        let events = [all, moved(0, 0, 2), moved(0, 2, 2), moved(0, 1, 2), found(&[0, 1, 2, 3])];
        check(&events, Leaving::AsObserved, [0, 1, 3]);
    }

    #[test]
    fn what_comes_from_the_remote_is_where_it_came_to() {
        let before = [made(4), killed(&[2, 3], 2, &[0, 1]), moved(0, 0, 2)].concat();
        let loads = |page, tier| vec![Event::Found(page, Tier::Remote), Event::Landed(page, tier)];
        for (tier, expected) in [(Tier::Ram, [2, 0, 2]), (Tier::Ssd, [0, 2, 2])] {
            let events = [before.clone(), loads(0, tier), loads(1, tier), found(&[0, 1])];
            check(&events, Leaving::AsObserved, expected);
        }
        // One that had never left here stays where it is; another is where it was found.
        let events = [before.clone(), loads(3, Tier::Ram), found(&[3, 0, 0])];
        check(&events, Leaving::AsObserved, [1, 2, 1]);
        // One that two wait for comes once.
        let twice = vec![Event::Landed(0, Tier::Ssd)];
        check(&[before, loads(0, Tier::Ram), twice, found(&[0])], Leaving::AsObserved, [1, 0, 1]);
    }

    #[test]
    fn what_the_remote_does_not_have_cannot_leave() {
        let events = [made(4), killed(&[0, 1, 2, 3], 4, &[]), moved(3, 3, 4), found(&[3, 2, 1, 0])];
        check(&events, Leaving::AsObserved, [0, 3, 1]);
    }

    #[test]
    fn what_came_to_the_remote_and_was_not_durable_there_waits_again() {
        // Of four pages on the disk two were in the remote; afterwards it is the older one alone, and that one leaves.
        let before = [made(4), moved(2, 0, 4), killed(&[0, 1, 2, 3], 3, &[])].concat();
        let events = [before.clone(), moved(3, 4, 0), found(&[0, 1, 2, 3])];
        check(&events, Leaving::AsObserved, [0, 3, 1]);
        check(&[before, moved(3, 4, 0), found(&[0])], Leaving::AsObserved, [0, 0, 1]);
    }

    #[test]
    fn what_was_not_durable_is_gone_and_what_is_there_all_the_same_is_not_compared() {
        let events = [vec![Event::Made(7)], killed(&[], 0, &[]), found(&[7, 7])];
        check(&events, Leaving::AsObserved, [0, 1, 0]);
        // It is in the way of what comes to memory, too.
        let fresh = vec![Event::Made(7), Event::Made(8), Event::Made(9)];
        check(&[fresh, found(&[7, 8, 9])], Leaving::AsObserved, [2, 1, 0]);
    }

    #[test]
    fn shares_are_of_all_uses() {
        let comparison = Comparison { observed: [50, 30, 20], simulated: [48, 33, 19], same: 90 };
        assert_eq!(comparison.shares(Tier::Ssd), (0.3, 0.33));
        assert!((comparison.disagreement() - 0.03).abs() < 1e-9);
        assert!(Comparison::default().disagreement().abs() < 1e-9);
    }
}

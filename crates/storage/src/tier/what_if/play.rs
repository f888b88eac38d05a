//! The policy of a tier, played on the uses that were seen.
//!
//! Each tier does here what it does in a mount. **Memory** takes new pages and what is asked to come, and what is not
//! there stays where it is. **The disk** takes everything that is used; where it is filled to 95 per cent, objects leave
//! for the remote until it is filled to 90, but very small and very large ones do not. What is read for the first time since the mount began
//! and was there before comes from where it came from, whatever the budget; so does what is used for the first time since
//! uses were forgotten.

use super::record::Happened;
use super::seen::{Object, Seen, Step};
use crate::store::record::ObjectId;
use crate::tier::counters::Tier;
use crate::tier::replacement::Replacement;
use crate::tier::ssd::{LEAVING_BYTES_MAX, LEAVING_BYTES_MIN, excess_bytes};

/// Where the sample's share of a budget has no room for so many of its largest objects, it tells little.
const ROOM_MIN: u64 = 64;
/// Uses in a row that the policy is told of: more make no difference.
const AGAIN_MAX: u32 = 256;

/// What is to be played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Play {
    /// What happened, as the mount saw it.
    Counted(Tier),
    /// A RAM tier of so many bytes.
    Memory(u64),
    /// A disk of so many bytes before a remote.
    Disk(u64),
}

/// What came of it, of all objects.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Played {
    /// Uses.
    pub uses: f64,
    /// Of them, those that found their object in the tier.
    pub found: f64,
    /// Bytes of objects that were used.
    pub bytes: f64,
    /// Of them, those that came from below.
    pub loaded_bytes: f64,
    /// Tokens of the pages that were used.
    pub tokens: f64,
    /// Of them, those that were found.
    pub found_tokens: f64,
    /// The budget is smaller than the sample can tell.
    pub is_rough: bool,
}

impl Played {
    /// The share of the uses that found their object.
    pub fn found_share(&self) -> f64 {
        if self.uses > 0.0 { self.found / self.uses } else { 0.0 }
    }
}

impl Play {
    /// Plays.
    pub fn on(self, seen: &Seen) -> Played {
        let mut sums = Sums::default();
        match self {
            Play::Counted(tier) => count(seen, tier, &mut sums),
            Play::Memory(budget) => play(seen, &mut Memory::new(seen, budget), &mut sums),
            Play::Disk(budget) => play(seen, &mut Disk::new(seen, budget), &mut sums),
        }
        Played { is_rough: self.is_rough(seen), ..sums.of_all(seen) }
    }

    fn is_rough(self, seen: &Seen) -> bool {
        let (Play::Memory(budget) | Play::Disk(budget)) = self else { return false };
        let largest = seen.objects.iter().map(|object| object.bytes).max().unwrap_or(0);
        seen.sampling_bits > 0 && largest.saturating_mul(ROOM_MIN) > budget >> seen.sampling_bits
    }
}

/// What the sample has.
#[derive(Debug, Default)]
struct Sums {
    uses: f64,
    missed: f64,
    bytes: f64,
    missed_bytes: f64,
    tokens: f64,
    missed_tokens: f64,
}

impl Sums {
    #[expect(clippy::cast_precision_loss, reason = "estimates of a few digits")]
    fn add(&mut self, object: &Object, step: Step, is_found: bool) {
        let times = f64::from(step.times);
        let (bytes, tokens) = (step.bytes as f64 * times, object.tokens * times);
        self.uses += times;
        self.bytes += bytes;
        self.tokens += tokens;
        if !is_found {
            self.missed += times;
            self.missed_bytes += bytes;
            self.missed_tokens += tokens;
        }
    }

    /// Of all objects. The uses of all are known: what the sample has too many or too few of them belongs to objects that
    /// are used often, which are found (SHARDS-adj of FAST '15).
    #[expect(clippy::cast_precision_loss, reason = "estimates of a few digits")]
    fn of_all(&self, seen: &Seen) -> Played {
        let factor = f64::from(seen.sampling_bits).exp2();
        let (uses, bytes) = (seen.uses as f64, seen.used_bytes as f64);
        let tokens = if self.uses > 0.0 { self.tokens / self.uses * uses } else { 0.0 };
        let missed = |sampled: f64, all: f64| (sampled * factor).min(all);
        Played {
            uses,
            found: uses - missed(self.missed, uses),
            bytes,
            loaded_bytes: missed(self.missed_bytes, bytes),
            tokens,
            found_tokens: tokens - missed(self.missed_tokens, tokens),
            is_rough: false,
        }
    }
}

/// A tier that is played.
trait Player {
    /// What happened to an object, other than a use.
    fn note(&mut self, object: usize, id: ObjectId, step: Step);

    /// An object is used; whether it is found.
    fn find(&mut self, object: usize, id: ObjectId, step: Step) -> bool;
}

fn play(seen: &Seen, player: &mut impl Player, sums: &mut Sums) {
    for step in &seen.steps {
        let at = step.object as usize;
        let object = &seen.objects[at];
        let id = ObjectId(object.number);
        match step.what {
            Happened::Used | Happened::UsedInMemory => {
                sums.add(object, *step, player.find(at, id, *step));
            }
            Happened::UsedAgain => {
                let mut is_found = false;
                for _ in 0..step.times.min(AGAIN_MAX) {
                    is_found = player.find(at, id, *step);
                }
                sums.add(object, *step, is_found);
            }
            _ => player.note(at, id, *step),
        }
    }
}

/// What the mount found where.
fn count(seen: &Seen, tier: Tier, sums: &mut Sums) {
    // Where it came from for this use.
    let mut has_come = vec![false; seen.objects.len()];
    let mut was_found = vec![false; seen.objects.len()];
    for step in &seen.steps {
        let at = step.object as usize;
        match (step.what, tier) {
            (Happened::Fetched, _) | (Happened::Landed, Tier::Ram) => has_come[at] = true,
            (Happened::Used | Happened::UsedInMemory, _) => {
                let is_near = tier != Tier::Ram || step.what == Happened::UsedInMemory;
                let is_found = is_near && !std::mem::take(&mut has_come[at]);
                was_found[at] = is_near;
                sums.add(&seen.objects[at], *step, is_found);
            }
            (Happened::UsedAgain, _) => sums.add(&seen.objects[at], *step, was_found[at]),
            _ => {}
        }
    }
}

/// The RAM tier.
struct Memory {
    replacement: Replacement,
    budget_bytes: u64,
    /// What came in just to be read was not here.
    has_landed: Vec<bool>,
    /// It was seen before.
    is_seen: Vec<bool>,
}

impl Memory {
    fn new(seen: &Seen, budget_bytes: u64) -> Memory {
        let budget_bytes = budget_bytes >> seen.sampling_bits;
        let [has_landed, is_seen] = [(); 2].map(|()| vec![false; seen.objects.len()]);
        let replacement = Replacement::new(budget_bytes);
        Memory { replacement, budget_bytes, has_landed, is_seen }
    }

    fn take_in(&mut self, id: ObjectId, bytes: u64) {
        if bytes > self.budget_bytes {
            return;
        }
        for victim in self.replacement.victims(bytes, |_| false) {
            self.replacement.evicted(victim.object);
        }
        self.replacement.insert(id, bytes);
        // The daemon opens it to look at it, or to write it to the disk.
        self.replacement.access(id, bytes);
    }
}

impl Player for Memory {
    fn note(&mut self, object: usize, id: ObjectId, step: Step) {
        let is_here = self.replacement.is_resident(id);
        self.is_seen[object] = true;
        match step.what {
            Happened::NewPage => {
                self.replacement.remove(id);
                self.take_in(id, step.bytes);
            }
            Happened::Promoted | Happened::Landed if !is_here => {
                self.has_landed[object] = step.what == Happened::Landed;
                self.take_in(id, step.bytes);
            }
            // Changes are made on the disk.
            Happened::NewFile | Happened::Gone => self.replacement.remove(id),
            _ => {}
        }
    }

    fn find(&mut self, object: usize, id: ObjectId, step: Step) -> bool {
        let was_seen = std::mem::replace(&mut self.is_seen[object], true);
        if !was_seen && step.what == Happened::UsedInMemory {
            // How it came in is forgotten.
            self.take_in(id, step.bytes);
            return true;
        }
        let is_here = self.replacement.is_resident(id);
        if is_here {
            self.replacement.access(id, step.bytes);
        }
        is_here && !std::mem::take(&mut self.has_landed[object])
    }
}

/// The disk before a remote.
struct Disk {
    replacement: Replacement,
    budget_bytes: u64,
    /// Objects that never leave.
    staying_bytes: u64,
    known: Vec<Known>,
}

/// What is known of an object of the disk.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// It was seen before.
    is_seen: bool,
    /// It came from the remote since it was last used.
    is_fetched: bool,
    /// Its bytes, if it is one that never leaves and is here.
    staying_bytes: Option<u64>,
}

impl Disk {
    fn new(seen: &Seen, budget_bytes: u64) -> Disk {
        let budget_bytes = budget_bytes >> seen.sampling_bits;
        let known = vec![Known::default(); seen.objects.len()];
        Disk { replacement: Replacement::new(budget_bytes), budget_bytes, staying_bytes: 0, known }
    }

    fn remove(&mut self, object: usize, id: ObjectId) {
        let staying_bytes = self.known[object].staying_bytes.take().unwrap_or(0);
        self.staying_bytes = self.staying_bytes.saturating_sub(staying_bytes);
        self.replacement.remove(id);
    }

    fn take_in(&mut self, object: usize, id: ObjectId, bytes: u64) {
        if (LEAVING_BYTES_MIN..=LEAVING_BYTES_MAX).contains(&bytes) {
            self.replacement.insert(id, bytes);
        } else {
            self.staying_bytes = self.staying_bytes.saturating_add(bytes);
            self.known[object].staying_bytes = Some(bytes);
        }
        let used_bytes = self.replacement.resident_bytes().saturating_add(self.staying_bytes);
        let excess = excess_bytes(self.budget_bytes, used_bytes);
        for victim in self.replacement.first_to_leave(excess, usize::MAX, |_| false) {
            self.replacement.evicted(victim.object);
        }
    }
}

impl Player for Disk {
    fn note(&mut self, object: usize, id: ObjectId, step: Step) {
        match step.what {
            Happened::NewPage | Happened::NewFile => {
                self.remove(object, id);
                self.known[object].is_seen = true;
                self.take_in(object, id, step.bytes);
            }
            Happened::Fetched => self.known[object].is_fetched = true,
            Happened::Gone => self.remove(object, id),
            _ => {}
        }
    }

    fn find(&mut self, object: usize, id: ObjectId, step: Step) -> bool {
        let known = &mut self.known[object];
        let was_fetched = std::mem::take(&mut known.is_fetched);
        let was_seen = std::mem::replace(&mut known.is_seen, true);
        let is_here = known.staying_bytes.is_some() || self.replacement.is_resident(id);
        if !is_here {
            self.take_in(object, id, step.bytes);
        }
        if self.replacement.is_resident(id) {
            self.replacement.access(id, step.bytes);
        }
        is_here || !was_seen && !was_fetched
    }
}

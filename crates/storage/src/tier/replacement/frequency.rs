//! The order by recency and number of uses: of objects used equally often the one used longest ago
//! leaves first, and each doubling of the uses is worth a time.
//!
//! One queue for each power of two keeps that in constant time (as Multi-Queue: Zhou, Philbin and
//! Li, USENIX 2001): only ends of queues are compared. The time is a multiple of the age at which
//! objects leave, which makes it right for every size of a tier and every rate of uses. A weight of
//! nothing is LRU, a large one LFU.

use super::list::List;
use super::names::Names;

const QUEUES: usize = 16;

/// Evictions over which the age is averaged.
const AGE_WINDOW: f32 = 1024.0;

/// The order.
#[derive(Debug)]
pub(super) struct Frequency {
    /// By the logarithm of the number of uses.
    queues: [List; QUEUES],
    /// Runs since their last use of those that left.
    age: f32,
    /// Evictions that have formed it, up to the window.
    evictions: f32,
}

/// How far a search for victims has come.
#[derive(Debug)]
pub(super) struct Cursor {
    next: [Option<u32>; QUEUES],
    run: u32,
    /// What a doubling of the uses is worth, in runs.
    worth: f32,
}

impl Frequency {
    pub(super) fn new() -> Frequency {
        Frequency { queues: std::array::from_fn(|_| List::over(2)), age: 0.0, evictions: 0.0 }
    }

    pub(super) fn start_run(&mut self) {
        for queue in &mut self.queues {
            queue.start_run();
        }
    }

    /// A resident object was used, or has come in, in its [run](super::names::Node::run).
    pub(super) fn place(&mut self, names: &mut Names, index: u32) {
        self.remove(names, index);
        let queue = queue_of(names[index].uses);
        names[index].queue = queue;
        self.queues[usize::from(queue)].place(names, index);
    }

    pub(super) fn remove(&mut self, names: &mut Names, index: u32) {
        self.queues[usize::from(names[index].queue)].remove(names, index);
    }

    /// Whether an object is listed.
    #[cfg(test)]
    pub(super) fn contains(&self, names: &Names, index: u32) -> bool {
        self.queues[0].contains(names, index)
    }

    /// An object leaves to make room.
    pub(super) fn evict(&mut self, names: &mut Names, index: u32, run: u32) {
        self.evictions = (self.evictions + 1.0).min(AGE_WINDOW);
        self.age += (age(run, names[index].run) - self.age) / self.evictions;
        self.remove(names, index);
    }

    /// Somebody needs an object just now.
    pub(super) fn spare(&mut self, names: &mut Names, index: u32, run: u32) {
        names[index].run = run;
        self.queues[usize::from(names[index].queue)].move_to_front(names, index);
    }

    /// Whether an object of so many uses would be the first to leave once it is here.
    pub(super) fn is_next(&self, names: &Names, uses: u16, weight: f32, run: u32) -> bool {
        let queue = usize::from(queue_of(uses));
        self.queues[queue].is_placed_last() && self.search(weight, run).queue(names) == Some(queue)
    }

    /// Begins a search for victims.
    pub(super) fn search(&self, weight: f32, run: u32) -> Cursor {
        let next = std::array::from_fn(|queue| self.queues[queue].last());
        Cursor { next, run, worth: weight * self.age * std::f32::consts::LN_2 }
    }

    /// The object that leaves after those found before.
    pub(super) fn next(&self, names: &Names, cursor: &mut Cursor) -> Option<u32> {
        let queue = cursor.queue(names)?;
        let index = cursor.next[queue]?;
        cursor.next[queue] = self.queues[queue].before(names, index);
        Some(index)
    }
}

impl Cursor {
    /// The queue whose end leaves first.
    fn queue(&self, names: &Names) -> Option<usize> {
        let mut worth = 0.0;
        let mut best: Option<(f32, usize)> = None;
        for (queue, next) in self.next.iter().enumerate() {
            if let Some(index) = next {
                let value = worth - age(self.run, names[*index].run);
                if best.is_none_or(|(least, _)| value < least) {
                    best = Some((value, queue));
                }
            }
            worth += self.worth;
        }
        best.map(|(_, queue)| queue)
    }
}

fn queue_of(uses: u16) -> u8 {
    #[expect(clippy::cast_possible_truncation, reason = "of 16 bits")]
    let queue = uses.max(1).ilog2() as u8;
    queue
}

/// Runs between a use and now; the count of runs may have gone around.
fn age(run: u32, used: u32) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    let age = run.wrapping_sub(used) as f32;
    age
}

//! Requests that were read from the device and wait for a thread.
//!
//! The kernel hands requests over in the order in which they came. Whoever has a hundred processes that ask again at once
//! would keep everybody else waiting behind a hundred requests, so a thread takes all of them in that are there, and
//! serves users in [turns](crate::turns).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvfs_fs::Release;
use kvfs_os::Wakeable;

use crate::gate::InHand;
use crate::turns::{Turns, User};

/// Bytes of requests that wait here: some thirty of the longest writes. Others wait in the kernel.
const BYTES_MAX: usize = 32 << 20;
/// How many may wait here: those of more clients than any machine runs at a time, at some 100 bytes each.
const COUNT_MAX: usize = 4096;

/// The longest time that counts as taken from others: while a request holds its thread for longer, others have another one.
const CHARGED_MAX: Duration = Duration::from_millis(10);

/// A request that waits.
pub(super) struct Taken {
    pub(super) message: Vec<u8>,
    /// Whoever shuts the gate waits for it.
    pub(super) in_hand: InHand,
    /// Whoever asks for a file waits for its release, which others may overtake here.
    pub(super) release: Option<Release>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Line(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    turns: Turns<Taken>,
    bytes: usize,
    /// Threads that wait in the kernel for requests, and do nothing else before they take this lock.
    asleep: Vec<Wakeable>,
}

impl Line {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another request may wait here.
    pub(super) fn has_room(&self) -> bool {
        let waiting = self.waiting();
        waiting.turns.len() < COUNT_MAX && waiting.bytes < BYTES_MAX
    }

    /// How many wait here.
    pub(super) fn len(&self) -> usize {
        self.waiting().turns.len()
    }

    /// Whether so many threads wait for requests.
    pub(super) fn has_idle(&self, threads: usize) -> bool {
        self.waiting().asleep.len() >= threads
    }

    pub(super) fn put(&self, user: User, taken: Taken) {
        let mut waiting = self.waiting();
        waiting.bytes += taken.message.len();
        waiting.turns.put(user, taken);
    }

    /// The next request, and whose it is.
    pub(super) fn take(&self) -> Option<(User, Taken)> {
        let mut waiting = self.waiting();
        let (user, taken) = waiting.turns.take()?;
        waiting.bytes -= taken.message.len();
        Some((user, taken))
    }

    /// Counts the time that a request took which [`Line::take`] has given. A disk that stood still is nobody's debt.
    pub(super) fn charge(&self, user: User, time: Duration) {
        self.waiting().turns.charge(user, time.min(CHARGED_MAX));
    }

    /// Wakes as many threads as have something to do beside the calling one, which takes so many requests; how many wait here.
    pub(super) fn call_others(&self, takes: usize) -> usize {
        let waiting = self.waiting();
        let count = waiting.turns.len();
        let wanted = count.saturating_sub(takes);
        waiting.asleep.iter().take(wanted).for_each(|thread| thread.wake());
        count
    }

    /// Calls `read`, in which the calling thread waits for a request or until it is called; `None` if one waits here.
    pub(super) fn wait<T>(&self, thread: Wakeable, read: impl FnOnce() -> T) -> Option<T> {
        {
            let mut waiting = self.waiting();
            if !waiting.turns.is_empty() {
                return None;
            }
            waiting.asleep.push(thread);
        }
        let outcome = read();
        self.waiting().asleep.retain(|other| *other != thread);
        Some(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::Gate;

    const MANY: User = User::Id(1000);
    const FEW: User = User::Id(1001);

    fn put(line: &Line, gate: &Gate, user: User, length: usize) {
        line.put(user, Taken { message: vec![0; length], in_hand: gate.take(), release: None });
    }

    #[test]
    fn who_has_few_requests_waits_for_one_of_the_others() {
        let (line, gate) = (Line::default(), Gate::default());
        for _ in 0..100 {
            put(&line, &gate, MANY, 100);
        }
        let (user, _) = line.take().unwrap();
        put(&line, &gate, FEW, 100);
        line.charge(user, Duration::from_micros(50));
        assert_eq!(line.take().map(|(user, _)| user), Some(FEW));
        assert_eq!(line.take().map(|(user, _)| user), Some(MANY));
    }

    #[test]
    fn no_more_wait_here_than_there_is_room_for() {
        let (line, gate) = (Line::default(), Gate::default());
        for _ in 0..COUNT_MAX {
            assert!(line.has_room());
            put(&line, &gate, MANY, 1);
        }
        assert!(!line.has_room());
        while line.take().is_some() {}
        assert!(line.has_room());
        put(&line, &gate, MANY, BYTES_MAX);
        assert!(!line.has_room());
        assert!(gate.shut(Duration::from_millis(1)).is_none(), "one is in hand");
        drop(line);
        assert!(gate.shut(Duration::from_secs(20)).is_some());
    }

    #[test]
    fn who_sleeps_is_called_for_what_one_thread_cannot_do() {
        let (line, gate) = (Line::default(), Gate::default());
        // Nothing comes through it.
        let (device, _open) = nix::unistd::pipe().unwrap();
        let (told, heard) = crossbeam_channel::unbounded();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let thread = Wakeable::this_thread().unwrap();
                let woken = line.wait(thread, || nix::unistd::read(&device, &mut [0; 8]));
                told.send(woken).unwrap();
            });
            while !line.has_idle(1) {
                std::thread::yield_now();
            }
            put(&line, &gate, MANY, 1);
            line.call_others(1);
            assert!(heard.recv_timeout(Duration::from_millis(20)).is_err(), "there is one request");
            put(&line, &gate, MANY, 1);
            // It may be about to sleep.
            while !sleeper.is_finished() {
                line.call_others(1);
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(heard.recv(), Ok(Some(Err(nix::errno::Errno::EINTR))));
        });
        assert!(!line.has_idle(1));
        let thread = Wakeable::this_thread().unwrap();
        assert_eq!(line.wait(thread, || panic!("what waits is slept over")), None::<()>);
    }
}

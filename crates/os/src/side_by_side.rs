//! One piece of work for each of many items, on several threads at once: what waits for a disk has to wait
//! for many things at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::Share;

/// Works on all items with at most so many threads, the calling one among them; what came of each, in
/// their order. Where no thread can be started, fewer do it. A panic of one is the caller's.
pub fn side_by_side<T: Sync, R: Send>(
    threads: usize, items: &[T], work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    side_by_side_with(threads, items, || (), |(), item| work(item))
}

/// The same where each thread begins with something of its own, a buffer for example.
pub fn side_by_side_with<S, T: Sync, R: Send>(
    threads: usize, items: &[T], begin: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, &T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let take = || take_all(&next, items, begin(), &work);
    in_order(thread::scope(|scope| {
        let others: Vec<_> =
            (1..threads.min(items.len())).map_while(|_| spawn(scope, take)).collect();
        let mut done = take();
        done.extend(others.into_iter().flat_map(joined));
        done
    }))
}

/// The same on threads that get this share of the processors. The calling thread waits, or does it if there
/// is none.
pub fn in_background<T: Sync, R: Send>(
    threads: usize, share: Share, items: &[T], work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let take = || take_all(&next, items, (), &|(), item| work(item));
    let take_with_share = || {
        share.take();
        take()
    };
    in_order(thread::scope(|scope| {
        let wanted = 0..threads.min(items.len());
        let all: Vec<_> = wanted.map_while(|_| spawn(scope, take_with_share)).collect();
        let mut done = if all.is_empty() { take() } else { Vec::new() };
        done.extend(all.into_iter().flat_map(joined));
        done
    }))
}

/// A thread, unless the system has no more of them: processes of the same user or group take them as well.
fn spawn<'scope, R: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>, work: impl FnOnce() -> R + Send + 'scope,
) -> Option<thread::ScopedJoinHandle<'scope, R>> {
    thread::Builder::new().spawn_scoped(scope, work).ok()
}

/// What came of the items that one thread took.
type Done<R> = Vec<(usize, R)>;

fn take_all<S, T, R>(
    next: &AtomicUsize, items: &[T], mut own: S, work: &impl Fn(&mut S, &T) -> R,
) -> Done<R> {
    let mut done = Vec::new();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(item) = items.get(number) else {
            return done;
        };
        done.push((number, work(&mut own, item)));
    }
}

fn joined<R>(thread: thread::ScopedJoinHandle<'_, R>) -> R {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn in_order<R>(mut done: Done<R>) -> Vec<R> {
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn outcomes_are_in_order_and_work_runs_at_once() {
        let items: Vec<usize> = (0..1000).collect();
        for threads in [1, 2, 7] {
            let squares = side_by_side(threads, &items, |item| item * item);
            assert!(squares.iter().enumerate().all(|(number, square)| number * number == *square));
        }
        // Each waits for the other.
        let both = Barrier::new(2);
        assert_eq!(side_by_side(8, &[1, 2], |_| both.wait().is_leader()).len(), 2);
        assert_eq!(side_by_side(8, &[] as &[u8], |_| ()), []);
        let next: Vec<usize> = (1..=1000).collect();
        for share in [Share::Leftovers, Share::Tenth, Share::Quarter] {
            assert_eq!(in_background(3, share, &items, |item| item + 1), next);
        }
    }

    #[test]
    fn a_panic_is_the_callers() {
        let outcome = std::panic::catch_unwind(|| {
            side_by_side(2, &[1, 2, 3, 4], |item| assert!(*item != 3, "three"));
        });
        assert!(outcome.is_err());
    }
}

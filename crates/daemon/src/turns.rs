//! Whose request is next: each user who waits has the same share of the thread.
//!
//! The kernel hands requests over in the order in which they came, so whoever has a hundred threads that ask again at once
//! would keep everybody else waiting behind a hundred requests. Here the user who has had least of the thread is next, and
//! who comes anew begins where the one in service began, so that nobody saves up time (start-time fair queueing: Goyal,
//! Vin and Cheng, SIGCOMM 1996). With one user it is the order of the kernel.

use std::collections::VecDeque;
use std::time::Duration;

use crate::protocol::wire::InHeader;

/// What a request that is being served counts for until it is known: longer than nearly all take.
const SERVICE: Duration = Duration::from_millis(1);

/// What a request counts for at least: taking it in and answering it is not measured, and of some that is all there is.
const SHORTEST: Duration = Duration::from_micros(10);

/// Whom a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// Of a process.
    Id(u32),
    /// What the kernel asks for by itself, as closing files: nobody waits for the answer.
    Kernel,
}

impl User {
    pub(crate) fn of(header: &InHeader) -> User {
        if header.pid == 0 { User::Kernel } else { User::Id(header.uid) }
    }
}

/// Requests that wait for their thread. Whoever takes them in bounds them.
#[derive(Debug)]
pub(crate) struct Turns<Request> {
    /// Those who wait, and those who have had more than the one in service; none if nobody waits.
    users: Vec<Share<Request>>,
    /// Requests that wait.
    count: usize,
    /// What the user in service had had before.
    now: Duration,
}

#[derive(Debug)]
struct Share<Request> {
    user: User,
    /// Time of the threads, counted from where the user came.
    had: Duration,
    /// Requests that threads are serving.
    in_service: u32,
    waiting: VecDeque<Request>,
}

impl<Request> Share<Request> {
    /// With what is being served: whoever holds threads has them.
    fn will_have_had(&self) -> Duration {
        self.had + SERVICE * self.in_service
    }
}

impl<Request> Default for Turns<Request> {
    fn default() -> Turns<Request> {
        Turns { users: Vec::new(), count: 0, now: Duration::ZERO }
    }
}

impl<Request> Turns<Request> {
    pub(crate) fn put(&mut self, user: User, request: Request) {
        self.count += 1;
        if let Some(share) = self.users.iter_mut().find(|share| share.user == user) {
            return share.waiting.push_back(request);
        }
        let waiting = VecDeque::from([request]);
        self.users.push(Share { user, had: self.now, in_service: 0, waiting });
    }

    /// The next request, and whose it is.
    pub(crate) fn take(&mut self) -> Option<(User, Request)> {
        let waits = self.users.iter_mut().filter(|share| !share.waiting.is_empty());
        let Some(next) = waits.min_by_key(|share| share.will_have_had()) else {
            self.users.retain(|share| share.in_service > 0);
            return None;
        };
        let (user, now) = (next.user, next.had);
        let request = next.waiting.pop_front()?;
        self.count -= 1;
        next.in_service += 1;
        self.now = now;
        let is_of_use = |share: &Share<Request>| {
            share.had > now || share.in_service > 0 || !share.waiting.is_empty()
        };
        self.users.retain(is_of_use);
        Some((user, request))
    }

    /// Counts the time that a request took which [`Turns::take`] has given.
    pub(crate) fn charge(&mut self, user: User, time: Duration) {
        // It works for all of them.
        let users = u32::try_from(self.users.len()).unwrap_or(u32::MAX);
        let parts = if user == User::Kernel { users.max(1) } else { 1 };
        let time = time.max(SHORTEST);
        if let Some(share) = self.users.iter_mut().find(|share| share.user == user) {
            share.had += time / parts;
            share.in_service = share.in_service.saturating_sub(1);
        }
    }

    /// How many requests wait.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: User = User::Id(1000);
    const FEW: User = User::Id(1001);

    fn turns(requests: &[(User, u32)]) -> Turns<u32> {
        let mut turns = Turns::default();
        for (user, request) in requests {
            turns.put(*user, *request);
        }
        turns
    }

    /// Takes a request that keeps the thread for so many microseconds.
    fn serve(turns: &mut Turns<u32>, microseconds: u64) -> Option<u32> {
        let (user, request) = turns.take()?;
        turns.charge(user, Duration::from_micros(microseconds));
        Some(request)
    }

    #[test]
    fn one_user_has_the_order_of_the_kernel() {
        let mut turns = turns(&[(MANY, 1), (MANY, 2), (MANY, 3)]);
        let order: Vec<u32> = std::iter::from_fn(|| serve(&mut turns, 50)).collect();
        assert_eq!(order, [1, 2, 3]);
        assert!(turns.is_empty());
    }

    #[test]
    fn who_comes_waits_for_one_request_and_not_for_a_hundred() {
        let mut turns = turns(&(0..100).map(|number| (MANY, number)).collect::<Vec<_>>());
        for served in 0..10 {
            assert_eq!(serve(&mut turns, 50), Some(served));
        }
        turns.put(FEW, 1000);
        assert_eq!(serve(&mut turns, 50), Some(1000));
        assert_eq!(serve(&mut turns, 50), Some(10));
    }

    #[test]
    fn time_counts_and_not_the_number_of_requests() {
        let requests = (0..400).map(|number| (if number < 200 { MANY } else { FEW }, number));
        let mut turns = turns(&requests.collect::<Vec<_>>());
        let mut long = 0;
        for _ in 0..110 {
            let (user, _) = turns.take().unwrap();
            long += u32::from(user == MANY);
            turns.charge(user, Duration::from_micros(if user == MANY { 1000 } else { 100 }));
        }
        // Of eleven requests one is a long one: then both have had the same.
        assert!((9..=11).contains(&long), "{long}");
    }

    #[test]
    fn who_asks_what_takes_no_time_does_not_go_before_others() {
        let mut turns = turns(&[]);
        for number in 0..10 {
            turns.put(MANY, number);
            turns.put(FEW, 100 + number);
        }
        let order: Vec<u32> = (0..10).filter_map(|_| serve(&mut turns, 0)).collect();
        assert_eq!(order.iter().filter(|number| **number >= 100).count(), 5, "{order:?}");
    }

    #[test]
    fn nobody_saves_up_time() {
        let mut turns = turns(&[(FEW, 0)]);
        assert_eq!(serve(&mut turns, 1), Some(0));
        for number in 1..=100 {
            turns.put(MANY, number);
        }
        for _ in 0..50 {
            serve(&mut turns, 1000);
        }
        // Whoever was away for 50 ms has no 50 ms to itself: both take turns.
        for number in 1000..1100 {
            turns.put(FEW, number);
        }
        let order: Vec<u32> = (0..4).filter_map(|_| serve(&mut turns, 1000)).collect();
        assert_eq!(order.iter().filter(|number| **number >= 1000).count(), 2, "{order:?}");
    }

    #[test]
    fn who_has_had_more_than_others_does_not_begin_anew_between_two_requests() {
        let mut turns = turns(&[(FEW, 1), (MANY, 100), (MANY, 101)]);
        assert_eq!(serve(&mut turns, 5000), Some(1));
        turns.put(FEW, 2);
        assert_eq!(serve(&mut turns, 50), Some(100));
        assert_eq!(serve(&mut turns, 50), Some(101));
        assert_eq!(serve(&mut turns, 50), Some(2));
    }

    #[test]
    fn who_holds_threads_does_not_get_the_next_one() {
        let mut turns = turns(&[(MANY, 1), (MANY, 2), (MANY, 3), (FEW, 100)]);
        assert_eq!(turns.take(), Some((MANY, 1)));
        assert_eq!(turns.take(), Some((FEW, 100)));
        assert_eq!(turns.take(), Some((MANY, 2)));
        turns.put(FEW, 101);
        turns.charge(FEW, Duration::from_micros(100));
        assert_eq!(turns.take(), Some((FEW, 101)));
    }

    #[test]
    fn what_the_kernel_asks_for_all_has_a_share_of_all() {
        let mut turns = Turns::default();
        let mut of_kernel = 0;
        for number in 0..10 {
            turns.put(User::Id(number), 0);
        }
        turns.put(User::Kernel, 1);
        for _ in 0..1000 {
            let (user, _) = turns.take().unwrap();
            of_kernel += u32::from(user == User::Kernel);
            turns.put(user, 0);
            turns.charge(user, Duration::from_micros(100));
        }
        assert!((450..550).contains(&of_kernel), "{of_kernel}");
    }

    #[test]
    fn nothing_is_remembered_of_who_does_not_wait() {
        let mut turns = Turns::default();
        for number in 0..1000 {
            turns.put(User::Id(number), number);
            serve(&mut turns, 10);
        }
        assert_eq!(turns.take(), None);
        assert!(turns.users.is_empty());
    }
}

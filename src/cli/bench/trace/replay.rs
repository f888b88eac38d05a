//! One policy, one room, all requests.

use std::time::{Duration, Instant};

use super::arguments::BLOCK_TOKENS;
use super::hints::Hints;
use super::policies::{Policy, Use};
use super::read::Trace;

/// What a policy made of a trace.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) policy: &'static str,
    /// Uses of blocks that had been used before.
    pub(super) repeated: u64,
    /// Of them, those that found their block.
    pub(super) found: u64,
    /// Of them, those before which all of the request was found too.
    pub(super) found_unbroken: u64,
    /// Tokens of all requests, and those of unbroken beginnings that were found.
    pub(super) tokens: u64,
    pub(super) tokens_found: u64,
    /// Blocks that came in when they were made.
    pub(super) written: u64,
    /// Blocks that came in again.
    pub(super) promoted: u64,
    /// Blocks that left.
    pub(super) demoted: u64,
    /// What the replay took.
    pub(super) duration: Duration,
}

/// Replays a trace.
pub(super) fn replay(
    trace: &Trace, (name, mut policy): (&'static str, Box<dyn Policy>), hints: &Hints,
) -> Outcome {
    let mut outcome = Outcome { policy: name, ..Outcome::default() };
    let mut seen = vec![false; trace.distinct];
    let start = Instant::now();
    for (number, request) in (0..).zip(&trace.requests) {
        let (mut is_unbroken, mut unbroken) = (true, 0);
        for (place, block) in (0..).zip(trace.blocks_of(*request)) {
            let is_new = !std::mem::replace(&mut seen[*block as usize], true);
            let was_here = policy.holds(*block);
            policy.note(Use { block: *block, request: number, place, is_new });
            let is_here = policy.holds(*block);
            let is_found = !is_new && was_here;
            is_unbroken &= is_found;
            unbroken += u64::from(is_unbroken);
            outcome.repeated += u64::from(!is_new);
            outcome.found += u64::from(is_found);
            outcome.written += u64::from(is_new && is_here);
            outcome.promoted += u64::from(!is_new && !was_here && is_here);
        }
        for hint in hints.behind(number) {
            policy.hear(hint);
        }
        outcome.found_unbroken += unbroken;
        outcome.tokens += request.tokens;
        outcome.tokens_found += (unbroken * BLOCK_TOKENS).min(request.tokens);
    }
    outcome.duration = start.elapsed();
    let resident = (0..).zip(&seen).filter(|(block, _)| policy.holds(*block)).count() as u64;
    outcome.demoted = outcome.written + outcome.promoted - resident;
    outcome
}

#[cfg(test)]
mod tests {
    use super::super::policies::all;
    use super::super::read::trace_of;
    use super::*;

    #[test]
    fn what_is_found_is_counted() {
        let trace = trace_of(&[&[1, 2, 3], &[1, 2, 3], &[4, 2], &[1, 9, 3]]);
        for policy in all(&trace, 10) {
            let outcome = replay(&trace, policy, &Hints::none());
            assert_eq!((outcome.repeated, outcome.found, outcome.found_unbroken), (6, 6, 4));
            assert_eq!((outcome.tokens, outcome.tokens_found), (11 * 512, 4 * 512));
            let moved = (outcome.written, outcome.promoted, outcome.demoted);
            assert_eq!(moved, (5, 0, 0), "{}", outcome.policy);
        }
    }

    #[test]
    fn what_leaves_is_counted() {
        let trace = trace_of(&[&[1, 2, 3, 4], &[1, 2, 3, 4], &[1, 2, 3, 4]]);
        for policy in all(&trace, 2) {
            let outcome = replay(&trace, policy, &Hints::none());
            let resident = outcome.written + outcome.promoted - outcome.demoted;
            assert!(resident <= 2, "{outcome:?}");
            assert!(outcome.found <= 4, "{outcome:?}");
        }
    }
}

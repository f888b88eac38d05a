//! What came of a replay, for people and for programs.

use std::fmt::Write;

use super::Room;
use super::arguments::TraceArguments;
use super::policies::{HINTED, KVFS, OPTIMUM};
use super::read::Trace;
use super::replay::Outcome;
use crate::cli::bench::figure::{Better, Figure, Target};

/// What the policy may find less than the best fixed one, of the repeated uses.
const BEHIND_MAX: f64 = 0.01;

/// What is a figure, and its name.
type Kind = (&'static str, fn(&Outcome) -> f64);
const KINDS: [Kind; 2] = [("blocks", found), ("prefix", found_unbroken)];

/// Shares of the repeated uses: of blocks that were found, and of those that were found in an unbroken
/// beginning of their request. The baseline is the best of the fixed policies; of hints, it is going without them.
pub(super) fn figures(trace: &Trace, rooms: &[Room]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for Room { share, outcomes, .. } in rooms {
        for (kind, value) in KINDS {
            let of = |name| outcomes.iter().find(|outcome| outcome.policy == name).map(value);
            let is_fixed = |outcome: &&Outcome| outcome.policy != KVFS && outcome.policy != OPTIMUM;
            let best = || outcomes.iter().filter(is_fixed).map(value).fold(0.0, f64::max);
            let without = of(KVFS).unwrap_or_default();
            let (own, best) = match of(HINTED) {
                Some(hinted) => (hinted, without),
                None => (without, best()),
            };
            let name = format!("{}_{}_{kind}", trace.name, two_digits(*share));
            figures.push(Figure {
                // Names are made once in the life of the program.
                name: name.leak(),
                unit: "share",
                better: Better::Higher,
                target: Target::Absolute(best - BEHIND_MAX),
                values: vec![own],
                baselines: vec![best],
            });
        }
    }
    figures
}

/// Per cent with two digits before the point, and after it what there is.
fn two_digits(share: f64) -> String {
    if share.fract() == 0.0 { format!("{share:02}") } else { format!("{share:05.2}") }
}

/// One line for each policy in each room.
pub(super) fn table(trace: &Trace, rooms: &[Room], options: &TraceArguments) -> String {
    let mut text = String::new();
    let (requests, distinct) = (trace.requests.len(), trace.distinct);
    let uses = trace.blocks().len();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{}: {requests} requests, {uses} uses of {distinct} blocks", trace.name);
    for Room { share, blocks, outcomes } in rooms {
        let _ = writeln!(text, "\nroom for {} % of the blocks, {blocks}", short(*share));
        let _ = writeln!(
            text,
            "{:<16}{:>8}{:>8}{:>15}{:>10}{:>10}{:>10}{:>12}{:>12}{:>10}",
            "policy",
            "blocks",
            "prefix",
            "prefix tokens",
            "written",
            "promoted",
            "demoted",
            "loading s",
            "computing s",
            "ns a use"
        );
        for outcome in outcomes {
            let seconds = seconds(outcome, options);
            let _ = writeln!(
                text,
                "{:<16}{:>8.3}{:>8.3}{:>15}{:>10}{:>10}{:>10}{:>12.1}{:>12.1}{:>10.0}",
                outcome.policy,
                found(outcome),
                found_unbroken(outcome),
                outcome.tokens_found,
                outcome.written,
                outcome.promoted,
                outcome.demoted,
                seconds.loading,
                seconds.computing,
                nanoseconds_per_use(outcome, uses),
            );
        }
    }
    text.push('\n');
    text
}

/// What requests wait for, one after the other.
struct Seconds {
    /// Tokens of unbroken beginnings that were found.
    loading: f64,
    /// All others.
    computing: f64,
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn seconds(outcome: &Outcome, options: &TraceArguments) -> Seconds {
    let found = outcome.tokens_found as f64;
    Seconds {
        loading: found * options.token_size.0 as f64 / options.load_rate.0 as f64,
        computing: (outcome.tokens as f64 - found) / options.compute_rate,
    }
}

/// The share of the repeated uses that found their block.
pub(super) fn found(outcome: &Outcome) -> f64 {
    share_of(outcome.found, outcome.repeated)
}

fn found_unbroken(outcome: &Outcome) -> f64 {
    share_of(outcome.found_unbroken, outcome.repeated)
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn share_of(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn nanoseconds_per_use(outcome: &Outcome, uses: usize) -> f64 {
    outcome.duration.as_secs_f64() * 1e9 / uses as f64
}

fn short(share: f64) -> String {
    format!("{share:.2}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::read::trace_of;
    use super::*;

    fn outcome(policy: &'static str, found: u64) -> Outcome {
        Outcome { policy, repeated: 100, found, found_unbroken: found / 2, ..Outcome::default() }
    }

    #[test]
    fn the_baseline_is_the_best_fixed_policy() {
        let trace = trace_of(&[&[1]]);
        let outcomes =
            vec![outcome(KVFS, 80), outcome("LRU", 82), outcome("ARC", 60), outcome(OPTIMUM, 90)];
        let figures = figures(&trace, &[Room { share: 5.0, blocks: 1, outcomes }]);
        let figures: Vec<_> = figures.iter().map(Figure::to_json).collect();
        assert_eq!(figures[0]["name"], "test_05_blocks");
        assert_eq!(figures[0]["value"], 0.8);
        assert_eq!(figures[0]["baseline"], 0.82);
        assert_eq!(figures[0]["target"], 0.81);
        assert_eq!(figures[1]["name"], "test_05_prefix");
        assert_eq!(figures[1]["value"], 0.4);
    }

    #[test]
    fn names_have_two_digits() {
        assert_eq!(
            [1.0, 20.0, 100.0, 0.5, 12.25].map(two_digits),
            ["01", "20", "100", "00.50", "12.25"]
        );
    }
}

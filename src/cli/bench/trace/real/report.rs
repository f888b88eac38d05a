//! What came of a replay with real bytes.

use std::time::Duration;

use super::super::arguments::BLOCK_TOKENS;
use super::arguments::RealArguments;
use super::client::Served;
use super::simulate::{Comparison, TIERS};
use super::supervise::Spent;
use crate::cli::bench::figure::{Better, Figure, Target, quantile};

/// What stands for what.
pub(super) const SCALED: &str = "a block of 512 tokens is a page of 16 tokens of one layer, 68 KiB; \
     tokens below are those of blocks, bytes those of pages";

/// How far the shares of the tiers may be from the simulated ones.
const DISAGREEMENT_MAX: f64 = 0.02;

/// One trace.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) name: String,
    pub(super) requests: usize,
    /// Blocks of all prompts.
    pub(super) uses: u64,
    pub(super) compared: Comparison,
    pub(super) at_once: Comparison,
    pub(super) served: Served,
    pub(super) spent: Spent,
    pub(super) client_seconds: f64,
    pub(super) seconds: f64,
    pub(super) paused: Duration,
    /// Seconds of the trace.
    pub(super) span: f64,
    pub(super) kills: usize,
    pub(super) passthrough: String,
}

/// How it was done.
pub(super) fn describe(outcome: &Outcome, options: &RealArguments) -> String {
    format!(
        "{}: {} requests of {:.0} s in {:.1} s, {:.1} s of which the disk had no room; {} clients, ram {}, \
         ssd {}, a remote directory; {} kills, {} requests made again",
        outcome.name,
        outcome.requests,
        outcome.span,
        outcome.seconds,
        outcome.paused.as_secs_f64(),
        options.clients,
        options.ram,
        options.ssd,
        outcome.kills,
        outcome.served.repeated,
    )
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
pub(super) fn figures(outcome: &Outcome) -> Vec<Figure> {
    let Outcome { compared, served, spent, .. } = outcome;
    let figure = |name: &str, unit, better, target, value, baseline: Option<f64>| Figure {
        // Names are made once in the life of the program.
        name: format!("{}_real_{name}", outcome.name).leak(),
        unit,
        better,
        target,
        values: vec![value],
        baselines: baseline.into_iter().collect(),
    };
    let (lower, none) = (Better::Lower, Target::None);
    let mut figures = Vec::new();
    for (tier, word) in TIERS {
        let (observed, simulated) = compared.shares(tier);
        let name = format!("from_{word}");
        figures.push(figure(&name, "share", Better::Higher, none, observed, Some(simulated)));
    }
    let limit = Target::Absolute(DISAGREEMENT_MAX);
    figures.push(figure("disagreement", "share", lower, limit, compared.disagreement(), None));
    let at_once = outcome.at_once.disagreement();
    figures.push(figure("disagreement_moving_at_once", "share", lower, none, at_once, None));
    let all = compared.observed.iter().sum::<u64>().max(1) as f64;
    let same = compared.same as f64 / all;
    figures.push(figure("same_tier", "share", Better::Higher, none, same, None));
    let zero = Target::Absolute(0.0);
    figures.push(figure("wrong_bytes", "B", lower, zero, served.wrong_bytes as f64, None));
    figures.push(figure("lost_pages", "pages", lower, zero, served.lost as f64, None));
    for (name, part) in [("load_prefix_median", 0.5), ("load_prefix_p99", 0.99)] {
        figures.push(figure(name, "ms", lower, none, quantile(&served.loads, part), None));
    }
    let asked = (outcome.uses * BLOCK_TOKENS).max(1) as f64 / 1e6;
    let tokens = |pages: u64| (pages * BLOCK_TOKENS) as f64 / asked;
    let mut each = |name: &str, unit, value| {
        figures.push(figure(&format!("{name}_per_million"), unit, lower, none, value, None));
    };
    each("computed", "tokens", tokens(served.made));
    for ((_, word), pages) in TIERS.iter().zip(served.loaded) {
        each(&format!("loaded_from_{word}"), "tokens", tokens(pages));
    }
    each("ssd_written", "MB", spent.written as f64 / 1e6 / asked);
    each("daemon_cpu", "s", spent.seconds / asked);
    each("client_cpu", "s", outcome.client_seconds / asked);
    figures
}

/// One line for each thing that must not be.
pub(super) fn complaints(outcome: &Outcome) -> Vec<String> {
    let Outcome { name, compared, served, .. } = outcome;
    let mut complaints = Vec::new();
    if served.wrong_bytes > 0 {
        complaints.push(format!("{name}: {} bytes that were read are wrong", served.wrong_bytes));
    }
    if served.lost > 0 {
        complaints.push(format!("{name}: {} pages that had been synced are gone", served.lost));
    }
    if compared.disagreement() > DISAGREEMENT_MAX {
        let shares = TIERS.map(|(tier, word)| {
            let (observed, simulated) = compared.shares(tier);
            format!("{word} {:.1} % against {:.1} %", 100.0 * observed, 100.0 * simulated)
        });
        complaints.push(format!(
            "{name}: hits and simulation disagree by more than {:.0} per cent: {}",
            100.0 * DISAGREEMENT_MAX,
            shares.join(", ")
        ));
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(served: Served, simulated: [u64; 3]) -> Outcome {
        let compared = Comparison { observed: [60, 30, 10], simulated, same: 90 };
        Outcome {
            name: "chat".to_owned(),
            requests: 10,
            uses: 200,
            compared,
            at_once: compared,
            served,
            spent: Spent { seconds: 2.0, written: 1_024_000 },
            client_seconds: 1.0,
            seconds: 3.0,
            paused: Duration::ZERO,
            span: 30.0,
            kills: 1,
            passthrough: "yes".to_owned(),
        }
    }

    #[test]
    fn figures_are_for_a_million_tokens() {
        let loads = vec![1.0, 2.0, 300.0];
        let served = Served { loads, loaded: [60, 30, 10], made: 100, ..Served::default() };
        let found = figures(&outcome(served, [60, 31, 9]));
        let value = |name: &str| {
            let name = format!("chat_real_{name}");
            let figure = found.iter().find(|figure| figure.name == name).expect(&name);
            figure.to_json()["value"].clone()
        };
        let check = |name: &str, expected: f64| assert_eq!(value(name), expected, "{name}");
        check("from_ram", 0.6);
        check("disagreement", 0.01);
        check("same_tier", 0.9);
        check("wrong_bytes", 0.0);
        check("load_prefix_median", 2.0);
        check("computed_per_million", 500_000.0);
        check("loaded_from_ssd_per_million", 150_000.0);
        check("ssd_written_per_million", 10.0);
        check("daemon_cpu_per_million", 19.53);
    }

    #[test]
    fn what_is_wrong_is_told() {
        let good = outcome(Served::default(), [59, 31, 10]);
        assert_eq!(complaints(&good), Vec::<String>::new());
        let bad = Served { wrong_bytes: 1, lost: 2, ..Served::default() };
        let said = complaints(&outcome(bad, [55, 35, 10]));
        assert_eq!(said.len(), 3);
        assert!(said[0].contains("1 bytes") && said[1].contains("2 pages"), "{said:?}");
        assert!(said[2].contains("ram 60.0 % against 55.0 %"), "{said:?}");
    }
}

//! One number against its baseline and its target.

use std::fmt::Write;

use serde_json::{Value, json};

/// Which direction is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Better {
    Higher,
    Lower,
}

/// What a target is relative to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// The value itself.
    Absolute(f64),
    /// This many times the baseline.
    TimesBaseline(f64),
    /// Reported only.
    None,
}

/// A measured number.
#[derive(Clone, Debug)]
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    pub(super) better: Better,
    pub(super) target: Target,
    /// One value per round.
    pub(super) values: Vec<f64>,
    /// The same of plain files, or of whatever it is compared with; empty where there is nothing to compare with.
    pub(super) baselines: Vec<f64>,
}

impl Figure {
    fn value(&self) -> f64 {
        median(&self.values)
    }

    fn baseline(&self) -> Option<f64> {
        (!self.baselines.is_empty()).then(|| median(&self.baselines))
    }

    fn target_value(&self) -> Option<f64> {
        match self.target {
            Target::Absolute(value) => Some(value),
            Target::TimesBaseline(times) => self.baseline().map(|baseline| baseline * times),
            Target::None => None,
        }
    }

    /// Whether the target is reached; a figure without one always is.
    fn is_met(&self) -> bool {
        self.target_value().is_none_or(|target| match self.better {
            Better::Higher => self.value() >= target,
            Better::Lower => self.value() <= target,
        })
    }

    /// Distance of the quartiles.
    fn spread(&self) -> f64 {
        quantile(&self.values, 0.75) - quantile(&self.values, 0.25)
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "value": round(self.value()),
            "unit": self.unit,
            "baseline": self.baseline().map(round),
            "target": self.target_value().map(round),
            "better": if self.better == Better::Higher { "higher" } else { "lower" },
            "runs": self.values.len(),
            "spread": round(self.spread()),
        })
    }
}

/// Median of some values.
pub(super) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value below which a part of them, 0 to 1, lies.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index among a handful of rounds"
)]
pub(super) fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let at = part * last as f64;
    let below = sorted[at.floor() as usize];
    below + (sorted[at.ceil() as usize] - below) * at.fract()
}

/// Four significant digits: more is noise.
fn round(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// The readable form.
pub(super) fn table(machine: &Value, figures: &[Figure]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    for (key, value) in machine.as_object().into_iter().flatten() {
        let plain = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(text, "{key}: {plain}");
    }
    let _ = writeln!(
        text,
        "\n{:<34}{:>10}{:>10}{:>8}{:>10}{:>9}  unit",
        "figure", "kvfs", "baseline", "ratio", "target", "spread"
    );
    for figure in figures {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), short);
        let ratio = figure.baseline().map(|baseline| figure.value() / baseline);
        let end = if figure.is_met() { "" } else { "  MISSED" };
        let _ = writeln!(
            text,
            "{:<34}{:>10}{:>10}{:>8}{:>10}{:>9}  {}{end}",
            figure.name,
            short(figure.value()),
            number(figure.baseline()),
            number(ratio),
            number(figure.target_value()),
            short(figure.spread()),
            figure.unit,
        );
    }
    text
}

/// The same for a document.
pub(super) fn markdown(machine: &Value, figures: &[Figure]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    for (key, value) in machine.as_object().into_iter().flatten() {
        let plain = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(text, "- {key}: {plain}");
    }
    text += "\n| figure | kvfs | baseline | ratio | target | unit | |\n";
    text += "|---|---:|---:|---:|---:|---|---|\n";
    for figure in figures {
        let number = |value: Option<f64>| value.map_or(String::new(), short);
        let ratio = figure.baseline().map(|baseline| figure.value() / baseline);
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} | {} |",
            figure.name,
            short(figure.value()),
            number(figure.baseline()),
            number(ratio),
            number(figure.target_value()),
            figure.unit,
            if figure.is_met() { "" } else { "missed" },
        );
    }
    text
}

fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size < 1e-3 && size > 0.0 => format!("{value:.1e}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(values: &[f64], better: Better, target: Target) -> Figure {
        Figure {
            name: "x",
            unit: "GB/s",
            better,
            target,
            values: values.to_vec(),
            baselines: vec![3.0, 1.0, 2.0],
        }
    }

    #[test]
    fn medians_and_quartiles() {
        fn check(values: &[f64], expected: (f64, f64)) {
            let figure = figure(values, Better::Higher, Target::None);
            assert!((figure.value() - expected.0).abs() < 1e-9, "{values:?}");
            assert!((figure.spread() - expected.1).abs() < 1e-9, "{values:?}");
        }
        check(&[5.0], (5.0, 0.0));
        check(&[4.0, 1.0, 2.0, 3.0], (2.5, 1.5));
        check(&[9.0, 1.0, 2.0, 3.0, 4.0], (3.0, 2.0));
    }

    #[test]
    fn targets() {
        fn check(value: f64, better: Better, target: Target, met: bool) {
            assert_eq!(figure(&[value], better, target).is_met(), met);
        }
        check(1.9, Better::Higher, Target::TimesBaseline(0.95), true);
        check(1.8, Better::Higher, Target::TimesBaseline(0.95), false);
        check(4.0, Better::Lower, Target::TimesBaseline(2.0), true);
        check(4.1, Better::Lower, Target::TimesBaseline(2.0), false);
        check(50.0, Better::Lower, Target::Absolute(50.0), true);
        check(51.0, Better::Lower, Target::Absolute(50.0), false);
        check(1e9, Better::Lower, Target::None, true);
    }

    #[test]
    fn the_json_form_has_the_documented_fields() {
        let value = figure(&[1.234_56], Better::Higher, Target::TimesBaseline(0.5)).to_json();
        let expected = json!({
            "name": "x", "value": 1.235, "unit": "GB/s", "baseline": 2.0, "target": 1.0,
            "better": "higher", "runs": 1, "spread": 0.0
        });
        assert_eq!(value, expected);
    }
}

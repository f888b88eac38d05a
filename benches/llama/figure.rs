//! What is measured, and how it is printed.

use std::time::Duration;

pub(crate) const ROUNDS: usize = 5;

/// The engine as `llama-server` has it by default.
pub(crate) const ENGINE: &str = "--threads 2 --poll 50 --flash auto --ubatch 512";

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub(crate) fn milliseconds(durations: &[Duration]) -> f64 {
    let values: Vec<f64> = durations.iter().map(|duration| duration.as_secs_f64() * 1e3).collect();
    median(&values)
}

/// What the command line says, without the options that cargo adds.
pub(crate) fn words() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|word| !word.starts_with('-'))
}

/// Whether the command line asks for a figure of this name.
pub(crate) fn is_wanted(name: &str) -> bool {
    let mut chosen = words().skip(1).peekable();
    chosen.peek().is_none() || chosen.any(|word| name.contains(&word))
}

/// Values of each round with kvfs, and of what they are compared with.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    pub(crate) ours: Vec<f64>,
    pub(crate) other: Vec<f64>,
}

impl Rounds {
    pub(crate) fn push(&mut self, ours: f64, other: f64) {
        self.ours.push(ours);
        self.other.push(other);
    }

    /// Prints medians, in `unit`, and the median of `result` of ours and the other, for which `target`
    /// is set.
    pub(crate) fn print(
        &self, name: &str, unit: &str, target: &str, result: impl Fn(f64, f64) -> f64,
    ) {
        let pairs = self.ours.iter().zip(&self.other);
        let results: Vec<f64> = pairs.map(|(ours, other)| result(*ours, *other)).collect();
        let all: Vec<String> = results.iter().map(|result| format!("{result:.2}")).collect();
        let [ours, other, middle] = [&self.ours, &self.other, &results].map(|it| median(it));
        let all = all.join(" ");
        println!("{name:<56}{ours:>9.2}{other:>9.2} {unit:<6}{middle:>7.2} ({target:>6})  {all}");
    }
}

/// The line above those of all figures.
pub(crate) fn print_header() {
    println!("{:<56}{:>9}{:>9} {:<6}{:>7} (target)  rounds", "", "kvfs", "other", "", "result");
}

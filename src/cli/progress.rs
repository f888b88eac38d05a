//! A bar for what takes seconds: how much of it is done, how fast it goes and when it ends. On a terminal only.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::output::bytes;

/// What a bar counts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scale {
    /// Bytes, of so many.
    Bytes(u64),
    /// Bytes, of which nobody knows how many come.
    BytesWithoutEnd,
    /// Files, beside which their bytes are told (`tell_bytes`).
    Files,
}

impl Scale {
    /// What stands behind the verb.
    fn template(self) -> &'static str {
        match self {
            Scale::Bytes(_) => {
                "{wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left"
            }
            Scale::BytesWithoutEnd => "{spinner} {binary_bytes}, {binary_bytes_per_sec}",
            Scale::Files => "{wide_bar} {pos} of {len} files, {msg}{eta} left",
        }
    }
}

/// A turning wheel, for what has no known end.
pub(crate) fn spinner(verb: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let spinner = ProgressBar::new_spinner().with_message(verb);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

/// A bar that says what is being done.
pub(crate) fn bar(verb: &str, scale: Scale) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let length = match scale {
        Scale::Bytes(length) => Some(length),
        Scale::BytesWithoutEnd | Scale::Files => None,
    };
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    match ProgressStyle::with_template(&format!("{verb} {}", scale.template())) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Tells beside a bar of files how many bytes these had so far, and how many come in a second.
pub(crate) fn tell_bytes(bar: &ProgressBar, count: u64) {
    let milliseconds = bar.elapsed().as_millis().max(1);
    let rate = u64::try_from(u128::from(count) * 1000 / milliseconds).unwrap_or(u64::MAX);
    bar.set_message(format!("{}, {}/s, ", bytes(count), bytes(rate)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_can_be_drawn() {
        for scale in [Scale::Bytes(1), Scale::BytesWithoutEnd, Scale::Files] {
            ProgressStyle::with_template(scale.template()).unwrap();
        }
    }

    #[test]
    fn bytes_are_told_beside_files() {
        let bar = ProgressBar::hidden();
        tell_bytes(&bar, 3 << 20);
        let told = bar.message();
        assert!(told.starts_with("3.0 MiB, ") && told.ends_with("/s, "), "{told}");
    }
}

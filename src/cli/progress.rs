//! A bar for what takes seconds, on a terminal only.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
pub(crate) fn bar(verb: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    match ProgressStyle::with_template(&format!("{verb} {{wide_bar}} {{percent}}% {{eta}}")) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

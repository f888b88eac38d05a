//! Colour for people: only on a terminal that can show it, and only where nobody asked for none.

use std::ffi::OsStr;
use std::io::IsTerminal;

/// How words stand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Paint {
    Heading,
    Good,
    Warning,
    Bad,
}

impl Paint {
    /// The parameters of an escape sequence that selects it.
    fn parameters(self) -> &'static str {
        match self {
            Paint::Heading => "1",
            Paint::Good => "32",
            Paint::Warning => "33",
            Paint::Bad => "1;31",
        }
    }
}

/// Whether words are painted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Style {
    pub(super) is_coloured: bool,
}

impl Style {
    /// Of what is printed on standard output.
    pub(super) fn of_output() -> Style {
        let [no_color, term] = ["NO_COLOR", "TERM"].map(std::env::var_os);
        let is_terminal = std::io::stdout().is_terminal();
        Style { is_coloured: wants_colour(is_terminal, no_color.as_deref(), term.as_deref()) }
    }

    pub(super) fn paint(self, paint: Paint, text: &str) -> String {
        self.paint_with(paint.parameters(), text)
    }

    /// The same for the parameters of any escape sequence.
    pub(super) fn paint_with(self, parameters: &str, text: &str) -> String {
        if self.is_coloured && !text.is_empty() {
            format!("\u{1b}[{parameters}m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }
}

/// As <https://no-color.org> has it: a variable that is set and not empty means no.
fn wants_colour(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty) && term != Some(OsStr::new("dumb"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_only_where_somebody_sees_it() {
        fn check(is_terminal: bool, no_color: Option<&str>, term: Option<&str>, expected: bool) {
            let found = wants_colour(is_terminal, no_color.map(OsStr::new), term.map(OsStr::new));
            assert_eq!(found, expected, "{is_terminal} {no_color:?} {term:?}");
        }
        check(true, None, Some("xterm"), true);
        check(true, Some(""), None, true);
        check(true, Some("1"), Some("xterm"), false);
        check(true, None, Some("dumb"), false);
        check(false, None, Some("xterm"), false);
        assert_eq!(Style { is_coloured: false }.paint(Paint::Bad, "a"), "a");
        assert_eq!(Style { is_coloured: true }.paint(Paint::Good, "a"), "\u{1b}[32ma\u{1b}[0m");
    }
}

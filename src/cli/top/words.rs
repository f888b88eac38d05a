//! Numbers and names as the few characters that a column has.

use crate::cli::output::{bytes, grouped};
use crate::cli::series::whole;
use crate::page::printable;

/// What stands for a number that is not known.
const UNKNOWN: &str = "-";

/// So many in a second.
pub(super) fn rate(per_second: Option<f64>) -> String {
    match per_second {
        None => UNKNOWN.to_owned(),
        Some(rate) if rate > 0.0 && rate < 9.95 => format!("{rate:.1}"),
        Some(rate) => grouped(whole(rate.round())),
    }
}

/// So many bytes in a second; nothing where there are none.
pub(super) fn byte_rate(bytes_per_second: Option<f64>) -> String {
    match bytes_per_second.map(|rate| whole(rate.round())) {
        None | Some(0) => String::new(),
        Some(rate @ 1..1024) => format!("{rate} B/s"),
        Some(rate) => format!("{}/s", bytes(rate)),
    }
}

/// A bound of how long something took.
pub(super) fn seconds(bound: Option<f64>) -> String {
    match bound {
        None => UNKNOWN.to_owned(),
        Some(bound) if bound.is_infinite() => "longer".to_owned(),
        Some(bound) if bound < 1e-3 => format!("{:.0} us", bound * 1e6),
        Some(bound) if bound < 1.0 => format!("{:.0} ms", bound * 1e3),
        Some(bound) => format!("{bound:.0} s"),
    }
}

/// A part of one.
pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or(UNKNOWN.to_owned(), |share| format!("{:.0} %", share * 100.0))
}

/// A part of a whole number.
pub(super) fn percent_of(part: u64, all: u64) -> String {
    format!("{} %", u128::from(part) * 100 / u128::from(all.max(1)))
}

/// Of how many characters so many are filled: full at the end alone, and not empty where there is something.
pub(super) fn bar(part: u64, all: u64, characters: usize) -> String {
    let filled = u128::from(part) * characters as u128 / u128::from(all.max(1));
    let filled = usize::try_from(filled).unwrap_or(characters).min(characters);
    let filled = filled.max(usize::from(part > 0 && characters > 0));
    format!("[{}{}]", "#".repeat(filled), ".".repeat(characters - filled))
}

/// A path: of one that is too long the end, which tells most.
pub(super) fn path(path: &str, characters_max: usize) -> String {
    let path = printable(path.chars());
    let count = path.chars().count();
    if count <= characters_max {
        return path;
    }
    let end = path.chars().skip(count - characters_max.saturating_sub(2));
    let dots = "..".chars().take(characters_max);
    dots.chain(end).take(characters_max).collect()
}

/// A text in lines of so many characters, broken between words where that can be.
pub(super) fn wrapped(text: &str, characters_max: usize) -> Vec<String> {
    let text: Vec<char> = printable(text.chars()).chars().collect();
    let mut lines = Vec::new();
    let mut rest = text.as_slice();
    while rest.len() > characters_max && characters_max > 0 {
        let fits = &rest[..=characters_max];
        let space = fits.iter().rposition(|character| *character == ' ').filter(|at| *at > 0);
        lines.push(rest[..space.unwrap_or(characters_max)].iter().collect());
        rest = &rest[space.map_or(characters_max, |at| at + 1)..];
    }
    lines.push(rest.iter().collect());
    lines
}

/// `NAME` of `models/NAME/sequences/chat`; `None` where a path is in no model.
pub(super) fn model_of(path: &str) -> Option<&str> {
    path.strip_prefix("models/")?.split('/').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fit_their_columns() {
        for (number, expected) in [
            (None, "-"),
            (Some(0.0), "0"),
            (Some(0.25), "0.2"),
            (Some(9.99), "10"),
            (Some(1234.4), "1 234"),
        ] {
            assert_eq!(rate(number), expected);
        }
        for (number, expected) in
            [(None, ""), (Some(0.2), ""), (Some(100.0), "100 B/s"), (Some(2048.0), "2.0 KiB/s")]
        {
            assert_eq!(byte_rate(number), expected);
        }
        for (bound, expected) in [
            (None, "-"),
            (Some(16e-6), "16 us"),
            (Some(0.131_072), "131 ms"),
            (Some(8.388_608), "8 s"),
            (Some(f64::INFINITY), "longer"),
        ] {
            assert_eq!(seconds(bound), expected);
        }
        assert_eq!([percent(None), percent(Some(0.834))], ["-", "83 %"]);
        assert_eq!(
            [percent_of(u64::MAX, 1), percent_of(0, 0)],
            ["1844674407370955161500 %", "0 %"]
        );
    }

    #[test]
    fn a_bar_tells_nothing_from_little() {
        assert_eq!(bar(0, 100, 4), "[....]");
        assert_eq!(bar(1, 100, 4), "[#...]");
        assert_eq!(bar(99, 100, 4), "[###.]");
        assert_eq!(bar(200, 100, 4), "[####]");
        assert_eq!(bar(1, 0, 4), "[####]");
        assert_eq!(bar(1, 1, 0), "[]");
    }

    #[test]
    fn long_texts_are_broken_between_words() {
        assert_eq!(wrapped("the disk is full", 8), ["the disk", "is full"]);
        assert_eq!(wrapped("the disk is full", 80), ["the disk is full"]);
        assert_eq!(wrapped("abcdefgh ij", 4), ["abcd", "efgh", "ij"]);
        assert_eq!(wrapped(" abcd", 2), [" a", "bc", "d"]);
        assert_eq!([wrapped("ab", 0), wrapped("", 3)], [["ab"], [""]]);
        assert_eq!(wrapped("a\nb", 9), ["a\\nb"]);
    }

    #[test]
    fn paths_keep_their_end_and_control_nothing() {
        assert_eq!(path("models/m/sequences/a", 10), "..uences/a");
        assert_eq!(path("a\u{1b}[2J\n", 20), "a\\u{1b}[2J\\n");
        assert_eq!([path("abc", 0), path("abc", 1), path("abcd", 2)], ["", ".", ".."]);
        assert_eq!(model_of("models/m/sequences/a"), Some("m"));
        assert_eq!(
            [model_of("models/m"), model_of("files/a"), model_of("-")],
            [Some("m"), None, None]
        );
    }
}

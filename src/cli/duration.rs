//! Durations as people write them: `90`, `15m`, `7d`.

use std::str::FromStr;

/// Whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seconds(pub u64);

impl From<Seconds> for u64 {
    fn from(seconds: Seconds) -> u64 {
        seconds.0
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Seconds, String> {
        let wrong =
            || format!("{text:?} is no duration: write seconds or a number with s, m, h, d or w");
        let digits = text.trim_end_matches(|character: char| !character.is_ascii_digit());
        let seconds = match &text[digits.len()..] {
            "" | "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            "w" => 7 * 86_400,
            _ => return Err(wrong()),
        };
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number.checked_mul(seconds).map(Seconds).ok_or_else(wrong)
    }
}

/// A duration for people, in the largest unit that it is a multiple of.
pub(crate) fn duration(seconds: u64) -> String {
    let units = [(86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")];
    let fits = units.into_iter().find(|(unit, _)| seconds.is_multiple_of(*unit));
    let (unit, name) = fits.unwrap_or((1, "seconds"));
    let count = seconds / unit;
    let name = if count == 1 { name.trim_end_matches('s') } else { name };
    format!("{count} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        fn check(text: &str, expected: Option<u64>) {
            assert_eq!(text.parse::<Seconds>().ok(), expected.map(Seconds), "{text}");
        }
        check("90", Some(90));
        check("90s", Some(90));
        check("15m", Some(900));
        check("12h", Some(43_200));
        check("7d", Some(604_800));
        check("2w", Some(1_209_600));
        check("", None);
        check("d", None);
        check("1.5h", None);
        check("-1", None);
        check("1y", None);
        check("18446744073709551615w", None);
    }

    #[test]
    fn durations_for_people() {
        fn check(seconds: u64, expected: &str) {
            assert_eq!(duration(seconds), expected);
        }
        check(1, "1 second");
        check(90, "90 seconds");
        check(3600, "1 hour");
        check(172_800, "2 days");
    }
}

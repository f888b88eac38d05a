//! Durations as people write them: `90`, `1.5s`, `250ms`, `15m`, `7d`.

use std::str::FromStr;
use std::time::Duration;

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
        match parse(text)? {
            parsed if parsed.subsec_nanos() == 0 => Ok(Seconds(parsed.as_secs())),
            _ => Err(format!("{text:?} is no number of whole seconds")),
        }
    }
}

/// The one reading of durations: a number, with a fraction or without, and a unit.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is no duration: write seconds or a number with ms, s, m, h, d or w");
    let number = text.trim_end_matches(|character: char| !character.is_ascii_digit());
    let unit_milliseconds = match &text[number.len()..] {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "w" => 7 * 86_400_000,
        _ => return Err(wrong()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let billionths = billionths(whole, fraction).ok_or_else(wrong)?;
    let nanoseconds = billionths * unit_milliseconds / 1000;
    let seconds = u64::try_from(nanoseconds / 1_000_000_000).map_err(|_| wrong())?;
    let rest = u32::try_from(nanoseconds % 1_000_000_000).map_err(|_| wrong())?;
    Ok(Duration::new(seconds, rest))
}

/// A number with a fraction, of which nobody means less than a billionth, in these; sizes are read so as well.
pub(super) fn billionths(whole: &str, fraction: &str) -> Option<u128> {
    let is_number =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let fraction: u128 = format!("{fraction:0<9.9}").parse().ok()?;
    Some(u128::from(whole) * 1_000_000_000 + fraction)
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

/// How long something has lasted, for people, in its two largest units: `3 h 4 min`.
pub(crate) fn age(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let first = units.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(units.len() - 1);
    let (unit, name) = units[first];
    let whole = format!("{} {name}", seconds / unit);
    match units.get(first + 1).map(|(next, name)| (seconds % unit / next, name)) {
        Some((rest, name)) if rest > 0 => format!("{whole} {rest} {name}"),
        _ => whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages() {
        for (seconds, expected) in
            [(0, "0 s"), (59, "59 s"), (60, "1 min"), (90, "1 min 30 s"), (11_040, "3 h 4 min")]
        {
            assert_eq!(age(seconds), expected);
        }
        assert_eq!(age(86_400 * 3 + 59), "3 d");
    }

    #[test]
    fn durations() {
        fn check(text: &str, expected: Option<u64>) {
            assert_eq!(text.parse::<Seconds>().ok(), expected.map(Seconds), "{text}");
        }
        check("90", Some(90));
        check("90s", Some(90));
        check("15m", Some(900));
        check("12h", Some(43_200));
        check("1.5h", Some(5400));
        check("7d", Some(604_800));
        check("2w", Some(1_209_600));
        check("", None);
        check("d", None);
        check("0.5", None);
        check("-1", None);
        check("+1", None);
        check("1y", None);
        check("18446744073709551615w", None);
        check("18446744073709551616", None);
    }

    #[test]
    fn parts_of_seconds() {
        fn check(text: &str, expected_ms: Option<u64>) {
            assert_eq!(parse(text).ok(), expected_ms.map(Duration::from_millis), "{text}");
        }
        check("0.5", Some(500));
        check("1.0", Some(1000));
        check("250ms", Some(250));
        check("0.25m", Some(15_000));
        check("0", Some(0));
        check(".5", None);
        check("5.", None);
        check("1.2.3", None);
        check("nan", None);
        check("1e3", None);
        check("1 s", None);
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

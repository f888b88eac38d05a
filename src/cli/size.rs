//! Sizes as people write them: `4G`, `1.5G`, `512MiB`, `1073741824`.

use std::fmt;
use std::str::FromStr;

use super::duration::billionths;

/// A number of bytes. Units are powers of 1024, and have a fraction as those of durations do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub u64);

/// Units and how far each shifts.
const UNITS: [(&str, u32); 4] = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];

impl From<Size> for u64 {
    fn from(size: Size) -> u64 {
        size.0
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let wrong = || format!("{text:?} is no size: write bytes or a number with K, M, G or T");
        let digits = text.trim_end_matches(|character: char| !character.is_ascii_digit());
        let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(wrong()),
        };
        let (whole, fraction) = match digits.split_once('.') {
            // There is no half of a byte.
            Some(_) if shift == 0 => return Err(wrong()),
            Some(parts) => parts,
            None => (digits, "0"),
        };
        let billionths = billionths(whole, fraction).ok_or_else(wrong)?;
        let bytes = billionths.checked_mul(1 << shift).ok_or_else(wrong)? / 1_000_000_000;
        // Less than a byte is not nothing, which stands for something else.
        if bytes == 0 && billionths > 0 {
            return Err(wrong());
        }
        u64::try_from(bytes).map(Size).map_err(|_| wrong())
    }
}

/// As short as it can be read back exactly.
impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |(_, shift): &&(&str, u32)| self.0 > 0 && self.0.trailing_zeros() >= *shift;
        match UNITS.iter().rev().find(fits) {
            Some((unit, shift)) => write!(formatter, "{}{unit}", self.0 >> shift),
            None => write!(formatter, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        fn check(text: &str, expected: Option<u64>) {
            assert_eq!(text.parse::<Size>().ok(), expected.map(Size), "{text}");
            let shown = expected.map(|bytes| Size(bytes).to_string().parse::<Size>().unwrap().0);
            assert_eq!(shown, expected, "{text}");
        }
        check("0", Some(0));
        check("4096", Some(4096));
        check("512K", Some(512 << 10));
        check("0.001K", Some(1));
        check("0.0001K", None);
        check("0.0G", Some(0));
        check("512MiB", Some(512 << 20));
        check("4g", Some(4 << 30));
        check("16383T", Some(16383 << 40));
        check("16777216T", None);
        check("18446744073709551615", Some(u64::MAX));
        check("18446744073709551616", None);
        check("", None);
        check("G", None);
        check("-1", None);
        check("+1", None);
        check("1.5G", Some(1536 << 20));
        check("0.5k", Some(512));
        check("1.5", None);
        check("1.5B", None);
        check("1.G", None);
        check(".5G", None);
        check("1.5.5G", None);
        check("4 G", None);
        check("4X", None);
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_is_exact() {
        fn check(bytes: u64, expected: &str) {
            assert_eq!(Size(bytes).to_string(), expected);
        }
        check(0, "0");
        check(1023, "1023");
        check(1 << 10, "1K");
        check((4 << 30) + (1 << 20), "4097M");
        check(8 << 30, "8G");
    }
}

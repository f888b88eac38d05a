//! Sizes as people write them: `4G`, `512MiB`, `1073741824`.

use std::str::FromStr;

use serde::Deserialize;

/// A number of bytes. Units are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Written")]
pub(crate) struct Size(pub u64);

/// A size in a TOML file: a number of bytes, or text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Bytes(u64),
    Text(String),
}

impl TryFrom<Written> for Size {
    type Error = String;

    fn try_from(written: Written) -> Result<Size, String> {
        match written {
            Written::Bytes(bytes) => Ok(Size(bytes)),
            Written::Text(text) => text.parse(),
        }
    }
}

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
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number.checked_mul(1 << shift).map(Size).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        fn check(text: &str, expected: Option<u64>) {
            assert_eq!(text.parse::<Size>().ok(), expected.map(Size), "{text}");
        }
        check("0", Some(0));
        check("4096", Some(4096));
        check("512K", Some(512 << 10));
        check("512MiB", Some(512 << 20));
        check("4g", Some(4 << 30));
        check("16383T", Some(16383 << 40));
        check("16777216T", None);
        check("", None);
        check("G", None);
        check("-1", None);
        check("1.5G", None);
        check("4 G", None);
        check("4X", None);
    }
}

//! The policy for cold copies, as the option `--cold` and a manifest's `cold_encoding` say it.

use std::fmt;
use std::str::FromStr;

use super::Encoding;
use kvfs_page::Dtype;

/// How hard zstd tries, 1 to 19.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ZstdLevel(u8);

impl ZstdLevel {
    /// zstd's own default.
    pub const DEFAULT: ZstdLevel = ZstdLevel(3);

    /// The least effort.
    pub const FASTEST: ZstdLevel = ZstdLevel(1);

    /// The level, if it is one: from 20 on zstd takes hundreds of megabytes for each thread.
    pub fn new(level: u8) -> Option<ZstdLevel> {
        (1..=19).contains(&level).then_some(ZstdLevel(level))
    }

    /// The level as a number, 1 to 19.
    pub fn get(self) -> u8 {
        self.0
    }
}

/// Blocks of 32 values of one row that a page's values are rounded to.
///
/// The layouts are ggml's: an f16 scale, then 32 i8, 34 bytes; or 16 bytes of nibbles, 18 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quantisation {
    /// 8.5 bits per value.
    Q8_0,
    /// 4.5 bits per value.
    Q4_0,
}

impl Quantisation {
    /// The encoding of a blob that holds such blocks.
    pub fn encoding(self) -> Encoding {
        match self {
            Quantisation::Q8_0 => Encoding::Q8_0,
            Quantisation::Q4_0 => Encoding::Q4_0,
        }
    }

    /// The blocks as elements of a page.
    pub(super) fn dtype(self) -> Dtype {
        match self {
            Quantisation::Q8_0 => Dtype::Q8_0,
            Quantisation::Q4_0 => Dtype::Q4_0,
        }
    }
}

/// How cold copies are encoded: `none`, `zstd`, `zstd:LEVEL`, `q8_0` or `q4_0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ColdEncoding {
    /// Raw.
    None,
    /// Everything with zstd; pages shuffled where it pays.
    Zstd(ZstdLevel),
    /// Pages lossily, as new versions. What cannot be, and everything else, with zstd at its
    /// default level.
    Quantised(Quantisation),
}

/// The text names no encoding of cold copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAColdEncoding(String);

impl FromStr for ColdEncoding {
    type Err = NotAColdEncoding;

    fn from_str(text: &str) -> Result<ColdEncoding, NotAColdEncoding> {
        let refused = || NotAColdEncoding(text.to_owned());
        match text {
            "none" => Ok(ColdEncoding::None),
            "zstd" => Ok(ColdEncoding::Zstd(ZstdLevel::DEFAULT)),
            "q8_0" => Ok(ColdEncoding::Quantised(Quantisation::Q8_0)),
            "q4_0" => Ok(ColdEncoding::Quantised(Quantisation::Q4_0)),
            _ => {
                let digits = text.strip_prefix("zstd:").ok_or_else(refused)?;
                // Parsing alone would take a sign.
                let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
                let level = digits.parse().ok().filter(|_| is_number).and_then(ZstdLevel::new);
                level.map(ColdEncoding::Zstd).ok_or_else(refused)
            }
        }
    }
}

impl fmt::Display for ColdEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ColdEncoding::None => f.write_str("none"),
            ColdEncoding::Zstd(level) => write!(f, "zstd:{}", level.get()),
            ColdEncoding::Quantised(quantisation) => quantisation.dtype().fmt(f),
        }
    }
}

impl fmt::Display for NotAColdEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.0;
        write!(f, "{text:?} is no cold encoding: none, zstd, zstd:LEVEL (1 to 19), q8_0 or q4_0")
    }
}

impl std::error::Error for NotAColdEncoding {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form() {
        fn check(text: &str, expected: Option<&str>) {
            let parsed = text.parse::<ColdEncoding>();
            match expected {
                Some(canonical) => {
                    let parsed = parsed.unwrap();
                    assert_eq!(parsed.to_string(), canonical);
                    assert_eq!(canonical.parse(), Ok(parsed));
                }
                None => assert!(parsed.unwrap_err().to_string().contains("is no cold encoding")),
            }
        }
        check("none", Some("none"));
        check("zstd", Some("zstd:3"));
        check("zstd:1", Some("zstd:1"));
        check("zstd:19", Some("zstd:19"));
        check("q8_0", Some("q8_0"));
        check("q4_0", Some("q4_0"));
        for refused in ["", "zstd:", "zstd:0", "zstd:20", "zstd:+3", "zstd:-1", "zstd:256"] {
            check(refused, None);
        }
        for refused in ["raw", "ZSTD", "zstd:3 ", "q5_0", "q8_0:1"] {
            check(refused, None);
        }
    }
}

//! The report in which a reader tells the mount what it attended to.
//!
//! The daemon does not see what a mapping or a passed-through read moves, so whoever moves the
//! bytes counts them, and now and then sets the attribute [`ATTRIBUTE`] of the sequence's directory
//! to what has been added since. The mount adds it to its metrics and keeps nothing. Whoever may
//! write to the sequence may report; nobody else is asked to.
//!
//! ```text
//! resident_bytes=4198400 streamed_bytes=0 prefetched_bytes=0 stalled_bytes=0 stalled_nanoseconds=0
//! ```

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The attribute.
pub const ATTRIBUTE: &str = "user.kvfs.reader";

/// The same for the kernel.
pub const ATTRIBUTE_C: &std::ffi::CStr = c"user.kvfs.reader";

/// Most that one report may add to a counter: no reader moves a pebibyte between two reports, and
/// the counters of the mount cannot be made to wrap.
const INCREMENT_MAX: u64 = 1 << 50;

/// Longest text of a report: five names with numbers of 16 digits.
pub const REPORT_BYTES_MAX: usize = 256;

/// Bytes of pages and tails that scans handed out, and what they waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Read where they are in memory: mapped, or kept by the reader.
    pub resident_bytes: u64,
    /// Read from the mount into buffers.
    pub streamed_bytes: u64,
    /// Of pages that had to be opened, what was there when it was wanted.
    pub prefetched_bytes: u64,
    /// Of pages that had to be opened, what was waited for.
    pub stalled_bytes: u64,
    /// Time that scans waited.
    pub stalled: Duration,
}

impl Counts {
    const NAMES: [&str; 5] = [
        "resident_bytes",
        "streamed_bytes",
        "prefetched_bytes",
        "stalled_bytes",
        "stalled_nanoseconds",
    ];

    /// All of them, in the order of the fields; the time in nanoseconds.
    #[must_use]
    pub fn values(&self) -> [u64; 5] {
        let nanoseconds = u64::try_from(self.stalled.as_nanos()).unwrap_or(u64::MAX);
        [
            self.resident_bytes,
            self.streamed_bytes,
            self.prefetched_bytes,
            self.stalled_bytes,
            nanoseconds,
        ]
    }

    /// What [`values`](Self::values) gives, the other way.
    #[must_use]
    pub fn from_values(values: [u64; 5]) -> Self {
        Self {
            resident_bytes: values[0],
            streamed_bytes: values[1],
            prefetched_bytes: values[2],
            stalled_bytes: values[3],
            stalled: Duration::from_nanos(values[4]),
        }
    }

    /// What was added since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let (now, then) = (self.values(), earlier.values());
        Self::from_values(std::array::from_fn(|index| now[index].saturating_sub(then[index])))
    }

    /// Reads a report. The error says what is wrong with it.
    pub fn parse(report: &[u8]) -> Result<Self, String> {
        if report.len() > REPORT_BYTES_MAX {
            return Err(format!("a report of {} bytes", report.len()));
        }
        str::from_utf8(report).map_err(|error| error.to_string())?.parse()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in Self::NAMES.iter().zip(self.values()).enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(f, "{space}{name}={value}")?;
        }
        Ok(())
    }
}

impl FromStr for Counts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut values = [None; 5];
        for word in text.split(' ') {
            let (name, value) = word.split_once('=').ok_or("a word without =")?;
            let index = Self::NAMES.iter().position(|known| *known == name);
            let slot = &mut values[index.ok_or("an unknown counter")?];
            let value: u64 = value.parse().map_err(|_| format!("{name} is no number"))?;
            if value > INCREMENT_MAX {
                return Err(format!("{name} is more than {INCREMENT_MAX}"));
            }
            if slot.replace(value).is_some() {
                return Err(format!("{name} stands there twice"));
            }
        }
        Ok(Self::from_values(values.map(Option::unwrap_or_default)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports() {
        fn check(text: &str, expected: Result<[u64; 5], &str>) {
            let found = Counts::parse(text.as_bytes()).map(|counts| counts.values());
            assert_eq!(found, expected.map_err(str::to_owned), "{text}");
        }
        let all = "resident_bytes=1 streamed_bytes=2 prefetched_bytes=3 stalled_bytes=4 \
                   stalled_nanoseconds=5";
        check(all, Ok([1, 2, 3, 4, 5]));
        assert_eq!(Counts::parse(all.as_bytes()).unwrap().to_string(), all);
        check("stalled_bytes=7", Ok([0, 0, 0, 7, 0]));
        check("", Err("a word without ="));
        check("bytes=1", Err("an unknown counter"));
        check("stalled_bytes=-1", Err("stalled_bytes is no number"));
        check("stalled_bytes=1 stalled_bytes=1", Err("stalled_bytes stands there twice"));
        check(
            "resident_bytes=1125899906842625",
            Err("resident_bytes is more than 1125899906842624"),
        );
        check(&"x".repeat(257), Err("a report of 257 bytes"));
        assert!(Counts::parse(b"\xff=1").is_err());
        let largest = Counts::from_values([INCREMENT_MAX; 5]).to_string();
        assert!(largest.len() <= REPORT_BYTES_MAX && Counts::parse(largest.as_bytes()).is_ok());
    }
}

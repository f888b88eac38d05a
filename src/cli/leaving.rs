//! What would leave memory, and the disk, before a file, as the policy of each tier orders them.
//!
//! The mount tells it (`user.kvfs.rank`): exactly where a file is among the next to leave, and else how many there are at least.

use std::ffi::CStr;
use std::path::Path;

use serde_json::{Value, json};

use super::history::shown;
use super::output::{Failure, bytes};
use crate::sys;

const RANK: &CStr = c"user.kvfs.rank";

/// What leaves a tier before a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaving {
    tier: String,
    files: u64,
    bytes: u64,
    /// There are more: so many were looked at.
    has_more: bool,
}

impl Leaving {
    /// Of each tier that a file may leave to make room for others; nothing of what is none.
    pub(super) fn find(path: &Path) -> Result<Vec<Leaving>, Failure> {
        let told = match sys::extended_attribute(path, RANK) {
            Ok(told) => told.unwrap_or_default(),
            // It went meanwhile, or is none that could leave.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTSUP)) => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(Failure::Failed(format!("{}: {error}", shown(path)))),
        };
        let told = String::from_utf8_lossy(&told);
        Ok(told.lines().filter_map(Leaving::parse).collect())
    }

    /// `TIER FILES BYTES`, and `more` behind it.
    fn parse(line: &str) -> Option<Leaving> {
        let mut words = line.split(' ');
        let tier = words.next()?.to_owned();
        let (files, bytes) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(Leaving { tier, files, bytes, has_more: words.next() == Some("more") })
    }

    /// The same for people.
    pub(super) fn in_words(&self) -> String {
        let tier = match self.tier.as_str() {
            "ram" => "memory",
            "ssd" => "the disk",
            other => other,
        };
        if self.files == 0 {
            return format!(
                "it is the next to leave {tier} when room is needed there, unless it is in use then"
            );
        }
        let (files, bytes) = (self.files, bytes(self.bytes));
        let at_least = if self.has_more { "more than " } else { "" };
        let name = if files == 1 { "file" } else { "files" };
        format!(
            "{at_least}{files} {name}, {bytes} leave {tier} before it when room is needed there, but for those in use then"
        )
    }

    /// The same for programs.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "tier": self.tier,
            "files_before": self.files,
            "bytes_before": self.bytes,
            "has_more_before": self.has_more,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_first_in_words() {
        fn check(line: &str, words: &str) {
            assert_eq!(Leaving::parse(line).unwrap().in_words(), words);
        }
        let behind = "when room is needed there, but for those in use then";
        check("ram 2 8192", &format!("2 files, 8.0 KiB leave memory before it {behind}"));
        check("ssd 1 10", &format!("1 file, 10 bytes leave the disk before it {behind}"));
        let next =
            "it is the next to leave memory when room is needed there, unless it is in use then";
        check("ram 0 0", next);
        let more = format!("more than 4096 files, 4.0 KiB leave the disk before it {behind}");
        check("ssd 4096 4096 more", &more);
        for wrong in ["", "ram", "ram 1", "ram x 1"] {
            assert_eq!(Leaving::parse(wrong), None, "{wrong}");
        }
    }
}

//! What a limit would delete before something: what was used longer ago, by the times that `stat` shows. Limits know later uses
//! of files whose times somebody has set.
//!
//! A file goes alone, a sequence from its end; it was used when the last of its files was. What is pinned or in
//! use stays, which nobody can tell for all of them from outside.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::history::shown;
use super::output::bytes;
use super::subject::if_there;

/// Files that are looked at, which takes about a second.
const FILES_MAX: u64 = 100_000;

/// When something was used, and what of a limited directory was used before.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Order {
    used: SystemTime,
    limited: PathBuf,
    before: Before,
}

#[derive(Debug, PartialEq, Eq)]
enum Before {
    /// It is a part of a sequence, or not.
    Counted { total: Total, is_part: bool },
    /// There is too much to look at.
    TooMany,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Total {
    files: u64,
    bytes: u64,
}

impl Order {
    /// The order below a limited directory of the file or sequence that a path is, or is in; `unit_of` tells which
    /// that is, and nothing of what stays. `None` for other directories, which have no place in it.
    pub(super) fn find(
        path: &Path, limited: &Path, unit_of: impl Fn(&Path) -> Option<PathBuf>,
    ) -> io::Result<Option<Order>> {
        let Some(unit) = unit_of(path) else { return Ok(None) };
        let is_part = unit != path;
        let mut units: HashMap<PathBuf, (SystemTime, Total)> = HashMap::new();
        let is_all = walk(limited, |file, metadata| {
            let Some(unit) = unit_of(file) else { return Ok(()) };
            let used = metadata.accessed()?.max(metadata.modified()?);
            let (last, total) = units.entry(unit).or_insert((used, Total::default()));
            *last = used.max(*last);
            total.files += 1;
            total.bytes += metadata.len();
            Ok(())
        })?;
        let limited = limited.to_owned();
        let Some((used, _)) = units.get(&unit).copied() else { return Ok(None) };
        if !is_all {
            return Ok(Some(Order { used, limited, before: Before::TooMany }));
        }
        let mut total = Total::default();
        for (_, of_unit) in units.values().filter(|(last, _)| *last < used) {
            total.files += of_unit.files;
            total.bytes += of_unit.bytes;
        }
        Ok(Some(Order { used, limited, before: Before::Counted { total, is_part } }))
    }

    /// The same for people.
    pub(super) fn in_words(&self, now: SystemTime) -> String {
        let ago = ago(now.duration_since(self.used).unwrap_or_default());
        let before = match self.before {
            Before::TooMany => {
                format!("more than {FILES_MAX} files are there, too many to compare with")
            }
            Before::Counted { total, is_part } => {
                let behind =
                    if is_part { ", and of its sequence what comes behind it" } else { "" };
                let (files, bytes) = (total.files, bytes(total.bytes));
                format!("{files} files, {bytes} were used longer ago and go first{behind}")
            }
        };
        format!(
            "last used {ago} ago, by the times that stat shows; below {} {before}",
            shown(&self.limited)
        )
    }

    /// The same for programs.
    pub(super) fn to_json(&self) -> Value {
        let used = self.used.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let total = match self.before {
            Before::Counted { total, .. } => Some(total),
            Before::TooMany => None,
        };
        json!({
            "used_unix_seconds": used.as_secs(),
            "directory": self.limited.display().to_string(),
            "files_before": total.map(|total| total.files),
            "bytes_before": total.map(|total| total.bytes),
        })
    }
}

/// Shows the files below a directory; false if there are too many.
fn walk(
    directory: &Path, mut show: impl FnMut(&Path, &std::fs::Metadata) -> io::Result<()>,
) -> io::Result<bool> {
    let mut directories = vec![directory.to_owned()];
    let mut files = 0;
    while let Some(directory) = directories.pop() {
        for entry in if_there(directory.read_dir())?.into_iter().flatten() {
            let Some(entry) = if_there(entry)? else { break };
            let Some(metadata) = if_there(entry.metadata())? else { continue };
            if metadata.is_dir() {
                directories.push(entry.path());
            } else if metadata.is_file() {
                show(&entry.path(), &metadata)?;
                files += 1;
                if files > FILES_MAX {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

fn ago(time: Duration) -> String {
    let seconds = time.as_secs();
    let units = [(86_400, "days"), (3600, "hours"), (60, "minutes")];
    let fits = units.into_iter().find(|(unit, _)| seconds >= 2 * unit);
    let (unit, name) = fits.unwrap_or((1, "seconds"));
    format!("{} {name}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, FileTimes};

    use super::*;

    const NOW: Duration = Duration::from_secs(1_000_000_000);

    fn file(path: &Path, used: u64, bytes: usize) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, vec![0; bytes]).unwrap();
        let at = |seconds| SystemTime::UNIX_EPOCH + NOW - Duration::from_secs(seconds);
        // A use is what came last, a change or an access.
        let times = FileTimes::new().set_modified(at(used + 1000)).set_accessed(at(used));
        File::options().write(true).open(path).unwrap().set_times(times).unwrap();
    }

    #[test]
    fn what_was_used_longer_ago_goes_first() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for (name, used, bytes) in [
            ("a", 9000, 10),
            ("b", 7300, 20),
            ("c", 50, 40),
            ("s/0", 8000, 100),
            ("s/1", 7200, 200),
        ] {
            file(&at(name), used, bytes);
        }
        let sequence = |path: &Path| {
            let is_in_sequence = path.starts_with(at("s"));
            Some(if is_in_sequence { at("s") } else { path.to_owned() })
        };
        let words = |name: &str| {
            let order = Order::find(&at(name), directory.path(), sequence).unwrap();
            order.map(|order| order.in_words(SystemTime::UNIX_EPOCH + NOW))
        };
        let told = |ago: &str, files: u64, bytes: &str, behind: &str| {
            let below = directory.path().display();
            Some(format!(
                "last used {ago} ago, by the times that stat shows; below {below} {files} files, {bytes} were used \
                 longer ago and go first{behind}"
            ))
        };
        assert_eq!(words("a"), told("2 hours", 0, "0 bytes", ""));
        assert_eq!(words("b"), told("2 hours", 1, "10 bytes", ""));
        assert_eq!(words("c"), told("50 seconds", 4, "330 bytes", ""));
        assert_eq!(words("s"), told("2 hours", 2, "30 bytes", ""));
        let behind = ", and of its sequence what comes behind it";
        assert_eq!(words("s/0"), told("2 hours", 2, "30 bytes", behind));
        assert_eq!(words("gone"), None);
        assert_eq!(Order::find(&at("a"), directory.path(), |_| None).unwrap(), None);
        let order = Order::find(&at("b"), directory.path(), sequence).unwrap().unwrap();
        let json = order.to_json();
        assert_eq!((&json["files_before"], &json["bytes_before"]), (&json!(1), &json!(10)));
        assert_eq!(json["used_unix_seconds"], NOW.as_secs() - 7300);
    }
}

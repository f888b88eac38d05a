//! `kvfs quota`: what a directory may hold, and for how long. The limits are extended attributes; the
//! mount enforces them.

use std::ffi::CStr;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use kvfs_os::mountinfo;
use serde_json::{Map, Value, json};

use super::duration::{Seconds, duration};
use super::output::{Failure, Outcome, Report, bytes};
use super::size::Size;
use super::status;
use super::summary::Summary;
use crate::sys;

const QUOTA: &CStr = c"user.kvfs.quota";
const AGE: &CStr = c"user.kvfs.age";
const TTL: &CStr = c"user.kvfs.ttl";
/// Behind the seconds of a time to live that uses begin anew.
const RENEWED: &str = " renewed";
const USED: &CStr = c"user.kvfs.used_bytes";

/// Of the mount itself: no directory of the store.
const OWN_DIRECTORY: &str = ".kvfs";

const PLACES: &str = "only directories in files/ and models/ (but no layer) have limits, and files in files/ a time to live";
const TOO_LARGE: &str =
    "the largest limits are 1000 years, and one byte less than 8 EiB: write none for no limit";

/// What the status begins the lines of limited directories with.
const STATUS_KEY: &str = "quota ";

const QUOTA_HELP: &str = "\
Without options the limits are shown; those of all directories if PATH is the mountpoint.

Beyond --size, what was used longest ago is deleted, also from the remote in the end: whole files, \
and of sequences the last pages. What is pinned (user.kvfs.pin), open, mapped or being written stays. \
It happens in the background, so for some seconds a directory may hold more.

Example: kvfs quota --size 100G --age 30d /mnt/kv/models/llama";

/// `kvfs quota`.
#[derive(Debug, Args)]
#[command(after_help = QUOTA_HELP)]
pub(crate) struct QuotaArguments {
    /// Bytes that the files below PATH may have together, or none
    #[arg(long, value_name = "SIZE|none", value_parser = Limit::parse::<Size>)]
    pub size: Option<Limit>,
    /// Delete what was not used for so long (90s, 15m, 12h, 7d), or none
    #[arg(long, value_name = "TIME|none", value_parser = Limit::parse::<Seconds>)]
    pub age: Option<Limit>,
    /// Delete what was written so long ago, or none; of a directory it holds for all below that
    /// have none of their own
    #[arg(long, value_name = "TIME|none", value_parser = Limit::parse::<Seconds>)]
    pub ttl: Option<Limit>,
    /// With --ttl: each use begins the time anew
    #[arg(long, requires = "ttl")]
    pub renew: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// A directory of files/ or models/, a file in files/ (only --ttl), or the mountpoint
    pub path: PathBuf,
}

/// A limit to set, or to take away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit(pub Option<u64>);

impl Limit {
    fn parse<T: FromStr<Err = String> + Into<u64>>(text: &str) -> Result<Limit, String> {
        if text == "none" {
            return Ok(Limit(None));
        }
        match text.parse::<T>()?.into() {
            0 => Err("0 is no limit: write none to take a limit away".to_owned()),
            number => Ok(Limit(Some(number))),
        }
    }
}

/// Sets limits, or shows them.
pub(crate) fn run(arguments: &QuotaArguments) -> Outcome {
    let (mount, path) = mountinfo::kvfs_above(&arguments.path).map_err(Failure::Failed)?;
    if path.starts_with(mount.mountpoint.join(OWN_DIRECTORY)) {
        return Err(Failure::Failed(format!("{}: {PLACES}", path.display())));
    }
    if arguments.renew && arguments.ttl == Some(Limit(None)) {
        return Err(Failure::Usage("--renew is for a --ttl that is not none".to_owned()));
    }
    set(&path, QUOTA, arguments.size, "")?;
    set(&path, AGE, arguments.age, "")?;
    set(&path, TTL, arguments.ttl, if arguments.renew { RENEWED } else { "" })?;
    if path == mount.mountpoint {
        return all(&path, arguments.json);
    }
    let read = |name| attribute(&path, name);
    let (size, age, ttl) = (read(QUOTA)?, read(AGE)?, read(TTL)?);
    let is_renewed = text(&path, TTL)?.is_some_and(|ttl| ttl.ends_with(RENEWED));
    let used = read(USED)?;
    if arguments.json {
        let path = path.display().to_string();
        return Ok(Report::json(&json!({
            "path": path, "size_bytes": size, "age_seconds": age, "ttl_seconds": ttl,
            "ttl_renewed": ttl.map(|_| is_renewed),
            "used_bytes": used,
        })));
    }
    let mut summary = Summary::new(&path);
    summary.add("size", size.map_or("no limit".to_owned(), bytes));
    summary.add("age", age.map_or("no limit".to_owned(), duration));
    let renewed = if is_renewed { ", renewed by each use" } else { "" };
    summary.add("ttl", ttl.map_or("no limit".to_owned(), |ttl| duration(ttl) + renewed));
    if let Some(used) = used {
        summary.add("used", bytes(used));
    }
    Ok(Report::text(summary.to_text()))
}

/// All limited directories, as the mount tells them.
fn all(mountpoint: &Path, json: bool) -> Outcome {
    let text = status::read(mountpoint)?;
    let directories: Vec<(&str, Map<String, Value>)> = text
        .lines()
        .filter_map(|line| line.strip_prefix(STATUS_KEY)?.rsplit_once(": "))
        .map(|(path, fields)| (path, parse(fields)))
        .collect();
    if json {
        let found: Vec<Value> = directories
            .into_iter()
            .map(|(path, mut fields)| {
                fields.insert("path".to_owned(), path.into());
                Value::Object(fields)
            })
            .collect();
        return Ok(Report::json(&Value::from(found)));
    }
    if directories.is_empty() {
        return Ok(Report::text("no directory has a limit\n".to_owned()));
    }
    let lines = directories.iter().map(|(path, fields)| describe(path, fields));
    Ok(Report::text(lines.collect()))
}

fn parse(fields: &str) -> Map<String, Value> {
    let pairs = fields.split_whitespace().filter_map(|field| field.split_once('='));
    pairs
        .filter_map(|(key, value)| Some((key.to_owned(), value.parse::<u64>().ok()?.into())))
        .collect()
}

fn describe(path: &str, fields: &Map<String, Value>) -> String {
    let number = |key: &str| fields.get(key).and_then(Value::as_u64);
    let ttl = number("ttl").map(|ttl| (ttl, number("ttl_renewed").is_some()));
    let limits = each_in_words(number("size"), number("age"), ttl);
    let count = |key: &str| number(key).unwrap_or(0);
    format!(
        "{path}: {}; holds {} in {} files, removed {} in {} files\n",
        limits.join(", "),
        bytes(count("used_bytes")),
        count("files"),
        bytes(count("removed_bytes")),
        count("removed_files"),
    )
}

/// The limits of a path, if it has any.
pub(super) fn in_words(path: &Path) -> Result<Option<String>, Failure> {
    let read = |name| attribute(path, name);
    let is_renewed = text(path, TTL)?.is_some_and(|ttl| ttl.ends_with(RENEWED));
    let limits = each_in_words(read(QUOTA)?, read(AGE)?, read(TTL)?.map(|ttl| (ttl, is_renewed)));
    Ok((!limits.is_empty()).then(|| limits.join(", ")))
}

/// Whether a directory has a limit by which what was used longest ago goes first.
pub(super) fn deletes_by_use(path: &Path) -> Result<bool, Failure> {
    Ok(attribute(path, QUOTA)?.is_some() || attribute(path, AGE)?.is_some())
}

/// A time to live stands with whether uses begin it anew.
fn each_in_words(size: Option<u64>, age: Option<u64>, ttl: Option<(u64, bool)>) -> Vec<String> {
    let mut limits = Vec::new();
    limits.extend(size.map(|size| format!("at most {}", bytes(size))));
    limits.extend(age.map(|age| format!("used within {}", duration(age))));
    limits.extend(ttl.map(|(ttl, is_renewed)| {
        let what = if is_renewed { "written or used" } else { "written" };
        format!("{what} within {}", duration(ttl))
    }));
    limits
}

fn set(path: &Path, name: &CStr, limit: Option<Limit>, behind: &str) -> Result<(), Failure> {
    let outcome = match limit {
        None => return Ok(()),
        Some(Limit(Some(number))) => {
            sys::set_extended_attribute(path, name, format!("{number}{behind}").as_bytes())
        }
        Some(Limit(None)) => match sys::remove_extended_attribute(path, name) {
            Err(error) if error.raw_os_error() == Some(libc::ENODATA) => Ok(()),
            outcome => outcome,
        },
    };
    outcome.map_err(|error| Failure::Failed(format!("{}: {}", path.display(), explain(&error))))
}

fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => PLACES.to_owned(),
        // 0 was refused before.
        Some(libc::EINVAL) => TOO_LARGE.to_owned(),
        _ => error.to_string(),
    }
}

fn attribute(path: &Path, name: &CStr) -> Result<Option<u64>, Failure> {
    let value = text(path, name)?;
    Ok(value.and_then(|value| value.split(' ').next()?.parse().ok()))
}

fn text(path: &Path, name: &CStr) -> Result<Option<String>, Failure> {
    let value = sys::extended_attribute(path, name)
        .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?;
    Ok(value.and_then(|value| String::from_utf8(value).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_status_in_words() {
        let fields = parse(
            "size=1073741824 age=604800 used_bytes=4096 files=1 removed_bytes=0 removed_files=2",
        );
        let expected = "files/a: at most 1.0 GiB, used within 7 days; holds 4.0 KiB in 1 files, \
                        removed 0 bytes in 2 files\n";
        assert_eq!(describe("files/a", &fields), expected);
        let fields =
            parse("ttl=120 ttl_renewed=1 used_bytes=0 files=0 removed_bytes=0 removed_files=0");
        assert!(describe("files/a", &fields).contains("written or used within 2 minutes;"));
    }
}

//! `kvfs gc`: has the daemon of a mount delete unreferenced objects, which has the remote's
//! credentials and knows what is under way.

use std::ffi::CStr;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use kvfs_os::mountinfo;
use serde_json::{Value, json};

use super::arguments::GcArguments;
use super::output::{Failure, Outcome, Report, bytes};
use super::probe::status_value;
use super::progress;
use crate::sys;

const GC: &CStr = c"user.kvfs.gc";
/// How often the daemon is asked whether it is done.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Starts a collection and waits for its end. Interrupted, the daemon goes on.
pub(crate) fn run(arguments: &GcArguments) -> Outcome {
    let (mount, _) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
    let place = mount.mountpoint.display();
    let failed = |error: std::io::Error| match error.raw_os_error() {
        Some(libc::EBUSY) => Failure::Failed(format!("{place}: a collection is running already")),
        _ => Failure::Failed(format!("{place}: {error}")),
    };
    let collect = |word: &str| {
        let words = [&[word.to_owned()], arguments.forget_store.as_slice()].concat().join(" ");
        let started = sys::set_extended_attribute(&mount.mountpoint, GC, words.as_bytes());
        started.map_err(failed)?;
        let bar = progress::spinner("collecting garbage");
        let found = wait(&mount.mountpoint).map_err(failed);
        bar.finish_and_clear();
        let found = found?;
        match status_value(&found, "error") {
            Some(error) => Err(Failure::Failed(error.to_owned())),
            None => Ok(found),
        }
    };
    let report = |found: &str, dry_run| {
        Report::answer(arguments.json, &to_json(found, dry_run), describe(found, dry_run))
    };
    if !arguments.consent.yes {
        let found = collect("dry-run")?;
        if !arguments.consent.is_given(describe(&found, true).trim_end())? {
            return Ok(report(&found, true));
        }
    }
    Ok(report(&collect("collect")?, false))
}

fn to_json(found: &str, dry_run: bool) -> Value {
    let number = |key| status_value(found, key).and_then(|text| text.parse::<u64>().ok());
    let count = |key| number(key).unwrap_or(0);
    let remote = number("stores").map(|stores| {
        json!({
            "stores": stores,
            "referenced_objects": number("referenced"),
            "young_objects": count("young"),
            "deleted_objects": count("deleted"),
            "deleted_bytes": count("deleted_bytes"),
            "removed_uploads": count("swept"),
            "complete": count("unfinished") == 0,
        })
    });
    json!({
        "dry_run": dry_run,
        "remote": remote,
        "store_deleted_objects": count("store_deleted"),
        "packs_freed_bytes": count("packs_freed_bytes"),
    })
}

fn wait(mountpoint: &Path) -> std::io::Result<String> {
    loop {
        let report = sys::long_extended_attribute(mountpoint, GC)?.unwrap_or_default();
        if report != b"running" {
            return Ok(String::from_utf8_lossy(&report).into_owned());
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

fn describe(found: &str, dry_run: bool) -> String {
    let number = |key| status_value(found, key).and_then(|text| text.parse::<u64>().ok());
    let deleted = if dry_run { "would be deleted" } else { "deleted" };
    let mut text = String::new();
    if let (Some(stores), Some(referenced)) = (number("stores"), number("referenced")) {
        let count = |key| number(key).unwrap_or(0);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "remote: {stores} stores, {referenced} objects in use, {} too young to be deleted, \
             {} {deleted} ({}), {} remains of uploads removed",
            count("young"),
            count("deleted"),
            bytes(count("deleted_bytes")),
            count("swept"),
        );
        if count("unfinished") > 0 {
            text.push_str(
                "remote: the time was over before everything was deleted: run it again\n",
            );
        }
    }
    let _ = writeln!(text, "store: {} objects {deleted}", number("store_deleted").unwrap_or(0));
    if let Some(freed) = number("packs_freed_bytes").filter(|freed| *freed > 0) {
        let what = if dry_run { "hold for nothing" } else { "held for nothing, given back" };
        let _ = writeln!(text, "packs: {} {what}", bytes(freed));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_in_words() {
        let found = "stores: 2\nreferenced: 9\nyoung: 1\ndeleted: 3\ndeleted_bytes: 2048\n\
                     swept: 0\nunfinished: 1\nstore_deleted: 0\n";
        let expected = "remote: 2 stores, 9 objects in use, 1 too young to be deleted, \
                        3 would be deleted (2.0 KiB), 0 remains of uploads removed\n\
                        remote: the time was over before everything was deleted: run it again\n\
                        store: 0 objects would be deleted\n";
        assert_eq!(describe(found, true), expected);
        let value = to_json(found, true);
        let remote = json!({
            "stores": 2, "referenced_objects": 9, "young_objects": 1, "deleted_objects": 3,
            "deleted_bytes": 2048, "removed_uploads": 0, "complete": false,
        });
        assert_eq!((&value["dry_run"], &value["remote"]), (&json!(true), &remote));
        assert_eq!(to_json("store_deleted: 4\n", false)["remote"], Value::Null);
        assert_eq!(to_json("store_deleted: 4\n", false)["store_deleted_objects"], 4);
        assert_eq!(describe("store_deleted: 4\n", false), "store: 4 objects deleted\n");
        let freed = "store_deleted: 0\npacks_freed_bytes: 2048\n";
        let expected = "store: 0 objects deleted\npacks: 2.0 KiB held for nothing, given back\n";
        assert_eq!(describe(freed, false), expected);
    }
}

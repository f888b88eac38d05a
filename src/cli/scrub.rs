//! `kvfs scrub`: has the daemon of a mount compare what it stores with its checksums.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use kvfs_os::mountinfo;
use serde_json::{Value, json};

use super::interrupt;
use super::output::{EXIT_FSCK_ERRORS, EXIT_OK, Failure, Outcome, Report, bytes, complain};
use super::probe::status_value;
use super::progress::{self, Scale};
use super::size::Size;
use crate::sys;

const SCRUB: &CStr = c"user.kvfs.scrub";
/// How often the daemon is asked how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// `kvfs scrub`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs scrub --rate 100M /mnt/kv")]
pub(crate) struct ScrubArguments {
    /// Bytes per second that are read at most [default: as fast as the disk]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<Size>,
    /// Do not wait for the end: `kvfs status` tells
    #[arg(long, short = 'b')]
    pub background: bool,
    /// End the one that runs
    #[arg(long, conflicts_with_all = ["rate", "background"])]
    pub stop: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Where the cache is mounted, or a file or directory in it
    pub path: PathBuf,
}

/// Starts a scrub and waits for its end. Interrupted, the daemon goes on.
pub(crate) fn run(arguments: &ScrubArguments) -> Outcome {
    if arguments.rate.is_some_and(|rate| rate.0 == 0) {
        let why =
            "--rate 0: nothing would ever be read; give bytes per second such as 50M, or --stop";
        return Err(Failure::Usage(why.to_owned()));
    }
    let (mount, path) = mountinfo::kvfs_above(&arguments.path).map_err(Failure::Failed)?;
    let place = path.display();
    let failed = |error: std::io::Error| match error.raw_os_error() {
        Some(libc::EBUSY) => Failure::Failed(format!("{place}: a scrub is running already")),
        _ => Failure::Failed(format!("{place}: {error}")),
    };
    let word = match (arguments.stop, arguments.rate) {
        (true, _) => "stop".to_owned(),
        (false, None) => "start".to_owned(),
        (false, Some(rate)) => format!("start {}", rate.0),
    };
    sys::set_extended_attribute(&path, SCRUB, word.as_bytes()).map_err(failed)?;
    if arguments.stop || arguments.background {
        let state = if arguments.stop { "stopped" } else { "started" };
        return Ok(Report::answer(arguments.json, &json!({ "state": state }), String::new()));
    }
    let bar = progress::bar("comparing", Scale::Files);
    let (shown, line) = (bar.clone(), goes_on(&place.to_string()));
    let told = interrupt::before_end(move || {
        shown.finish_and_clear();
        complain("kvfs", &line);
    });
    told.map_err(failed)?;
    let found = wait(&mount.mountpoint, &bar).map_err(failed)?;
    let count = |key| status_value(&found, key).and_then(|text| text.parse::<u64>().ok());
    let state = status_value(&found, "scrub").unwrap_or_default();
    if state != "done" {
        return Err(Failure::Failed(format!("{place}: the scrub has {state}")));
    }
    let (damaged, repaired) = (count("scrub_damaged_files"), count("scrub_repaired_files"));
    let exit = if damaged == repaired { EXIT_OK } else { EXIT_FSCK_ERRORS };
    Ok(Report { exit, ..Report::answer(arguments.json, &to_json(&found), describe(&found)) })
}

fn to_json(found: &str) -> Value {
    let count = |key| status_value(found, key).and_then(|text| text.parse::<u64>().ok());
    json!({
        "state": status_value(found, "scrub"),
        "files": count("scrub_files_done"),
        "skipped_files": count("scrub_files_skipped"),
        "read_bytes": count("scrub_bytes_read"),
        "damaged_files": count("scrub_damaged_files"),
        "repaired_files": count("scrub_repaired_files"),
    })
}

/// What somebody should know who does not wait for the end.
fn goes_on(place: &str) -> String {
    format!(
        "the scrub goes on: kvfs status {place} tells how far it is, kvfs scrub --stop {place} ends it"
    )
}

fn wait(mountpoint: &Path, bar: &ProgressBar) -> std::io::Result<String> {
    loop {
        let report = sys::extended_attribute(mountpoint, SCRUB)?.unwrap_or_default();
        let report = String::from_utf8_lossy(&report).into_owned();
        let number = |key| status_value(&report, key).and_then(|text| text.parse().ok());
        bar.set_length(number("scrub_files").unwrap_or(0));
        bar.set_position(number("scrub_files_done").unwrap_or(0));
        progress::tell_bytes(bar, number("scrub_bytes_read").unwrap_or(0));
        if status_value(&report, "scrub") != Some("running") {
            bar.finish_and_clear();
            return Ok(report);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

fn describe(found: &str) -> String {
    let count = |key| {
        status_value(found, key).and_then(|text| text.parse::<u64>().ok()).unwrap_or_default()
    };
    let (damaged, repaired) = (count("scrub_damaged_files"), count("scrub_repaired_files"));
    let damage = match damaged {
        0 if count("scrub_files_skipped") > 0 => "no damage in the others".to_owned(),
        0 => "no damage".to_owned(),
        damaged => format!(
            "{damaged} damaged, {repaired} of them mended; see .kvfs/errors and the store's quarantine/"
        ),
    };
    format!(
        "{} files, {} read, {} not compared: {damage}\n",
        count("scrub_files_done"),
        bytes(count("scrub_bytes_read")),
        count("scrub_files_skipped"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bytes_per_second_are_refused_in_words() {
        let (rate, path) = (Some(Size(0)), PathBuf::from("/nowhere"));
        let arguments = ScrubArguments { rate, background: false, stop: false, json: false, path };
        let failure = run(&arguments).unwrap_err();
        assert!(matches!(failure, Failure::Usage(_)));
        assert!(failure.line().starts_with("--rate 0: "), "{}", failure.line());
    }

    #[test]
    fn a_report_in_words() {
        let found = "scrub: done\nscrub_files: 9\nscrub_files_done: 9\nscrub_files_skipped: 1\n\
                     scrub_bytes_read: 2048\nscrub_damaged_files: 0\nscrub_repaired_files: 0\n";
        assert_eq!(
            describe(found),
            "9 files, 2.0 KiB read, 1 not compared: no damage in the others\n"
        );
        let found = found.replace("damaged_files: 0", "damaged_files: 2");
        let expected = "9 files, 2.0 KiB read, 1 not compared: 2 damaged, 0 of them mended; see \
                        .kvfs/errors and the store's quarantine/\n";
        assert_eq!(describe(&found), expected);
        let expected = json!({
            "state": "done", "files": 9, "skipped_files": 1, "read_bytes": 2048,
            "damaged_files": 2, "repaired_files": 0,
        });
        assert_eq!(to_json(&found), expected);
    }
}

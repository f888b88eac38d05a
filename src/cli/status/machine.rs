//! All mounts of the machine at a time: one that hangs or is stale delays none of the others.

use std::path::PathBuf;
use std::time::Duration;

use kvfs_os::mountinfo;
use serde_json::{Value, json};

use super::{read_within, sections, to_json};
use crate::cli::output::{EXIT_FAILED, EXIT_OK, Failure, Outcome, Report};
use crate::cli::style::{Paint, Style};
use crate::page::printable;

/// A healthy mount answers within milliseconds, and whoever names none wants an overview.
const DEADLINE: Duration = Duration::from_secs(3);
/// Mounts that are asked at a time: each has a process that asks.
const ASKED_MAX: usize = 32;

/// What came back from one.
struct Told {
    mountpoint: PathBuf,
    status: Result<String, Failure>,
}

/// What can be reached, in the order in which it was mounted; what hides another mount comes once.
fn mountpoints() -> Result<Vec<PathBuf>, Failure> {
    let mounts = mountinfo::read()
        .map_err(|error| Failure::Failed(format!("/proc/self/mountinfo: {error}")))?;
    let mut found = Vec::new();
    for mount in mounts.iter().filter(|mount| mount.is_kvfs()) {
        let is_on_top = mountinfo::top_at(&mounts, &mount.mountpoint) == Some(mount);
        if is_on_top && !found.contains(&mount.mountpoint) {
            found.push(mount.mountpoint.clone());
        }
    }
    Ok(found)
}

fn ask_all() -> Result<Vec<Told>, Failure> {
    let mut told = Vec::new();
    for some in mountpoints()?.chunks(ASKED_MAX) {
        std::thread::scope(|scope| {
            let asked = some
                .iter()
                .map(|mountpoint| scope.spawn(|| read_within(mountpoint, DEADLINE)))
                .collect::<Vec<_>>();
            for (mountpoint, thread) in some.iter().zip(asked) {
                let panicked = |_| Err(Failure::failed("asking it failed"));
                let status = thread.join().unwrap_or_else(panicked);
                told.push(Told { mountpoint: mountpoint.clone(), status });
            }
        });
    }
    Ok(told)
}

fn exit(told: &[Told]) -> u8 {
    if told.iter().all(|told| told.status.is_ok()) { EXIT_OK } else { EXIT_FAILED }
}

/// All of them, for people.
pub(super) fn look(style: Style) -> Outcome {
    let told = ask_all()?;
    if told.is_empty() {
        return Ok(Report::text("no kvfs is mounted on this machine\n".to_owned()));
    }
    let texts = told.iter().map(|told| match &told.status {
        Ok(status) => sections::describe(status, style),
        Err(failure) => {
            let line = printable(failure.line().chars());
            let head = sections::head(&told.mountpoint.to_string_lossy(), style);
            format!("{head}state: {}\n", style.paint(Paint::Bad, &line))
        }
    });
    let text = texts.collect::<Vec<_>>().join("\n");
    Ok(Report::ending(text, exit(&told)))
}

/// The same for programs: the fields of each, or why there are none.
pub(super) fn look_as_json() -> Outcome {
    let told = ask_all()?;
    let mounts = told.iter().map(|told| match &told.status {
        Ok(status) => to_json(status),
        Err(failure) => {
            json!({ "mountpoint": told.mountpoint.to_string_lossy(), "error": failure.line() })
        }
    });
    let mounts: Vec<Value> = mounts.collect();
    Ok(Report { exit: exit(&told), ..Report::json(&json!({ "mounts": mounts })) })
}

//! `kvfs explain`: where a file or directory is and why, or why it is gone.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use super::history::{Event, Events};
use super::output::{Failure, Outcome, Report};
use super::subject::Subject;
use super::{plan, quota, status};
use crate::sys;

const PIN: &CStr = c"user.kvfs.pin";
/// What happened last: a page of a terminal.
const EVENTS_MAX: usize = 20;

const EXPLAIN_HELP: &str = "\
Only root and whoever mounted the store may ask.

Example: kvfs explain /mnt/kv/models/llama/sequences/chat-42";

/// `kvfs explain`.
#[derive(Debug, Args)]
#[command(after_help = EXPLAIN_HELP)]
pub(crate) struct ExplainArguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// A file or directory in a mount, which may be gone by now
    pub path: PathBuf,
}

/// Explains a path.
pub(crate) fn run(arguments: &ExplainArguments) -> Outcome {
    let subject = Subject::find(&arguments.path)?;
    let path = subject.path.display();
    let status = status::read(&subject.mountpoint)?;
    let events = last_events(&subject)?;
    let explain = |error: std::io::Error| Failure::Failed(format!("{path}: {error}"));
    let places = if subject.is_there() {
        Some(plan::places(&subject.path, &status).map_err(explain)?)
    } else if events.is_empty() {
        return Err(Failure::Failed(format!(
            "{path} is not there, and nothing is known of it: its user removed it, it never was there, or it \
             went longer ago than the store remembers"
        )));
    } else {
        None
    };
    let limits = limits(&subject)?;
    let is_pinned =
        matches!(sys::extended_attribute(&subject.path, PIN), Ok(Some(value)) if value == b"1");
    let events = events.into_iter();
    if arguments.json {
        let events: Vec<Value> =
            events.filter_map(|(_, line)| serde_json::from_str(&line).ok()).collect();
        return Ok(Report::json(&json!({
            "path": path.to_string(),
            "is_there": places.is_some(),
            "places": places.as_ref().map(|(_, places)| places),
            "pinned": is_pinned,
            "limits": limits,
            "events": events,
        })));
    }
    let events: Vec<Event> = events.map(|(event, _)| event).collect();
    let mut text = format!("path: {path}\n");
    // Writing to a String cannot fail.
    match (&places, events.last()) {
        (Some((places, _)), _) => {
            for place in places {
                let _ = writeln!(text, "where: {place}");
            }
        }
        (None, Some(last)) => {
            let _ = writeln!(text, "where: it is not there");
            let _ = writeln!(text, "why: {} {}: {}", last.what, last.time(), last.why());
        }
        (None, None) => {}
    }
    if is_pinned {
        text.push_str("pinned: it stays, whoever needs room\n");
    }
    for limit in &limits {
        let _ = writeln!(text, "limit: {limit}");
    }
    if events.is_empty() {
        text.push_str("events: none\n");
    }
    for event in &events {
        let _ = writeln!(text, "{}", event.row());
    }
    Ok(Report::text(text))
}

fn last_events(subject: &Subject) -> Result<VecDeque<(Event, String)>, Failure> {
    let mut events = Events::open(&subject.mountpoint)?;
    let mut last = VecDeque::new();
    while let Some((event, line)) = events.next()? {
        if subject.concerns(&event) {
            last.push_back((event, line));
            if last.len() > EVENTS_MAX {
                last.pop_front();
            }
        }
    }
    Ok(last)
}

/// The limits that hold for a path, the nearest first.
fn limits(subject: &Subject) -> Result<Vec<String>, Failure> {
    let is_in_mount = |path: &&Path| path.starts_with(&subject.mountpoint);
    let mut found = Vec::new();
    for path in subject.path.ancestors().take_while(is_in_mount) {
        let is_there = path.symlink_metadata().is_ok_and(|metadata| !metadata.is_symlink());
        if let Some(limits) = is_there.then(|| quota::in_words(path)).transpose()?.flatten() {
            found.push(format!("{}: {limits}", path.display()));
        }
    }
    Ok(found)
}

//! `kvfs explain`: where a file or directory is and why, or why it is gone.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use serde_json::{Value, json};

use super::history::{Event, Events, shown};
use super::leaving::Leaving;
use super::order::Order;
use super::output::{Failure, Outcome, Report};
use super::subject::{LOST, Relation, Subject};
use super::{plan, quota, status};
use crate::page::printable;
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
    let status = status::read(&subject.mountpoint)?;
    // What is there when these have been read was not deleted by the last of them.
    let past = Past::of(&subject)?;
    let places = places(&subject, &status)?;
    let why = past.why(places.is_some());
    if places.is_none() && past.events.is_empty() {
        let path = shown(&subject.path);
        return Err(Failure::Failed(format!("{path} is not there, and {}", past.unknown())));
    }
    let limits = limits(&subject)?;
    let order = if places.is_some() { order(&subject)? } else { None };
    let leaving = if places.is_some() { Leaving::find(&subject.path)? } else { Vec::new() };
    let is_pinned =
        matches!(sys::extended_attribute(&subject.path, PIN), Ok(Some(value)) if value == b"1");
    if arguments.json {
        let lines = past.events.iter().map(|(_, _, line)| line);
        let events: Vec<Value> = lines.filter_map(|line| serde_json::from_str(line).ok()).collect();
        return Ok(Report::json(&json!({
            "path": subject.path.display().to_string(),
            "is_there": places.is_some(),
            "virtual": subject.is_virtual(),
            "places": places.as_ref().map(|(_, places)| places),
            "why": why,
            "pinned": is_pinned,
            "limits": limits,
            "order": order.as_ref().map(Order::to_json),
            "leaving": leaving.iter().map(Leaving::to_json).collect::<Vec<_>>(),
            "events": events,
            "events_lost": past.lost,
        })));
    }
    let mut text = format!("path: {}\n", shown(&subject.path));
    // Writing to a String cannot fail.
    for place in places.as_ref().map_or(&["it is not there".to_owned()][..], |(words, _)| words) {
        let _ = writeln!(text, "where: {place}");
    }
    if let Some(why) = why {
        let _ = writeln!(text, "why: {why}");
    }
    if is_pinned {
        text.push_str("pinned: it stays, whoever needs room\n");
    }
    for limit in &limits {
        let _ = writeln!(text, "limit: {limit}");
    }
    if let Some(order) = order {
        let _ = writeln!(text, "order: {}", order.in_words(SystemTime::now()));
    }
    for leaving in &leaving {
        let _ = writeln!(text, "order: {}", leaving.in_words());
    }
    if past.events.is_empty() {
        text.push_str("events: none\n");
    }
    for (event, ..) in &past.events {
        let _ = writeln!(text, "{}", event.row());
    }
    if past.lost > 0 {
        let _ = writeln!(text, "events lost: {}", past.lost_in_words());
    }
    Ok(Report::text(text))
}

/// Where it is, for people and programs, if it is there.
fn places(subject: &Subject, status: &str) -> Result<Option<(Vec<String>, Value)>, Failure> {
    if !subject.is_there() {
        return Ok(None);
    }
    if subject.is_virtual() {
        let words = "nowhere: it is virtual, and made when it is read";
        return Ok(Some((vec![words.to_owned()], Value::Null)));
    }
    let places = plan::places(&subject.path, status);
    let places = places.map_err(|error| {
        let path = shown(&subject.path);
        Failure::Failed(format!("{path}: {error}"))
    });
    places.map(Some)
}

/// What is remembered of it.
#[derive(Debug, Default)]
struct Past {
    /// The last ones, with their lines.
    events: VecDeque<(Event, Relation, String)>,
    /// What happened last to the name itself, or to the sequence that it is in.
    last: Option<(Event, Relation)>,
    /// The last time that it was deleted, with its sequence or alone.
    deleted: Option<(Event, Relation)>,
    /// Events of the mount that were not kept, and the last time.
    lost: u64,
    lost_at: String,
}

impl Past {
    fn of(subject: &Subject) -> Result<Past, Failure> {
        let mut past = Past::default();
        let mut events = Events::open(&subject.mountpoint)?;
        while let Some((event, line)) = events.next()? {
            past.add(event, line, |event| subject.relation(event));
        }
        Ok(past)
    }

    fn add(&mut self, event: Event, line: String, relation: impl Fn(&Event) -> Option<Relation>) {
        if event.what == LOST {
            self.lost += event.files;
            self.lost_at = event.time();
        }
        let Some(relation) = relation(&event) else { return };
        if relation != Relation::Other {
            // The end of a sequence may go, and the sequence stays.
            let is_all = relation == Relation::Sequence || event.from_token.is_none();
            if event.what == "deleted" && is_all {
                self.deleted = Some((event.clone(), relation));
            }
            self.last = Some((event.clone(), relation));
        }
        self.events.push_back((event, relation, line));
        if self.events.len() > EVENTS_MAX {
            self.events.pop_front();
        }
    }

    /// Why it is there again, or is not: no more than the events prove. What its users do leaves none.
    fn why(&self, is_there: bool) -> Option<String> {
        let told = |(event, relation): &(Event, Relation)| {
            let what = match (relation, &event.path) {
                (Relation::Sequence, Some(path)) => format!("{} was ", printable(path.chars())),
                _ => String::new(),
            };
            format!("{what}{} {}: {}", event.what, event.time(), event.why())
        };
        if is_there {
            let deleted = told(self.deleted.as_ref()?);
            return Some(format!("{deleted}; made again since, or renamed to this"));
        }
        let later = "if it was made again since, what became of that is not remembered";
        Some(match (&self.last, &self.deleted) {
            (Some((last, _)), Some(deleted)) if last.number == deleted.0.number => {
                format!("{}; {later}", told(deleted))
            }
            (Some(last), _) => format!("not known; the last that is remembered is {}", told(last)),
            (None, _) => "not known; what is remembered happened to others".to_owned(),
        })
    }

    /// What can be said of what is gone and has no event.
    fn unknown(&self) -> String {
        if self.lost > 0 {
            return format!("why cannot be told: {}", self.lost_in_words());
        }
        "nothing is known of it: its user removed it, it never was there, it had another name when it went, or it \
         went longer ago than the store remembers"
            .to_owned()
    }

    fn lost_in_words(&self) -> String {
        let (lost, at) = (self.lost, &self.lost_at);
        format!("{lost} events found no room, the last {at}, and may have been about it")
    }
}

/// The limits that hold for a path, the nearest first.
fn limits(subject: &Subject) -> Result<Vec<String>, Failure> {
    let is_in_mount = |path: &&Path| path.starts_with(&subject.mountpoint);
    let mut found = Vec::new();
    for path in subject.path.ancestors().take_while(is_in_mount) {
        let is_there = path.symlink_metadata().is_ok_and(|metadata| !metadata.is_symlink());
        if let Some(limits) = is_there.then(|| quota::in_words(path)).transpose()?.flatten() {
            found.push(format!("{}: {limits}", shown(path)));
        }
    }
    Ok(found)
}

/// What goes before it, where a limit above it deletes what was used longest ago.
fn order(subject: &Subject) -> Result<Option<Order>, Failure> {
    let is_in_mount = |path: &&Path| path.starts_with(&subject.mountpoint);
    for limited in subject.path.ancestors().skip(1).take_while(is_in_mount) {
        if quota::deletes_by_use(limited)? {
            let order = Order::find(&subject.path, limited, |path| subject.unit_of(path));
            return order.map_err(|error| Failure::Failed(format!("{}: {error}", shown(limited))));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELETED: &str = "deleted NOW: room";
    const UNKNOWN: &str = "if it was made again since, what became of that is not remembered";

    fn event(number: u64, what: &str, from_token: Option<u64>) -> Event {
        let (what, time, reason) = (what.to_owned(), "NOW".to_owned(), "room".to_owned());
        let path = Some("models/m/sequences/a".to_owned());
        Event { number, what, time, reason, path, from_token, files: 1, ..Event::default() }
    }

    fn past(events: &[(&str, Option<u64>, Option<Relation>)]) -> Past {
        let mut past = Past::default();
        for (number, (what, from_token, relation)) in (1..).zip(events) {
            past.add(event(number, what, *from_token), String::new(), |_| *relation);
        }
        past
    }

    #[test]
    fn no_cause_is_told_that_is_not_proven() {
        fn check(
            events: &[(&str, Option<u64>, Option<Relation>)], gone: &str, there: Option<&str>,
        ) {
            let past = past(events);
            assert_eq!(past.why(false).as_deref(), Some(gone), "{events:?}");
            assert_eq!(past.why(true).as_deref(), there, "{events:?}");
        }
        let (itself, sequence, other) =
            (Some(Relation::Itself), Some(Relation::Sequence), Some(Relation::Other));
        let again = format!("{DELETED}; made again since, or renamed to this");
        let again = Some(again.as_str());
        let deleted = ("deleted", None, itself);
        check(&[("evicted", None, itself), deleted], &format!("{DELETED}; {UNKNOWN}"), again);
        // It was made again, and what its user did then left no event.
        let last =
            |what: &str| format!("not known; the last that is remembered is {what} NOW: room");
        check(&[deleted, ("refused", None, itself)], &last("refused"), again);
        check(&[deleted, ("deleted", None, None)], &format!("{DELETED}; {UNKNOWN}"), again);
        check(&[("damaged", None, itself)], &last("damaged"), None);
        // What is below went, or another name of its file.
        let others = "not known; what is remembered happened to others";
        check(&[("deleted", None, other)], others, None);
        check(&[deleted, ("deleted", None, other)], &format!("{DELETED}; {UNKNOWN}"), again);
        // The end of a sequence is not the sequence, but the pages in it.
        let end = "deleted NOW: room (from token 64 on)";
        let unknown = format!("not known; the last that is remembered is {end}");
        check(&[("deleted", Some(64), itself)], &unknown, None);
        let end = format!("models/m/sequences/a was {end}");
        let there = format!("{end}; made again since, or renamed to this");
        check(&[("deleted", Some(64), sequence)], &format!("{end}; {UNKNOWN}"), Some(&there));
    }

    #[test]
    fn what_was_lost_is_told_where_nothing_is_known() {
        let known = past(&[("deleted", None, None)]);
        assert_eq!(known.lost, 0);
        assert!(known.unknown().starts_with("nothing is known of it"), "{}", known.unknown());
        let mut past = past(&[("events lost", None, None), ("deleted", None, None)]);
        past.add(Event { files: 6, ..event(3, "events lost", None) }, String::new(), |_| None);
        let expected =
            "why cannot be told: 7 events found no room, the last NOW, and may have been about it";
        assert_eq!(past.unknown(), expected);
        assert!(past.events.is_empty());
    }
}

//! What the daemon shows in a browser, at the address of its metrics.
//!
//! It is what commands show: the figures of `kvfs top`, the words of `kvfs status`, the events of `kvfs log`, the cells of
//! `kvfs map`. Whoever may see sums alone gets figures of a mount that has told nothing else (`sums`), so that no name
//! can slip through. The daemon gives the texts of `.kvfs/`; nothing here asks the mount through the kernel, which would
//! wait for the daemon.

mod document;
mod names;
mod past;
mod sums;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Value, json};

use super::history::Event;
use super::map::{self, Inside};
use super::top::{self, EVENTS_MAX, Figures, Sample};
use super::{output, status};
use crate::fs::glance::Told;
use crate::fuse::{Access, Look, Page};
use past::Past;

/// The page of a mount.
#[derive(Debug, Default)]
pub(crate) struct Browser(Mutex<Known>);

/// What is known of the mount.
#[derive(Debug, Default)]
struct Known {
    before: Option<Sample>,
    now: Option<Sample>,
    events: VecDeque<Event>,
    last_event: u64,
    past: Past,
    /// The last answers, for all and for those who may see sums, until the mount tells more.
    answers: [Option<String>; 2],
}

/// What the page shows.
#[derive(Serialize)]
struct Shown<'a> {
    access: &'static str,
    unix_milliseconds: u64,
    #[serde(flatten)]
    figures: Figures,
    past: &'a Past,
    events: Vec<Value>,
    /// All that `kvfs status` tells.
    status: Option<String>,
}

impl Browser {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Page for Browser {
    fn note(&self, told: Told) {
        let Told { status, metrics, events, hottest } = told;
        let told = top::Told { errno: 0, status, metrics, events, hottest };
        let sample = Sample::of(told, Instant::now());
        let mut known = self.known();
        known.last_event = top::last_event(&sample, known.last_event);
        known.events.extend(sample.events.iter().cloned());
        let too_many = known.events.len().saturating_sub(EVENTS_MAX.into());
        drop(known.events.drain(..too_many));
        known.past.note(&sample, unix_milliseconds() / 1000);
        known.before = known.now.replace(sample);
        known.answers = [None, None];
    }

    fn last_event(&self) -> u64 {
        self.known().last_event
    }

    fn document(&self, access: Access, nonce: &str) -> String {
        let known = self.known();
        let (figures, events) = match access {
            Access::All => (known.figures(access), known.events.clone()),
            Access::Sums => (known.figures(access), VecDeque::new()),
        };
        drop(known);
        let place = figures.mountpoint.clone();
        document::filled(nonce, &place, &top::frame(figures, events, Path::new(&place)))
    }

    fn figures(&self, access: Access) -> String {
        let mut known = self.known();
        let at = usize::from(access == Access::Sums);
        if let Some(answer) = &known.answers[at] {
            return answer.clone();
        }
        let answer = known.answer(access);
        known.answers[at] = Some(answer.clone());
        answer
    }

    fn map(&self, look: &Look<'_>, path: &str) -> Result<String, String> {
        let path = Path::new(path.trim_matches('/'));
        let map = map::for_page(&Inside::new(look), path);
        map.map(|map| map.to_string()).map_err(|failure| failure.line().to_owned())
    }

    fn names(&self, look: &Look<'_>) -> Result<String, String> {
        names::of(&Inside::new(look)).map(|names| names.to_string())
    }
}

impl Known {
    fn figures(&self, access: Access) -> Figures {
        let Some(now) = &self.now else { return Figures::default() };
        match access {
            Access::All => Figures::of(self.before.as_ref(), now),
            Access::Sums => {
                let before = self.before.as_ref().map(sums::of);
                Figures::of(before.as_ref(), &sums::of(now))
            }
        }
    }

    fn answer(&self, access: Access) -> String {
        let is_all = access == Access::All;
        let status = self.now.as_ref().filter(|_| is_all);
        // The latest stands first.
        let events = self.events.iter().rev().filter(|_| is_all).map(|event| {
            let (time, place, why) = (event.time(), event.place(), event.why());
            json!({ "number": event.number, "time": time, "what": event.what, "place": place, "why": why })
        });
        let shown = Shown {
            access: if is_all { "all" } else { "sums" },
            unix_milliseconds: unix_milliseconds(),
            figures: self.figures(access),
            past: &self.past,
            events: events.collect(),
            status: status.map(|now| status::described(now.status_text())),
        };
        output::json_text(&serde_json::to_string(&shown).unwrap_or_default())
    }
}

fn unix_milliseconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;

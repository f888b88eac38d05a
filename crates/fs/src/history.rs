//! `.kvfs/events`: what happened, one line of JSON for each event, made while it is read.
//!
//! A hundred thousand lines are never in memory at once: a reader has a window of some, and a read makes the next
//! ones. At the end the file goes on when something happens, as one does that is appended to.

use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use serde_json::json;

use super::FsError;
use super::transfer::copy_text;
use crate::core::Core;
use crate::core::state::State;
use kvfs_page::calendar::date_of;
use kvfs_page::{TokenStart, names};
use kvfs_storage::store::event::Event;
use kvfs_storage::store::events::EventCursor;
use kvfs_storage::store::record::{InodeId, Role, Time};

/// Events that one read makes lines of, with the state held: some 20 us each where they are on the disk.
pub(super) const EVENTS_AT_ONCE: usize = 32;
const DAY_SECONDS: i64 = 86_400;

/// A first read from here on begins after the event whose number stands above it: whoever looks again and again
/// need not keep the file open, with which nobody can unmount, nor read all of it each time.
const AFTER: u64 = 1 << 62;

/// An open `.kvfs/events`.
#[derive(Debug, Default)]
pub(crate) struct History(Mutex<Window>);

/// The lines that were read last: a read that was interrupted is asked again.
#[derive(Debug, Default)]
struct Window {
    from: EventCursor,
    start: u64,
    text: String,
    has_begun: bool,
}

impl History {
    /// Reads from where the last read ended, from within what it gave, or from the beginning.
    pub(super) fn read(
        &self, core: &Core, offset: u64, buffer: &mut [u8],
    ) -> Result<usize, FsError> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if offset == 0 && window.start > 0 {
            *window = Window::default();
        }
        if !std::mem::replace(&mut window.has_begun, true)
            && let Some(number) = offset.checked_sub(AFTER)
        {
            let state = core.state();
            window.from = core.store.events.after(&state.metadata, number)?;
            window.start = offset;
        }
        let within = offset.checked_sub(window.start).ok_or(FsError::Invalid)?;
        let held = window.text.len() as u64;
        if within < held {
            return Ok(copy_text(window.text.as_bytes(), within, buffer));
        }
        if within > held {
            return Err(FsError::Invalid);
        }
        let text = next_lines(core, &mut window.from)?;
        if text.is_empty() {
            return Ok(0);
        }
        (window.start, window.text) = (offset, text);
        Ok(copy_text(window.text.as_bytes(), 0, buffer))
    }
}

/// Lines of the events with higher numbers, as many as one read makes.
pub(super) fn lines_after(core: &Core, number: u64) -> Result<String, FsError> {
    let mut from = core.store.events.after(&core.state().metadata, number)?;
    next_lines(core, &mut from)
}

fn next_lines(core: &Core, from: &mut EventCursor) -> Result<String, FsError> {
    let state = core.state();
    let mut text = String::new();
    for event in core.store.events.read(&state.metadata, from, EVENTS_AT_ONCE)? {
        let event = if event.path.is_some() {
            event
        } else {
            let path = event.inode.and_then(|id| path_now(&state, id, event.directory));
            event.at(path)
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", line(&event));
    }
    Ok(text)
}

fn line(event: &Event) -> serde_json::Value {
    json!({
        "number": event.number,
        "time": written(event.time),
        "what": event.what.name(),
        "path": event.path,
        "inode": event.inode.map(|inode| inode.0),
        "directory": event.directory.map(|directory| directory.0),
        "reason": event.reason,
        "files": event.files,
        "bytes": event.bytes,
        "used": event.used.map(written),
        "from_token": event.from_token,
        "uses": event.uses,
    })
}

/// The path that a file has now, if its role and the directory in which it was last found tell its name.
pub(crate) fn path_now(state: &State, id: InodeId, directory: Option<InodeId>) -> Option<String> {
    let found_in = || state.nodes.get(&id).and_then(|node| node.found_in);
    let directory = directory.or_else(found_in)?;
    let inode = state.metadata.inode(id).ok().flatten()?;
    let name = match inode.file()?.role {
        Role::Page(page) if page.is_state() => names::format_state(TokenStart(page.start)),
        Role::Page(page) => names::format_page(TokenStart(page.start)),
        Role::Tail { start, .. } => names::format_tail(TokenStart(start)),
        Role::Tokens => names::TOKENS.to_owned(),
        Role::Plain | Role::Manifest => return None,
    };
    let entry = state.entry(directory, name.as_bytes()).ok().flatten();
    let leads_to_it = entry.is_some_and(|entry| entry.inode == id);
    leads_to_it.then(|| state.path(directory, name.as_bytes()))
}

/// A time as RFC 3339 writes it, in UTC.
pub(crate) fn written(time: Time) -> String {
    let (year, month, day) = date_of(time.seconds.div_euclid(DAY_SECONDS));
    let second = time.seconds.rem_euclid(DAY_SECONDS);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let milliseconds = time.nanoseconds / 1_000_000;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z")
}

#[cfg(test)]
mod tests;

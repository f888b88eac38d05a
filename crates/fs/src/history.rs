//! `.kvfs/events`: what happened, one line of JSON for each event, made while it is read.
//!
//! A hundred thousand lines are never in memory at once: a reader has a window of some, and a read makes the next
//! ones. At the end the file goes on when something happens, as one does that is appended to.

use std::fmt::Write;
use std::sync::{Mutex, PoisonError, TryLockError};

use serde::{Deserialize, Serialize};
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
    /// `from` is yet to be found: behind the event of this number.
    behind: Option<u64>,
    read: SoFar,
}

/// How far somebody has read, without what only this daemon knows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct SoFar {
    start: u64,
    text: String,
    has_begun: bool,
    /// The number of the last event of the text, or before it.
    last: u64,
}

impl History {
    /// How far it has come; `None` while somebody reads, who may wait for the state.
    pub(crate) fn so_far(&self) -> Option<SoFar> {
        match self.0.try_lock() {
            Ok(window) => Some(window.read.clone()),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner().read.clone()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Goes on where another daemon was.
    pub(crate) fn from(read: SoFar) -> History {
        let behind = read.has_begun.then_some(read.last);
        History(Mutex::new(Window { from: EventCursor::default(), behind, read }))
    }

    /// Reads from where the last read ended, from within what it gave, or from the beginning.
    pub(super) fn read(
        &self, core: &Core, offset: u64, buffer: &mut [u8],
    ) -> Result<usize, FsError> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Window { from, behind, read } = &mut *window;
        if offset == 0 && read.start > 0 {
            (*from, *behind, *read) = Default::default();
        }
        if !std::mem::replace(&mut read.has_begun, true)
            && let Some(number) = offset.checked_sub(AFTER)
        {
            (*behind, read.start, read.last) = (Some(number), offset, number);
        }
        if let Some(number) = *behind {
            *from = core.store.events.after(&core.state().metadata, number)?;
            *behind = None;
        }
        let within = offset.checked_sub(read.start).ok_or(FsError::Invalid)?;
        let held = read.text.len() as u64;
        if within < held {
            return Ok(copy_text(read.text.as_bytes(), within, buffer));
        }
        if within > held {
            return Err(FsError::Invalid);
        }
        let (text, last) = next_lines(core, from)?;
        let Some(last) = last else { return Ok(0) };
        (read.start, read.text, read.last) = (offset, text, last);
        Ok(copy_text(read.text.as_bytes(), 0, buffer))
    }
}

/// Lines of the events with higher numbers, as many as one read makes.
pub(super) fn lines_after(core: &Core, number: u64) -> Result<String, FsError> {
    let mut from = core.store.events.after(&core.state().metadata, number)?;
    Ok(next_lines(core, &mut from)?.0)
}

/// Some more lines, and the number of the last event among them, if there are any.
fn next_lines(core: &Core, from: &mut EventCursor) -> Result<(String, Option<u64>), FsError> {
    let state = core.state();
    let (mut text, mut last) = (String::new(), None);
    for event in core.store.events.read(&state.metadata, from, EVENTS_AT_ONCE)? {
        let event = if event.path.is_some() {
            event
        } else {
            let path = event.inode.and_then(|id| path_now(&state, id, event.directory));
            event.at(path)
        };
        last = Some(event.number);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", line(&event));
    }
    Ok((text, last))
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

/// Names of a directory that are looked through for that of a file: some 0.2 ms, with the state held.
const NAMES_MAX: usize = 512;

/// The path that a plain file has now, if it is among the first names of a directory. Nothing leads from a file to its names.
pub(crate) fn path_in(state: &State, id: InodeId, directory: InodeId) -> Option<String> {
    let (mut found, mut looked_at) = (None, 0);
    let looked = state.metadata.entries(directory, 0, |_, name, entry| {
        looked_at += 1;
        found = (entry.inode == id).then(|| name.to_vec());
        found.is_none() && looked_at < NAMES_MAX
    });
    looked.ok()?;
    found.map(|name| state.path(directory, &name))
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

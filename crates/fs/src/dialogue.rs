//! `.kvfs/settings`: read, it tells the settings of the mount; written, it is a request to change some, and what is
//! read from the same descriptor next is the answer.
//!
//! Each descriptor has a conversation of its own, so two who change something at a time get each an answer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::attributes::Caller;
use super::transfer::copy_text;
use super::{FileSystem, FsError};

/// All settings together are a few kilobytes.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// What the answer to a request that was carried out begins with.
const DONE: &str = "ok\n";

/// One conversation.
#[derive(Debug, Default)]
pub(crate) struct Dialogue(Mutex<Turn>);

#[derive(Debug, Default)]
struct Turn {
    request: Vec<u8>,
    /// Where its last bytes ended, as the descriptor counts.
    end: u64,
    answer: Option<Answer>,
}

#[derive(Debug)]
struct Answer {
    text: Arc<[u8]>,
    /// Where it begins: at 0, or for who reads on from where the request ended, there.
    offset: u64,
}

/// Only the daemon's user and root may ask, also where a mode is not what decides.
pub(super) fn check_caller(caller: Caller) -> Result<(), FsError> {
    let is_allowed = caller.uid == 0 || caller.uid == nix::unistd::geteuid().as_raw();
    if is_allowed { Ok(()) } else { Err(FsError::NotPermitted) }
}

impl Dialogue {
    /// The turn, unless somebody carries the request out.
    fn try_turn(&self) -> Option<MutexGuard<'_, Turn>> {
        match self.0.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Adds to the request, whatever the offset; after an answer another one begins.
    pub(crate) fn ask(&self, bytes: &[u8], offset: u64) -> Result<(), FsError> {
        let mut turn = self.try_turn().ok_or(FsError::TryAgain)?;
        if turn.answer.take().is_some() {
            turn.request.clear();
        }
        if turn.request.len() + bytes.len() > REQUEST_BYTES_MAX {
            return Err(FsError::TooLarge);
        }
        turn.request.extend_from_slice(bytes);
        turn.end = offset.saturating_add(bytes.len() as u64);
        Ok(())
    }

    /// Whether reading waits: a request is to be carried out first, or somebody does so.
    pub(crate) fn is_asked(&self) -> bool {
        self.try_turn().is_none_or(|turn| turn.answer.is_none() && !turn.request.is_empty())
    }

    /// Carries the request out, if there is one, and tells what lies at `offset` of the answer; how much that is.
    pub(crate) fn answer(&self, fs: &FileSystem, offset: u64, buffer: &mut [u8]) -> usize {
        let mut turn = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if turn.answer.is_none() {
            let end = turn.end;
            let text: Arc<[u8]> = Arc::from(reply(fs, &turn.request).into_bytes());
            turn.answer = Some(Answer { text, offset: if offset == end { end } else { 0 } });
        }
        let Some(answer) = &turn.answer else { return 0 };
        copy_text(&answer.text, offset.saturating_sub(answer.offset), buffer)
    }
}

fn reply(fs: &FileSystem, request: &[u8]) -> String {
    let Some(steering) = fs.steering.get() else {
        return "error: nobody knows the settings of this mount\n".to_owned();
    };
    if request.is_empty() {
        return steering.settings();
    }
    let outcome = match std::str::from_utf8(request) {
        Ok(request) => steering.change(fs, request),
        Err(_) => Err("the request is not UTF-8".to_owned()),
    };
    match outcome {
        Ok(()) => DONE.to_owned(),
        Err(line) => format!("error: {line}\n"),
    }
}

//! `.kvfs/settings`: read, it tells the settings of the mount; written, it is a request to change some, and what is
//! read from the same descriptor next is the answer.
//!
//! Each descriptor has a conversation of its own, so two who change something at a time get each an answer.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use serde::{Deserialize, Serialize};

use super::attributes::Caller;
use super::reply::Reply;
use super::{FileSystem, FsError};

/// All settings together are a few kilobytes.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// What the answer to a request that was carried out begins with.
const DONE: &str = "ok\n";

/// One conversation.
#[derive(Debug, Default)]
pub(crate) struct Dialogue(Mutex<Turn>);

/// What was asked and answered so far.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Turn {
    /// Who opened it could run by itself what the daemon may be asked to run.
    may_exchange: bool,
    request: Vec<u8>,
    reply: Reply,
}

/// Only the daemon's user and root may ask, also where a mode is not what decides.
pub(super) fn check_caller(caller: Caller) -> Result<(), FsError> {
    let is_allowed = caller.uid == 0 || caller.uid == nix::unistd::geteuid().as_raw();
    if is_allowed { Ok(()) } else { Err(FsError::NotPermitted) }
}

impl Dialogue {
    /// How far it has come; `None` while somebody carries a request out.
    pub(crate) fn so_far(&self) -> Option<Turn> {
        self.try_turn().map(|turn| turn.clone())
    }

    /// Who asks may have the daemon exchanged, too.
    pub(crate) fn allow_exchange(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).may_exchange = true;
    }

    /// Goes on where another daemon was.
    pub(crate) fn from(turn: Turn) -> Dialogue {
        Dialogue(Mutex::new(turn))
    }

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
        if turn.reply.withdraw() {
            turn.request.clear();
        }
        if turn.request.len() + bytes.len() > REQUEST_BYTES_MAX {
            return Err(FsError::TooLarge);
        }
        turn.request.extend_from_slice(bytes);
        turn.reply.note_question(offset, bytes.len());
        Ok(())
    }

    /// Whether reading waits: a request is to be carried out first, or somebody does so.
    pub(crate) fn is_asked(&self) -> bool {
        self.try_turn().is_none_or(|turn| !turn.reply.is_given() && !turn.request.is_empty())
    }

    /// Carries the request out, if there is one, and tells what lies at `offset` of the answer; how much that is.
    pub(crate) fn answer(&self, fs: &FileSystem, offset: u64, buffer: &mut [u8]) -> usize {
        let mut turn = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !turn.reply.is_given() {
            let text = carry_out(fs, &turn);
            turn.reply.give(text, offset);
        }
        turn.reply.copy(offset, buffer)
    }
}

/// Does what is requested, and tells what became of it.
fn carry_out(fs: &FileSystem, Turn { request, may_exchange, .. }: &Turn) -> String {
    if let Some(answer) = fs.upgrades.answer(request, *may_exchange) {
        return answer;
    }
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
        Ok(()) => {
            fs.upgrades.note_settings();
            DONE.to_owned()
        }
        Err(line) => format!("error: {line}\n"),
    }
}

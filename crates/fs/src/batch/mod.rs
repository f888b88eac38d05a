//! `.kvfs/batch`: a question about many names of one directory is written, its answer is read from the same
//! descriptor. It spares those who know of it a request for each name, and an open, a read and a close for each small
//! file. `kvfs_page::batch` has the form of both.
//!
//! Whoever opened it is who asks: a descriptor that goes to somebody else asks for him with the rights of the first,
//! as any descriptor does, and a program with more rights that is made to write to one gives none of them away.
//!
//! The kernel lets one write at a time to an inode, also one whose bytes come slowly, so each user has an inode of his
//! own under this name.

mod answer;
mod names;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::attributes::Caller;
use crate::core::handle::{Handle, Served};
use crate::opened::Opened;
use crate::prefixes::{Share, Shares};
use crate::transfer::copy_text;
use crate::{FileSystem, FsError};
use kvfs_page::batch::{QUESTION_BYTES_MAX, Question, QuestionError, question_bytes};
use kvfs_storage::store::record::InodeId;

/// Where the numbers of these inodes begin: far behind those of stored ones, and before those of models' virtual
/// directories.
const FIRST_NUMBER: u64 = 1 << 62;
/// Its name in `.kvfs/`.
pub(crate) const NAME: &str = "batch";

/// Descriptors of one user, and of all: an engine has one for each thread that asks, and an answer is soon made.
const OPEN_OF_EACH: u64 = 64;
const OPEN_OF_ALL: u64 = 1024;
/// Bytes of questions and answers that they hold. A question of 4 MiB with its answer of 9 MiB fits four times; what
/// finds no room is refused (ENOSPC), or told as to be asked again, so nobody else's memory goes.
const BYTES_OF_EACH: u64 = 64 << 20;
const BYTES_OF_ALL: u64 = 256 << 20;

/// The inode that a user finds under the name.
pub(crate) fn inode_of(uid: u32) -> InodeId {
    InodeId(FIRST_NUMBER + u64::from(uid))
}

/// Whether an inode is one of these.
pub(crate) fn is_batch(id: InodeId) -> bool {
    (FIRST_NUMBER..=FIRST_NUMBER + u64::from(u32::MAX)).contains(&id.0)
}

/// What a mount keeps for all of them.
#[derive(Debug)]
pub(crate) struct Batches {
    open: Arc<Shares>,
    bytes: Arc<Shares>,
}

impl Default for Batches {
    fn default() -> Batches {
        Batches {
            open: Shares::new(OPEN_OF_EACH, OPEN_OF_ALL),
            bytes: Shares::new(BYTES_OF_EACH, BYTES_OF_ALL),
        }
    }
}

/// An open `.kvfs/batch`.
#[derive(Debug)]
pub(crate) struct Batch {
    caller: Caller,
    turn: Mutex<Turn>,
    bytes: Arc<Shares>,
    /// Counted.
    _open: Share,
}

/// The question of now, and what came of it.
#[derive(Debug, Default)]
struct Turn {
    question: Vec<u8>,
    /// Bytes that are counted for it: as long as it will be, once it says so.
    held_bytes: usize,
    /// As long as it says.
    is_whole: bool,
    /// Its answer or its refusal was told: what is written next is another question.
    is_told: bool,
    answer: Option<Vec<u8>>,
    /// Counts the bytes of both.
    held: Option<Share>,
}

/// Opens it for who asks.
pub(crate) fn open(
    fs: &FileSystem, id: InodeId, flags: i32, caller: Caller,
) -> Result<Opened, FsError> {
    if flags & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDWR {
        return Err(FsError::NotPermitted);
    }
    let open = fs.batches.open.take(caller.uid, 1).ok_or(FsError::TryAgain)?;
    let bytes = Arc::clone(&fs.batches.bytes);
    let batch = Arc::new(Batch { caller, turn: Mutex::default(), bytes, _open: open });
    let handle = fs.core.state().add_handle(Handle::new(id, true, Served::Batch(batch)));
    Ok(Opened::uncached(handle, true))
}

impl Batch {
    /// The turn, unless somebody makes the answer.
    fn try_turn(&self) -> Option<MutexGuard<'_, Turn>> {
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Adds to the question, whatever the offset; once its answer was told, another one begins. A question that is
    /// whole must be answered first: two that share a descriptor would have their questions mixed up.
    pub(crate) fn ask(&self, bytes: &[u8]) -> Result<(), FsError> {
        let mut turn = self.try_turn().ok_or(FsError::TryAgain)?;
        if turn.is_told {
            *turn = Turn::default();
        }
        if turn.is_whole {
            return Err(FsError::TryAgain);
        }
        let outcome = self.add(&mut turn, bytes);
        if outcome.is_err() {
            // Half a question is of no use to whoever asks next.
            *turn = Turn::default();
        }
        outcome
    }

    fn add(&self, turn: &mut Turn, bytes: &[u8]) -> Result<(), FsError> {
        let length = turn.question.len() + bytes.len();
        if length > QUESTION_BYTES_MAX {
            return Err(FsError::TooLarge);
        }
        if turn.held.is_none() {
            turn.held = self.bytes.take(self.caller.uid, 0);
        }
        let held = turn.held.as_mut().ok_or(FsError::NoRoom)?;
        turn.question.extend_from_slice(bytes);
        let whole = question_bytes(&turn.question)?;
        if whole.is_some_and(|whole| length > whole) {
            return Err(FsError::Invalid);
        }
        // The kernel divides a long write: there must be room for the rest as soon as its length is known, or whoever
        // writes is told of the first part alone.
        let wanted = whole.unwrap_or(length);
        if !held.grow(wanted.saturating_sub(turn.held_bytes) as u64) {
            return Err(FsError::NoRoom);
        }
        turn.held_bytes = wanted;
        turn.is_whole = whole == Some(length);
        Ok(())
    }

    /// Whether reading takes a while: an answer is to be made first, or somebody makes it.
    pub(crate) fn is_asked(&self) -> bool {
        self.try_turn().is_none_or(|turn| turn.is_whole && turn.answer.is_none())
    }

    /// Answers the question, if that was not done, and tells what lies at `offset` of the answer; how much that is.
    pub(crate) fn answer(
        &self, fs: &FileSystem, offset: u64, buffer: &mut [u8],
    ) -> Result<usize, FsError> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        turn.is_told = true;
        if !turn.is_whole {
            return Err(FsError::Invalid);
        }
        let Turn { question, answer, held, .. } = &mut *turn;
        if answer.is_none() {
            let held = held.as_mut().ok_or(FsError::NoRoom)?;
            let question = Question::parse(question)?;
            *answer = Some(answer::make(fs, self.caller, &question, held)?);
        }
        let answer = answer.as_deref().unwrap_or_default();
        Ok(copy_text(answer, offset, buffer))
    }
}

impl From<QuestionError> for FsError {
    fn from(error: QuestionError) -> FsError {
        match error {
            QuestionError::TooLarge => FsError::TooLarge,
            QuestionError::Invalid(_) => FsError::Invalid,
        }
    }
}

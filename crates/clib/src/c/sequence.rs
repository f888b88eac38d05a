//! Operations on the sequences of a model, by the names that llama.cpp gives them.

use std::ffi::c_char;
use std::ops::Bound;
use std::path::Path;

use super::memory::{Caller, Plain, Structure};
use super::status::{Failure, Status, guard};
use crate::reader::ReadError;
use crate::sequence::{self, SequenceError};

/// The sequences of a model in a mount, or in a copy of one.
#[derive(Debug)]
pub struct Sequences(sequence::Sequences);

/// Where a sequence begins and ends.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SequenceEnds {
    /// `sizeof(kvfs_sequence_ends)`, set before the call.
    pub size: usize,
    /// Rows in its files, holes included; the next token that is appended has this row.
    pub rows: u64,
    /// Position of the first token; 0 if there is none.
    pub first: u64,
    /// The position behind the last token; 0 if there is none.
    pub end: u64,
}

// SAFETY: numbers without gaps.
unsafe impl Structure for SequenceEnds {
    const NAME: &'static str = "kvfs_sequence_ends";
    const REQUIRED_BYTES: usize = size_of::<usize>();
}

/// Consecutive rows at consecutive positions. Rows in no run are holes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first row: its number in the pages and the tail.
    pub row: u64,
    /// How many.
    pub tokens: u64,
    /// Position of the first row, for `kvfs_block.first_position`.
    pub position: u64,
    /// That position less the one that its K was rotated for, for `kvfs_block.shift`.
    pub shift: i64,
}

// SAFETY: numbers without gaps.
unsafe impl Plain for Run {}

impl From<SequenceError> for Failure {
    fn from(error: SequenceError) -> Self {
        let status = match &error {
            SequenceError::Name(_) | SequenceError::Positions(_) => Status::Argument,
            SequenceError::NoSuchSequence(_)
            | SequenceError::NoSnapshot { .. }
            | SequenceError::NoWindow { .. } => Status::Missing,
            SequenceError::Exists(_) => Status::Exists,
            SequenceError::Read(ReadError::Manifest { .. }) | SequenceError::Manifest(_) => {
                Status::Manifest
            }
            SequenceError::State(_) => Status::Page,
            SequenceError::Read(_) | SequenceError::Changed { .. } | SequenceError::Io { .. } => {
                Status::File
            }
        };
        Failure::new(status, error.to_string())
    }
}

/// A range of positions; none are behind `u64::MAX`.
type Positions = (Bound<u64>, Bound<u64>);

fn positions(start: u64, end: u64) -> Positions {
    let end = if end == u64::MAX { Bound::Unbounded } else { Bound::Excluded(end) };
    (Bound::Included(start), end)
}

/// Does something to a sequence.
///
/// # Safety
/// The promises of the header.
unsafe fn change(
    sequences: *const Sequences, name: *const c_char,
    act: impl FnOnce(&sequence::Sequences, &str) -> Result<(), SequenceError>,
) -> Status {
    let call = |caller: &Caller| {
        let sequences = caller.handle(sequences, "sequences")?;
        Ok(act(&sequences.0, caller.text(name, "name")?)?)
    };
    // SAFETY: the caller's.
    unsafe { guard(call) }
}

/// Creates `*sequences` of the model in directory `model`, `MOUNT/models/NAME`, to be freed with
/// `kvfs_sequences_free`. Names are UTF-8 that ends with NUL, positions go from `start` to before
/// `end`, `UINT64_MAX` for all that come. When an operation returns it is durable; it has happened as
/// a whole or not at all. Nobody may append to a sequence meanwhile.
///
/// `KVFS_STATUS_MANIFEST` if there is no model, `KVFS_STATUS_FILE` if it cannot be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_sequences_open(
    model: *const c_char, sequences: *mut *mut Sequences,
) -> Status {
    let call = |caller: &Caller| {
        caller.create(sequences, || {
            Ok(Sequences(sequence::Sequences::open(Path::new(caller.text(model, "model")?))?))
        })
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Frees what `kvfs_sequences_open` gave, when no call uses it any more. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_sequences_free(sequences: *mut Sequences) {
    let call = |caller: &Caller| caller.take(sequences).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard(call) };
}

/// Removes the tokens at some positions (`llama_memory_seq_rm`).
///
/// `KVFS_STATUS_MISSING` if there is no such sequence, or a recurrent layer no snapshot to go back to;
/// `KVFS_STATUS_FILE` for what the kernel answers otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_rm(
    sequences: *const Sequences, name: *const c_char, start: u64, end: u64,
) -> Status {
    // SAFETY: the promises of the header.
    unsafe { change(sequences, name, |all, name| all.seq_rm(name, positions(start, end))) }
}

/// Makes `to` of the tokens of `from` at some positions (`llama_memory_seq_cp`); they share their
/// pages.
///
/// `KVFS_STATUS_EXISTS` if `to` has tokens; the others as `kvfs_seq_rm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_cp(
    sequences: *const Sequences, from: *const c_char, to: *const c_char, start: u64, end: u64,
) -> Status {
    let call = |caller: &Caller| {
        let all = &caller.handle(sequences, "sequences")?.0;
        let (from, to) = (caller.text(from, "from")?, caller.text(to, "to")?);
        Ok(all.seq_cp(from, to, positions(start, end))?)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Removes all other sequences (`llama_memory_seq_keep`).
///
/// As `kvfs_seq_rm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_keep(sequences: *const Sequences, name: *const c_char) -> Status {
    // SAFETY: the promises of the header.
    unsafe { change(sequences, name, sequence::Sequences::seq_keep) }
}

/// Moves the tokens at some positions by `delta` (`llama_memory_seq_add`). Those that would stand
/// before 0 are removed. No K is rotated: `kvfs_seq_runs` tells how far each row has moved.
///
/// `KVFS_STATUS_ARGUMENT` for tokens that would stand too far behind; the others as `kvfs_seq_rm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_add(
    sequences: *const Sequences, name: *const c_char, start: u64, end: u64, delta: i64,
) -> Status {
    let act =
        |all: &sequence::Sequences, name: &str| all.seq_add(name, positions(start, end), delta);
    // SAFETY: the promises of the header.
    unsafe { change(sequences, name, act) }
}

/// Divides the positions of some tokens, rounding down (`llama_memory_seq_div`).
///
/// `KVFS_STATUS_ARGUMENT` for a divisor of 0 and for more than a million tokens; the others as
/// `kvfs_seq_rm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_div(
    sequences: *const Sequences, name: *const c_char, start: u64, end: u64, divisor: u64,
) -> Status {
    let act =
        |all: &sequence::Sequences, name: &str| all.seq_div(name, positions(start, end), divisor);
    // SAFETY: the promises of the header.
    unsafe { change(sequences, name, act) }
}

/// Removes the tokens at some positions and moves those behind them up, and the sequence as it was
/// becomes `snapshot`: what an engine does when its context is full. It takes as long as a few files
/// do; an engine that does not want to wait calls it on another thread and keeps new rows meanwhile.
///
/// As `kvfs_seq_cp`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_shift(
    sequences: *const Sequences, name: *const c_char, start: u64, end: u64, snapshot: *const c_char,
) -> Status {
    let call = |caller: &Caller| {
        let all = &caller.handle(sequences, "sequences")?.0;
        let (name, snapshot) = (caller.text(name, "name")?, caller.text(snapshot, "snapshot")?);
        Ok(all.context_shift(name, start..end, snapshot)?)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Removes all tokens of a sequence (`llama_memory_clear` for one).
///
/// As `kvfs_seq_rm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_clear(
    sequences: *const Sequences, name: *const c_char,
) -> Status {
    // SAFETY: the promises of the header.
    unsafe { change(sequences, name, sequence::Sequences::clear) }
}

/// Fills `*ends`, whose `size` the caller has set (`llama_memory_seq_pos_min` and `_max`).
///
/// As `kvfs_seq_rm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_ends(
    sequences: *const Sequences, name: *const c_char, ends: *mut SequenceEnds,
) -> Status {
    let call = |caller: &Caller| {
        let all = &caller.handle(sequences, "sequences")?.0;
        let name = caller.text(name, "name")?;
        let (_, rows) = all.positions(name)?;
        let (first, end) = all.seq_pos(name)?.map_or((0, 0), |(first, last)| (first, last + 1));
        caller.write(SequenceEnds { size: size_of::<SequenceEnds>(), rows, first, end }, ends)
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Writes where the rows of a sequence stand to `runs`, `[capacity]`, in the order of rows, and how
/// many runs there are to `*count`. Where there are more than `capacity` the first ones are written.
///
/// As `kvfs_seq_rm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_seq_runs(
    sequences: *const Sequences, name: *const c_char, runs: *mut Run, capacity: usize,
    count: *mut u64,
) -> Status {
    let call = |caller: &Caller| {
        let all = &caller.handle(sequences, "sequences")?.0;
        let (positions, rows) = all.positions(caller.text(name, "name")?)?;
        let found: Vec<Run> = positions
            .within(0..rows)
            .map(|run| {
                let crate::page::Run { row, tokens, position, shift } = run;
                Run { row, tokens, position, shift }
            })
            .collect();
        caller.store(&found[..found.len().min(capacity)], runs, "runs")?;
        caller.store(&[found.len() as u64], count, "count")
    };
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

//! An attention operation that the engine's threads share.
//!
//! The work is cut into pieces that each thread takes as it comes: chunks of queries if there are
//! enough of them, otherwise shares of what a chunk sees, which whoever is last merges. So no thread
//! waits for another before the barrier that the engine has behind each operation.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::abi::{Custom, RawTensor, TASKS_MAX};
use super::attend::{Chunk, Share};
use super::guard;
use super::operation::FlashAttention;
use crate::attention::{Attention, Partials};

/// Queries of a chunk: K and V are read once for all of them. With 32 queries of 4 heads to a KV
/// head there are 128 rows to each row of K, so the arithmetic takes far longer than the reading.
const CHUNK_QUERIES: usize = 32;
/// Chunks for each thread that keep all threads busy to the end.
const CHUNKS_PER_THREAD: usize = 4;

/// An operation while it is computed.
pub(super) struct Job<'a> {
    operation: FlashAttention<'a>,
    attention: Attention,
    chunks: Vec<(Chunk, Mutex<Progress>)>,
    /// Of each chunk.
    shares: usize,
    /// The first piece that nobody has taken.
    next: AtomicUsize,
    chunks_left: AtomicUsize,
    error: Mutex<Option<String>>,
}

/// What has been done of a chunk.
struct Progress {
    /// Of each share.
    parts: Vec<Option<Partials>>,
    left: usize,
}

impl<'a> Job<'a> {
    /// For so many threads, or more or less.
    ///
    /// # Errors
    /// A line that says what the runtime cannot do.
    pub(super) fn new(operation: FlashAttention<'a>, threads: usize) -> Result<Self, String> {
        let attention = operation.attention().map_err(|error| error.to_string())?;
        let queries = (0..operation.queries).step_by(CHUNK_QUERIES);
        let count = queries.len() * operation.streams;
        let shares = if count >= threads * CHUNKS_PER_THREAD { 1 } else { threads };
        let chunk = |stream: usize, first: usize| {
            let queries = first..(first + CHUNK_QUERIES).min(operation.queries);
            let parts = (0..shares).map(|_| None).collect();
            (Chunk { stream, queries }, Mutex::new(Progress { parts, left: shares }))
        };
        let streams = 0..operation.streams;
        let chunks = streams.flat_map(|stream| queries.clone().map(move |first| (stream, first)));
        let chunks = chunks.map(|(stream, first)| chunk(stream, first)).collect();
        Ok(Self {
            operation,
            attention,
            chunks,
            shares,
            next: AtomicUsize::new(0),
            chunks_left: AtomicUsize::new(count),
            error: Mutex::default(),
        })
    }

    /// What takes the operation's place. The job must be there while it is computed.
    pub(super) fn as_custom(&self) -> Custom {
        Custom { function: compute, tasks: TASKS_MAX, data: (&raw const *self).cast_mut().cast() }
    }

    /// Whether it has been computed.
    ///
    /// # Errors
    /// A line that says what went wrong.
    pub(super) fn is_done(&self) -> Result<bool, String> {
        match self.error.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(line) => Err(line),
            None => Ok(self.chunks_left.load(Ordering::Acquire) == 0),
        }
    }

    /// Takes pieces until there are no more.
    fn work(&self) {
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = self.chunks.get(piece / self.shares) else { return };
            if let Err(line) = self.piece(chunk, piece % self.shares) {
                return self.fail(line);
            }
        }
    }

    fn piece(&self, chunk: &(Chunk, Mutex<Progress>), index: usize) -> Result<(), String> {
        let (chunk, progress) = chunk;
        let share = Share { index, count: self.shares };
        let part = self.operation.attend(&self.attention, chunk, share)?;
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.parts[index] = Some(part);
        progress.left -= 1;
        if progress.left > 0 {
            return Ok(());
        }
        let mut parts = progress.parts.drain(..).flatten();
        let mut whole = parts.next().ok_or("an operation without threads")?;
        for part in parts {
            whole.merge(&part).map_err(|error| error.to_string())?;
        }
        // SAFETY: the last share of a chunk comes once, and chunks have queries of their own.
        unsafe { self.operation.store(chunk, whole) }?;
        self.chunks_left.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    fn fail(&self, line: String) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(line);
    }
}

/// One thread of the engine comes to the operation.
///
/// # Safety
/// `data` is that of [`Job::as_custom`], and the job is there. Its tensors are only read, apart
/// from the destination.
unsafe extern "C" fn compute(
    _: *mut RawTensor, _thread: c_int, _threads: c_int, data: *mut c_void,
) {
    // SAFETY: the caller's.
    let job = unsafe { &*data.cast::<Job<'_>>() };
    let returned = guard(false, || {
        job.work();
        true
    });
    if !returned {
        job.fail("an attention thread panicked".to_owned());
    }
}

//! An attention operation that the engine's threads share.
//!
//! The work is cut into pieces that each thread takes as it comes: chunks of queries if there are
//! enough of them, otherwise shares of what a chunk sees, which whoever is last merges. So no thread
//! waits for another before the barrier that the engine has behind each operation. Where part of the
//! cache has left memory, shares are stretches of cells, and a thread may wait for the disk.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::abi::{Custom, RawTensor, TASKS_MAX};
use super::attend::{Chunk, Share};
use super::cold::Span;
use super::guard;
use super::operation::FlashAttention;
use super::ring::{Pass, Taken};
use crate::attention::{Attention, Partials};

/// Queries of a chunk: K and V are read once for all of them. With 32 queries of 4 heads to a KV
/// head there are 128 rows to each row of K, so the arithmetic takes far longer than the reading.
const CHUNK_QUERIES: usize = 32;
/// Chunks for each thread that keep all threads busy to the end.
const CHUNKS_PER_THREAD: usize = 4;

/// An operation while it is computed.
pub(super) struct Job<'a, 'r> {
    operation: FlashAttention<'a>,
    attention: Attention,
    chunks: Vec<(Chunk, Mutex<Progress>)>,
    /// Of each chunk.
    shares: usize,
    /// Of each stream, if not everything is in memory.
    spans: Option<Vec<Vec<Span>>>,
    pass: Option<&'r Pass<'r>>,
    /// The first piece that nobody has taken.
    next: AtomicUsize,
    chunks_left: AtomicUsize,
    error: Mutex<Option<String>>,
}

/// What has been done of a chunk. Shares are merged in their order, whichever is done first: a
/// result depends on no clock.
#[derive(Default)]
struct Progress {
    merged: Option<Partials>,
    shares_merged: usize,
    /// Those behind one that is not done.
    waiting: BTreeMap<usize, Partials>,
}

/// How many chunks the queries of a stream make.
pub(super) fn chunks_of_stream(operation: &FlashAttention<'_>) -> usize {
    operation.queries.div_ceil(CHUNK_QUERIES)
}

impl<'a, 'r> Job<'a, 'r> {
    /// For so many threads, or more or less. With `spans` each is a share, so that what was read is
    /// needed by all chunks at about the same time.
    ///
    /// # Errors
    /// A line that says what the runtime cannot do.
    pub(super) fn new(
        operation: FlashAttention<'a>, threads: usize, spans: Option<Vec<Vec<Span>>>,
        pass: Option<&'r Pass<'r>>,
    ) -> Result<Self, String> {
        let attention = operation.attention().map_err(|error| error.to_string())?;
        let queries = (0..operation.queries).step_by(CHUNK_QUERIES);
        let count = queries.len() * operation.streams;
        let shares = match &spans {
            Some(spans) => spans.iter().map(Vec::len).max().unwrap_or(0),
            None if count >= threads * CHUNKS_PER_THREAD => 1,
            None => threads,
        };
        let streams = 0..operation.streams;
        let chunks = streams.flat_map(|stream| queries.clone().map(move |first| (stream, first)));
        let chunk = |(stream, first): (usize, usize)| {
            let queries = first..(first + CHUNK_QUERIES).min(operation.queries);
            (Chunk::new(stream, queries), Mutex::default())
        };
        let chunks = chunks.map(chunk).collect();
        Ok(Self {
            operation,
            attention,
            chunks,
            shares,
            spans,
            pass,
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
            let (chunk, share) = self.place(piece);
            let Some((chunk, progress)) = self.chunks.get(chunk) else { return };
            if let Err(line) = self.piece(chunk, progress, share) {
                return self.fail(line);
            }
        }
    }

    /// Chunk and share of a piece. What was read is wanted by all chunks of its stream, in the order
    /// of the loads: stream, span, chunk.
    fn place(&self, piece: usize) -> (usize, usize) {
        if self.spans.is_none() {
            return (piece / self.shares, piece % self.shares);
        }
        let chunks = chunks_of_stream(&self.operation);
        let (stream, rest) = (piece / (chunks * self.shares), piece % (chunks * self.shares));
        (stream * chunks + rest % chunks, rest / chunks)
    }

    fn piece(&self, chunk: &Chunk, progress: &Mutex<Progress>, index: usize) -> Result<(), String> {
        let part = match &self.spans {
            None => {
                let share = Share { index, count: self.shares };
                self.operation.attend(&self.attention, chunk, share)
            }
            Some(spans) => self.attend_span(chunk, spans[chunk.stream()].get(index)),
        }?;
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.waiting.insert(index, part);
        while let Some(part) = progress.next() {
            match &mut progress.merged {
                Some(merged) => merged.merge(&part).map_err(|error| error.to_string())?,
                None => progress.merged = Some(part),
            }
        }
        if progress.shares_merged < self.shares {
            return Ok(());
        }
        let whole = progress.merged.take().ok_or("an operation without threads")?;
        // SAFETY: the last share of a chunk comes once, and chunks have queries of their own.
        unsafe { self.operation.store(chunk, whole) }?;
        self.chunks_left.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    /// A stretch of cells where it is. A stream whose groups start elsewhere has one less than others.
    fn attend_span(&self, chunk: &Chunk, span: Option<&Span>) -> Result<Partials, String> {
        let Some(span) = span else {
            return self.operation.attend_cells(&self.attention, chunk, 0..0, None);
        };
        let taken = span.load.zip(self.pass).map(|(load, pass)| pass.take(load));
        // What the disk did not give, the kernel may.
        let rows = taken.as_ref().and_then(Taken::rows);
        self.operation.attend_cells(&self.attention, chunk, span.cells.clone(), rows)
    }

    fn fail(&self, line: String) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(line);
        if let Some(pass) = self.pass {
            pass.abandon();
        }
    }
}

impl Progress {
    /// The next share in order, if it is done.
    fn next(&mut self) -> Option<Partials> {
        let part = self.waiting.remove(&self.shares_merged)?;
        self.shares_merged += 1;
        Some(part)
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
    let job = unsafe { &*data.cast::<Job<'_, '_>>() };
    let returned = guard(false, || {
        job.work();
        true
    });
    if !returned {
        job.fail("an attention thread panicked".to_owned());
    }
}

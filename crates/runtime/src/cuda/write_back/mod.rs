//! New K and V on their way to the mount, while the next token is already being computed.
//!
//! ```text
//! caller    take a free buffer, let the side stream copy rows into it, queue it
//! side      wait for the rows, copy, record
//! thread    wait for the copy, append to the layer's tail, give the buffer back
//! ```
//!
//! One queue and one thread keep the order: the rows of a layer as they were given, and the ids of
//! tokens after the rows of all layers. Buffers and queue are bounded, so who computes faster than
//! the mount takes rows waits for a buffer. After a failure nothing more is written, so rows have no
//! gaps, and every later call says why; what is on the mount stays as it is.

mod files;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};

use self::files::Files;
use super::driver::{Context, Event, Pinned, Stream};
use super::{CudaAttention, CudaError};
use crate::page::{Layer, Manifest, TokenStart};

/// Rows that wait at most: a step of a model with 64 layers, so that a token is never stopped by
/// the one before it.
const BUFFERS: usize = 64;

/// Of a buffer at least, so that a prompt goes in few pieces: a copy takes as long to start as to
/// move so many bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Rows in memory of the device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRows {
    /// `[tokens, row bytes]`, of each token K of all heads, then V.
    pub address: u64,
    /// Whole rows.
    pub bytes: usize,
    /// The driver's handle of the stream that makes them, a `CUstream`; null for the default stream.
    pub stream: *mut std::ffi::c_void,
}

/// Why rows are not written any more.
#[derive(Debug, Clone)]
struct Failure {
    path: PathBuf,
    why: String,
}

impl From<Failure> for CudaError {
    fn from(Failure { path, why }: Failure) -> Self {
        Self::WriteBack { path, why }
    }
}

enum Rows {
    /// Bytes that are on their way into a buffer.
    Buffer(Pinned, usize),
    Bytes(Vec<u8>),
}

enum Job {
    Rows {
        layer: Layer,
        token: u64,
        rows: Rows,
    },
    Tokens(Vec<u32>),
    /// Everything before it is done; durable too, if it says so.
    Flush {
        is_durable: bool,
        done: Sender<()>,
    },
}

/// Appends rows to a sequence of a mount.
#[derive(Debug)]
pub struct WriteBack {
    copies: Stream,
    context: Context,
    made: Event,
    /// The last rows that were given have been copied.
    copied: Event,
    /// Of each layer, bytes of a row.
    row_bytes: Vec<usize>,
    buffer_bytes: usize,
    /// Of each layer, the token that comes next.
    next: Vec<u64>,
    free: Receiver<Pinned>,
    jobs: Option<Sender<Job>>,
    failure: Arc<Mutex<Option<Failure>>>,
    thread: Option<JoinHandle<()>>,
}

impl WriteBack {
    /// To a sequence that holds `tokens` tokens. The directories of its layers are there.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if there is no pinned memory for the buffers, 4 MiB or 64 rows, and
    /// [`CudaError::Device`].
    pub fn new(
        cuda: &CudaAttention, sequence: &Path, manifest: &Manifest, tokens: u64,
    ) -> Result<Self, CudaError> {
        let context = cuda.context.clone();
        let geometry = manifest.geometry();
        let row_bytes: Vec<usize> = files::row_bytes(manifest)
            .map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
            .collect();
        let whole = row_bytes.iter().map(|row_bytes| BUFFER_BYTES.next_multiple_of(*row_bytes));
        let buffer_bytes = whole.max().unwrap_or(BUFFER_BYTES);
        let (give_back, free) = bounded(BUFFERS);
        for _ in 0..BUFFERS {
            let buffer = Pinned::new(&context, "rows on their way to the mount", buffer_bytes)?;
            // There is room for all of them.
            let _ = give_back.send(buffer);
        }
        let (jobs, queue) = bounded(BUFFERS);
        let failure = Arc::default();
        let worker = Worker {
            files: Files::new(sequence, manifest, tokens),
            give_back,
            failure: Arc::clone(&failure),
        };
        let thread = std::thread::Builder::new().name("kvfs-write-back".to_owned());
        let thread = thread.spawn(move || worker.work(&queue)).map_err(|error| {
            CudaError::Unavailable(format!("a thread to write rows with ({error})"))
        })?;
        Ok(Self {
            copies: context.stream()?,
            made: context.event()?,
            copied: context.event()?,
            context,
            row_bytes,
            buffer_bytes,
            next: vec![tokens; geometry.num_layers() as usize],
            free,
            jobs: Some(jobs),
            failure,
            thread: Some(thread),
        })
    }

    /// The token whose rows a layer takes next.
    pub fn next(&self, layer: Layer) -> Option<u64> {
        self.next.get(layer.0 as usize).copied()
    }

    /// Takes rows that are in memory of the host.
    ///
    /// # Errors
    /// [`CudaError::WriteBack`] if rows before these could not be written or these are not whole, or
    /// of no layer.
    pub fn append(&mut self, layer: Layer, rows: &[u8]) -> Result<(), CudaError> {
        self.check(layer, rows.len())?;
        for part in rows.chunks(self.piece_bytes(layer)) {
            self.queue(layer, part.len(), Rows::Bytes(part.to_vec()))?;
        }
        Ok(())
    }

    /// Takes rows that a stream of the device makes. They are copied when everything that is in that
    /// stream now has been done, and nobody waits; see [`hold`](Self::hold).
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`CudaError::Device`].
    ///
    /// # Safety
    /// The rows must be memory of the device of so many bytes, and the stream one of its streams. Until
    /// the copy, which [`hold`](Self::hold) or [`flush`](Self::flush) waits for, nobody may free or
    /// change them.
    pub unsafe fn append_device(
        &mut self, layer: Layer, rows: DeviceRows,
    ) -> Result<(), CudaError> {
        self.check(layer, rows.bytes)?;
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.copy(layer, rows) };
        if let Err(error) = &outcome {
            // The rows are lost, so none may come after them.
            let path = PathBuf::from(layer.to_string());
            keep(&self.failure, Failure { path, why: error.to_string() });
        }
        outcome
    }

    /// # Safety
    /// As [`append_device`](Self::append_device).
    unsafe fn copy(&mut self, layer: Layer, rows: DeviceRows) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let makes = unsafe { Stream::of_caller(&self.context, rows.stream) }?;
        makes.record(&self.made)?;
        self.copies.wait(&self.made)?;
        let mut at = 0;
        while at < rows.bytes {
            let bytes = self.piece_bytes(layer).min(rows.bytes - at);
            let Ok(mut buffer) = self.free.recv() else { return Err(self.stopped()) };
            // SAFETY: the caller's promise.
            let copied = unsafe {
                self.copies.download_from(rows.address + at as u64, &mut buffer, 0..bytes)
            };
            copied?;
            self.queue(layer, bytes, Rows::Buffer(buffer, bytes))?;
            at += bytes;
        }
        self.copies.record(&self.copied)
    }

    /// What comes later in a stream waits, on the device, until all rows that were given have been
    /// copied: before memory of theirs is used again.
    ///
    /// # Errors
    /// [`CudaError::Device`].
    ///
    /// # Safety
    /// The stream must be a `CUstream` of the device, or null for the default one.
    pub unsafe fn hold(&self, stream: *mut std::ffi::c_void) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::of_caller(&self.context, stream) }?;
        stream.wait(&self.copied)
    }

    /// Rows of so many tokens of a layer were written by somebody else, as a page: the next ones come
    /// after them.
    pub fn skip(&mut self, layer: Layer, tokens: u64) {
        if let Some(next) = self.next.get_mut(layer.0 as usize) {
            *next += tokens;
        }
    }

    /// All layers have been given the rows of these tokens: their ids come after them.
    ///
    /// # Errors
    /// [`CudaError::WriteBack`] if rows could not be written.
    pub fn complete(&mut self, tokens: &[u32]) -> Result<(), CudaError> {
        self.refuse_after_failure()?;
        self.send(Job::Tokens(tokens.to_vec()))
    }

    /// Waits until everything that was given is in the files.
    ///
    /// # Errors
    /// [`CudaError::WriteBack`] if something is not.
    pub fn flush(&mut self) -> Result<(), CudaError> {
        self.wait(false)
    }

    /// As [`flush`](Self::flush), and it survives a crash.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn sync(&mut self) -> Result<(), CudaError> {
        self.wait(true)
    }

    fn wait(&mut self, is_durable: bool) -> Result<(), CudaError> {
        let (done, is_done) = bounded(1);
        self.send(Job::Flush { is_durable, done })?;
        is_done.recv().map_err(|_| self.stopped())?;
        self.refuse_after_failure()
    }

    fn check(&self, layer: Layer, bytes: usize) -> Result<(), CudaError> {
        self.refuse_after_failure()?;
        let refuse = |why: String| Failure { path: PathBuf::from(layer.to_string()), why };
        if self.next(layer).is_none() {
            return Err(refuse("no such layer".to_owned()).into());
        }
        let row_bytes = self.row_bytes[layer.0 as usize];
        if !bytes.is_multiple_of(row_bytes) {
            let why = format!("{bytes} bytes are no rows of {row_bytes}");
            return Err(refuse(why).into());
        }
        Ok(())
    }

    /// Bytes of the whole rows that a buffer holds.
    fn piece_bytes(&self, layer: Layer) -> usize {
        let row_bytes = self.row_bytes[layer.0 as usize];
        self.buffer_bytes / row_bytes * row_bytes
    }

    fn queue(&mut self, layer: Layer, bytes: usize, rows: Rows) -> Result<(), CudaError> {
        let next = &mut self.next[layer.0 as usize];
        let token = *next;
        *next += (bytes / self.row_bytes[layer.0 as usize]) as u64;
        self.send(Job::Rows { layer, token, rows })
    }

    fn send(&self, job: Job) -> Result<(), CudaError> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(self.stopped()) }
    }

    fn refuse_after_failure(&self) -> Result<(), CudaError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// The thread is gone, which nothing but a defect makes happen.
    fn stopped(&self) -> CudaError {
        let why = "the thread that writes rows has ended".to_owned();
        self.refuse_after_failure().err().unwrap_or(Failure { path: PathBuf::new(), why }.into())
    }
}

impl Drop for WriteBack {
    /// Writes what was given; who wants to hear of errors flushes before.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // Buffers are freed after copies into them.
        let _ = self.copies.synchronize();
    }
}

/// The thread.
struct Worker {
    files: Files,
    give_back: Sender<Pinned>,
    failure: Arc<Mutex<Option<Failure>>>,
}

impl Worker {
    fn work(mut self, queue: &Receiver<Job>) {
        for job in queue {
            let has_failed = self.failure.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            let outcome = match job {
                Job::Rows { rows, .. } if has_failed => {
                    self.recycle(rows);
                    Ok(())
                }
                Job::Rows { layer, token, rows } => {
                    let outcome = self.write(layer, token, &rows);
                    self.recycle(rows);
                    outcome
                }
                Job::Tokens(ids) if !has_failed => self.files.append_tokens(&ids),
                Job::Flush { is_durable, done } => {
                    let synced = is_durable && !has_failed;
                    let outcome = if synced { self.files.sync() } else { Ok(()) };
                    self.keep(outcome);
                    // Nobody may be waiting any more.
                    let _ = done.send(());
                    Ok(())
                }
                Job::Tokens(_) => Ok(()),
            };
            self.keep(outcome);
        }
    }

    fn write(&mut self, layer: Layer, token: u64, rows: &Rows) -> Result<(), Failure> {
        let bytes = match rows {
            Rows::Bytes(bytes) => bytes,
            Rows::Buffer(buffer, bytes) => {
                let copied = buffer.bytes().map(|all| &all[..*bytes]);
                copied.map_err(|error| Failure {
                    path: self.files.tail(layer, TokenStart(token)),
                    why: error.to_string(),
                })?
            }
        };
        self.files.append(layer, token, bytes)
    }

    fn recycle(&self, rows: Rows) {
        if let Rows::Buffer(buffer, _) = rows {
            // Nobody may want it any more.
            let _ = self.give_back.send(buffer);
        }
    }

    fn keep(&self, outcome: Result<(), Failure>) {
        if let Err(failure) = outcome {
            keep(&self.failure, failure);
        }
    }
}

fn keep(first: &Mutex<Option<Failure>>, failure: Failure) {
    log::warn!("{}: {}: no more rows are written", failure.path.display(), failure.why);
    first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
}

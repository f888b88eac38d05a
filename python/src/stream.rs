//! Layers one after the other, the next one being read while the caller works.
//!
//! A thread goes through a stream of the library, which reads ahead on threads of its own, and gives away a part as
//! soon as the caller wants one: it has the next part in its hands then. Pages belong to whoever gets them. They are
//! none of those that attention keeps, so what a careless library writes to them is seen by nobody else.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use kvfs_page::Layer;
use kvfs_runtime::reader::{self, Limits, Mapping, ReadError, Residents, Run, Settings};
use pyo3::prelude::*;

use crate::errors::Failure;
use crate::fork::{OfProcess, Process};
use crate::page::Page;
use crate::sequence::SIGNAL_INTERVAL;

/// Half of it for the pages on their way, which is what the library reads ahead by itself; half for the part that
/// waits for the caller: 8192 tokens of a layer with rows of 8 KiB.
pub(crate) const AHEAD_BYTES: u64 = 128 << 20;

/// Pages of a part at most, however short they are: each may be a mapping, of which a process has 65,530.
const PAGES_MAX: usize = 4096;

/// What a stream goes through.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) layers: Option<Vec<Layer>>,
    pub(crate) start: u64,
    pub(crate) end: Option<u64>,
    pub(crate) ahead_bytes: u64,
}

/// Pages of one layer, in memory. A layer that does not fit into the memory for reading ahead comes in several parts.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Part {
    /// The layer.
    #[pyo3(get)]
    layer: u32,
    /// In order. The first and the last one of a layer may have more tokens than were asked for.
    #[pyo3(get)]
    pages: Vec<Py<Page>>,
    /// The rows behind the pages, as `Sequence.tail` gives them.
    #[pyo3(get)]
    tail: Option<Py<Page>>,
    /// Whether the next part is of another layer.
    #[pyo3(get)]
    last: bool,
}

#[pymethods]
impl Part {
    fn __repr__(&self) -> String {
        let (layer, pages) = (self.layer, self.pages.len());
        let tail = if self.tail.is_some() { " and a tail" } else { "" };
        format!("<kvfs.Part of layer {layer}: {pages} pages{tail}>")
    }
}

/// The same where the interpreter is not held.
#[derive(Debug)]
struct Gathered {
    layer: Layer,
    pages: Vec<Page>,
    tail: Option<Page>,
    /// Of pages that are not mapped.
    bytes: u64,
    is_last: bool,
}

type Outcome = Result<Gathered, Failure>;

/// An iterator over parts of layers; `Sequence.stream` makes it. It ends its threads when it is at the end, closed,
/// or let go of; what was read stays.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Stream {
    path: PathBuf,
    process: Process,
    is_cancelled: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Going(OfProcess<Going>),
    /// All parts were given.
    Ended,
    /// Somebody has closed it, or what could not be read was told.
    Closed,
}

/// The thread, and what it gives.
#[derive(Debug)]
struct Going {
    parts: Option<Receiver<Outcome>>,
    thread: Option<JoinHandle<()>>,
}

impl Going {
    /// Waits for the end of the thread, which waits for the pages that are being read. Whether it came to it.
    fn join(&mut self) -> bool {
        // What it would still give, nobody takes.
        self.parts = None;
        self.thread.take().is_none_or(|thread| thread.join().is_ok())
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        self.join();
    }
}

impl Stream {
    pub(crate) fn begin(path: &Path, wanted: Wanted) -> Result<Self, Failure> {
        let settings = Settings {
            residents: Arc::new(Residents::new(Limits { pages: 0, kept_bytes: 0 })),
            stream_bytes: wanted.ahead_bytes / 2,
            mapping: Mapping::Private,
        };
        let sequence = reader::Sequence::open_with(path, settings)?;
        let end = wanted.end.map_or_else(|| sequence.valid_tokens(), Ok)?;
        if wanted.start > end {
            let start = wanted.start;
            return Err(Failure::argument(format!("start is {start}, behind the end, {end}")));
        }
        let layers = wanted.layers.unwrap_or_else(|| sequence.layers());
        let tokens = wanted.start..end;
        // What is missing is told here, before anything is read.
        drop(sequence.stream_layers(&layers, tokens.clone())?);
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let (to, parts) = sync_channel(0);
        let reading = Reading {
            path: path.to_owned(),
            to,
            is_cancelled: Arc::clone(&is_cancelled),
            part_bytes: wanted.ahead_bytes / 2,
        };
        let thread = Builder::new().name("kvfs-layers".to_owned());
        let thread = thread.spawn(move || reading.run(&sequence, &layers, tokens));
        let thread = Some(thread.map_err(Failure::io(path))?);
        let going = OfProcess::new(Going { parts: Some(parts), thread });
        let state = Mutex::new(State::Going(going));
        Ok(Self { path: path.to_owned(), process: Process::this(), is_cancelled, state })
    }

    /// The next part, if it comes soon.
    fn poll(&self) -> Result<Polled, Failure> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let going = match &mut *state {
            State::Going(going) => going.get()?,
            State::Ended => return Ok(Polled::End),
            State::Closed => {
                let why = "this stream was closed, or what it read had failed: begin another one";
                return Err(Failure::argument(why));
            }
        };
        let received = going.parts.as_ref().map(|parts| parts.recv_timeout(SIGNAL_INTERVAL));
        match received {
            Some(Err(RecvTimeoutError::Timeout)) => Ok(Polled::Later),
            Some(Ok(Ok(part))) => Ok(Polled::Part(part)),
            Some(Ok(Err(failure))) => {
                *state = State::Closed;
                Err(failure)
            }
            Some(Err(RecvTimeoutError::Disconnected)) | None => {
                let has_ended = going.join() && !self.is_cancelled.load(Ordering::Relaxed);
                *state = if has_ended { State::Ended } else { State::Closed };
                if has_ended {
                    return Ok(Polled::End);
                }
                let why =
                    io::Error::other("the thread that reads layers has ended before they did");
                Err(Failure::io(&self.path)(why))
            }
        }
    }

    fn end(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Going(_)) {
            *state = State::Closed;
        }
    }
}

enum Polled {
    Part(Gathered),
    Later,
    End,
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.process != Process::this() {
            // Its mutex may be held for ever, and what is in it is leaked.
            return;
        }
        // Not while the interpreter is held: a page may have to come from far away.
        if Python::try_attach(|py| py.detach(|| self.end())).is_none() {
            self.end();
        }
    }
}

/// What the thread has.
struct Reading {
    path: PathBuf,
    to: SyncSender<Outcome>,
    is_cancelled: Arc<AtomicBool>,
    part_bytes: u64,
}

/// Nobody wants anything more.
struct Unwanted;

impl Reading {
    fn run(self, sequence: &reader::Sequence, layers: &[Layer], tokens: std::ops::Range<u64>) {
        let outcome = match sequence.stream_layers(layers, tokens) {
            Ok(mut stream) => self.give_all(sequence, &mut stream),
            Err(error) => Err(error.into()),
        };
        if let Err(failure) = outcome {
            // Whoever has closed the stream wants no failure.
            let _ = self.to.send(Err(failure));
        }
    }

    fn give_all(
        &self, sequence: &reader::Sequence, stream: &mut reader::Stream<'_>,
    ) -> Result<(), Failure> {
        while let Some(layer) = stream.layer() {
            let mut part = Gathered::new(layer);
            while let Some(run) = self.next_run(stream)? {
                // Only when more comes is it known that this is not the last one.
                if part.is_full(self.part_bytes) {
                    let full = std::mem::replace(&mut part, Gathered::new(layer));
                    if self.give(full).is_err() {
                        return Ok(());
                    }
                }
                part.add(&self.path, sequence, &run)?;
            }
            part.is_last = true;
            if self.give(part).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// None at the end of a layer, and when nobody wants more: then the part is not taken.
    fn next_run(&self, stream: &mut reader::Stream<'_>) -> Result<Option<Run>, ReadError> {
        if self.is_cancelled.load(Ordering::Relaxed) {
            return Ok(None);
        }
        stream.next_run()
    }

    fn give(&self, part: Gathered) -> Result<(), Unwanted> {
        if self.is_cancelled.load(Ordering::Relaxed) {
            return Err(Unwanted);
        }
        self.to.send(Ok(part)).map_err(|_| Unwanted)
    }
}

impl Gathered {
    fn new(layer: Layer) -> Self {
        Self { layer, pages: Vec::new(), tail: None, bytes: 0, is_last: false }
    }

    fn is_full(&self, bytes: u64) -> bool {
        !self.pages.is_empty() && (self.bytes >= bytes || self.pages.len() >= PAGES_MAX)
    }

    fn add(&mut self, path: &Path, sequence: &reader::Sequence, run: &Run) -> Result<(), Failure> {
        let manifest = sequence.manifest();
        for page in run.files() {
            self.pages.push(Page::of_loaded(path, manifest, self.layer, page)?);
        }
        if let Some(rows) = run.tail() {
            self.tail = Some(Page::of_tail(path, manifest, self.layer, rows)?);
        }
        self.bytes += run.bytes() - run.mapped_bytes();
        Ok(())
    }

    fn into_part(self, py: Python<'_>) -> PyResult<Part> {
        let pages = self.pages.into_iter().map(|page| Py::new(py, page));
        Ok(Part {
            layer: self.layer.0,
            pages: pages.collect::<PyResult<_>>()?,
            tail: self.tail.map(|tail| Py::new(py, tail)).transpose()?,
            last: self.is_last,
        })
    }
}

#[pymethods]
impl Stream {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Part>> {
        self.process.check("this stream")?;
        loop {
            match py.detach(|| self.poll())? {
                Polled::Part(part) => return part.into_part(py).map(Some),
                Polled::End => return Ok(None),
                Polled::Later => py.check_signals()?,
            }
        }
    }

    /// Ends it. Pages that were given stay.
    fn close(&self, py: Python<'_>) {
        if self.process == Process::this() {
            py.detach(|| self.end());
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }
}

//! One sequence: its tokens, pages and rows, and what is done with the whole of it.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvfs_os::{extended_attribute, remove_extended_attribute, set_extended_attribute};
use kvfs_page::{Layer, LayerKind, names};
use kvfs_runtime::attention::InstructionSet;
use kvfs_runtime::reader::{self, Backend, Rates, TailRows};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::append::Appender;
use crate::errors::{Failure, Kind};
use crate::fork::{OfProcess, Process, settings};
use crate::layers::{Arrays, tensors};
use crate::model::{Model, program};
use crate::page::Page;
use crate::prefix::Prefix;
use crate::rows::Rows;
use crate::stream::{self, Stream};
use crate::tail;
use crate::tensor::Tensor;
use crate::tokens::token_ids;

/// How long a call waits before it looks whether the user wants to stop.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Times that a sequence is listed while others seal its pages.
const ATTEMPTS: usize = 8;

/// A sequence of a model: `MODEL/sequences/NAME`.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Sequence {
    #[pyo3(get)]
    model: Py<Model>,
    #[pyo3(get)]
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    process: Process,
    reader: Mutex<Option<(Version, OfProcess<reader::Sequence>)>>,
    appender: Mutex<Option<Appender>>,
}

impl Sequence {
    pub(crate) fn new(handle: Py<Model>, model: &Model, name: String) -> Self {
        let path = model.sequences.path(&name);
        let (reader, appender) = (Mutex::default(), Mutex::default());
        Self { model: handle, name, path, process: Process::this(), reader, appender }
    }

    fn model(&self) -> &Model {
        self.model.get()
    }

    /// Works with the sequence as it is now. It is opened once, and listed anew when something has changed.
    pub(crate) fn read<T>(
        &self, mut work: impl FnMut(&mut reader::Sequence) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.process.check("this sequence")?;
        let mut held = lock(&self.reader);
        let version = Version::of(&self.path)?;
        if held.is_none() {
            let opened = reader::Sequence::open_with(&self.path, settings())?;
            *held = Some((version, OfProcess::new(opened)));
        }
        let (listed, sequence) = held.as_mut().ok_or_else(|| Failure::changed("already closed"))?;
        let sequence = sequence.get()?;
        if *listed != version {
            refresh(sequence)?;
            *listed = version;
        }
        match work(sequence) {
            // A page was replaced or sealed, which only the listing of its layer tells.
            Err(failure) if failure.kind() == Kind::Changed => {
                refresh(sequence)?;
                work(sequence)
            }
            outcome => outcome,
        }
    }

    /// An operation on the whole sequence; open tails are other files afterwards.
    fn edit(&self, work: impl FnOnce(&Model) -> Result<(), Failure>) -> Result<(), Failure> {
        self.process.check("this sequence")?;
        let mut appender = lock(&self.appender);
        *appender = None;
        work(self.model())
    }

    fn append_rows(&self, ids: &[u32], layers: &[Rows<'_>]) -> Result<u64, Failure> {
        self.process.check("this sequence")?;
        let mut held = lock(&self.appender);
        if held.as_ref().is_none_or(|appender| !appender.is_current()) {
            *held = None;
            *held = Some(Appender::open(&self.model().sequences, &self.name)?);
        }
        let appender = held.as_mut().ok_or_else(|| Failure::changed("already closed"))?;
        let outcome = appender.append(ids, layers);
        if outcome.is_err() {
            *held = None;
            // Takes out what was written of it. Where that fails now (the mount is gone), opening it the next
            // time does it; until then `tokens` tells readers that nothing was added.
            let _ = self.model().sequences.trim(&self.name);
        }
        outcome
    }

    /// Sets an attribute of the directory, or of all pages.
    fn set(&self, path: &Path, name: &std::ffi::CStr, value: Option<&str>) -> Result<(), Failure> {
        self.process.check("this sequence")?;
        match value {
            Some(value) => set_extended_attribute(path, name, value.as_bytes()),
            None => match remove_extended_attribute(path, name) {
                Err(error) if error.raw_os_error() == Some(libc::ENODATA) => Ok(()),
                outcome => outcome,
            },
        }
        .map_err(Failure::io(path))
    }

    /// The pages of a layer that have names now.
    fn starts(&self, layer: u32) -> Result<Vec<u64>, Failure> {
        let directory = self.path.join(names::format_layer(Layer(layer)));
        let failed = Failure::io(&directory);
        let mut starts = Vec::new();
        for entry in fs::read_dir(&directory).map_err(&failed)? {
            let name = entry.map_err(&failed)?.file_name();
            starts.extend(names::parse_page(name.as_encoded_bytes()).map(|start| start.0));
        }
        starts.sort_unstable();
        Ok(starts)
    }

    fn open_prefix(&self, layer: u32, asked: Option<u64>) -> Result<Option<Prefix>, Failure> {
        let page_tokens = u64::from(self.model().manifest.geometry().page_tokens());
        let open = || {
            let end = self.read(|sequence| tail::end_of(sequence, Layer(layer), asked))?;
            let starts = (0..end / page_tokens).map(|index| index * page_tokens);
            let pages = starts.map(|start| self.page_at(layer, start));
            let pages = pages.collect::<Result<Vec<_>, _>>()?;
            let is_passed_through = self.model().is_passed_through;
            (!pages.is_empty()).then(|| Prefix::open(&pages, is_passed_through)).transpose()
        };
        for _ in 0..ATTEMPTS {
            let before = Version::of(&self.path)?.directory;
            let outcome = open();
            // Or the pages are of after an operation on the whole, and as many as there were before.
            if Version::of(&self.path)?.directory == before {
                return outcome;
            }
        }
        let path = self.path.display();
        Err(Failure::changed(format!("{path}: is edited again and again: ask for it later")))
    }

    fn page_at(&self, layer: u32, start: u64) -> Result<Page, Failure> {
        let model = self.model();
        Page::new(&self.path, &model.manifest, model.is_passed_through, layer, start)
    }
}

/// What tells that a sequence has to be listed anew: new tokens, or an operation on the whole of it. Listing takes a
/// request for each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    directory: (u64, i64, i64),
    tokens: Option<(u64, u64)>,
}

impl Version {
    fn of(sequence: &Path) -> Result<Self, Failure> {
        let directory = fs::metadata(sequence).map_err(Failure::io(sequence))?;
        let tokens = fs::metadata(sequence.join(names::TOKENS)).ok();
        Ok(Self {
            directory: (directory.ino(), directory.mtime(), directory.mtime_nsec()),
            tokens: tokens.map(|tokens| (tokens.ino(), tokens.len())),
        })
    }
}

/// Lists a sequence anew, also while others seal its pages.
fn refresh(sequence: &mut reader::Sequence) -> Result<(), Failure> {
    let mut outcome = sequence.refresh();
    for _ in 0..ATTEMPTS {
        if !matches!(outcome, Err(reader::ReadError::Changed(_))) {
            break;
        }
        outcome = sequence.refresh();
    }
    Ok(outcome?)
}

/// What an exception left in there is made anew.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl Sequence {
    /// Token ids, of all rows that every layer has.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let read = |sequence: &mut reader::Sequence| {
            let mut ids = sequence.token_ids()?;
            ids.truncate(usize::try_from(sequence.valid_tokens()?).unwrap_or(usize::MAX));
            Ok(ids)
        };
        Ok(py.detach(|| self.read(read))?)
    }

    /// Tokens that every layer has rows of.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let tokens = py.detach(|| self.read(|sequence| Ok(sequence.valid_tokens()?)))?;
        Ok(usize::try_from(tokens).unwrap_or(usize::MAX))
    }

    /// The layers that keep K and V, in the order in which `append` takes them.
    fn layers(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let layers = py.detach(|| self.read(|sequence| Ok(sequence.layers())))?;
        Ok(layers.into_iter().map(|layer| layer.0).collect())
    }

    /// The pages of a layer, in order; none of them is opened yet. Rows behind the last one are in its tail.
    fn pages(&self, py: Python<'_>, layer: u32) -> PyResult<Vec<Page>> {
        let list = || {
            let starts = self.starts(layer)?.into_iter();
            starts.map(|start| self.page_at(layer, start)).collect::<Result<Vec<_>, _>>()
        };
        Ok(py.detach(list)?)
    }

    /// One page by its first token, which is opened when its arrays are asked for.
    fn page(&self, layer: u32, start: u64) -> PyResult<Page> {
        Ok(self.page_at(layer, start)?)
    }

    /// The full pages of a layer before token `end` as one array of each sort; `None` where there is none. Without
    /// `end` those whose tokens have ids. What follows is in a page that is not full, or in the tail.
    ///
    /// Operations on the whole sequence meanwhile: all pages are of before or all of after, or it raises `Changed` (or
    /// `Missing`, where the sequence goes).
    #[pyo3(signature = (layer, end = None))]
    fn prefix(&self, py: Python<'_>, layer: u32, end: Option<u64>) -> PyResult<Option<Prefix>> {
        Ok(py.detach(|| self.open_prefix(layer, end))?)
    }

    /// The rows of a layer that are in no page yet, up to token `end`, as a page of their own; `None` where all are in
    /// pages. Without `end` those that have ids; a writer may have come further in this layer.
    ///
    /// The arrays are a copy: the tail grows, and whoever edits the sequence may cut it.
    #[pyo3(signature = (layer, end = None))]
    fn tail(&self, py: Python<'_>, layer: u32, end: Option<u64>) -> PyResult<Option<Page>> {
        let layer = Layer(layer);
        let read = |sequence: &mut reader::Sequence| {
            let end = tail::end_of(sequence, layer, end)?;
            Ok(sequence.tail(layer, end)?)
        };
        let rows = py.detach(|| self.read(read))?;
        let page = |rows: TailRows| Page::of_tail(&self.path, &self.model().manifest, layer, &rows);
        Ok(py.detach(|| rows.map(page).transpose())?)
    }

    /// Goes through layers in order, and reads ahead while the caller works: gives a `Part` after the other, each of
    /// one layer. A layer has several where its pages have to be read and take more memory than half of
    /// `ahead_bytes`, which is about what is held for parts that the caller has not got yet.
    ///
    /// Without `end` the tokens that have ids, without `layers` all of `layers()`. What is there now is read: rows that are
    /// added later are not, and where pages are replaced meanwhile the stream ends with `Changed`.
    #[pyo3(signature = (start = 0, end = None, *, layers = None, ahead_bytes = stream::AHEAD_BYTES))]
    fn stream(
        &self, py: Python<'_>, start: u64, end: Option<u64>, layers: Option<Vec<u32>>,
        ahead_bytes: u64,
    ) -> PyResult<Stream> {
        self.process.check("this sequence")?;
        let layers = layers.map(|layers| layers.into_iter().map(Layer).collect());
        let wanted = stream::Wanted { layers, start, end, ahead_bytes };
        Ok(py.detach(|| Stream::begin(&self.path, wanted))?)
    }

    /// Adds tokens with their rows to every layer, and returns how many tokens there are then.
    ///
    /// `k` and `v` are lists with an array for each of `layers()`, or one array with a dimension for layers
    /// before the three of `layout` (`hnd`: [heads, tokens, dim], `nhd`: [tokens, heads, dim]; that of the
    /// model where it is not given). `side` has one for each of the layers that keep something beside K and V, or a
    /// dimension for these layers before [tokens, elements of a row]; of any element type, since only the engine
    /// knows what is in it. Readers see the tokens when all of them are there, or nothing.
    #[pyo3(signature = (tokens, k, v = None, *, side = None, layout = None))]
    fn append(
        &self, tokens: &Bound<'_, PyAny>, k: &Bound<'_, PyAny>, v: Option<&Bound<'_, PyAny>>,
        side: Option<&Bound<'_, PyAny>>, layout: Option<&str>,
    ) -> PyResult<u64> {
        let py = k.py();
        let ids = token_ids(tokens)?;
        let arrays = Arrays::take(tensors(k, "k")?, v, side)?;
        let manifest = &self.model().manifest;
        let layers = (0..manifest.geometry().num_layers()).map(Layer).filter(|layer| {
            manifest.layer_kind(*layer).as_ref().is_some_and(LayerKind::has_rows_of_tokens)
        });
        let rows = arrays.rows(manifest, &layers.collect::<Vec<_>>(), layout)?;
        Ok(py.detach(|| self.append_rows(&ids, &rows))?)
    }

    /// Writes one page, with its checksum. Token ids come with `append_tokens`, when the pages of all layers are
    /// there; only the last page of a sequence may be short.
    #[pyo3(signature = (layer, start, k, v = None, *, side = None, layout = None))]
    #[expect(clippy::too_many_arguments, reason = "all but two of them have names in Python")]
    fn write_page(
        &self, layer: u32, start: u64, k: &Bound<'_, PyAny>, v: Option<&Bound<'_, PyAny>>,
        side: Option<&Bound<'_, PyAny>>, layout: Option<&str>,
    ) -> PyResult<Page> {
        let py = k.py();
        self.process.check("this sequence")?;
        let page = self.page_at(layer, start)?;
        let arrays = Arrays::take(vec![Tensor::take(k, "k")?], v, side)?;
        let rows = arrays.rows(&self.model().manifest, &[Layer(layer)], layout)?;
        let [rows] = rows[..] else {
            return Err(Failure::argument("k has several layers: write one page at a time").into());
        };
        rows.check_side(Layer(layer), &self.model().manifest)?;
        py.detach(|| {
            crate::append::write_page(page.file(), page.place(), &rows, 0, rows.k.tokens)
        })?;
        Ok(page)
    }

    /// Adds ids of tokens whose pages are written. Returns how many tokens are valid then.
    fn append_tokens(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<u64> {
        let ids = token_ids(tokens)?;
        self.process.check("this sequence")?;
        py.detach(|| crate::append::append_ids(&self.path, &ids))?;
        Ok(py.detach(|| self.read(|sequence| Ok(sequence.valid_tokens()?)))?)
    }

    /// Makes `name` of the tokens at positions `start` to `end`; the two share their pages from then on.
    #[pyo3(signature = (name, start = 0, end = None))]
    fn copy(&self, py: Python<'_>, name: String, start: u64, end: Option<u64>) -> PyResult<Self> {
        let end = end.unwrap_or(u64::MAX);
        py.detach(|| {
            self.edit(|model| Ok(model.sequences.seq_cp(&self.name, &name, start..end)?))
        })?;
        Ok(Self::new(self.model.clone_ref(py), self.model(), name))
    }

    /// Removes the tokens at positions `start` to `end`; those behind keep theirs.
    #[pyo3(signature = (start, end = None))]
    fn remove(&self, py: Python<'_>, start: u64, end: Option<u64>) -> PyResult<()> {
        let end = end.unwrap_or(u64::MAX);
        Ok(py.detach(|| self.edit(|model| Ok(model.sequences.seq_rm(&self.name, start..end)?)))?)
    }

    /// Removes the tokens at positions `start` to `end` and moves those behind up, as an engine does whose context
    /// is full. The sequence as it was becomes `snapshot`, where a prompt still finds what was dropped.
    fn shift(&self, py: Python<'_>, start: u64, end: u64, snapshot: &str) -> PyResult<()> {
        let shift =
            |model: &Model| Ok(model.sequences.context_shift(&self.name, start..end, snapshot)?);
        Ok(py.detach(|| self.edit(shift))?)
    }

    /// Removes all tokens.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.edit(|model| Ok(model.sequences.clear(&self.name)?)))?)
    }

    /// Waits until a layer has rows of all tokens before `end`, `timeout` seconds at most; returns how many it has.
    fn wait_for(&self, py: Python<'_>, layer: u32, end: u64, timeout: f64) -> PyResult<u64> {
        let timeout = Duration::try_from_secs_f64(timeout)
            .map_err(|_| Failure::argument(format!("timeout is {timeout}: seconds from 0 on")))?;
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).min(SIGNAL_INTERVAL);
            let wait =
                |sequence: &mut reader::Sequence| Ok(sequence.wait_for(Layer(layer), end, left)?);
            let reached = py.detach(|| self.read(wait))?;
            if reached >= end || Instant::now() >= deadline {
                return Ok(reached);
            }
            py.check_signals()?;
        }
    }

    /// Keeps the pages that are there on the disk, as they are, also when room is needed.
    #[pyo3(signature = (pinned = true))]
    fn pin(&self, py: Python<'_>, pinned: bool) -> PyResult<()> {
        let value = if pinned { Some("1") } else { None };
        let set = || {
            let layers = self.read(|sequence| Ok(sequence.layers()))?;
            for layer in layers {
                for start in self.starts(layer.0)? {
                    self.set(self.page_at(layer.0, start)?.file(), c"user.kvfs.pin", value)?;
                }
            }
            Ok::<(), Failure>(())
        };
        Ok(py.detach(set)?)
    }

    /// Seconds after its last change at which the sequence is deleted; `None` where it stays.
    #[getter]
    fn ttl(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let value = py.detach(|| extended_attribute(&self.path, c"user.kvfs.ttl"));
        let value = value.map_err(Failure::io(&self.path))?;
        // Behind the number may stand that each use begins it anew.
        let seconds = |value| String::from_utf8(value).ok()?.split(' ').next()?.parse().ok();
        Ok(value.and_then(seconds))
    }

    #[setter]
    fn set_ttl(&self, py: Python<'_>, seconds: Option<u64>) -> PyResult<()> {
        let value = seconds.map(|seconds| seconds.to_string());
        Ok(py.detach(|| self.set(&self.path, c"user.kvfs.ttl", value.as_deref()))?)
    }

    /// Brings the pages nearer; as `kvfs promote`.
    fn promote(&self, py: Python<'_>) -> PyResult<()> {
        program(py, "promote", (&self.path,)).map(drop)
    }

    /// Sends the pages away, to the remote or (`ssd`) only out of memory; as `kvfs evict`.
    #[pyo3(signature = (to = None))]
    fn evict(&self, py: Python<'_>, to: Option<&str>) -> PyResult<()> {
        program(py, "evict", (&self.path, to)).map(drop)
    }

    /// Writes the sequence to a file: tensors if it ends in `.safetensors`, else a slot of llama.cpp; as
    /// `kvfs export`.
    fn export(&self, py: Python<'_>, file: PathBuf) -> PyResult<()> {
        program(py, "export_file", (&self.path, file)).map(drop)
    }

    /// What a scan of all layers would read from where, and how long that takes.
    #[pyo3(signature = (threads = 1))]
    fn plan<'py>(&self, py: Python<'py>, threads: usize) -> PyResult<Bound<'py, PyDict>> {
        let backend = Backend::Cpu { instructions: InstructionSet::detect(), threads, why: None };
        let ask = |sequence: &mut reader::Sequence| {
            let end = sequence.valid_tokens()?;
            Ok(sequence.plan(0..end, backend.clone(), &Rates::default())?)
        };
        let plan = py.detach(|| self.read(ask))?;
        let found = PyDict::new(py);
        found.set_item("tokens", plan.tokens)?;
        found.set_item("layers", plan.layers)?;
        found.set_item("pages", plan.pages)?;
        found.set_item("ram_bytes", plan.tiers.ram)?;
        found.set_item("ssd_bytes", plan.tiers.ssd)?;
        found.set_item("remote_bytes", plan.tiers.remote)?;
        found.set_item("tail_bytes", plan.tail_bytes)?;
        found.set_item("first_seconds", plan.first.as_secs_f64())?;
        found.set_item("each_seconds", plan.each.as_secs_f64())?;
        Ok(found)
    }

    /// Lets go of open files, of the right to append, and of pages that attention has loaded. The next call opens
    /// what it needs again.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            *lock(&self.appender) = None;
            *lock(&self.reader) = None;
        });
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    /// The sequence's directory.
    #[getter]
    fn path(&self) -> &Path {
        &self.path
    }

    fn __fspath__(&self) -> &OsStr {
        self.path.as_os_str()
    }

    fn __repr__(&self) -> String {
        format!("kvfs.Sequence({:?})", self.path.display().to_string())
    }
}

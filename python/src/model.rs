//! A model's directory: one cache identity, and the sequences in it.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kvfs_page::names::{MANIFEST, PREFIXES, SEQUENCES, TOKENS, format_layer};
use kvfs_page::{Layer, Manifest, PrefixHash};
use kvfs_runtime::reader::longest_prefix;
use kvfs_runtime::sequence::{SequenceError, Sequences};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::append::publish;
use crate::errors::{Failure, Kind};
use crate::page::is_passed_through;
use crate::sequence::Sequence;
use crate::tokens::token_ids;

/// The cache of one model: `MOUNTPOINT/models/NAME`.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
    pub(crate) is_passed_through: bool,
    pub(crate) sequences: Sequences,
}

impl Model {
    fn read(path: &Path) -> Result<Self, Failure> {
        let path = std::path::absolute(path).map_err(Failure::io(path))?;
        let sequences = Sequences::open(&path)?;
        let place = path.join(MANIFEST);
        let is_passed_through = is_passed_through(&place).map_err(Failure::io(&place))?;
        Ok(Self { manifest: sequences.manifest().clone(), path, is_passed_through, sequences })
    }

    /// Makes it, or takes the one that is there if it is for the same cache.
    fn make(path: &Path, json: &[u8]) -> Result<Self, Failure> {
        let manifest = Manifest::parse(json)
            .map_err(|error| Failure::argument(format!("manifest: {error}")))?;
        match Self::read(path) {
            Err(failure) if failure.kind() == Kind::Missing => {}
            found => {
                let found = found?;
                if found.manifest.fields() == manifest.fields() {
                    return Ok(found);
                }
                return Err(Failure::refused(format!(
                    "{}: is the cache of something else: its manifest is {}",
                    path.display(),
                    found.manifest.to_json().split_whitespace().collect::<Vec<_>>().join(" ")
                )));
            }
        }
        fill(path, &manifest).map_err(Failure::io(path))?;
        Self::read(path)
    }

    fn make_sequence(&self, name: &str) -> Result<(), Failure> {
        let layers = (0..self.manifest.geometry().num_layers()).map(Layer);
        let fill = |directory: &Path| {
            let make = || -> io::Result<()> {
                for layer in layers {
                    DirBuilder::new()
                        .recursive(true)
                        .create(directory.join(format_layer(layer)))?;
                }
                File::create(directory.join(TOKENS)).map(drop)
            };
            make().map_err(|error| SequenceError::Io { path: directory.to_owned(), error })
        };
        Ok(self.sequences.make(name, fill)?)
    }

    fn hashes(&self, tokens: &[u32]) -> Vec<PrefixHash> {
        let page_tokens = self.manifest.geometry().page_tokens() as usize;
        let mut parent = self.manifest.prefix_root();
        let pages = tokens.chunks_exact(page_tokens);
        pages
            .map(|ids| {
                let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                let hash = PrefixHash::next(parent, &bytes);
                parent = Some(hash);
                hash
            })
            .collect()
    }
}

/// Writes the manifest under another name first, so that nobody sees a part of it.
fn fill(path: &Path, manifest: &Manifest) -> io::Result<()> {
    DirBuilder::new().recursive(true).create(path)?;
    let staging = path.join(format!(".{MANIFEST}.{}.tmp", std::process::id()));
    let mut file = File::create(&staging)?;
    file.write_all(manifest.to_json().as_bytes())?;
    file.sync_all()?;
    // Closed before the rename: a file that somebody may still write is not published.
    drop(file);
    publish(&staging, &path.join(MANIFEST))?;
    DirBuilder::new().recursive(true).create(path.join(SEQUENCES))?;
    File::open(path)?.sync_all()
}

#[pymethods]
impl Model {
    /// Opens a model that is there.
    #[new]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(py.detach(|| Self::read(&path))?)
    }

    /// Makes a model, or opens it if it is there with the same manifest. The names are those of
    /// `manifest.json`: `num_layers`, `num_kv_heads`, `head_dim`, `dtype` are needed.
    #[staticmethod]
    #[pyo3(signature = (path, **manifest))]
    fn create(
        py: Python<'_>, path: PathBuf, manifest: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let fields = PyDict::new(py);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        fields.set_item("schema_version", 1)?;
        fields.set_item("model_id", name)?;
        if let Some(manifest) = manifest {
            fields.update(manifest.as_mapping())?;
        }
        let json = py.import(intern!(py, "json"))?;
        let json: String = json.call_method1(intern!(py, "dumps"), (fields,))?.extract()?;
        Ok(py.detach(|| Self::make(&path, json.as_bytes()))?)
    }

    /// The model's directory.
    #[getter]
    fn path(&self) -> &Path {
        &self.path
    }

    /// What is in `manifest.json`.
    #[getter]
    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let json = py.import(intern!(py, "json"))?;
        json.call_method1(intern!(py, "loads"), (self.manifest.to_json(),))
    }

    /// Layers, those without pages included.
    #[getter]
    fn num_layers(&self) -> u32 {
        self.manifest.geometry().num_layers()
    }

    /// KV heads of each layer.
    #[getter]
    fn num_kv_heads(&self) -> u32 {
        self.manifest.geometry().num_kv_heads()
    }

    /// Elements of a K row.
    #[getter]
    fn head_dim(&self) -> u32 {
        self.manifest.geometry().head_dim()
    }

    /// Elements of a V row.
    #[getter]
    fn v_head_dim(&self) -> u32 {
        self.manifest.geometry().v_head_dim()
    }

    /// Tokens of a full page.
    #[getter]
    fn page_tokens(&self) -> u32 {
        self.manifest.geometry().page_tokens()
    }

    /// The element type, as the manifest calls it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.manifest.geometry().dtype().name()
    }

    /// The order of dimensions in pages: `hnd` or `nhd`.
    #[getter]
    fn layout(&self) -> &'static str {
        self.manifest.geometry().layout().name()
    }

    /// The sequence that has the longest prefix of a prompt, and how many tokens that is.
    #[pyo3(name = "match")]
    fn find(slf: &Bound<'_, Self>, tokens: &Bound<'_, PyAny>) -> PyResult<Match> {
        let py = slf.py();
        let ids = token_ids(tokens)?;
        let model = slf.get();
        let found = py.detach(|| longest_prefix(&model.path, &ids)).map_err(Failure::from)?;
        let name = found.sequence.as_deref().and_then(Path::file_name);
        let sequence = name.map(|name| {
            let name = name.to_string_lossy().into_owned();
            Py::new(py, Sequence::new(slf.clone().unbind(), model, name))
        });
        Ok(Match { sequence: sequence.transpose()?, tokens: found.tokens })
    }

    /// The names of the sequences.
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(py.detach(|| self.sequences.names()).map_err(Failure::from)?)
    }

    /// A sequence that is there.
    fn sequence(slf: &Bound<'_, Self>, name: String) -> PyResult<Sequence> {
        let model = slf.get();
        let path = model.sequences.path(&name);
        if !slf.py().detach(|| path.is_dir()) {
            return Err(Failure::missing(format!(
                "{}: no such sequence: create_sequence({name:?}) makes it",
                path.display()
            ))
            .into());
        }
        Ok(Sequence::new(slf.clone().unbind(), model, name))
    }

    /// A new sequence without tokens. One that is there is fine as long as it has none.
    fn create_sequence(slf: &Bound<'_, Self>, name: String) -> PyResult<Sequence> {
        let model = slf.get();
        slf.py().detach(|| model.make_sequence(&name))?;
        Ok(Sequence::new(slf.clone().unbind(), model, name))
    }

    /// The names of the prefixes that end with each full page of these tokens, for `has`.
    fn prefix_hashes(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let ids = token_ids(tokens)?;
        let hashes = py.detach(|| self.hashes(&ids));
        Ok(hashes.iter().map(ToString::to_string).collect())
    }

    /// Which of these prefixes some sequence has in every layer, all asked in one call.
    fn has(&self, py: Python<'_>, hashes: Vec<String>) -> PyResult<Vec<bool>> {
        let parsed = hashes.iter().map(|hash| {
            let why = |error| Failure::argument(format!("{hash:?}: {error}"));
            hash.parse::<PrefixHash>().map_err(why)
        });
        let parsed = parsed.collect::<Result<Vec<_>, _>>()?;
        let directory = self.path.join(PREFIXES);
        let ask = |hash: &PrefixHash| {
            let text = hash.to_string();
            let path = directory.join(&text[..2]).join(&text);
            path.try_exists().map_err(Failure::io(&path))
        };
        Ok(py.detach(|| parsed.iter().map(ask).collect::<Result<Vec<_>, _>>())?)
    }

    /// Makes a sequence of a file of another program (a slot of llama.cpp, or a cache in safetensors, which needs
    /// `tokens`); as `kvfs import`.
    #[pyo3(signature = (file, name, tokens = None))]
    fn import_file(
        slf: &Bound<'_, Self>, file: PathBuf, name: String, tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Sequence> {
        let py = slf.py();
        let model = slf.get();
        let tokens = tokens.map(token_ids).transpose()?;
        let bytes =
            tokens.map(|ids| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
        let to = model.sequences.path(&name);
        program(py, "import_file", (file, to, bytes))?;
        Ok(Sequence::new(slf.clone().unbind(), model, name))
    }

    fn __fspath__(&self) -> &OsStr {
        self.path.as_os_str()
    }

    fn __repr__(&self) -> String {
        format!("kvfs.Model({:?})", self.path.display().to_string())
    }
}

/// What `Model.match` found. It unpacks: `sequence, tokens = model.match(prompt)`.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Match {
    /// `None` if no sequence begins like the prompt.
    #[pyo3(get)]
    sequence: Option<Py<Sequence>>,
    /// The first so many tokens are the same, and their K and V are there in every layer.
    #[pyo3(get)]
    tokens: u64,
}

#[pymethods]
impl Match {
    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let both = (self.sequence.as_ref().map(|sequence| sequence.clone_ref(py)), self.tokens);
        both.into_pyobject(py)?.into_any().try_iter().map(Bound::into_any)
    }

    fn __repr__(&self) -> String {
        let name =
            self.sequence.as_ref().map_or("None".to_owned(), |s| format!("{:?}", s.get().name));
        format!("kvfs.Match(sequence={name}, tokens={})", self.tokens)
    }
}

/// Calls a function of `kvfs.program`, which runs the `kvfs` program.
pub(crate) fn program<'py>(
    py: Python<'py>, function: &str,
    arguments: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
) -> PyResult<Bound<'py, PyAny>> {
    let module = py.import(intern!(py, "kvfs.program"))?;
    module.getattr(function)?.call1(arguments.into_pyobject(py)?)
}

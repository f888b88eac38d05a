//! One page: K and V of some tokens of one layer, and what the layer keeps beside them.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use kvfs_os::{extended_attribute, map_private};
use kvfs_page::limits::PAYLOAD_OFFSET;
use kvfs_page::{Geometry, Layer, Manifest, Metadata, PagePlace, TokenStart, names, pack_rows};
use kvfs_runtime::reader::{LoadedPage, TailRows};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use pyo3::prelude::*;

use crate::array::Array;
use crate::element::Element;
use crate::errors::Failure;
use crate::memory::Memory;

/// Bytes of a page's header.
#[allow(clippy::cast_possible_truncation, reason = "4096")]
pub(crate) const PAYLOAD_BYTE: usize = PAYLOAD_OFFSET as usize;

/// A page of a layer. It is opened when its arrays are asked for, and lives as long as they do, whatever
/// becomes of the file, the mount or this process's parent.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Page {
    path: PathBuf,
    place: PagePlace,
    is_passed_through: bool,
    loaded: OnceLock<Loaded>,
}

/// What begins with a page.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) memory: Arc<Memory>,
    pub(crate) tokens: u32,
}

impl Page {
    pub(crate) fn new(
        sequence: &Path, manifest: &Manifest, is_passed_through: bool, layer: u32, start: u64,
    ) -> Result<Self, Failure> {
        let place = PagePlace::new(manifest, Layer(layer), TokenStart(start))
            .map_err(|error| Failure::argument(error.to_string()))?;
        let directory = sequence.join(names::format_layer(Layer(layer)));
        let path = directory.join(names::format_page(TokenStart(start)));
        Ok(Self { path, place, is_passed_through, loaded: OnceLock::new() })
    }

    /// A page that a stream has loaded.
    pub(crate) fn of_loaded(
        sequence: &Path, manifest: &Manifest, layer: Layer, page: &Arc<LoadedPage>,
    ) -> Result<Self, Failure> {
        let mut own = Self::new(sequence, manifest, page.is_mapped(), layer.0, page.start())?;
        let memory = Arc::new(Memory::Loaded(Arc::clone(page)));
        own.loaded = Loaded { memory, tokens: page.tokens() }.into();
        Ok(own)
    }

    /// Rows of a tail, in the order of a page.
    pub(crate) fn of_tail(
        sequence: &Path, manifest: &Manifest, layer: Layer, rows: &TailRows,
    ) -> Result<Self, Failure> {
        let start = TokenStart(rows.start());
        let mut page = Self::new(sequence, manifest, false, layer.0, start.0)?;
        page.path.set_file_name(names::format_tail(start));
        let tokens = u32::try_from(rows.tokens()).unwrap_or(u32::MAX);
        let bytes = pack_rows(page.place.geometry(), rows.rows(), tokens, &Metadata::default())?;
        page.loaded = Loaded { memory: Arc::new(Memory::Bytes(bytes)), tokens }.into();
        Ok(page)
    }

    pub(crate) fn file(&self) -> &Path {
        &self.path
    }

    /// Whether it is rows of a tail, and no file that has the form of a page.
    pub(crate) fn is_tail(&self) -> bool {
        self.path
            .file_name()
            .is_some_and(|name| names::parse_tail(name.as_encoded_bytes()).is_some())
    }

    pub(crate) fn place(&self) -> &PagePlace {
        &self.place
    }

    /// Maps it where the kernel serves the file: nobody can shorten such a file, and its mapping outlives the
    /// daemon. Elsewhere it is read, for touching a mapping could end the process.
    fn load(&self) -> Result<&Loaded, Failure> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded);
        }
        let failed = Failure::io(&self.path);
        let file = File::open(&self.path).map_err(&failed)?;
        let loaded = if self.is_passed_through {
            let (tokens, length) = self.measure(&file)?;
            let map = map_private(&file, length).map_err(&failed)?;
            Loaded { memory: Arc::new(Memory::Mapped(map.into())), tokens }
        } else {
            let bytes = self.read(&file)?;
            let tokens = self.check(&bytes, bytes.len() as u64)?;
            Loaded { memory: Arc::new(Memory::Bytes(bytes)), tokens }
        };
        // Whoever came first stays.
        Ok(self.loaded.get_or_init(|| loaded))
    }

    /// Opens the file of a page that is there with all tokens that a page may have, in a directory that is held open:
    /// whatever has its name by now, the file is that directory's.
    pub(crate) fn open_full(&self, directory: &File) -> Result<File, Failure> {
        let failed = Failure::io(&self.path);
        let name = self.path.file_name().unwrap_or_default();
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let file = openat(directory, name, flags, Mode::empty());
        let file = File::from(file.map_err(|error| failed(error.into()))?);
        let full = self.place.geometry().page_tokens();
        match self.measure(&file)? {
            (tokens, _) if tokens == full => Ok(file),
            (tokens, _) => Err(Failure::missing(format!(
                "{}: has {tokens} tokens, and more were to follow: compute them again",
                self.path.display()
            ))),
        }
    }

    fn read(&self, file: &File) -> Result<Vec<u8>, Failure> {
        let failed = Failure::io(&self.path);
        let length = file.metadata().map_err(&failed)?.len();
        let geometry = self.place.geometry();
        if length > geometry.file_bytes(geometry.page_tokens()) {
            return Err(Failure::refused(format!("{}: longer than a page", self.path.display())));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        file.read_exact_at(&mut bytes, 0).map_err(&failed)?;
        Ok(bytes)
    }

    /// Tokens and bytes of the file. Asking for its length is a request to the daemon, as dear as opening it; and
    /// nearly all pages are full.
    fn measure(&self, file: &File) -> Result<(u32, usize), Failure> {
        let failed = Failure::io(&self.path);
        let geometry = self.place.geometry();
        let mut first = [0; PAYLOAD_BYTE];
        file.read_exact_at(&mut first, 0).map_err(&failed)?;
        let bytes = |length: u64| usize::try_from(length).unwrap_or(usize::MAX);
        let full = geometry.file_bytes(geometry.page_tokens());
        if let Ok(tokens) = self.check(&first, full) {
            return Ok((tokens, bytes(full)));
        }
        let length = file.metadata().map_err(&failed)?.len();
        let tokens = self.check(&first, length)?;
        Ok((tokens, bytes(length)))
    }

    fn check(&self, file: &[u8], length: u64) -> Result<u32, Failure> {
        let first = &file[..file.len().min(PAYLOAD_BYTE)];
        let header = self.place.check_header(first, length);
        let refused = |error| Failure::refused(format!("{}: {error}", self.path.display()));
        header.map(|header| header.tokens).map_err(refused)
    }

    fn loaded(&self, py: Python<'_>) -> PyResult<&Loaded> {
        match self.loaded.get() {
            Some(loaded) => Ok(loaded),
            None => Ok(py.detach(|| self.load())?),
        }
    }
}

impl Loaded {
    /// The tensors of a page in memory.
    pub(crate) fn k(&self, geometry: &Geometry) -> Array {
        self.array(0, Element::of(geometry.dtype()), &geometry.k_shape(self.tokens))
    }

    /// `None` where the model keeps none.
    pub(crate) fn v(&self, geometry: &Geometry) -> Option<Array> {
        let (offset, shape) = (geometry.k_bytes(self.tokens), geometry.v_shape(self.tokens));
        let array = || self.array(offset, Element::of(geometry.dtype()), &shape);
        (geometry.v_head_dim() > 0).then(array)
    }

    /// `None` where the layer keeps none.
    pub(crate) fn side(&self, geometry: &Geometry) -> Option<Array> {
        let offset = geometry.k_bytes(self.tokens) + geometry.v_bytes(self.tokens);
        let array = || self.array(offset, Element::U8, &geometry.side_shape(self.tokens));
        (geometry.side_row_bytes() > 0).then(array)
    }

    /// A tensor that begins at a byte of the payload.
    fn array(&self, offset: u64, element: Element, shape: &[u64]) -> Array {
        let offset = PAYLOAD_BYTE + usize::try_from(offset).unwrap_or(0);
        let shape = shape.iter().map(|length| i64::try_from(*length).unwrap_or(0)).collect();
        Array::new(Arc::clone(&self.memory), offset, element, shape)
    }
}

#[pymethods]
impl Page {
    /// K, `[num_kv_heads, tokens, head_dim]` or in the order of the model's layout. No byte is copied where the
    /// kernel serves the mount (`mapped`).
    #[getter]
    fn k(&self, py: Python<'_>) -> PyResult<Array> {
        Ok(self.loaded(py)?.k(self.place.geometry()))
    }

    /// V in the same order; `None` for a model that keeps none.
    #[getter]
    fn v(&self, py: Python<'_>) -> PyResult<Option<Array>> {
        Ok(self.loaded(py)?.v(self.place.geometry()))
    }

    /// What the layer keeps of each token beside K and V, bytes `[tokens, row_bytes]`; `None` for a layer that keeps
    /// nothing.
    #[getter]
    fn side(&self, py: Python<'_>) -> PyResult<Option<Array>> {
        Ok(self.loaded(py)?.side(self.place.geometry()))
    }

    /// Tokens in it; the last page of a sequence may be short.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.loaded(py)?.tokens)
    }

    /// Whether its arrays are the file's own memory.
    #[getter]
    fn mapped(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.loaded(py)?.memory.is_mapped())
    }

    /// The layer.
    #[getter]
    fn layer(&self) -> u32 {
        self.place.layer().0
    }

    /// Its first token.
    #[getter]
    fn start(&self) -> u64 {
        self.place.start().0
    }

    /// The file.
    #[getter]
    fn path(&self) -> &Path {
        &self.path
    }

    /// Where the mount holds it: `ram`, `ssd` or `remote`; `None` outside of a mount.
    #[getter]
    fn tier(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let value = py.detach(|| extended_attribute(&self.path, c"user.kvfs.tier"));
        let value = value.map_err(Failure::io(&self.path))?;
        Ok(value.map(|value| String::from_utf8_lossy(&value).into_owned()))
    }

    fn __fspath__(&self) -> &OsStr {
        self.path.as_os_str()
    }

    fn __repr__(&self) -> String {
        format!("kvfs.Page({:?})", self.path.display().to_string())
    }
}

/// Whether the kernel serves the files of a mount; asked of one that was opened before.
pub(crate) fn is_passed_through(path: &Path) -> io::Result<bool> {
    Ok(extended_attribute(path, c"user.kvfs.served_by")?.as_deref() == Some(b"kernel"))
}

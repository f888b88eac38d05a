//! The beginning of a layer as one array.
//!
//! Full pages of a layer are files of one length, a multiple of 4096. So they can be mapped one behind the other, and K is
//! an array over all of them: from page to page it goes on behind V and the next header. Tokens do not follow each
//! other without a gap at the end of a page, which is why pages are a dimension of their own.
//!
//! An operation on the whole sequence puts another directory in its place. The pages are opened below the directory of the
//! layer as it was found once: so none of them is of before and another of after, also where the first directory comes
//! back meanwhile, which no comparison of before and after would tell.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;

use kvfs_os::MappedFiles;
use kvfs_page::Geometry;
use pyo3::prelude::*;

use crate::array::Array;
use crate::errors::Failure;
use crate::memory::Memory;
use crate::page::{Loaded, Page};
use crate::workers::each;

/// Pages that are worth a thread.
const PAGES_OF_THREAD: usize = 8;

/// The full pages of a layer from the first one on, as arrays with a dimension for pages. They live as long as the
/// arrays, whatever becomes of the files, the mount or this process's parent.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Prefix {
    /// The layer.
    #[pyo3(get)]
    layer: u32,
    /// How many.
    #[pyo3(get)]
    pages: usize,
    geometry: Geometry,
    first: Loaded,
}

impl Prefix {
    /// Takes the pages, of which there is one at least.
    pub(crate) fn open(pages: &[Page], is_passed_through: bool) -> Result<Self, Failure> {
        let first = pages.first().ok_or_else(|| Failure::argument("a prefix without pages"))?;
        let geometry = *first.place().geometry();
        let directory = directory_of(&pages[0])?;
        let take = if is_passed_through { map } else { read };
        let memory = take(pages, &directory)?;
        let first = Loaded { memory: Arc::new(memory), tokens: geometry.page_tokens() };
        let layer = pages[0].place().layer();
        Ok(Self { layer: layer.0, pages: pages.len(), geometry, first })
    }

    fn all(&self, first: Array) -> Array {
        first.of_equals(self.pages, page_bytes(&self.geometry))
    }
}

fn page_bytes(geometry: &Geometry) -> usize {
    usize::try_from(geometry.file_bytes(geometry.page_tokens())).unwrap_or(usize::MAX)
}

/// Holds the directory that the page is in now.
fn directory_of(page: &Page) -> Result<File, Failure> {
    let path = page.file().parent().unwrap_or(page.file());
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    opened.map_err(Failure::io(path))
}

/// Where the kernel serves the files, as a page by itself.
fn map(pages: &[Page], directory: &File) -> Result<Memory, Failure> {
    let failed = Failure::io(pages[0].file());
    let bytes = page_bytes(pages[0].place().geometry());
    let files = MappedFiles::reserve(pages.len(), bytes).map_err(failed)?;
    let place = |(index, page): (usize, &Page)| {
        let file = page.open_full(directory)?;
        files.place(index, &file).map_err(Failure::io(page.file()))
    };
    let outcomes = each(pages.iter().enumerate().collect(), PAGES_OF_THREAD, place);
    outcomes.into_iter().collect::<Result<(), _>>()?;
    Ok(Memory::MappedFiles(files))
}

/// Elsewhere.
fn read(pages: &[Page], directory: &File) -> Result<Memory, Failure> {
    let bytes = page_bytes(pages[0].place().geometry());
    let length = pages.len().checked_mul(bytes);
    let mut memory = Vec::new();
    if length.is_none_or(|length| memory.try_reserve_exact(length).is_err()) {
        let why = std::io::Error::from_raw_os_error(libc::ENOMEM);
        return Err(Failure::io(pages[0].file())(why));
    }
    memory.resize(length.unwrap_or(0), 0);
    let jobs = pages.iter().zip(memory.chunks_exact_mut(bytes)).collect();
    let outcomes = each(jobs, PAGES_OF_THREAD, |(page, place): (&Page, &mut [u8])| {
        page.open_full(directory)?.read_exact_at(place, 0).map_err(Failure::io(page.file()))
    });
    outcomes.into_iter().collect::<Result<(), _>>()?;
    Ok(Memory::Bytes(memory))
}

#[pymethods]
impl Prefix {
    /// K of all pages, `[pages, num_kv_heads, page_tokens, head_dim]` or in the order of the model's layout.
    #[getter]
    fn k(&self) -> Array {
        self.all(self.first.k(&self.geometry))
    }

    /// V in the same order; `None` for a model that keeps none.
    #[getter]
    fn v(&self) -> Option<Array> {
        self.first.v(&self.geometry).map(|first| self.all(first))
    }

    /// What the layer keeps of each token beside K and V, bytes `[pages, page_tokens, row_bytes]`; `None` for a layer
    /// that keeps nothing.
    #[getter]
    fn side(&self) -> Option<Array> {
        self.first.side(&self.geometry).map(|first| self.all(first))
    }

    /// Tokens in them.
    #[getter]
    fn tokens(&self) -> u64 {
        self.pages as u64 * u64::from(self.geometry.page_tokens())
    }

    /// Whether the arrays are the files' own memory.
    #[getter]
    fn mapped(&self) -> bool {
        self.first.memory.is_mapped()
    }

    fn __repr__(&self) -> String {
        format!("<kvfs.Prefix of layer {}: {} pages>", self.layer, self.pages)
    }
}

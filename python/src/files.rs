//! Values of an engine under names in a directory below `files/`, many in one call.
//!
//! For engines whose blocks are opaque to the mount: they come without token ids, or in a layout that no page has. A value
//! appears whole under its name, or not at all. What came of each is told one by one, so that one damaged file costs
//! an engine one block and not the batch.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kvfs_runtime::batch::have_many;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use pyo3::prelude::*;

use crate::append::publish;
use crate::errors::{Failure, Kind};
use crate::tensor::Tensor;
use crate::workers::each;

/// Names worth a question to the mount, or a thread: the kernel knows most of them, and answers in a microsecond.
const NAMES_LEAST: usize = 16;

/// A directory of values: `MOUNTPOINT/files/...`, made if it is missing.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Files {
    path: PathBuf,
}

/// What came of one of many.
type Outcome = Result<(), Failure>;

impl Files {
    /// The file of a name, which is no path: it could leave the directory, and a name that begins with a dot is
    /// one of a file that is being written.
    fn place(&self, name: &str) -> Result<PathBuf, Failure> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
            return Err(Failure::argument(format!(
                "{name:?} is no name of a value: it may not be empty, begin with a dot or have a slash"
            )));
        }
        Ok(self.path.join(name))
    }

    fn places(&self, names: &[String]) -> Result<Vec<PathBuf>, Failure> {
        names.iter().map(|name| self.place(name)).collect()
    }

    /// Writes under another name, which the value loses when all of it is there.
    fn write_one(&self, path: &Path, bytes: &[u8]) -> Outcome {
        let (staging, mut file) = self.staging()?;
        let written = file.write_all(bytes);
        // Closed before the rename: a file that somebody may still write is not published.
        drop(file);
        let outcome = written
            .map_err(Failure::io(&staging))
            .and_then(|()| publish(&staging, path).map_err(Failure::io(path)));
        if outcome.is_err() {
            // Best effort: what failed first is what to tell.
            let _ = fs::remove_file(&staging);
        }
        outcome
    }

    /// A new file of a name that nobody else has: not of this process, nor of one with the same number in another
    /// container.
    fn staging(&self) -> Result<(PathBuf, File), Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let of_now =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!(".{:x}-{number:x}-{of_now:x}.tmp", std::process::id());
            let path = self.path.join(name);
            match File::options().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                opened => {
                    let file = opened.map_err(Failure::io(&path))?;
                    return Ok((path, file));
                }
            }
        }
    }
}

/// Whether a name is there. Its attributes, which the kernel would have to ask the daemon for, do not matter.
fn has_one(path: &Path) -> Result<bool, Failure> {
    match access(path, AccessFlags::F_OK) {
        Ok(()) => Ok(true),
        Err(Errno::ENOENT) => Ok(false),
        Err(error) => Err(Failure::io(path)(error.into())),
    }
}

/// Fills a buffer with a value, which must be as long.
fn read_one(path: &Path, into: &mut [u8]) -> Outcome {
    let failed = Failure::io(path);
    let file = File::open(path).map_err(&failed)?;
    // One request less than asking for the length first: what is behind the end is looked for only where the value
    // is a whole one.
    let mut filled = 0;
    while filled < into.len() {
        match file.read_at(&mut into[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    let is_longer =
        filled == into.len() && file.read_at(&mut [0], filled as u64).map_err(&failed)? > 0;
    if filled < into.len() || is_longer {
        let length = file.metadata().map_err(&failed)?.len();
        return Err(Failure::refused(format!(
            "{}: has {length} bytes, and the buffer {}: another layout wrote it: give each its own directory",
            path.display(),
            into.len()
        )));
    }
    Ok(())
}

fn tensors(objects: &[Bound<'_, PyAny>], names: usize, what: &str) -> PyResult<Vec<Tensor>> {
    if objects.len() != names {
        let count = objects.len();
        return Err(Failure::argument(format!("{names} names and {count} {what}")).into());
    }
    let taken = objects.iter().enumerate().map(|(index, object)| {
        let tensor = Tensor::take(object, &format!("{what}[{index}]"))?;
        if !tensor.is_contiguous_from(0) {
            let what = &tensor.what;
            let why = "is not contiguous: .contiguous() in torch, numpy.ascontiguousarray";
            return Err(Failure::argument(format!("{what} {why}")).into());
        }
        Ok(tensor)
    });
    taken.collect()
}

/// As Python has it: the exception of each, or `None` where it went well.
fn told(py: Python<'_>, outcomes: Vec<Outcome>) -> Vec<Option<Py<PyAny>>> {
    let exception = |failure| PyErr::from(failure).into_value(py).into_any();
    outcomes.into_iter().map(|outcome| outcome.err().map(exception)).collect()
}

#[pymethods]
impl Files {
    /// Opens the directory, and makes it where it is missing.
    #[new]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let make = || {
            let path = std::path::absolute(&path).map_err(Failure::io(&path))?;
            DirBuilder::new().recursive(true).create(&path).map_err(Failure::io(&path))?;
            Ok::<_, Failure>(Self { path })
        };
        Ok(py.detach(make)?)
    }

    /// The directory.
    #[getter]
    fn path(&self) -> &Path {
        &self.path
    }

    /// Which of these names have a value.
    fn has(&self, py: Python<'_>, names: Vec<String>) -> PyResult<Vec<bool>> {
        let places = self.places(&names)?;
        if names.len() >= NAMES_LEAST {
            let found =
                py.detach(|| have_many(&self.path, &names).map_err(Failure::io(&self.path)))?;
            return Ok(found.into_iter().map(|size| size.is_some()).collect());
        }
        Ok(py.detach(|| places.iter().map(|path| has_one(path)).collect::<Result<_, _>>())?)
    }

    /// How many of these names, from the first one on, have a value.
    fn count_leading(&self, py: Python<'_>, names: Vec<String>) -> PyResult<usize> {
        let places = self.places(&names)?;
        let count = || {
            for (index, path) in places.iter().enumerate() {
                if !has_one(path)? {
                    return Ok(index);
                }
            }
            Ok::<_, Failure>(places.len())
        };
        Ok(py.detach(count)?)
    }

    /// Reads values, each into its buffer (a contiguous, writable array of as many bytes). Returns what went wrong with
    /// each: `None`, or an exception (`Missing` where there is no value). What its buffer holds then is undefined.
    fn read(
        &self, py: Python<'_>, names: Vec<String>, buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let places = self.places(&names)?;
        let mut tensors = tensors(&buffers, names.len(), "buffers")?;
        let into = tensors.iter_mut().map(Tensor::bytes_mut).collect::<Result<Vec<_>, _>>()?;
        let jobs: Vec<_> = places.into_iter().zip(into).collect();
        let outcomes = py.detach(|| each(jobs, 1, |(path, into)| read_one(&path, into)));
        Ok(told(py, outcomes))
    }

    /// Writes values, each under its name, which it replaces; whoever reads sees the old one or the new one. Returns what
    /// went wrong with each: `None`, or an exception.
    fn write(
        &self, py: Python<'_>, names: Vec<String>, values: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let places = self.places(&names)?;
        let tensors = tensors(&values, names.len(), "values")?;
        let jobs: Vec<_> = places.into_iter().zip(tensors.iter().map(Tensor::bytes)).collect();
        let outcomes = py.detach(|| each(jobs, 1, |(path, bytes)| self.write_one(&path, bytes)));
        Ok(told(py, outcomes))
    }

    /// Removes values. Returns which of them were there.
    fn remove(&self, py: Python<'_>, names: Vec<String>) -> PyResult<Vec<bool>> {
        let remove = |path: PathBuf| match fs::remove_file(&path).map_err(Failure::io(&path)) {
            Err(failure) if failure.kind() == Kind::Missing => Ok(false),
            outcome => outcome.map(|()| true),
        };
        let places = self.places(&names)?;
        let outcomes = py.detach(|| each(places, NAMES_LEAST, remove));
        Ok(outcomes.into_iter().collect::<Result<_, _>>()?)
    }

    fn __fspath__(&self) -> &OsStr {
        self.path.as_os_str()
    }

    fn __repr__(&self) -> String {
        format!("kvfs.Files({:?})", self.path.display().to_string())
    }
}

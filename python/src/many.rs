//! Many names of a directory of a mount in one request.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use kvfs_runtime::batch;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Failure;

/// Which of these names are there, in a directory of a mount.
#[pyfunction]
pub(crate) fn have_many(
    py: Python<'_>, directory: PathBuf, names: Vec<OsString>,
) -> PyResult<Vec<bool>> {
    let names = bytes_of(names);
    let found = py.detach(|| batch::have_many(&directory, &names).map_err(failed(&directory)))?;
    Ok(found.into_iter().map(|size| size.is_some()).collect())
}

/// The bytes of the files of these names, in a directory of a mount; `None` where there is no file.
#[pyfunction]
pub(crate) fn read_many(
    py: Python<'_>, directory: PathBuf, names: Vec<OsString>,
) -> PyResult<Vec<Option<Bound<'_, PyBytes>>>> {
    let names = bytes_of(names);
    let read = || {
        let values = batch::read_many(&directory, &names).map_err(failed(&directory))?;
        let values = values.into_iter().zip(&names).map(|(value, name)| {
            let name = OsString::from_vec(name.clone());
            value.map_err(Failure::io(&directory.join(name)))
        });
        values.collect::<Result<Vec<_>, Failure>>()
    };
    let values = py.detach(read)?;
    Ok(values.into_iter().map(|value| value.map(|bytes| PyBytes::new(py, &bytes))).collect())
}

fn bytes_of(names: Vec<OsString>) -> Vec<Vec<u8>> {
    names.into_iter().map(OsString::into_vec).collect()
}

fn failed(directory: &Path) -> impl Fn(io::Error) -> Failure {
    let failed = Failure::io(directory);
    move |error| match error.kind() {
        io::ErrorKind::InvalidInput => Failure::argument(error.to_string()),
        _ => failed(error),
    }
}

//! Arrays that somebody hands over: by DLPack without a copy, else by the buffer protocol.
//!
//! Buffers are copied: the stable ABI has their addresses only since Python 3.11, and this works from 3.10 on.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::dlpack::Imported;
use crate::element::Element;
use crate::errors::Failure;

#[derive(Debug)]
enum Source {
    Shared(Imported),
    Copied(PyBackedBytes),
}

/// An array, and how to call it in a message.
#[derive(Debug)]
pub(crate) struct Tensor {
    source: Source,
    pub(crate) what: String,
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
    /// In bytes.
    pub(crate) strides: Vec<usize>,
}

impl Tensor {
    /// Takes an array.
    pub(crate) fn take(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        if let Some(shared) = Imported::take(object, what)? {
            return Ok(Self {
                what: what.to_owned(),
                element: shared.element,
                shape: shared.shape.clone(),
                strides: shared.strides.clone(),
                source: Source::Shared(shared),
            });
        }
        Self::of_buffer(object, what)
    }

    fn of_buffer(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let py = object.py();
        let kind = object.get_type().name()?;
        let view = PyMemoryView::from(object).map_err(|_| {
            Failure::argument(format!(
                "{what} is a {kind}: give an array (NumPy, torch, anything with __dlpack__ or a buffer)"
            ))
        })?;
        let format: String = view.getattr(intern!(py, "format"))?.extract()?;
        if format.starts_with(['>', '!']) {
            let why = "is in another byte order than the machine's: convert it, \
                       .astype(x.dtype.newbyteorder('=')) in NumPy";
            return Err(Failure::argument(format!("{what} {why}")).into());
        }
        let bytes: usize = view.getattr(intern!(py, "itemsize"))?.extract()?;
        let element = Element::from_format(format.trim_start_matches(['@', '=', '<']), bytes);
        let element = element.ok_or_else(|| {
            Failure::argument(format!(
                "{what} has elements of format {format:?}: numbers are needed"
            ))
        })?;
        let shape: Vec<usize> = view.getattr(intern!(py, "shape"))?.extract()?;
        let copied = view.call_method0(intern!(py, "tobytes"))?.cast_into::<PyBytes>()?;
        let mut strides = vec![bytes; shape.len()];
        for index in (1..shape.len()).rev() {
            strides[index - 1] = strides[index] * shape[index];
        }
        let source = Source::Copied(copied.into());
        Ok(Self { source, what: what.to_owned(), element, shape, strides })
    }

    /// From the first element to the last one.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.source {
            Source::Shared(shared) => shared.bytes(),
            Source::Copied(bytes) => bytes,
        }
    }

    /// The same, to be filled.
    pub(crate) fn bytes_mut(&mut self) -> Result<&mut [u8], Failure> {
        let why = match &mut self.source {
            Source::Shared(shared) if !shared.is_read_only => return Ok(shared.bytes_mut()),
            Source::Shared(_) => "is read-only",
            Source::Copied(_) => "is a buffer, which is not filled: give an array with __dlpack__",
        };
        Err(Failure::argument(format!("{} {why}", self.what)))
    }

    /// Whether the last dimensions, from `first` on, follow each other without a gap.
    pub(crate) fn is_contiguous_from(&self, first: usize) -> bool {
        let mut next = self.element.bytes();
        let dimensions = self.shape.iter().zip(&self.strides).skip(first);
        dimensions.rev().all(|(length, stride)| {
            let fits = *length <= 1 || *stride == next;
            next *= length;
            fits
        })
    }

    /// The values as f32, in order; they must follow each other.
    pub(crate) fn to_f32(&self) -> Result<Vec<f32>, Failure> {
        let what = &self.what;
        if !self.is_contiguous_from(0) {
            return Err(Failure::argument(format!(
                "{what} is not contiguous: .contiguous() in torch, numpy.ascontiguousarray"
            )));
        }
        let bytes = self.bytes();
        let halves = || bytes.as_chunks::<2>().0.iter();
        match self.element {
            Element::F32 => {
                Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            Element::F16 => Ok(halves().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()),
            Element::BF16 => Ok(halves().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()),
            other => Err(Failure::argument(format!(
                "{what} is {}: float32, float16 or bfloat16 is needed",
                other.name()
            ))),
        }
    }
}

//! Arrays that Python gets.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::dlpack::{DEVICE_CPU, Exported};
use crate::element::Element;
use crate::errors::Failure;
use crate::memory::Memory;

/// Memory as an array: any library takes it by DLPack, without a copy.
///
/// `numpy.from_dlpack(a)`, `torch.from_dlpack(a)`, or `a.numpy()`.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Array {
    memory: Arc<Memory>,
    offset: usize,
    element: Element,
    shape: Vec<i64>,
    /// In elements.
    strides: Vec<i64>,
}

impl Array {
    /// Rows that follow each other.
    pub(crate) fn new(
        memory: Arc<Memory>, offset: usize, element: Element, shape: Vec<i64>,
    ) -> Self {
        let mut strides = vec![1; shape.len()];
        for index in (1..shape.len()).rev() {
            strides[index - 1] = strides[index] * shape[index];
        }
        Self { memory, offset, element, shape, strides }
    }

    /// Several of such arrays, each so many bytes behind the one before.
    pub(crate) fn of_equals(self, count: usize, each_bytes: usize) -> Self {
        let whole = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        let stride = whole(each_bytes / self.element.bytes());
        let shape = [&[whole(count)], &self.shape[..]].concat();
        let strides = [&[stride], &self.strides[..]].concat();
        Self { shape, strides, ..self }
    }

    /// What was computed.
    pub(crate) fn of_floats(values: Vec<f32>, shape: &[usize]) -> Self {
        let shape = shape.iter().map(|length| i64::try_from(*length).unwrap_or(i64::MAX)).collect();
        Self::new(Arc::new(Memory::Floats(values)), 0, Element::F32, shape)
    }

    fn exported(&self) -> Exported {
        Exported {
            memory: Arc::clone(&self.memory),
            offset: self.offset,
            element: self.element,
            shape: self.shape.clone(),
            strides: self.strides.clone(),
            is_read_only: !self.memory.is_writable(),
        }
    }
}

#[pymethods]
impl Array {
    /// Lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Elements from one to the next of each dimension.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    /// The element type, as NumPy and torch call it.
    #[getter]
    fn dtype(&self) -> String {
        self.element.name()
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> i64 {
        let item = i64::try_from(self.element.bytes()).unwrap_or(0);
        self.shape.iter().product::<i64>() * item
    }

    /// Whether it may not be written to. What a library that knows no read-only arrays writes there
    /// nevertheless reaches no file.
    #[getter]
    fn readonly(&self) -> bool {
        !self.memory.is_writable()
    }

    fn __len__(&self) -> usize {
        self.shape.first().map_or(0, |length| usize::try_from(*length).unwrap_or(0))
    }

    fn __repr__(&self) -> String {
        format!("kvfs.Array(shape={:?}, dtype={})", self.shape, self.element.name())
    }

    /// The capsule of the protocol. A copy on request is the taker's matter.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self, py: Python<'py>, stream: Option<Bound<'py, PyAny>>, max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>, copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() || dl_device.is_some_and(|(kind, _)| kind != DEVICE_CPU) {
            let why =
                "it is in the processor's memory: copy it to the device, .to(device) in torch";
            return Err(pyo3::exceptions::PyBufferError::new_err(why));
        }
        if copy == Some(true) {
            return Err(pyo3::exceptions::PyBufferError::new_err("copy it with .numpy().copy()"));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        self.exported().into_capsule(py, is_versioned)
    }

    /// The processor.
    #[pyo3(name = "__dlpack_device__")]
    #[allow(clippy::unused_self, reason = "the protocol asks the array")]
    fn dlpack_device(&self) -> (i32, i32) {
        (DEVICE_CPU, 0)
    }

    /// The same memory in NumPy.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if !matches!(self.element, Element::F32 | Element::F16) && !self.element.is_integer() {
            let name = self.element.name();
            let why = format!(
                "NumPy has no {name}: .bits().numpy() has the same memory as whole numbers"
            );
            return Err(Failure::argument(why).into());
        }
        let numpy = py.import(intern!(py, "numpy"))?;
        let again = Py::new(py, self.copied())?;
        numpy.call_method1(intern!(py, "from_dlpack"), (again,))
    }

    /// What `numpy.asarray` asks for.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        &self, py: Python<'py>, dtype: Option<Bound<'py, PyAny>>, copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = self.numpy(py)?;
        match (dtype, copy) {
            (Some(dtype), _) => array.call_method1(intern!(py, "astype"), (dtype,)),
            (None, Some(true)) => array.call_method0(intern!(py, "copy")),
            (None, _) => Ok(array),
        }
    }

    /// The same memory as whole numbers of the same width, for libraries without the type.
    fn bits(&self) -> Self {
        Self { element: self.element.as_bits(), ..self.copied() }
    }

    /// A copy of the bytes.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bits = Py::new(py, self.bits())?;
        let numpy = py.import(intern!(py, "numpy"))?;
        let array = numpy.call_method1(intern!(py, "from_dlpack"), (bits,))?;
        let bytes = array.call_method0(intern!(py, "tobytes"))?;
        Ok(bytes.cast_into::<PyBytes>()?.into_any())
    }
}

impl Array {
    /// The same array once more.
    fn copied(&self) -> Self {
        Self {
            memory: Arc::clone(&self.memory),
            offset: self.offset,
            element: self.element,
            shape: self.shape.clone(),
            strides: self.strides.clone(),
        }
    }
}

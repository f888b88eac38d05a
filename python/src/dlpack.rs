//! Arrays of other libraries, in and out, without a copy: <https://dmlc.github.io/dlpack/latest/>.
//!
//! The only `unsafe` code of the package. Both forms of capsule are spoken: the versioned one, which can say that
//! an array is read-only, and the older one.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::{ffi, intern};

use crate::element::Element;
use crate::errors::Failure;
use crate::memory::Memory;

const NAME: &CStr = c"dltensor";
const USED_NAME: &CStr = c"used_dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
const VERSIONED_USED_NAME: &CStr = c"used_dltensor_versioned";

/// The version whose structures stand here.
const VERSION: Version = Version { major: 1, minor: 0 };
const FLAG_READ_ONLY: u64 = 1;

/// The processor's memory.
pub(crate) const DEVICE_CPU: i32 = 1;
/// Memory of the host that a GPU can reach as well.
const DEVICE_CUDA_HOST: i32 = 3;
const DEVICE_ROCM_HOST: i32 = 11;

/// Most dimensions of what is taken: layers, batch, heads, tokens, elements, and one to spare.
const DIMENSIONS_MAX: i32 = 6;

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    data_type: DataType,
    shape: *mut i64,
    /// In elements; null where rows follow each other.
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// An array of ours.
#[derive(Debug)]
pub(crate) struct Exported {
    pub(crate) memory: Arc<Memory>,
    /// Where it begins in the memory.
    pub(crate) offset: usize,
    pub(crate) element: Element,
    pub(crate) shape: Vec<i64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
    pub(crate) is_read_only: bool,
}

/// What a capsule points to, and what it needs.
struct Holder<T> {
    managed: T,
    exported: Exported,
}

impl Exported {
    /// The capsule that `__dlpack__` gives.
    pub(crate) fn into_capsule(
        self, py: Python<'_>, is_versioned: bool,
    ) -> PyResult<Bound<'_, PyAny>> {
        let pointer = if is_versioned {
            let flags = if self.is_read_only { FLAG_READ_ONLY } else { 0 };
            let holder = Box::leak(Box::new(Holder {
                managed: ManagedVersioned {
                    version: VERSION,
                    context: ptr::null_mut(),
                    deleter: Some(delete_versioned),
                    flags,
                    tensor: Tensor::of_nothing(),
                },
                exported: self,
            }));
            holder.managed.tensor = holder.exported.tensor();
            holder.managed.context = ptr::from_mut(holder).cast();
            ptr::from_mut(&mut holder.managed).cast::<c_void>()
        } else {
            let holder = Box::leak(Box::new(Holder {
                managed: Managed {
                    tensor: Tensor::of_nothing(),
                    context: ptr::null_mut(),
                    deleter: Some(delete),
                },
                exported: self,
            }));
            holder.managed.tensor = holder.exported.tensor();
            holder.managed.context = ptr::from_mut(holder).cast();
            ptr::from_mut(&mut holder.managed).cast::<c_void>()
        };
        let name = if is_versioned { VERSIONED_NAME } else { NAME };
        // SAFETY: the interpreter is held, the pointer is not null and the name lives for ever.
        let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(end_of_capsule)) };
        // SAFETY: a new reference, or null with an exception set; what it would hold is leaked then.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
    }

    fn tensor(&mut self) -> Tensor {
        Tensor {
            data: self.memory.start().wrapping_add(self.offset).cast_mut().cast(),
            device: Device { kind: DEVICE_CPU, id: 0 },
            dimensions: i32::try_from(self.shape.len()).unwrap_or(0),
            data_type: DataType { code: self.element.code, bits: self.element.bits, lanes: 1 },
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

impl Tensor {
    /// To be replaced once what it points to has its place.
    const fn of_nothing() -> Self {
        Self {
            data: ptr::null_mut(),
            device: Device { kind: DEVICE_CPU, id: 0 },
            dimensions: 0,
            data_type: DataType { code: 0, bits: 0, lanes: 0 },
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: whoever has the array gives back what `into_capsule` made, once.
    let context = unsafe { (*managed).context };
    // SAFETY: it is the box that `into_capsule` leaked.
    drop(unsafe { Box::from_raw(context.cast::<Holder<Managed>>()) });
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: whoever has the array gives back what `into_capsule` made, once.
    let context = unsafe { (*managed).context };
    // SAFETY: it is the box that `into_capsule` leaked.
    drop(unsafe { Box::from_raw(context.cast::<Holder<ManagedVersioned>>()) });
}

/// Nobody took what is in a capsule of ours, if it still has the first name.
unsafe extern "C" fn end_of_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter hands over the capsule that ends.
    if let Some(managed) = unsafe { content::<Managed>(capsule, NAME) } {
        // SAFETY: nobody has taken it.
        unsafe { delete(managed.as_ptr()) };
    }
    // SAFETY: as above.
    if let Some(managed) = unsafe { content::<ManagedVersioned>(capsule, VERSIONED_NAME) } {
        // SAFETY: nobody has taken it.
        unsafe { delete_versioned(managed.as_ptr()) };
    }
}

/// What a capsule of that name points to.
///
/// # Safety
/// The interpreter is held, and the capsule lives.
unsafe fn content<T>(capsule: *mut ffi::PyObject, name: &CStr) -> Option<NonNull<T>> {
    // SAFETY: any object may be asked.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: it is valid under this name.
    NonNull::new(unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }.cast())
}

/// Whose deleter is called at the end.
#[derive(Debug)]
enum Owner {
    Plain(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

/// An array of another library.
#[derive(Debug)]
pub(crate) struct Imported {
    owner: Owner,
    start: *mut u8,
    /// From the first element to the end of the last one.
    bytes: usize,
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
    /// In bytes.
    pub(crate) strides: Vec<usize>,
    pub(crate) is_read_only: bool,
}

// SAFETY: DLPack allows use and the deleter on any thread; a producer in Python takes the interpreter itself.
unsafe impl Send for Imported {}
// SAFETY: shared, it is only read.
unsafe impl Sync for Imported {}

impl Imported {
    /// Takes an array over; `None` if the object is none.
    pub(crate) fn take(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Option<Self>> {
        let py = object.py();
        let Some(export) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
        if let Some(device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? {
            let (kind, _): (i32, i32) = device.call0()?.extract()?;
            check_device(kind, what)?;
        }
        let options = pyo3::types::PyDict::new(py);
        options.set_item(intern!(py, "max_version"), (VERSION.major, VERSION.minor))?;
        let capsule = match export.call((), Some(&options)) {
            // A library from before versions were known.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0(),
            outcome => outcome,
        };
        let capsule = capsule.map_err(|error| {
            Failure::argument(format!("{what} cannot be shared: {}", error.value(py)))
        })?;
        Self::of_capsule(&capsule, what).map(Some).map_err(PyErr::from)
    }

    fn of_capsule(capsule: &Bound<'_, PyAny>, what: &str) -> Result<Self, Failure> {
        let pointer = capsule.as_ptr();
        // SAFETY: the interpreter is held, as the reference shows.
        let versioned = unsafe { content::<ManagedVersioned>(pointer, VERSIONED_NAME) };
        // SAFETY: as above.
        let plain = unsafe { content::<Managed>(pointer, NAME) };
        let (owner, used) = match (versioned, plain) {
            (Some(managed), _) => (Owner::Versioned(managed), VERSIONED_USED_NAME),
            (None, Some(managed)) => (Owner::Plain(managed), USED_NAME),
            (None, None) => {
                return Err(Failure::argument(format!("{what}: __dlpack__ gave no array")));
            }
        };
        // From here on it is ours to delete.
        // SAFETY: the capsule is valid, and the name lives for ever.
        unsafe { ffi::PyCapsule_SetName(pointer, used.as_ptr()) };
        Self::of_owner(owner, what)
    }

    fn of_owner(owner: Owner, what: &str) -> Result<Self, Failure> {
        let mut taken = Self {
            owner,
            start: ptr::null_mut(),
            bytes: 0,
            element: Element::F32,
            shape: Vec::new(),
            strides: Vec::new(),
            is_read_only: false,
        };
        if let Owner::Versioned(managed) = &taken.owner {
            // SAFETY: the version stands first in every version of the structure.
            let major = unsafe { managed.as_ref() }.version.major;
            if major != VERSION.major {
                // Where its deleter stands is unknown.
                std::mem::forget(taken);
                let why = format!("{what} speaks DLPack {major}, kvfs {}", VERSION.major);
                return Err(Failure::argument(why));
            }
        }
        let (tensor, flags) = match &taken.owner {
            // SAFETY: valid until its deleter is called.
            Owner::Plain(managed) => (&unsafe { managed.as_ref() }.tensor, 0),
            Owner::Versioned(managed) => {
                // SAFETY: valid until its deleter is called.
                let managed = unsafe { managed.as_ref() };
                (&managed.tensor, managed.flags)
            }
        };
        check_device(tensor.device.kind, what)?;
        if tensor.data_type.lanes != 1 || !(0..=DIMENSIONS_MAX).contains(&tensor.dimensions) {
            let (lanes, dimensions) = (tensor.data_type.lanes, tensor.dimensions);
            let why =
                format!("{what} has {dimensions} dimensions and {lanes} lanes: nothing here has");
            return Err(Failure::argument(why));
        }
        let element = Element { code: tensor.data_type.code, bits: tensor.data_type.bits };
        let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
        // SAFETY: `shape` has that many numbers.
        let shape = unsafe { numbers(tensor.shape, dimensions) };
        // SAFETY: `strides` is null or has that many numbers.
        let strides = unsafe { numbers(tensor.strides, dimensions) };
        let place = Place::new(&shape, &strides, element, what)?;
        let start = tensor.data.cast::<u8>();
        taken.start = start.wrapping_add(usize::try_from(tensor.byte_offset).unwrap_or(usize::MAX));
        taken.is_read_only = flags & FLAG_READ_ONLY != 0;
        (taken.element, taken.bytes) = (element, place.bytes);
        (taken.shape, taken.strides) = (place.shape, place.strides);
        Ok(taken)
    }

    /// From the first element to the last one.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the producer keeps the memory until its deleter is called, and no element lies outside.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The same, to be written to; whoever calls has looked at `is_read_only`.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Plain(managed) => {
                // SAFETY: valid until its deleter is called, which happens here alone.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { deleter(managed.as_ptr()) };
                }
            }
            Owner::Versioned(managed) => {
                // SAFETY: valid until its deleter is called, which happens here alone.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { deleter(managed.as_ptr()) };
                }
            }
        }
    }
}

fn check_device(kind: i32, what: &str) -> Result<(), Failure> {
    match kind {
        DEVICE_CPU | DEVICE_CUDA_HOST | DEVICE_ROCM_HOST => Ok(()),
        _ => Err(Failure::argument(format!(
            "{what} is on another device (DLPack's kind {kind}): bring it to the processor first, .cpu() in torch"
        ))),
    }
}

/// Some numbers of the producer; none where there is no list.
///
/// # Safety
/// The pointer is null, or has that many.
unsafe fn numbers(first: *const i64, count: usize) -> Vec<i64> {
    if first.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller says so.
    unsafe { std::slice::from_raw_parts(first, count) }.to_vec()
}

/// Where elements lie, in bytes.
struct Place {
    shape: Vec<usize>,
    strides: Vec<usize>,
    bytes: usize,
}

impl Place {
    fn new(shape: &[i64], strides: &[i64], element: Element, what: &str) -> Result<Self, Failure> {
        let odd = || {
            Failure::argument(format!("{what} runs backwards or is too large: make it contiguous"))
        };
        let item = element.bytes();
        let shape: Vec<usize> = shape
            .iter()
            .map(|length| usize::try_from(*length).map_err(|_| odd()))
            .collect::<Result<_, _>>()?;
        let mut next = item;
        let mut places = vec![0; shape.len()];
        for index in (0..shape.len()).rev() {
            // The stride of a dimension with one element says nothing.
            if let Some(stride) = strides.get(index).filter(|_| shape[index] > 1) {
                let stride = usize::try_from(*stride).map_err(|_| odd())?;
                places[index] = stride.checked_mul(item).ok_or_else(odd)?;
            } else {
                places[index] = next;
            }
            next = next.checked_mul(shape[index].max(1)).ok_or_else(odd)?;
        }
        let mut bytes = if shape.contains(&0) { 0 } else { item };
        if bytes > 0 {
            for (length, stride) in shape.iter().zip(&places) {
                let reach = (length - 1).checked_mul(*stride);
                bytes = reach.and_then(|reach| bytes.checked_add(reach)).ok_or_else(odd)?;
            }
        }
        Ok(Self { shape, strides: places, bytes })
    }
}

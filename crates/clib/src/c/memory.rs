//! What callers point to: read and written here alone, checked as far as it can be.

use std::ffi::{CStr, c_char};
use std::mem::{MaybeUninit, size_of};
use std::ptr;

use half::f16;

use super::status::{Failure, Status};

/// Largest structure that is believed to be one: a size beyond it was never set.
const STRUCTURE_BYTES_MAX: usize = 4096;

/// A structure that may grow at its end.
///
/// # Safety
/// It is `repr(C)` without padding, starts with `size: usize`, is aligned as that is, and every
/// pattern of bits is a value of it; zeros behind the required bytes are the defaults.
pub(super) unsafe trait Structure: Copy {
    /// As the header calls it.
    const NAME: &'static str;
    /// Bytes that every caller gives.
    const REQUIRED_BYTES: usize;
}

/// Numbers, or structures of numbers.
///
/// # Safety
/// Every pattern of bits is a value, and there is no padding.
pub(super) unsafe trait Plain: Copy {}

// SAFETY: a number.
unsafe impl Plain for u8 {}
// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for u64 {}
// SAFETY: a number.
unsafe impl Plain for f32 {}
// SAFETY: a number, transparent.
unsafe impl Plain for f16 {}

/// Stands for the promises that a caller makes for one call.
///
/// Its methods take pointers of the call and of what it points to, and nothing else.
pub(super) struct Caller(());

impl Caller {
    /// # Safety
    /// As long as the value lives, every pointer that its methods are given and do not refuse
    /// points to memory of the length that goes with it, which nobody writes to meanwhile (or
    /// reads, where it is written here).
    pub(super) unsafe fn new() -> Self {
        Self(())
    }

    /// Refuses a pointer that cannot be one to `count` values.
    #[allow(clippy::unused_self, reason = "the receiver stands for the promise")]
    pub(super) fn check<T>(
        &self, pointer: *const T, count: usize, what: &str,
    ) -> Result<(), Failure> {
        if count == 0 {
            return Ok(());
        }
        if pointer.is_null() {
            return Err(Failure::argument(format!("{what} is NULL")));
        }
        if !pointer.is_aligned() {
            let alignment = align_of::<T>();
            let why = format!("{what} is at {pointer:p}: must be aligned to {alignment} bytes");
            return Err(Failure::argument(why));
        }
        let bytes = count.checked_mul(size_of::<T>()).filter(|n| isize::try_from(*n).is_ok());
        if bytes.is_none_or(|bytes| pointer.addr().checked_add(bytes).is_none()) {
            let why = format!("{what} with {count} values is larger than memory");
            return Err(Failure::argument(why));
        }
        Ok(())
    }

    /// Values that the caller gave; a pointer to none of them may be anything.
    pub(super) fn slice<T: Plain>(
        &self, pointer: *const T, count: usize, what: &str,
    ) -> Result<&[T], Failure> {
        if count == 0 {
            return Ok(&[]);
        }
        self.check(pointer, count, what)?;
        // SAFETY: not NULL, aligned and within memory; the rest is the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
    }

    /// Text that ends with NUL.
    pub(super) fn text(&self, pointer: *const c_char, what: &str) -> Result<&str, Failure> {
        let text = std::str::from_utf8(self.name(pointer, what)?);
        text.map_err(|_| Failure::argument(format!("{what} is no UTF-8")))
    }

    /// The same of a file, whose name may be any bytes.
    pub(super) fn name(&self, pointer: *const c_char, what: &str) -> Result<&[u8], Failure> {
        self.check(pointer, 1, what)?;
        // SAFETY: not NULL; that it ends with NUL is the caller's promise.
        Ok(unsafe { CStr::from_ptr(pointer) }.to_bytes())
    }

    /// Writes to memory of the caller.
    pub(super) fn store<T: Plain>(
        &self, values: &[T], pointer: *mut T, what: &str,
    ) -> Result<(), Failure> {
        self.check(pointer, values.len(), what)?;
        if !values.is_empty() {
            // SAFETY: not NULL, aligned and within memory; `values` belong to the library, so they
            // do not overlap with the caller's.
            unsafe { ptr::copy_nonoverlapping(values.as_ptr(), pointer, values.len()) };
        }
        Ok(())
    }

    /// The size that a structure says it has.
    fn size<T: Structure>(&self, pointer: *const T) -> Result<usize, Failure> {
        let (name, known, alignment) = (T::NAME, size_of::<T>(), align_of::<T>());
        self.check(pointer, 1, name)?;
        // SAFETY: every structure starts with its size, and this one is not NULL and aligned.
        let size = unsafe { pointer.cast::<usize>().read() };
        if size < T::REQUIRED_BYTES || size > STRUCTURE_BYTES_MAX || !size.is_multiple_of(alignment)
        {
            let why = format!("{name}.size is {size}: set it to sizeof({name}), here {known}");
            return Err(Failure::argument(why));
        }
        Ok(size)
    }

    /// A structure of this or another version: what an older caller does not have is zero, what a
    /// newer one has beyond must be.
    pub(super) fn read<T: Structure>(&self, pointer: *const T) -> Result<T, Failure> {
        let (size, known) = (self.size(pointer)?, size_of::<T>());
        let start = pointer.cast::<u8>();
        let beyond = self.slice(start.wrapping_add(known), size.saturating_sub(known), T::NAME)?;
        if beyond.iter().any(|byte| *byte != 0) {
            let name = T::NAME;
            return Err(Failure::new(
                Status::Unsupported,
                format!("{name} has {size} bytes, this version knows {known}: zero the others"),
            ));
        }
        let mut value = MaybeUninit::<T>::zeroed();
        // SAFETY: the caller has `size` bytes there, and the value has `known`.
        unsafe { ptr::copy_nonoverlapping(start, value.as_mut_ptr().cast(), size.min(known)) };
        // SAFETY: any bytes are a value of a structure.
        Ok(unsafe { value.assume_init() })
    }

    /// `count` structures behind each other, all of the size that the first one says.
    pub(super) fn read_all<T: Structure>(
        &self, pointer: *const T, count: usize,
    ) -> Result<Vec<T>, Failure> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let size = self.size(pointer)?;
        let bytes = count.checked_mul(size);
        let bytes = bytes.ok_or_else(|| Failure::argument(format!("{count} of {}", T::NAME)))?;
        self.check(pointer.cast::<u8>(), bytes, T::NAME)?;
        let mut all = Vec::new();
        for index in 0..count {
            let element = pointer.wrapping_byte_add(index * size);
            let found = self.size(element)?;
            if found != size {
                let name = T::NAME;
                let why = format!("{name} {index} has size {found}, the first one {size}");
                return Err(Failure::argument(why));
            }
            all.push(self.read(element)?);
        }
        Ok(all)
    }

    /// Fills a structure as far as the caller knows it; what it knows beyond becomes zero.
    pub(super) fn write<T: Structure>(&self, value: T, pointer: *mut T) -> Result<(), Failure> {
        let (size, known) = (self.size(pointer)?, size_of::<T>());
        let (start, first) = (pointer.cast::<u8>(), size_of::<usize>());
        let from = (&raw const value).cast::<u8>().wrapping_add(first);
        // SAFETY: the caller has `size` bytes there, the value `known`, and both more than `first`.
        unsafe {
            ptr::copy_nonoverlapping(from, start.wrapping_add(first), size.min(known) - first);
        }
        // SAFETY: the caller has `size` bytes there.
        unsafe { ptr::write_bytes(start.wrapping_add(size.min(known)), 0, size - size.min(known)) };
        Ok(())
    }

    /// A handle that was created and not freed.
    pub(super) fn handle<T>(&self, handle: *const T, what: &str) -> Result<&T, Failure> {
        self.check(handle, 1, what)?;
        // SAFETY: not NULL and aligned; that it is a handle is the caller's promise.
        Ok(unsafe { &*handle })
    }

    /// A handle that may be absent.
    pub(super) fn optional<T>(&self, handle: *const T, what: &str) -> Result<Option<&T>, Failure> {
        if handle.is_null() { Ok(None) } else { self.handle(handle, what).map(Some) }
    }

    /// Gives the caller a new handle, or NULL.
    pub(super) fn create<T>(
        &self, out: *mut *mut T, make: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<(), Failure> {
        self.check(out, 1, "the handle to be created")?;
        // SAFETY: not NULL and aligned.
        unsafe { out.write(ptr::null_mut()) };
        let handle = Box::into_raw(Box::new(make()?));
        // SAFETY: not NULL and aligned.
        unsafe { out.write(handle) };
        Ok(())
    }

    /// Takes a handle back.
    pub(super) fn take<T>(&self, handle: *mut T) -> Result<Option<Box<T>>, Failure> {
        if handle.is_null() {
            return Ok(None);
        }
        self.check(handle, 1, "the handle to be freed")?;
        // SAFETY: `create` made it from a box, and nobody uses it any more: the caller's promise.
        Ok(Some(unsafe { Box::from_raw(handle) }))
    }
}

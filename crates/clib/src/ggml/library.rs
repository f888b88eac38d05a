//! Libraries of the engine, as the dynamic linker has them.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::PathBuf;

/// A library that is loaded.
pub(super) struct Library(*mut c_void);

/// What `dl_iterate_phdr` looks for and finds.
struct Search {
    prefix: &'static str,
    found: Option<PathBuf>,
}

impl Library {
    /// The library whose file name starts like this. An engine that is itself a plug-in (of Python
    /// or Node) has its libraries loaded locally, so the default search does not see them. An
    /// engine that is all in one file is found by the default search.
    pub(super) fn find(prefix: &'static str) -> Self {
        let mut search = Search { prefix, found: None };
        // SAFETY: the callback gets the address of `search`, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(compare), (&raw mut search).cast()) };
        let path = search
            .found
            .and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        let Some(path) = path else { return Self(libc::RTLD_DEFAULT) };
        // SAFETY: with NOLOAD nothing is loaded, so no code runs; it stays for as long as the
        // engine does.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        Self(if handle.is_null() { libc::RTLD_DEFAULT } else { handle })
    }

    /// A function; `F` is its type.
    ///
    /// # Safety
    /// A function of that name, where there is one, has this type.
    ///
    /// # Errors
    /// A line that says what is missing.
    pub(super) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        // SAFETY: the handle is one of `dlopen` or the default.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        // SAFETY: the caller's.
        unsafe { function_at(found, name) }
    }
}

/// The function at an address, which is NULL if there is none.
///
/// # Safety
/// The function has type `F`.
///
/// # Errors
/// A line that says what is missing.
pub(super) unsafe fn function_at<F: Copy>(
    address: *const c_void, name: &CStr,
) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    if address.is_null() {
        let name = name.to_string_lossy();
        return Err(format!("the engine has no {name}: build it with GGML_BACKEND_DL=ON"));
    }
    // SAFETY: the caller's.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

/// # Safety
/// For `dl_iterate_phdr` alone, with the address of a [`Search`].
unsafe extern "C" fn compare(
    object: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void,
) -> c_int {
    // SAFETY: the linker gives an object.
    let name = unsafe { (*object).dlpi_name };
    if name.is_null() {
        return 0;
    }
    // SAFETY: the name of an object is a string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let path = PathBuf::from(name.as_ref());
    // SAFETY: the address that the caller gave.
    let search = unsafe { &mut *search.cast::<Search>() };
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    if !file.starts_with(search.prefix) {
        return 0;
    }
    search.found = Some(path);
    1
}

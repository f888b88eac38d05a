//! Buffers: address space of the process, in which each tensor of a KV cache is a file.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{io, ptr, slice};

use kvfs_formats::slot::reference::is_referred;

use super::abi::{
    Buffer, BufferInterface, BufferType, Device, RawTensor, STATUS_FAILED, STATUS_SUCCESS,
};
use super::family::Table;
use super::files::{CacheFile, CacheFiles};
use super::region::{HUGE_PAGE_BYTES, OS_PAGE_BYTES, Region};
use super::restore::restore;
use super::rows::Rows;
use super::tensor::TensorView;
use super::{guard, plugin, say};

const NAME: &CStr = c"KVFS";

/// What tensors of the engine's attention caches are called, before the number of the layer.
pub(super) const CACHE_NAMES: [&str; 2] = ["cache_k_l", "cache_v_l"];

/// What belongs to a buffer.
pub(super) struct Memory {
    pub(super) region: Region,
    size: usize,
    /// Taken with the first tensor of a cache.
    files: Mutex<Option<CacheFiles>>,
    /// By offset in the region.
    tensors: Mutex<BTreeMap<usize, Cache>>,
    /// Nothing has been stored yet, so all is zero: a new cache is cleared, and writing its zeros
    /// would take the time and the memory of all of it.
    fresh: AtomicBool,
}

/// A tensor of a cache.
struct Cache {
    /// To be mapped.
    shared: File,
    length: usize,
    /// Where it can be read past the page cache: else the kernel reads what has left memory, fault by
    /// fault.
    file: Option<Arc<CacheFile>>,
}

pub(super) fn buffer_type(device: *mut Device) -> BufferType {
    BufferType {
        get_name: name,
        alloc_buffer: allocate,
        get_alignment: alignment,
        get_max_size: ptr::null(),
        get_alloc_size: allocated_size,
        is_host,
        device,
        context: ptr::null_mut(),
    }
}

unsafe extern "C" fn name(_: *mut BufferType) -> *const c_char {
    NAME.as_ptr()
}

/// Each tensor starts an OS page, so that it can be a file.
unsafe extern "C" fn alignment(_: *mut BufferType) -> usize {
    OS_PAGE_BYTES
}

unsafe extern "C" fn is_host(_: *mut BufferType) -> bool {
    true
}

/// What a tensor takes of a buffer. Those of a cache take whole huge pages, so that the kernel can map
/// their files in such: two threads read 35 GB/s then, and 26 from pages of 4 KiB.
///
/// # Safety
/// A tensor of the engine.
unsafe extern "C" fn allocated_size(_: *mut BufferType, tensor: *const RawTensor) -> usize {
    // SAFETY: the caller's.
    let bytes = unsafe { (plugin().engine.functions.nbytes)(tensor) };
    // SAFETY: the caller's.
    let tensor = unsafe { TensorView::new(tensor) };
    let is_cache =
        |tensor: TensorView<'_>| CACHE_NAMES.iter().any(|name| tensor.name().starts_with(name));
    if bytes >= HUGE_PAGE_BYTES && tensor.is_some_and(is_cache) {
        bytes.next_multiple_of(HUGE_PAGE_BYTES)
    } else {
        bytes
    }
}

/// # Safety
/// `kind` is this backend's type.
unsafe extern "C" fn allocate(kind: *mut BufferType, size: usize) -> *mut Buffer {
    guard(ptr::null_mut(), || {
        let region = match Region::reserve(size) {
            Ok(region) => region,
            Err(error) => {
                say(&format!("{size} bytes of address space: {error}"));
                return ptr::null_mut();
            }
        };
        let memory = Memory {
            region,
            size,
            files: Mutex::default(),
            tensors: Mutex::default(),
            fresh: AtomicBool::new(true),
        };
        // The engine does without the others: it copies by `set_tensor` and `get_tensor`.
        let interface = BufferInterface(plugin().engine.family.fill(
            Table::Buffer,
            &[
                ("free_buffer", free as *const c_void),
                ("get_base", base as *const c_void),
                ("init_tensor", init_tensor as *const c_void),
                ("memset_tensor", memset_tensor as *const c_void),
                ("set_tensor", set_tensor as *const c_void),
                ("get_tensor", get_tensor as *const c_void),
                ("clear", clear as *const c_void),
            ],
        ));
        let context = Box::into_raw(Box::new(memory)).cast();
        // SAFETY: the interface is of the engine's family, the context this module's.
        unsafe { (plugin().engine.functions.buffer_init)(kind, interface, context, size) }
    })
}

/// # Safety
/// A buffer that `allocate` made.
unsafe fn context(buffer: *mut Buffer) -> *mut Memory {
    // SAFETY: the caller's.
    unsafe { plugin().engine.family.buffer_field(buffer, "context") }.cast_mut().cast()
}

/// # Safety
/// A buffer that `allocate` made.
unsafe fn memory<'a>(buffer: *mut Buffer) -> &'a Memory {
    // SAFETY: the caller's.
    let context = unsafe { context(buffer) };
    // SAFETY: the context of such a buffer is a box of this.
    unsafe { &*context }
}

/// # Safety
/// As [`memory`], and nobody uses the buffer any more.
unsafe extern "C" fn free(buffer: *mut Buffer) {
    // SAFETY: the caller's.
    let context = unsafe { context(buffer) };
    // SAFETY: the context of such a buffer is a box of this.
    let memory = unsafe { Box::from_raw(context) };
    guard((), || drop(memory));
}

/// # Safety
/// As [`memory`].
unsafe extern "C" fn base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe { memory(buffer) }.region.base()
}

/// # Safety
/// As [`memory`], and a tensor of it.
unsafe extern "C" fn init_tensor(buffer: *mut Buffer, tensor: *mut RawTensor) -> c_int {
    guard(STATUS_FAILED, || {
        // SAFETY: the caller's.
        let memory = unsafe { memory(buffer) };
        // SAFETY: the caller's.
        let Some(tensor) = (unsafe { TensorView::new(tensor) }) else { return STATUS_FAILED };
        match memory.init(tensor) {
            Ok(()) => STATUS_SUCCESS,
            Err(line) => {
                say(&line);
                STATUS_FAILED
            }
        }
    })
}

impl Memory {
    /// Maps a file for a tensor of a cache; other tensors stay in memory.
    fn init(&self, tensor: TensorView<'_>) -> Result<(), String> {
        let name = tensor.name();
        let layer = CACHE_NAMES.iter().find_map(|prefix| name.strip_prefix(prefix));
        let is_layer = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !tensor.raw().view_src.is_null() || !layer.is_some_and(is_layer) {
            return Ok(());
        }
        let missing = || format!("{name}: not a tensor of this buffer");
        let Some(bytes) = tensor.bytes() else {
            // A type that no operation here takes: stock keeps it in memory.
            return Ok(());
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let length = bytes.len().next_multiple_of(OS_PAGE_BYTES);
        let offset = self.region.offset_of(tensor.raw().data, length).ok_or_else(missing)?;
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if files.is_none() {
            *files = Some(CacheFiles::take(&plugin().directory)?);
        }
        let files = files.as_ref().expect("taken above");
        let file = files.create(name, length)?;
        self.region.map(offset, length, &file).map_err(|error| format!("{name}: {error}"))?;
        let read = CacheFile::open(&files.path(name)).ok().map(Arc::new);
        self.tensors().insert(offset, Cache { shared: file, length, file: read });
        Ok(())
    }

    fn tensors(&self) -> MutexGuard<'_, BTreeMap<usize, Cache>> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps bytes of a page from `start` on into the cache where `range` is.
    pub(super) fn map_page(&self, range: Range<usize>, page: &File, start: u64) -> io::Result<()> {
        let tensors = self.tensors();
        let found = tensors.range(..=range.start).next_back();
        let (offset, cache) = found.ok_or(io::ErrorKind::InvalidInput)?;
        let file = cache.file.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let cache_end = offset + cache.length;
        if range.end > cache_end {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.region.map_private(range.clone(), page, start)?;
        file.cover(range.start - offset..range.end - offset);
        // What follows is written row by row. Where the kernel reads megabytes ahead, or fills a huge
        // page, the first of them would wait for that in each K and V of a layer.
        let huge_page_end = range.end.next_multiple_of(HUGE_PAGE_BYTES);
        self.region.touch_alone(range.end..huge_page_end.min(cache_end));
        Ok(())
    }

    /// Maps the files of caches again where pages are instead.
    fn remove_pages(&self) {
        for (offset, cache) in &*self.tensors() {
            if !cache.file.as_ref().is_some_and(|file| file.uncover()) {
                continue;
            }
            if let Err(error) = self.region.map(*offset, cache.length, &cache.shared) {
                say(&format!("the file of a cache: {error}"));
            }
        }
    }

    /// Says that something is stored now.
    fn touch(&self) {
        self.fresh.store(false, Ordering::Relaxed);
    }
}

/// Whether a buffer, or NULL, is one of this backend.
pub(super) fn is_ours(buffer: *mut Buffer) -> bool {
    if buffer.is_null() {
        return false;
    }
    let plugin = plugin();
    // SAFETY: a buffer that a tensor has is one of the engine's.
    let kind = unsafe { (plugin.engine.functions.buffer_get_type)(buffer) };
    kind == plugin.tables.buffer_type()
}

/// Says that an operation writes to a tensor; whether its buffer is one of this backend.
pub(super) fn touch(tensor: TensorView<'_>) -> bool {
    let buffer = tensor.root().raw().buffer;
    if !is_ours(buffer) {
        return false;
    }
    // SAFETY: `allocate` made it.
    unsafe { memory(buffer) }.touch();
    true
}

/// The file of a tensor that is a view of no other, if it is one of a cache.
pub(super) fn cache_file(root: TensorView<'_>) -> Option<Arc<CacheFile>> {
    let buffer = root.raw().buffer;
    if !is_ours(buffer) {
        return None;
    }
    // SAFETY: `allocate` made it.
    let memory = unsafe { memory(buffer) };
    let offset = memory.region.offset_of(root.raw().data, 0)?;
    memory.tensors().get(&offset)?.file.clone()
}

/// Address of a part of a tensor, if it lies in the buffer.
fn part(memory: &Memory, tensor: *const RawTensor, offset: usize, size: usize) -> *mut u8 {
    // SAFETY: the engine gives a tensor.
    let start = unsafe { (*tensor).data }.wrapping_byte_add(offset);
    if memory.region.offset_of(start, size).is_some() { start.cast() } else { ptr::null_mut() }
}

/// # Safety
/// As [`memory`], and a tensor of it.
unsafe extern "C" fn memset_tensor(
    buffer: *mut Buffer, tensor: *mut RawTensor, value: u8, offset: usize, size: usize,
) {
    // SAFETY: the caller's.
    let memory = unsafe { memory(buffer) };
    memory.touch();
    let to = part(memory, tensor, offset, size);
    if !to.is_null() {
        // SAFETY: the part lies in the buffer.
        unsafe { ptr::write_bytes(to, value, size) };
    }
}

/// # Safety
/// As [`memory`], a tensor of it, and `size` bytes at `data`.
unsafe extern "C" fn set_tensor(
    buffer: *mut Buffer, tensor: *mut RawTensor, data: *const c_void, offset: usize, size: usize,
) {
    // SAFETY: the caller's.
    let memory = unsafe { memory(buffer) };
    memory.touch();
    let to = part(memory, tensor, offset, size);
    if to.is_null() {
        return;
    }
    guard((), || {
        // SAFETY: the caller's; it is only read before the part is written, or lies elsewhere.
        let from = unsafe { slice::from_raw_parts(data.cast::<u8>(), size) };
        // SAFETY: the caller's.
        let tensor = unsafe { TensorView::new(tensor) };
        let rows = tensor.and_then(|tensor| Rows::new(memory, tensor, to, size));
        if let Some(rows) = rows.filter(|_| is_referred(from)) {
            if let Err(line) = restore(&rows, from, plugin().model.as_ref()) {
                say(&line);
            }
            return;
        }
        // SAFETY: the part lies in the buffer; it may be what is copied.
        unsafe { ptr::copy(data.cast(), to, size) };
    });
}

/// # Safety
/// As [`memory`], a tensor of it, and room for `size` bytes at `data`.
unsafe extern "C" fn get_tensor(
    buffer: *mut Buffer, tensor: *const RawTensor, data: *mut c_void, offset: usize, size: usize,
) {
    // SAFETY: the caller's.
    let memory = unsafe { memory(buffer) };
    let from = part(memory, tensor, offset, size);
    if !from.is_null() {
        // SAFETY: the part lies in the buffer; it may be where it is copied to.
        unsafe { ptr::copy(from, data.cast(), size) };
    }
}

/// # Safety
/// As [`memory`].
unsafe extern "C" fn clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: the caller's.
    let memory = unsafe { memory(buffer) };
    memory.remove_pages();
    let fresh = memory.fresh.swap(false, Ordering::Relaxed);
    if !(fresh && value == 0) {
        // SAFETY: the region is as long.
        unsafe { ptr::write_bytes(memory.region.base().cast::<u8>(), value, memory.size) };
    }
}

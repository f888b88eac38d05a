//! Rows of a cache that the engine loads: where they go, by copy or by a mapping.

use std::fs::File;
use std::{io, ptr};

use super::buffer::{CACHE_NAMES, Memory};
use super::tensor::TensorView;

/// Where rows go that the engine loads.
pub(super) struct Rows<'m> {
    memory: &'m Memory,
    /// Of the tensor.
    pub(super) name: String,
    pub(super) layer: u32,
    pub(super) is_v: bool,
    pub(super) row_bytes: usize,
    to: *mut u8,
    length: usize,
}

impl<'m> Rows<'m> {
    /// The `length` bytes from `to` on, which lie in the memory; nothing, if the tensor is none of a
    /// cache.
    pub(super) fn new(
        memory: &'m Memory, tensor: TensorView<'_>, to: *mut u8, length: usize,
    ) -> Option<Self> {
        let root = tensor.root();
        let name = root.name();
        let (is_v, layer) = match CACHE_NAMES.map(|prefix| name.strip_prefix(prefix)) {
            [Some(layer), _] => (false, layer),
            [_, Some(layer)] => (true, layer),
            _ => return None,
        };
        let row_bytes = root.strides()[1];
        let layer = layer.parse().ok()?;
        Some(Self { memory, name: name.to_owned(), layer, is_v, row_bytes, to, length })
    }

    fn part(&self, at: usize, length: usize) -> *mut u8 {
        assert!(at.checked_add(length).is_some_and(|end| end <= self.length));
        self.to.wrapping_add(at)
    }

    pub(super) fn copy(&self, at: usize, from: &[u8]) {
        let to = self.part(at, from.len());
        // SAFETY: the part lies in the buffer; the engine may load rows from where they are.
        unsafe { ptr::copy(from.as_ptr(), to, from.len()) };
    }

    pub(super) fn zero(&self, at: usize, length: usize) {
        let to = self.part(at, length);
        // SAFETY: the part lies in the buffer.
        unsafe { ptr::write_bytes(to, 0, length) };
    }

    /// Maps `length` bytes of a page from `start` on to where they belong.
    pub(super) fn map(&self, at: usize, page: &File, start: u64, length: usize) -> io::Result<()> {
        let to = self.part(at, length);
        let first = self.memory.region.offset_of(to.cast(), length);
        let first = first.ok_or(io::ErrorKind::InvalidInput)?;
        self.memory.map_page(first..first + length, page, start)
    }
}

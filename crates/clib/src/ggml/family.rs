//! Families of ggml's versions, by what lies where in the structures of `ggml-backend-impl.h`.
//!
//! ggml keeps one `GGML_BACKEND_API_VERSION` while these change. Each structure that holds functions is
//! a table of words here, named in their order; fields stand behind the functions. [`probe`](super::probe)
//! asks a live engine for the same.

use std::ffi::c_void;
use std::ptr;

use super::abi::{Backend, Buffer};

/// More than any family has in one structure.
pub(super) const WORDS_MAX: usize = 24;

/// A word of a structure: a function, or a field.
pub(super) type Word = *const c_void;

/// Structures that hold functions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Table {
    BufferType,
    Buffer,
    Backend,
    Device,
    Registration,
}

impl Table {
    /// As lines say it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::BufferType => "buffer type",
            Self::Buffer => "buffer",
            Self::Backend => "backend",
            Self::Device => "device",
            Self::Registration => "registration",
        }
    }
}

/// Versions whose structures are alike.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    /// Those that were compared with their sources and tried.
    pub(super) versions: &'static [&'static str],
    buffer: &'static [&'static str],
    backend: &'static [&'static str],
}

const BUFFER_TYPE: &[&str] = &[
    "get_name",
    "alloc_buffer",
    "get_alignment",
    "get_max_size",
    "get_alloc_size",
    "is_host",
    "device",
];

const DEVICE: &[&str] = &[
    "get_name",
    "get_description",
    "get_memory",
    "get_type",
    "get_props",
    "init_backend",
    "get_buffer_type",
    "get_host_buffer_type",
    "buffer_from_host_ptr",
    "supports_op",
    "supports_buft",
    "offload_op",
    "event_new",
    "event_free",
    "event_synchronize",
    "registration",
];

const REGISTRATION: &[&str] =
    &["api_version", "get_name", "get_device_count", "get_device", "get_proc_address"];

/// From the oldest to the newest.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        name: "0.9.7",
        versions: &["0.9.7"],
        buffer: &[
            "free_buffer",
            "get_base",
            "init_tensor",
            "memset_tensor",
            "set_tensor",
            "get_tensor",
            "cpy_tensor",
            "clear",
            "reset",
            "type",
            "context",
            "size",
        ],
        backend: &[
            "guid",
            "get_name",
            "free",
            "set_tensor_async",
            "get_tensor_async",
            "cpy_tensor_async",
            "synchronize",
            "graph_plan_create",
            "graph_plan_free",
            "graph_plan_update",
            "graph_plan_compute",
            "graph_compute",
            "event_record",
            "event_wait",
            "graph_optimize",
            "device",
        ],
    },
    // Copies in two dimensions were added.
    Family {
        name: "0.15 to 0.25",
        versions: &["0.15.3", "0.17.0", "0.19.0", "0.23.0", "0.25.1", "0.25.3"],
        buffer: &[
            "free_buffer",
            "get_base",
            "init_tensor",
            "memset_tensor",
            "set_tensor",
            "get_tensor",
            "set_tensor_2d",
            "get_tensor_2d",
            "cpy_tensor",
            "clear",
            "reset",
            "type",
            "context",
            "size",
        ],
        backend: &[
            "guid",
            "get_name",
            "free",
            "set_tensor_async",
            "get_tensor_async",
            "set_tensor_2d_async",
            "get_tensor_2d_async",
            "cpy_tensor_async",
            "synchronize",
            "graph_plan_create",
            "graph_plan_free",
            "graph_plan_update",
            "graph_plan_compute",
            "graph_compute",
            "event_record",
            "event_wait",
            "graph_optimize",
            "device",
        ],
    },
];

impl Family {
    pub(super) fn words(&self, table: Table) -> &'static [&'static str] {
        match table {
            Table::BufferType => BUFFER_TYPE,
            Table::Buffer => self.buffer,
            Table::Backend => self.backend,
            Table::Device => DEVICE,
            Table::Registration => REGISTRATION,
        }
    }

    /// Where a word stands, if the family has it.
    pub(super) fn position(&self, table: Table, word: &str) -> Option<usize> {
        self.words(table).iter().position(|name| *name == word)
    }

    /// A structure that has these words where this family has them, and NULL elsewhere.
    pub(super) fn fill(&self, table: Table, words: &[(&str, Word)]) -> [Word; WORDS_MAX] {
        let mut filled = [ptr::null(); WORDS_MAX];
        for (to, name) in filled.iter_mut().zip(self.words(table)) {
            *to =
                words.iter().find(|(known, _)| known == name).map_or(ptr::null(), |found| found.1);
        }
        filled
    }

    /// A field of a buffer of the engine.
    ///
    /// # Safety
    /// A buffer of an engine of this family, which has the field.
    pub(super) unsafe fn buffer_field(&self, buffer: *const Buffer, field: &str) -> Word {
        // SAFETY: the caller's.
        unsafe { word(buffer.cast(), self.position(Table::Buffer, field)) }
    }

    /// A field of a backend of the engine.
    ///
    /// # Safety
    /// A backend of an engine of this family, which has the field.
    pub(super) unsafe fn backend_field(&self, backend: *const Backend, field: &str) -> Word {
        // SAFETY: the caller's.
        unsafe { word(backend.cast(), self.position(Table::Backend, field)) }
    }
}

/// # Safety
/// The structure has a word at the position.
unsafe fn word(structure: *const Word, position: Option<usize>) -> Word {
    // SAFETY: the caller's.
    position.map_or(ptr::null(), |position| unsafe { structure.wrapping_add(position).read() })
}

//! Which family the engine is of, as it shows itself.
//!
//! Its public functions are given structures whose words are all functions of this module, each of which
//! notes that it was called: so the engine tells where it looks for what, and no word of it is called
//! on a guess. All of this runs in a child process ([`child`](super::child)).

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use super::abi::{Buffer, BufferInterface, BufferType, RawTensor};
use super::engine::Functions;
use super::family::{FAMILIES, Family, Table, WORDS_MAX, Word};
use super::library::Library;

/// As long as the buffer that is shown to the engine, aligned as it wants its memory.
#[repr(align(64))]
struct Scratch([AtomicU8; SCRATCH_BYTES]);

const SCRATCH_BYTES: usize = 4096;
const NOTHING: usize = usize::MAX;

static SCRATCH: Scratch = Scratch([const { AtomicU8::new(0) }; SCRATCH_BYTES]);
/// The word that was called last.
static CALLED: AtomicUsize = AtomicUsize::new(NOTHING);

/// The word at a position: whatever it is given, it returns what can be used as a pointer, an empty
/// string, a large number.
extern "C" fn traced<const POSITION: usize>() -> Word {
    CALLED.store(POSITION, Ordering::Relaxed);
    scratch()
}

fn scratch() -> Word {
    SCRATCH.0.as_ptr().cast()
}

fn traced_words() -> [Word; WORDS_MAX] {
    macro_rules! words {
        ($($position:literal)*) => { [$(traced::<$position> as Word),*] };
    }
    words![0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23]
}

/// What a function of the engine is given.
#[derive(Clone, Copy)]
enum Argument {
    /// The structure.
    This,
    Tensor,
    Scratch,
    Number(usize),
}
use Argument::{Number, Scratch as Memory, Tensor, This};

/// A function of the engine, and the word that it uses of a structure.
struct Use {
    function: &'static CStr,
    table: Table,
    word: &'static str,
    arguments: &'static [Argument],
}

/// `[function] table.word (arguments)` in the form of a [`Use`].
macro_rules! uses {
    ($($table:ident { $($function:literal $word:literal [$($argument:expr),*];)* })*) => {
        &[$($(Use { function: $function, table: Table::$table, word: $word, arguments: &[$($argument),*] }),*),*]
    };
}

/// What is freed comes last. Where a field is asked for, the function returns it.
const USES: &[Use] = uses! {
    BufferType {
        c"ggml_backend_buft_name" "get_name" [This];
        c"ggml_backend_buft_alloc_buffer" "alloc_buffer" [This, Number(64)];
        c"ggml_backend_buft_get_alignment" "get_alignment" [This];
        c"ggml_backend_buft_get_max_size" "get_max_size" [This];
        c"ggml_backend_buft_get_alloc_size" "get_alloc_size" [This, Tensor];
        c"ggml_backend_buft_is_host" "is_host" [This];
        c"ggml_backend_buft_get_device" "device" [This];
    }
    Device {
        c"ggml_backend_dev_name" "get_name" [This];
        c"ggml_backend_dev_description" "get_description" [This];
        c"ggml_backend_dev_memory" "get_memory" [This, Memory, Memory];
        c"ggml_backend_dev_type" "get_type" [This];
        c"ggml_backend_dev_get_props" "get_props" [This, Memory];
        c"ggml_backend_dev_init" "init_backend" [This, Memory];
        c"ggml_backend_dev_buffer_type" "get_buffer_type" [This];
        c"ggml_backend_dev_host_buffer_type" "get_host_buffer_type" [This];
        c"ggml_backend_dev_buffer_from_host_ptr" "buffer_from_host_ptr" [This, Memory, Number(64), Number(64)];
        c"ggml_backend_dev_supports_op" "supports_op" [This, Tensor];
        c"ggml_backend_dev_supports_buft" "supports_buft" [This, Memory];
        c"ggml_backend_dev_offload_op" "offload_op" [This, Tensor];
        c"ggml_backend_event_new" "event_new" [This];
        c"ggml_backend_dev_backend_reg" "registration" [This];
    }
    Registration {
        c"ggml_backend_reg_name" "get_name" [This];
        c"ggml_backend_reg_dev_count" "get_device_count" [This];
        c"ggml_backend_reg_dev_get" "get_device" [This, Number(0)];
        c"ggml_backend_reg_get_proc_address" "get_proc_address" [This, Memory];
    }
    Buffer {
        c"ggml_backend_buffer_get_base" "get_base" [This];
        c"ggml_backend_buffer_init_tensor" "init_tensor" [This, Tensor];
        c"ggml_backend_tensor_memset" "memset_tensor" [Tensor, Number(0), Number(0), Number(16)];
        c"ggml_backend_tensor_set" "set_tensor" [Tensor, Memory, Number(0), Number(16)];
        c"ggml_backend_tensor_get" "get_tensor" [Tensor, Memory, Number(0), Number(16)];
        c"ggml_backend_tensor_set_2d" "set_tensor_2d"
            [Tensor, Memory, Number(0), Number(16), Number(2), Number(16), Number(16)];
        c"ggml_backend_tensor_get_2d" "get_tensor_2d"
            [Tensor, Memory, Number(0), Number(16), Number(2), Number(16), Number(16)];
        c"ggml_backend_buffer_copy_tensor" "cpy_tensor" [Tensor, Tensor];
        c"ggml_backend_buffer_clear" "clear" [This, Number(0)];
        c"ggml_backend_buffer_reset" "reset" [This];
        c"ggml_backend_buffer_free" "free_buffer" [This];
    }
    Backend {
        c"ggml_backend_guid" "guid" [This];
        c"ggml_backend_name" "get_name" [This];
        c"ggml_backend_tensor_set_async" "set_tensor_async" [This, Tensor, Memory, Number(0), Number(16)];
        c"ggml_backend_tensor_get_async" "get_tensor_async" [This, Tensor, Memory, Number(0), Number(16)];
        c"ggml_backend_tensor_set_2d_async" "set_tensor_2d_async"
            [This, Tensor, Memory, Number(0), Number(16), Number(2), Number(16), Number(16)];
        c"ggml_backend_tensor_get_2d_async" "get_tensor_2d_async"
            [This, Tensor, Memory, Number(0), Number(16), Number(2), Number(16), Number(16)];
        c"ggml_backend_synchronize" "synchronize" [This];
        c"ggml_backend_graph_plan_create" "graph_plan_create" [This, Memory];
        c"ggml_backend_graph_plan_compute" "graph_plan_compute" [This, Memory];
        c"ggml_backend_graph_plan_free" "graph_plan_free" [This, Memory];
        c"ggml_backend_graph_compute_async" "graph_compute" [This, Memory];
        c"ggml_backend_event_record" "event_record" [Memory, This];
        c"ggml_backend_event_wait" "event_wait" [This, Memory];
        c"ggml_backend_get_device" "device" [This];
        c"ggml_backend_free" "free" [This];
    }
};

/// Any function whose arguments are pointers and numbers: those that it does not have are not looked at.
type Function =
    unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize) -> Word;

/// Where the engine found a word; nowhere, if it has no such function.
struct Seen {
    used: &'static Use,
    position: Option<usize>,
}

/// The family whose structures the engine uses.
///
/// # Safety
/// In a child process. The tensor is the engine's, has a KiB of memory and no buffer.
///
/// # Errors
/// A line that says what differs from the family that is most like it.
pub(super) unsafe fn family(
    base: &Library, functions: &Functions, tensor: *mut RawTensor,
) -> Result<&'static Family, String> {
    let mut words = traced_words();
    let this: Word = words.as_mut_ptr().cast();
    // SAFETY: it keeps a copy of the words; the type, the context and the size are not looked into.
    let buffer = unsafe {
        let (kind, context) = (this.cast_mut().cast::<BufferType>(), scratch().cast_mut());
        (functions.buffer_init)(kind, BufferInterface(words), context, SCRATCH_BYTES)
    };
    // SAFETY: the caller's.
    unsafe { (*tensor).buffer = buffer };
    let mut seen = Vec::with_capacity(USES.len());
    for used in USES {
        if used.word == "free_buffer" {
            // SAFETY: the engine made the buffer, which is still there.
            unsafe { check_fields(&seen, buffer, this)? };
        }
        let structure = if used.table == Table::Buffer { buffer.cast_const().cast() } else { this };
        // SAFETY: the caller's.
        let position = unsafe { position(base, used, structure, tensor) };
        if used.word == "free_buffer" {
            // SAFETY: the caller's.
            unsafe { (*tensor).buffer = std::ptr::null_mut() };
        }
        seen.push(Seen { used, position });
    }
    best(&seen)
}

/// # Safety
/// As [`family`], with such a structure.
unsafe fn position(
    base: &Library, used: &Use, structure: Word, tensor: *mut RawTensor,
) -> Option<usize> {
    // SAFETY: the function takes and returns pointers and numbers.
    let function: Function = unsafe { base.function(used.function) }.ok()?;
    let mut v = [0; 8];
    for (value, argument) in v.iter_mut().zip(used.arguments) {
        *value = match argument {
            This => structure.addr(),
            Tensor => tensor.addr(),
            Memory => scratch().addr(),
            Number(number) => *number,
        };
    }
    CALLED.store(NOTHING, Ordering::Relaxed);
    // SAFETY: the caller's: what it does wrong ends the child.
    let returned = unsafe { function(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]) };
    match CALLED.load(Ordering::Relaxed) {
        NOTHING => traced_words().iter().position(|word| *word == returned),
        called => Some(called),
    }
}

/// The family that has every word where the engine looks for it.
fn best(seen: &[Seen]) -> Result<&'static Family, String> {
    let differences = |family: &Family| {
        let differs =
            |seen: &&Seen| seen.position != family.position(seen.used.table, seen.used.word);
        seen.iter().filter(differs).count()
    };
    let best =
        FAMILIES.iter().min_by_key(|family| differences(family)).expect("there are families");
    let differs = |seen: &&Seen| seen.position != best.position(seen.used.table, seen.used.word);
    let Some(Seen { used, position }) = seen.iter().find(differs) else { return Ok(best) };
    let place = |position: Option<usize>| {
        position.map_or("nowhere".to_owned(), |position| format!("at word {position}"))
    };
    Err(format!(
        "{} finds {} of a {} {}, ggml {} has it {}",
        used.function.to_string_lossy(),
        used.word,
        used.table.name(),
        place(*position),
        best.name,
        place(best.position(used.table, used.word)),
    ))
}

/// Fields of a buffer stand behind its functions, so those that were seen tell where.
///
/// # Safety
/// The buffer is the engine's, of the type, as [`family`] made it.
unsafe fn check_fields(seen: &[Seen], buffer: *mut Buffer, kind: Word) -> Result<(), String> {
    let family = best(seen)?;
    let size = std::ptr::without_provenance::<c_void>(SCRATCH_BYTES);
    for (field, expected) in [("type", kind), ("context", scratch()), ("size", size)] {
        // SAFETY: the caller's; an engine that has it elsewhere has a buffer of about this size.
        if unsafe { family.buffer_field(buffer, field) } != expected {
            return Err(format!("a buffer has no {field} where ggml {} has it", family.name));
        }
    }
    Ok(())
}

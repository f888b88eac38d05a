//! The engine put to the trial: tensors, types and operations are what this library takes them for.
//!
//! A small attention is computed by the engine's CPU backend, then with this library's in its place,
//! and by hand; rows of its cache are stored by `SET_ROWS`. Everything here runs in a child process
//! ([`child`](super::child)), so a structure that is not what it was ends that and nothing else.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use half::f16;

use super::abi::{
    Buffer, BufferType, Custom, FLAG_COMPUTE, FLAG_OUTPUT, Graph, InitParameters, OPERATION_NONE,
    PoolParameters, Properties, RawTensor, TensorContext, types,
};
use super::cpu::Cpu;
use super::engine::{Engine, Operations};
use super::family::{Family, Table, Word};
use super::job::Job;
use super::library::Library;
use super::operation::FlashAttention;
use super::replace::Replaced;
use super::tensor::TensorView;

const HEAD_DIM: usize = 64;
const KV_HEADS: usize = 2;
const QO_HEADS: usize = 4;
const QUERIES: usize = 2;
const CELLS: usize = 32;
const WIDTH: usize = HEAD_DIM * KV_HEADS;
/// The cells that rows are stored in; the first query sees all but the last.
const STORED: [usize; 4] = [3, 7, 8, 20];
const MEMORY_BYTES: usize = 1 << 20;
/// The root of `HEAD_DIM`.
const SCALE: f32 = 1.0 / 8.0;
/// Of sums of numbers around 1, in f16.
const TOLERANCE: f32 = 0.02;
/// What nobody has written yet.
const PATTERN: u8 = 0xa5;

/// Types that caches and operations have here, with their blocks: bytes and elements.
const TYPES: [(i32, &CStr, usize, i64); 7] = [
    (types::F32, c"f32", 4, 1),
    (types::F16, c"f16", 2, 1),
    (types::Q4_0, c"q4_0", 18, 32),
    (types::Q8_0, c"q8_0", 34, 32),
    (types::I32, c"i32", 4, 1),
    (types::I64, c"i64", 8, 1),
    (types::BF16, c"bf16", 2, 1),
];

/// A function of the engine, by its type.
macro_rules! function {
    ($base:expr, $name:literal, ($($argument:ty),*) -> $result:ty) => {{
        type Function = unsafe extern "C" fn($($argument),*) -> $result;
        // SAFETY: the type is that of the header.
        unsafe { $base.function::<Function>($name) }?
    }};
}

/// Calls a function of the engine.
macro_rules! call {
    ($function:expr $(, $argument:expr)*) => {{
        let function = $function;
        // SAFETY: in a child process, with what the header says.
        unsafe { function($($argument),*) }
    }};
}

fn check(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn look<'t>(tensor: *const RawTensor) -> Result<TensorView<'t>, String> {
    // SAFETY: the engine made it, and keeps it as long as the context, which is for ever.
    unsafe { TensorView::new(tensor) }.ok_or_else(|| "a tensor has no shape".to_owned())
}

/// What makes tensors.
pub(super) struct Trial<'a> {
    base: &'a Library,
    context: *mut TensorContext,
    operations: Operations,
}

impl<'a> Trial<'a> {
    /// # Errors
    /// A line that says what is missing.
    pub(super) fn new(base: &'a Library, operations: Operations) -> Result<Self, String> {
        let init = function!(base, c"ggml_init", (InitParameters) -> *mut TensorContext);
        let parameters =
            InitParameters { bytes: MEMORY_BYTES, memory: ptr::null_mut(), without_data: false };
        let context = call!(init, parameters);
        check(!context.is_null(), || "the engine has no memory".to_owned())?;
        Ok(Self { base, context, operations })
    }

    /// A tensor with memory, all zero.
    pub(super) fn tensor(&self, kind: i32, shape: [usize; 4]) -> Result<*mut RawTensor, String> {
        let new = function!(self.base, c"ggml_new_tensor_4d",
            (*mut TensorContext, c_int, i64, i64, i64, i64) -> *mut RawTensor);
        let [a, b, c, d] = shape.map(long);
        let tensor = call!(new, self.context, kind, a, b, c, d);
        check(!tensor.is_null(), || "the engine makes no tensor".to_owned())?;
        // SAFETY: the engine made it, and `check_tensor` has looked at its fields.
        let data = unsafe { (*tensor).data };
        let nbytes = function!(self.base, c"ggml_nbytes", (*const RawTensor) -> usize);
        let bytes = call!(nbytes, tensor);
        // SAFETY: the tensor has as much.
        unsafe { ptr::write_bytes(data.cast::<u8>(), 0, bytes) };
        Ok(tensor)
    }

    fn view(
        &self, of: *mut RawTensor, shape: [usize; 3], nb: [usize; 2], offset: usize,
    ) -> Result<*mut RawTensor, String> {
        let view = function!(self.base, c"ggml_view_3d",
            (*mut TensorContext, *mut RawTensor, i64, i64, i64, usize, usize, usize) -> *mut RawTensor);
        let [a, b, c] = shape.map(long);
        Ok(call!(view, self.context, of, a, b, c, nb[0], nb[1], offset))
    }

    /// Fields of a tensor, by what the engine says of it.
    pub(super) fn check_tensor(&self) -> Result<(), String> {
        let new = function!(self.base, c"ggml_new_tensor_4d",
            (*mut TensorContext, c_int, i64, i64, i64, i64) -> *mut RawTensor);
        let set_name = function!(self.base, c"ggml_set_name",
            (*mut RawTensor, *const c_char) -> *mut RawTensor);
        let get_name = function!(self.base, c"ggml_get_name", (*const RawTensor) -> *const c_char);
        let get_data = function!(self.base, c"ggml_get_data", (*const RawTensor) -> *mut c_void);
        let set_output = function!(self.base, c"ggml_set_output", (*mut RawTensor) -> ());
        let made = call!(new, self.context, types::F16, 64, 5, 3, 2);
        call!(set_name, made, c"kvfs".as_ptr());
        let differs = |field: &str| format!("a tensor has no {field} where it was");
        // SAFETY: the engine made it; what lies elsewhere shows below, or ends the child.
        let raw = unsafe { &*made };
        check((raw.kind, raw.ne) == (types::F16, [64, 5, 3, 2]), || differs("type or shape"))?;
        check(raw.nb == [2, 128, 640, 1920], || differs("strides"))?;
        check((raw.op, raw.flags) == (OPERATION_NONE, 0), || differs("operation or flags"))?;
        check(raw.buffer.is_null() && raw.view_src.is_null(), || differs("buffer"))?;
        check(raw.src.iter().all(|source| source.is_null()), || differs("sources"))?;
        check(!raw.data.is_null() && raw.data == call!(get_data, made), || differs("data"))?;
        check(raw.name.as_ptr() == call!(get_name, made), || differs("name"))?;
        check(TensorView::name(&look(made)?) == "kvfs", || differs("name"))?;
        call!(set_output, made);
        // SAFETY: as above.
        check(unsafe { (*made).flags } == FLAG_OUTPUT, || differs("flags"))?;
        let view = self.view(made, [32, 4, 1], [128, 640], 128)?;
        // SAFETY: as above.
        let raw_view = unsafe { &*view };
        let of = (raw_view.view_src, raw_view.view_offs, raw_view.src[0]);
        check(of == (made, 128, made), || differs("source of a view"))?;
        check(raw_view.op == self.operations.views[1], || differs("operation"))
    }

    /// Numbers and blocks of types.
    pub(super) fn check_types(&self) -> Result<(), String> {
        let name = function!(self.base, c"ggml_type_name", (c_int) -> *const c_char);
        let size = function!(self.base, c"ggml_type_size", (c_int) -> usize);
        let block = function!(self.base, c"ggml_blck_size", (c_int) -> i64);
        for (kind, expected, bytes, elements) in TYPES {
            let differs = || format!("type {kind} is not {}", expected.to_string_lossy());
            let found = call!(name, kind);
            check(!found.is_null(), differs)?;
            // SAFETY: a name is a string that stays.
            check(unsafe { CStr::from_ptr(found) } == expected, differs)?;
            check((call!(size, kind), call!(block, kind)) == (bytes, elements), || {
                format!("a block of {} has another size", expected.to_string_lossy())
            })?;
        }
        Ok(())
    }

    /// Structures that the engine fills in: neither shorter nor longer than here, and the number of
    /// threads where it is expected.
    pub(super) fn check_filled(&self, engine: &Engine) -> Result<(), String> {
        const ROOM: usize = 2048;
        let length =
            |bytes: &[u8]| bytes.iter().rposition(|byte| *byte != PATTERN).map_or(0, |at| at + 1);
        let props = function!(self.base, c"ggml_backend_dev_get_props", (Word, *mut c_void) -> ());
        let mut room = [[PATTERN; ROOM]; 2];
        call!(props, engine.cpu_device.cast_const().cast(), room[0].as_mut_ptr().cast());
        call!(engine.functions.pool_parameters_init, room[1].as_mut_ptr().cast(), 77);
        let lengths = (length(&room[0]), length(&room[1]));
        let parameters = size_of::<PoolParameters>();
        // Padding at the end may be left alone.
        check(lengths.0 == size_of::<Properties>(), || {
            "ggml_backend_dev_props has another size".to_owned()
        })?;
        check((parameters - 3..=parameters).contains(&lengths.1) && room[1][512] == 77, || {
            "ggml_threadpool_params is another".to_owned()
        })
    }

    /// A buffer and a backend of the engine's own have their fields where the family has them, and a
    /// tensor in the buffer keeps what is written.
    pub(super) fn check_live(&self, engine: &Engine, family: &Family) -> Result<(), String> {
        let cpu = function!(self.base, c"ggml_backend_cpu_buffer_type", () -> *mut BufferType);
        let allocate = function!(self.base, c"ggml_backend_buft_alloc_buffer", (*mut BufferType, usize) -> *mut Buffer);
        let get_base =
            function!(self.base, c"ggml_backend_buffer_get_base", (*mut Buffer) -> *mut c_void);
        let set = function!(self.base, c"ggml_backend_tensor_set",
            (*mut RawTensor, *const c_void, usize, usize) -> ());
        let get = function!(self.base, c"ggml_backend_tensor_get",
            (*const RawTensor, *mut c_void, usize, usize) -> ());
        let kind = call!(cpu);
        let buffer = call!(allocate, kind, 4096);
        check(!buffer.is_null(), || "the engine has no memory".to_owned())?;
        // SAFETY: a buffer of the engine, whose functions are where the family has them.
        let found = unsafe { family.buffer_field(buffer, "type") };
        // SAFETY: as above.
        let size = unsafe { family.buffer_field(buffer, "size") }.addr();
        let fits = found == kind.cast_const().cast() && (4096..8192).contains(&size);
        let is_host = call!(engine.functions.buffer_type_is_host, kind);
        check(fits && is_host, || "a buffer of the CPU is not where it was".to_owned())?;
        let tensor = self.tensor(types::F32, [16, 1, 1, 1])?;
        let base = call!(get_base, buffer);
        // SAFETY: `check_tensor` has looked at the fields.
        unsafe { (*tensor).buffer = buffer };
        // SAFETY: as above.
        unsafe { (*tensor).data = base };
        let (written, mut read) = ([7_i32; 16], [0_i32; 16]);
        call!(set, tensor, written.as_ptr().cast(), 0, 64);
        call!(get, tensor, read.as_mut_ptr().cast(), 0, 64);
        check(read == written, || "a tensor does not keep what is written".to_owned())?;
        let backend = call!(engine.functions.device_init, engine.cpu_device, ptr::null());
        check(!backend.is_null(), || "the engine's device makes no backend".to_owned())?;
        // SAFETY: a backend of the engine, whose functions are where the family has them.
        let device = unsafe { family.backend_field(backend, "device") };
        check(device == engine.cpu_device.cast_const().cast(), || {
            "a backend of the CPU has no device where it was".to_owned()
        })?;
        let words: *const Word = engine.cpu_device.cast_const().cast();
        let at = family.position(Table::Device, "registration").unwrap_or(0);
        // SAFETY: a device of the engine has a field behind its functions.
        let registration = unsafe { words.wrapping_add(at).read() };
        check(registration == engine.registration.cast_const().cast(), || {
            "the device of the CPU has no registration where it was".to_owned()
        })
    }

    /// Attention over rows that were just stored, by the engine and by this library.
    pub(super) fn check_graph(&self, engine: &'static Engine) -> Result<(), String> {
        let (source, k_cache, k_stored) = self.cache(1)?;
        let (_, v_cache, v_stored) = self.cache(2)?;
        let q = self.tensor(types::F32, [HEAD_DIM, QUERIES, QO_HEADS, 1])?;
        fill(q, 3)?;
        let out = self.attention(q, k_cache, v_cache)?;
        let graph = self.graph([k_stored, v_stored, out])?;
        let node = look(out)?;
        check(node.raw().op == self.operations.flash_attention, || {
            "FLASH_ATTN_EXT is another operation".to_owned()
        })?;
        check(node.raw().flags & FLAG_COMPUTE != 0, || {
            "nodes of a graph have no flag that says they are computed".to_owned()
        })?;
        let cpu = Cpu::new(engine).ok_or("the engine has no memory")?;
        call!(engine.cpu_functions.set_threads, cpu.backend(), 1);
        let compute = |by: &str| {
            // SAFETY: the graph is the engine's, with memory of the host.
            let status = unsafe { cpu.compute(graph) };
            check(status == 0, || format!("a small graph fails {by}: status {status}"))
        };
        compute("in the engine")?;
        check_rows(source, k_cache)?;
        let expected = expected();
        check_out(out, &expected, "the engine")?;
        // SAFETY: nobody else uses the numbers.
        let numbers = unsafe { node.numbers_mut(0, expected.len()) };
        numbers.ok_or("the result has another size")?.fill(f32::NAN);
        let operation = FlashAttention::new(node).ok_or("FLASH_ATTN_EXT has other operands")?;
        let job = Job::new(operation, 1, None, None)?;
        let mut replaced = Replaced::default();
        let custom: Custom = job.as_custom();
        // SAFETY: the node is the graph's; `replaced` goes before the job.
        unsafe { replaced.replace(out, self.operations.custom, custom) };
        compute("with the attention of kvfs")?;
        drop(replaced);
        check(job.is_done()?, || "the engine calls no CUSTOM operation".to_owned())?;
        check_out(out, &expected, "kvfs")
    }

    /// Rows, a cache that they are stored in, and the operation that does it.
    fn cache(
        &self, salt: usize,
    ) -> Result<(*mut RawTensor, *mut RawTensor, *mut RawTensor), String> {
        let set_rows = function!(self.base, c"ggml_set_rows",
            (*mut TensorContext, *mut RawTensor, *mut RawTensor, *mut RawTensor) -> *mut RawTensor);
        let rows = self.tensor(types::F32, [WIDTH, STORED.len(), 1, 1])?;
        fill(rows, salt)?;
        let indices = self.tensor(types::I64, [STORED.len(), 1, 1, 1])?;
        // SAFETY: as below.
        let data = unsafe { (*indices).data }.cast::<i64>();
        for (at, cell) in STORED.iter().enumerate() {
            // SAFETY: the engine's memory has what the shape spans.
            unsafe { data.wrapping_add(at).write(long(*cell)) };
        }
        let cache = self.tensor(types::F16, [WIDTH, CELLS, 1, 1])?;
        let stored = call!(set_rows, self.context, cache, rows, indices);
        check(look(stored)?.raw().op == self.operations.set_rows, || {
            "SET_ROWS is another operation".to_owned()
        })?;
        Ok((rows, cache, stored))
    }

    fn attention(
        &self, q: *mut RawTensor, k: *mut RawTensor, v: *mut RawTensor,
    ) -> Result<*mut RawTensor, String> {
        let flash = function!(self.base, c"ggml_flash_attn_ext",
            (*mut TensorContext, *mut RawTensor, *mut RawTensor, *mut RawTensor, *mut RawTensor, f32, f32, f32)
            -> *mut RawTensor);
        let heads =
            |cache| self.view(cache, [HEAD_DIM, CELLS, KV_HEADS], [WIDTH * 2, HEAD_DIM * 2], 0);
        let mask = self.tensor(types::F16, [CELLS, QUERIES, 1, 1])?;
        // SAFETY: as below.
        let data = unsafe { (*mask).data }.cast::<f16>();
        for at in (0..QUERIES * CELLS).filter(|at| !sees(at / CELLS, at % CELLS)) {
            // SAFETY: the engine's memory has what the shape spans.
            unsafe { data.wrapping_add(at).write(f16::NEG_INFINITY) };
        }
        Ok(call!(flash, self.context, q, heads(k)?, heads(v)?, mask, SCALE, 0.0, 0.0))
    }

    fn graph(&self, nodes: [*mut RawTensor; 3]) -> Result<*mut Graph, String> {
        let new = function!(self.base, c"ggml_new_graph", (*mut TensorContext) -> *mut Graph);
        let expand =
            function!(self.base, c"ggml_build_forward_expand", (*mut Graph, *mut RawTensor) -> ());
        let graph = call!(new, self.context);
        for node in nodes {
            call!(expand, graph, node);
        }
        Ok(graph)
    }
}

fn fill(tensor: *mut RawTensor, salt: usize) -> Result<(), String> {
    let view = look(tensor)?;
    let count = view.shape().iter().product();
    // SAFETY: nobody else uses the tensor.
    let numbers = unsafe { view.numbers_mut(0, count) }.ok_or("a tensor has no numbers")?;
    numbers.iter_mut().enumerate().for_each(|(at, number)| *number = value(salt, at));
    Ok(())
}

fn check_rows(rows: *mut RawTensor, cache: *mut RawTensor) -> Result<(), String> {
    let (rows, cache) = (look(rows)?, look(cache)?);
    check(rows.shape()[0] == WIDTH, || "a tensor has another shape".to_owned())?;
    let bytes = cache.bytes().ok_or("a cache has no memory")?;
    let is_stored = |(row, cell): (usize, &usize)| {
        let found = &bytes[cell * WIDTH * 2..][..WIDTH * 2];
        let expected = (0..WIDTH).map(|at| f16::from_f32(value(1, row * WIDTH + at)));
        found.chunks_exact(2).zip(expected).all(|(two, number)| two == number.to_le_bytes())
    };
    check(STORED.iter().enumerate().all(is_stored), || "SET_ROWS stores other rows".to_owned())
}

fn check_out(out: *mut RawTensor, expected: &[f32], who: &str) -> Result<(), String> {
    let out = look(out)?;
    check(out.shape() == [HEAD_DIM, QO_HEADS, QUERIES, 1], || {
        "FLASH_ATTN_EXT has a result of another shape".to_owned()
    })?;
    // SAFETY: nobody writes to it meanwhile.
    let numbers = unsafe { out.numbers_mut(0, expected.len()) };
    let numbers = numbers.ok_or("the result has another size")?;
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE;
    check(numbers.iter().zip(expected).all(is_near), || {
        format!("attention of {who} over a small cache is not what it should be")
    })
}

fn long(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Numbers between -1 and 1 that repeat nowhere near.
fn value(salt: usize, at: usize) -> f32 {
    let number = u8::try_from((at * 37 + salt * 101) % 199).unwrap_or(0);
    f32::from(number) / 99.5 - 1.0
}

/// Whether a query sees a cell.
fn sees(query: usize, cell: usize) -> bool {
    STORED[..STORED.len() - 1 + query].contains(&cell)
}

/// The attention, computed by hand: `[query, head, dim]`.
fn expected() -> Vec<f32> {
    let mut out = Vec::with_capacity(QUERIES * QO_HEADS * HEAD_DIM);
    for (query, head) in (0..QUERIES).flat_map(|query| (0..QO_HEADS).map(move |head| (query, head)))
    {
        let kv_head = head / (QO_HEADS / KV_HEADS);
        let row = |salt, row: usize, dim| value(salt, row * WIDTH + kv_head * HEAD_DIM + dim);
        let q = |dim| value(3, (head * QUERIES + query) * HEAD_DIM + dim);
        let rows = (0..STORED.len()).filter(|row| sees(query, STORED[*row]));
        let weights: Vec<(usize, f32)> = rows
            .map(|at| (at, (0..HEAD_DIM).map(|dim| q(dim) * row(1, at, dim)).sum::<f32>()))
            .map(|(at, product)| (at, (product * SCALE).exp()))
            .collect();
        let sum: f32 = weights.iter().map(|(_, weight)| weight).sum();
        let number = |dim| weights.iter().map(|(at, weight)| weight / sum * row(2, *at, dim)).sum();
        out.extend((0..HEAD_DIM).map(number).collect::<Vec<f32>>());
    }
    out
}

//! The kernels of one shape and dtype: which module and which of its functions, and launches that
//! are checked against the memory that they are given.
//!
//! `kernels/kernels.ptx.zst` has a module for each dtype and width of rows, and one that all share.
//! The driver compiles what is used and remembers it.

use std::f32::consts::LN_2;
use std::ffi::CString;
use std::io::Read as _;

use super::CudaError;
use super::arguments::{
    AttendArguments, Attention, BoundArguments, Heads, MassArguments, MergeArguments,
    PrepareArguments, SummaryArguments,
};
use super::driver::{Context, DeviceMemory, Grid, Kernel, Module, Stream};
use super::on_stream::DeviceResult;
use super::partials::Parts;
use super::table::Table;
use crate::attention::Shape;
use crate::page::Dtype;

const PTX: &[u8] = include_bytes!("../../../../kernels/kernels.ptx.zst");

/// What the compressed text may become, against a damaged product: it is 14 MB.
const PTX_BYTES_MAX: u64 = 64 << 20;

/// Widths of rows that there are modules for.
const WIDTHS: [usize; 3] = [64, 128, 256];

/// Rows that the widest kernels take at a time.
const ROWS_MAX: u32 = 8;

/// The name of the module for rows of a dtype and shape.
///
/// # Errors
/// [`CudaError::Unsupported`] if there is none.
pub(super) fn module_name(dtype: Dtype, shape: Shape) -> Result<String, CudaError> {
    let widest = shape.head_dim().max(shape.v_head_dim());
    let multiple = (dtype.block_elements() as usize).max(8);
    let fits = |elements: usize| elements.is_multiple_of(multiple);
    let width = WIDTHS.into_iter().find(|width| widest <= *width);
    match width.filter(|_| fits(shape.head_dim()) && fits(shape.v_head_dim())) {
        Some(width) => Ok(format!("{}_{width}", dtype.to_string().to_lowercase())),
        None => Err(CudaError::Unsupported(format!(
            "a head_dim of {} and v_head_dim of {} in {dtype} (multiples of {multiple} up to 256 are)",
            shape.head_dim(),
            shape.v_head_dim()
        ))),
    }
}

/// The PTX of a module, with the line that names it.
fn ptx(name: &str) -> Result<CString, CudaError> {
    let damaged = |why: &str| CudaError::Unavailable(format!("kernels.ptx.zst: {why}"));
    let mut decoder = zstd::Decoder::new(PTX).map_err(|error| damaged(&error.to_string()))?;
    // The build compresses with a window of that many bits.
    decoder.window_log_max(27).map_err(|error| damaged(&error.to_string()))?;
    let mut text = String::new();
    let read = decoder.take(PTX_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|error| damaged(&error.to_string()))?;
    let head = format!("// module {name}\n");
    let start = text.find(&head).ok_or_else(|| damaged(&format!("no module {name}")))?;
    let module = &text[start..];
    let end = module[head.len()..].find("\n// module ").map_or(module.len(), |at| head.len() + at);
    CString::new(&module[..end]).map_err(|error| damaged(&error.to_string()))
}

fn load(context: &Context, name: &str) -> Result<Module, CudaError> {
    Module::load(context, &ptx(name)?)
}

/// The kernels that do not depend on the dtype.
#[derive(Debug)]
pub(super) struct CommonKernels {
    prepare: Kernel,
    merge: Kernel,
    finish: Kernel,
    bound: Kernel,
}

/// Rotations of the queries, one copy of them for each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turns {
    pub(super) copies: u32,
    pub(super) pairs: u32,
    pub(super) first: u32,
    pub(super) is_interleaved: bool,
}

/// The queries of a call, in device memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueryMemory<'a> {
    /// `[num_queries, num_qo_heads, head_dim]`, then `[copies, pairs]` of (cos, sin), then
    /// `[num_queries]` positions, which are aligned to 8 bytes.
    pub(super) given: &'a DeviceMemory,
    pub(super) turns_at: usize,
    pub(super) positions_at: usize,
    /// `[copies, num_kv_heads, rows, head_dim]`
    pub(super) prepared: &'a DeviceMemory,
}

impl CommonKernels {
    pub(super) fn load(context: &Context) -> Result<Self, CudaError> {
        let module = load(context, "common")?;
        Ok(Self {
            prepare: module.kernel("prepare")?,
            merge: module.kernel("merge")?,
            finish: module.kernel("finish")?,
            bound: module.kernel("bound_pages")?,
        })
    }

    /// Scales and rotates the queries, which are at `q`.
    pub(super) fn prepare(
        &self, stream: &Stream, heads: Heads, scale: f32, turns: Turns,
        (q, memory): (u64, QueryMemory<'_>),
    ) -> Result<(), CudaError> {
        let rows = heads.num_queries as usize * (heads.num_kv_heads * heads.group) as usize;
        let q_bytes = rows * heads.head_dim as usize * size_of::<f32>();
        let turn_bytes = turns.copies as usize * turns.pairs as usize * 2 * size_of::<f32>();
        assert!(q_bytes <= memory.turns_at, "q is before the turns");
        assert!(memory.turns_at + turn_bytes <= memory.given.bytes(), "all turns are there");
        let prepared_bytes = turns.copies as usize * q_bytes;
        assert!(prepared_bytes <= memory.prepared.bytes(), "room for each copy of q");
        let arguments = PrepareArguments {
            heads,
            scale,
            q,
            turns: memory.given.address() + memory.turns_at as u64,
            pairs: turns.pairs,
            first: turns.first,
            interleaved: u32::from(turns.is_interleaved),
            prepared: memory.prepared.address(),
        };
        let x = u32::try_from(rows).unwrap_or(u32::MAX);
        // SAFETY: the kernel takes these arguments, and both memories hold what it reads and writes.
        unsafe { stream.launch(&self.prepare, Grid { x, y: turns.copies }, &arguments) }
    }

    /// Merges the first `count` parts into part `at` of another memory.
    pub(super) fn merge(
        &self, stream: &Stream, heads: Heads, from: (&Parts, u32), to: (&Parts, u32),
    ) -> Result<(), CudaError> {
        let (to, at) = to;
        assert!(at < to.capacity() && from.0.shape() == to.shape(), "parts that there are");
        let (merged_o, merged_m, merged_l) = to.addresses(at);
        let arguments =
            MergeArguments { merged_o, merged_m, merged_l, ..merge_arguments(heads, from) };
        let grid = Grid { x: arguments.rows, y: 1 };
        // SAFETY: the kernel takes these arguments, and both memories have the parts.
        unsafe { stream.launch(&self.merge, grid, &arguments) }
    }

    /// Merges the first `count` parts into memory of a caller's, or what they are in the end.
    ///
    /// # Safety
    /// The addresses must be those of memory as large as [`DeviceResult`] says, until the stream has
    /// done it.
    pub(super) unsafe fn deliver(
        &self, stream: &Stream, heads: Heads, from: (&Parts, u32), to: DeviceResult,
    ) -> Result<(), CudaError> {
        let arguments = merge_arguments(heads, from);
        let (kernel, arguments) = match to {
            DeviceResult::Partials { o: merged_o, m: merged_m, l: merged_l } => {
                (&self.merge, MergeArguments { merged_o, merged_m, merged_l, ..arguments })
            }
            DeviceResult::Output { out, sinks } => {
                (&self.finish, MergeArguments { merged_o: out, sinks, ..arguments })
            }
        };
        let grid = Grid { x: arguments.rows, y: 1 };
        // SAFETY: the kernel takes these arguments; the rest is the caller's promise.
        unsafe { stream.launch(kernel, grid, &arguments) }
    }
}

impl CommonKernels {
    /// Writes the most that a logit can be, `[num_queries, num_qo_heads, pages]`, for the pages of a
    /// table, by their `bounds`.
    pub(super) fn bound(
        &self, stream: &Stream, call: Call<'_>, table: (&Table, &DeviceMemory),
        bounds: &DeviceMemory, most: &DeviceMemory,
    ) -> Result<(), CudaError> {
        let ((table, memory), heads) = (table, call.heads);
        let num_pages = u32::try_from(table.pages.len()).unwrap_or(u32::MAX);
        let num_qo_heads = (heads.num_kv_heads * heads.group) as usize;
        let values = heads.num_queries as usize * num_qo_heads * table.pages.len();
        assert!(values * size_of::<f32>() <= most.bytes(), "a bound for each page");
        assert!(table.pages.len() * bounds_bytes(heads) <= bounds.bytes(), "of each page");
        assert!(table.bytes() <= memory.bytes(), "the table is there");
        let arguments = BoundArguments {
            heads,
            // What the queries were scaled by besides the scale of the logits.
            factor: if call.soft_cap == 0.0 { LN_2 } else { call.soft_cap },
            q: call.queries.prepared.address(),
            pages: memory.address(),
            bounds: bounds.address(),
            num_pages,
            most: most.address(),
        };
        let grid = Grid { x: num_pages, y: heads.num_kv_heads };
        // SAFETY: the kernel takes these arguments, and the memories hold what it reads and writes.
        unsafe { stream.launch(&self.bound, grid, &arguments) }
    }
}

/// Arguments without a place for the result.
fn merge_arguments(heads: Heads, (from, parts): (&Parts, u32)) -> MergeArguments {
    assert!(parts <= from.capacity(), "parts that there are");
    let num_qo_heads = heads.num_kv_heads * heads.group;
    let rows = heads.num_queries * num_qo_heads;
    assert!((rows, heads.v_head_dim) == from.shape(), "parts of these heads");
    let (o, m, l) = from.addresses(0);
    MergeArguments {
        o,
        m,
        l,
        sinks: 0,
        merged_o: 0,
        merged_m: 0,
        merged_l: 0,
        parts,
        rows,
        num_qo_heads,
        v_head_dim: heads.v_head_dim,
    }
}

/// Bytes of the smallest and largest K of a page.
pub(super) fn bounds_bytes(heads: Heads) -> usize {
    (heads.num_kv_heads * 2 * heads.head_dim) as usize * size_of::<f32>()
}

/// The attention kernels of a module.
#[derive(Debug)]
pub(super) struct AttendKernels {
    /// By the rows that they take at a time.
    decode: [(u32, Kernel); 5],
    masked: Kernel,
    mass: Kernel,
    summarise: Kernel,
}

/// What is the same for all launches of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) heads: Heads,
    /// 0 for none.
    pub(super) window: u32,
    /// 0 for none.
    pub(super) soft_cap: f32,
    pub(super) queries: QueryMemory<'a>,
}

impl Call<'_> {
    /// What is attended to: the pages of a table, which lies in device memory.
    fn attention(self, table: &Table, memory: &DeviceMemory) -> Attention {
        assert!(table.bytes() <= memory.bytes(), "the table is there");
        let Self { heads, window, soft_cap, queries } = self;
        Attention {
            heads,
            window,
            soft_cap,
            q: queries.prepared.address(),
            pages: memory.address(),
            splits: memory.address() + table.splits_at() as u64,
            positions: queries.given.address() + queries.positions_at as u64,
        }
    }
}

impl AttendKernels {
    pub(super) fn load(context: &Context, name: &str) -> Result<Self, CudaError> {
        let module = load(context, name)?;
        Ok(Self {
            decode: [
                (1, module.kernel("attend_1")?),
                (2, module.kernel("attend_2")?),
                (4, module.kernel("attend_4")?),
                (5, module.kernel("attend_5")?),
                (8, module.kernel("attend_8")?),
            ],
            masked: module.kernel("attend_masked_8")?,
            mass: module.kernel("add_mass_4")?,
            summarise: module.kernel("summarise_pages")?,
        })
    }

    /// The kernel for so many rows, and how often it goes over each KV head.
    fn choose(&self, rows: u32, is_masked: bool) -> (&Kernel, u32) {
        if is_masked {
            return (&self.masked, rows.div_ceil(ROWS_MAX));
        }
        let found = self.decode.iter().find(|(most, _)| rows <= *most);
        let (most, kernel) = found.unwrap_or(&self.decode[4]);
        (kernel, rows.div_ceil(*most))
    }

    /// Blocks of one split.
    pub(super) fn blocks_of_split(&self, heads: Heads, is_masked: bool) -> u32 {
        heads.num_kv_heads * self.choose(heads.num_queries * heads.group, is_masked).1
    }

    /// Attends to the pages of a table, which lies in device memory, and writes a part for each of
    /// its splits from part `at` on.
    pub(super) fn attend(
        &self, stream: &Stream, call: Call<'_>, table: (&Table, &DeviceMemory), to: (&Parts, u32),
    ) -> Result<(), CudaError> {
        let ((table, memory), (parts, at)) = (table, to);
        let splits = u32::try_from(table.splits.len()).unwrap_or(u32::MAX);
        assert!(splits <= parts.capacity() - at, "a part for each split");
        let heads = call.heads;
        let rows = heads.num_queries * heads.num_kv_heads * heads.group;
        assert!((rows, heads.v_head_dim) == parts.shape(), "parts of these heads");
        let (o, m, l) = parts.addresses(at);
        let arguments = AttendArguments { attention: call.attention(table, memory), o, m, l };
        let (kernel, passes) = self.choose(heads.num_queries * heads.group, table.is_masked);
        let grid = Grid { x: heads.num_kv_heads * passes, y: splits };
        // SAFETY: the kernel takes these arguments. A table's splits are of its pages, and those lie
        // in memory of the ring or of the hot window, which outlives the streams' work.
        unsafe { stream.launch(kernel, grid, &arguments) }
    }

    /// Adds the weights of the tokens of a table to `mass`, `[tokens]`; `totals` has the merged `m`,
    /// then `l`, each `[num_queries, num_qo_heads]`.
    pub(super) fn add_mass(
        &self, stream: &Stream, call: Call<'_>, table: (&Table, &DeviceMemory),
        totals: &DeviceMemory, mass: &DeviceMemory,
    ) -> Result<(), CudaError> {
        let ((table, memory), heads) = (table, call.heads);
        let rows = (heads.num_queries * heads.num_kv_heads * heads.group) as usize;
        assert!(2 * rows * size_of::<f32>() <= totals.bytes(), "m and l of each row");
        let end = table.pages.iter().map(|page| u64::from(page.index) + u64::from(page.tokens));
        assert!(end.max().unwrap_or(0) * 4 <= mass.bytes() as u64, "room for each token");
        let arguments = MassArguments {
            attention: call.attention(table, memory),
            m: totals.address(),
            l: totals.address() + (rows * size_of::<f32>()) as u64,
            mass: mass.address(),
        };
        let x = u32::try_from(table.splits.len()).unwrap_or(u32::MAX);
        // SAFETY: as in `attend`; no two splits have the same token.
        unsafe { stream.launch(&self.mass, Grid { x, y: 1 }, &arguments) }
    }

    /// Writes the smallest and largest K of the pages of a table, as the pages from `first` on.
    pub(super) fn summarise(
        &self, stream: &Stream, heads: Heads, table: (&Table, &DeviceMemory),
        (bounds, first): (&DeviceMemory, usize),
    ) -> Result<(), CudaError> {
        let (table, memory) = table;
        let of_page = bounds_bytes(heads);
        assert!((first + table.pages.len()) * of_page <= bounds.bytes(), "room for each page");
        assert!(table.bytes() <= memory.bytes(), "the table is there");
        let arguments = SummaryArguments {
            pages: memory.address(),
            bounds: bounds.address() + (first * of_page) as u64,
            num_kv_heads: heads.num_kv_heads,
            head_dim: heads.head_dim,
        };
        let x = u32::try_from(table.pages.len()).unwrap_or(u32::MAX);
        // SAFETY: as in `attend`, and the bounds were checked.
        unsafe { stream.launch(&self.summarise, Grid { x, y: heads.num_kv_heads }, &arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_is_there() {
        let dtypes = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F8E4m3, Dtype::Q8_0, Dtype::Q4_0];
        for dtype in dtypes {
            for width in WIDTHS {
                let shape = Shape::new(4, 2, width, width).unwrap();
                let name = module_name(dtype, shape).unwrap();
                let text = ptx(&name).unwrap().into_string().unwrap();
                assert!(text.starts_with(&format!("// module {name}\n")));
                assert_eq!(text.matches("// module ").count(), 1, "{name}");
                assert!(text.contains(".entry attend_masked_8("), "{name}");
            }
        }
        assert!(ptx("common").unwrap().into_string().unwrap().contains(".entry merge("));
        assert!(ptx("f16_512").is_err());
    }

    #[test]
    fn other_rows_are_for_the_cpu() {
        fn check(dtype: Dtype, dims: (usize, usize), expected: Option<&str>) {
            let shape = Shape::new(4, 2, dims.0, dims.1).unwrap();
            assert_eq!(module_name(dtype, shape).ok().as_deref(), expected, "{dims:?}");
        }
        check(Dtype::F16, (80, 64), Some("f16_128"));
        check(Dtype::F8E4m3, (192, 128), Some("f8_e4m3_256"));
        check(Dtype::F16, (576, 512), None);
        check(Dtype::F16, (60, 64), None);
        check(Dtype::Q4_0, (80, 64), None);
        check(Dtype::Q4_0, (96, 64), Some("q4_0_128"));
    }
}

//! `SET_ROWS`: new rows of K or V into their cells.
//!
//! `src[0]`, `[row, rows, 1, 1]` in f32, goes to the rows of the destination `[row, cells]` that
//! `src[1]`, `[rows]` of i64 or i32, numbers; with several streams the numbers go through all of
//! them. Quantised rows are made by the engine's own function, so they are what stock would write.

use half::bf16;
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::abi::types;
use super::engine::Quantize;
use super::tensor::{Number, TensorView, numbers, numbers_mut};

/// An operation whose tensors fit together.
pub(super) struct SetRows<'a> {
    to: TensorView<'a>,
    rows: TensorView<'a>,
    cells: TensorView<'a>,
    row_bytes: usize,
}

impl<'a> SetRows<'a> {
    /// Nothing, if it is to be left to the engine. Tensors need no memory yet.
    pub(super) fn new(to: TensorView<'a>) -> Option<Self> {
        let (rows, cells) = (to.source(0)?, to.source(1)?);
        let (row_bytes, _) = (to.row_bytes()?, to.dtype()?);
        let [length, count, ..] = rows.shape();
        let fits = rows.kind() == types::F32
            && rows.shape() == [length, count, 1, 1]
            && rows.row_bytes().is_some()
            && to.shape()[0] == length
            && to.shape()[2..] == [1, 1]
            // Without flash attention V is transposed, and its rows are single elements.
            && length > 1
            && matches!(cells.kind(), types::I64 | types::I32)
            && cells.row_bytes().is_some()
            && cells.shape() == [count, 1, 1, 1];
        fits.then_some(Self { to, rows, cells, row_bytes })
    }

    /// Writes them to `out`, the memory of the destination.
    ///
    /// # Errors
    /// A line that says what the engine gave.
    pub(super) fn run(&self, quantize: Quantize, out: &mut [u8]) -> Result<(), String> {
        let [length, count, ..] = self.rows.shape();
        let name = self.to.name();
        let missing = || format!("rows of {name}: a tensor has no memory");
        let from = self.rows.bytes().ok_or_else(missing)?;
        for index in 0..count {
            let row = numbers(from, index * self.rows.strides()[1], length).ok_or_else(missing)?;
            let cell = self.cell(index).ok_or_else(missing)?;
            let outside =
                || format!("rows of {name}: cell {cell}, but there are {}", self.to.shape()[1]);
            let cell = usize::try_from(cell).ok().filter(|cell| *cell < self.to.shape()[1]);
            let start = cell.ok_or_else(outside)? * self.to.strides()[1];
            let to = out.get_mut(start..start + self.row_bytes).ok_or_else(missing)?;
            convert(self.to.kind(), row, to, quantize).ok_or_else(missing)?;
        }
        Ok(())
    }

    fn cell(&self, index: usize) -> Option<i64> {
        fn one<T: Number>(tensor: TensorView<'_>, index: usize) -> Option<T> {
            numbers(tensor.bytes()?, index * size_of::<T>(), 1)?.first().copied()
        }
        match self.cells.kind() {
            types::I64 => one(self.cells, index),
            _ => one::<i32>(self.cells, index).map(i64::from),
        }
    }
}

fn convert(kind: i32, row: &[f32], to: &mut [u8], quantize: Quantize) -> Option<()> {
    match kind {
        types::F16 => numbers_mut::<f16>(to)?.convert_from_f32_slice(row),
        types::BF16 => numbers_mut::<bf16>(to)?.convert_from_f32_slice(row),
        _ => {
            let length = i64::try_from(row.len()).ok()?;
            let (from, to) = (row.as_ptr(), to.as_mut_ptr().cast());
            // SAFETY: `to` has the bytes of one row of this type, as its tensor says, `row` the
            // elements; these types need no importance.
            unsafe { quantize(kind, from, to, 0, 1, length, std::ptr::null()) };
        }
    }
    Some(())
}

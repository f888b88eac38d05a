//! Dense f32 arithmetic whose result for one row never depends on the other rows.
//!
//! A resumed run must continue exactly as an uninterrupted one would, so a token's arithmetic has
//! to be the same however the prompt was cut into chunks. Every sum here therefore has one fixed
//! order, and threads only ever split rows, never a sum.

use std::convert::Infallible;
use std::panic::resume_unwind;
use std::sync::OnceLock;
use std::thread;

/// Partial sums a dot product keeps: one 512-bit or four 128-bit registers of f32.
const LANES: usize = 16;

/// With fewer rows than this, starting threads costs more than it saves.
const MIN_ROWS_PER_THREAD: usize = 8;

/// A row-major matrix that maps vectors of `columns` to vectors of one value per row.
#[derive(Debug)]
pub(crate) struct Matrix {
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    /// A matrix of `values.len() / columns` rows.
    pub(crate) fn new(columns: usize, values: Vec<f32>) -> Self {
        assert!(values.len().is_multiple_of(columns), "a row is incomplete");
        Self { columns, values }
    }

    /// Row `index`, if there is one.
    pub(crate) fn row(&self, index: usize) -> Option<&[f32]> {
        self.values.chunks_exact(self.columns).nth(index)
    }

    /// The product with each row of `inputs`, `[tokens, columns]` to `[tokens, rows]`.
    pub(crate) fn apply(&self, inputs: &[f32]) -> Vec<f32> {
        let rows = self.values.len() / self.columns;
        let mut out = vec![0.0; inputs.len() / self.columns * rows];
        for_each_row(&mut out, rows, |token, out| {
            let input = &inputs[token * self.columns..][..self.columns];
            for (out, row) in out.iter_mut().zip(self.values.chunks_exact(self.columns)) {
                *out = dot(row, input);
            }
        });
        out
    }
}

/// The dot product, summed in a fixed order that vectorises.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            // Never a fused multiply-add: it would round differently where the CPU has one.
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

/// Calls `work` with the index and the slice of every `width` long row of `out`, on several
/// threads where there are rows enough.
pub(crate) fn for_each_row(out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    let Ok(()) = divide_rows(out, width, |first, out| {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            work(first + row, out);
        }
        Ok::<(), Infallible>(())
    });
}

/// Divides the `width` long rows of `out` among threads where there are rows enough; calls `work`
/// with the index of the first row and the slice of each share.
pub(crate) fn divide_rows<E: Send>(
    out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let rows = out.len() / width;
    let threads = cpus().min(rows / MIN_ROWS_PER_THREAD).max(1);
    let share = rows.div_ceil(threads).max(1);
    if threads == 1 {
        return work(0, out);
    }
    thread::scope(|scope| {
        let parts = out.chunks_mut(share * width).enumerate().map(|(part, out)| {
            let work = &work;
            scope.spawn(move || work(part * share, out))
        });
        let parts: Vec<_> = parts.collect();
        parts.into_iter().try_for_each(|part| part.join().unwrap_or_else(|why| resume_unwind(why)))
    })
}

/// How many CPUs this process may use. Asked once: the answer comes from files.
fn cpus() -> usize {
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

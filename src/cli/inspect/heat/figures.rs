//! What is told of each head: norms, outlier channels, and the error of lossy cold copies.

use crate::cli::output::short;
use crate::cli::page_values::{PageValues, Part};
use crate::tier::encoding::{Quantisation, Unsuitable};

/// A channel is an outlier where its mean, without signs, is more than so many times the median of the head's.
///
/// That few channels of K are far larger than the others in all tokens, and that V has none such, is what KIVI
/// (Liu et al., ICML 2024) found; it is why blocks along a row, which `q8_0` and `q4_0` are, round K worst there.
const OUTLIER_FACTOR: f64 = 6.0;

/// Most cells of one side of a field, the fewer the more heads there are: of the 1024 that a page may have, a part
/// stays below some 60 million pixels, a byte each.
pub(super) fn cells_max(heads: u32) -> usize {
    match heads {
        0..=16 => 512,
        17..=64 => 256,
        _ => 128,
    }
}

/// K or V of a page.
#[derive(Debug)]
pub(super) struct PartFigures {
    pub(super) part: Part,
    pub(super) heads: Vec<HeadFigures>,
}

/// One head.
#[derive(Debug)]
pub(super) struct HeadFigures {
    pub(super) cells: Cells,
    /// Of the values without their signs.
    pub(super) largest: f32,
    pub(super) not_finite: u64,
    /// By token; of the finite values.
    pub(super) norms: Vec<f64>,
    pub(super) outliers: Vec<usize>,
    /// Of `q8_0` and of `q4_0`: the norm of what rounding changes, in parts of the norm of the values.
    pub(super) errors: [Result<f64, Unsuitable>; 2],
}

/// The values without their signs, neighbours together where there are many: the largest of them, NaN where one is
/// not finite.
#[derive(Debug)]
pub(super) struct Cells {
    pub(super) columns: usize,
    pub(super) values: Vec<f32>,
    /// Tokens and channels of a cell.
    pub(super) tokens_each: usize,
    pub(super) channels_each: usize,
}

impl Cells {
    fn of(numbers: &[f32], channels: usize, most: usize) -> Cells {
        let tokens = numbers.len() / channels;
        let [tokens_each, channels_each] =
            [tokens, channels].map(|count| count.div_ceil(most).max(1));
        let columns = channels.div_ceil(channels_each);
        let mut values = vec![0.0_f32; tokens.div_ceil(tokens_each) * columns];
        for (token, row) in numbers.chunks_exact(channels).enumerate() {
            for (channel, number) in row.iter().enumerate() {
                let cell = &mut values[token / tokens_each * columns + channel / channels_each];
                if !number.is_finite() {
                    *cell = f32::NAN;
                } else if number.abs() > *cell {
                    *cell = number.abs();
                }
            }
        }
        Cells { columns, values, tokens_each, channels_each }
    }
}

impl PartFigures {
    pub(super) fn of(values: &PageValues, part: Part) -> PartFigures {
        let heads = values.geometry.num_kv_heads();
        let of_head = |head| HeadFigures::of(values, part, head, cells_max(heads));
        PartFigures { part, heads: (0..heads).map(of_head).collect() }
    }

    pub(super) fn largest(&self) -> f32 {
        self.heads.iter().map(|head| head.largest).fold(0.0, f32::max)
    }

    pub(super) fn largest_norm(&self) -> f64 {
        self.heads.iter().map(|head| head.norm_ends().1).fold(0.0, f64::max)
    }
}

impl HeadFigures {
    fn of(values: &PageValues, part: Part, head: u32, cells_max: usize) -> HeadFigures {
        let numbers = values.numbers(part, head);
        let channels = values.row_elements(part) as usize;
        let finite = || numbers.iter().copied().filter(|number| number.is_finite());
        let errors = [Quantisation::Q8_0, Quantisation::Q4_0].map(|quantisation| {
            let rounded = values.rounded(part, head, quantisation)?;
            Ok(relative_error(&numbers, &rounded))
        });
        HeadFigures {
            cells: Cells::of(&numbers, channels, cells_max),
            largest: finite().map(f32::abs).fold(0.0, f32::max),
            not_finite: (numbers.len() - finite().count()) as u64,
            norms: numbers.chunks_exact(channels).map(norm).collect(),
            outliers: outliers(&numbers, channels),
            errors,
        }
    }

    /// The least and the largest norm of a token.
    pub(super) fn norm_ends(&self) -> (f64, f64) {
        let least = self.norms.iter().copied().fold(f64::INFINITY, f64::min);
        (least, self.norms.iter().copied().fold(0.0, f64::max))
    }
}

fn norm(numbers: &[f32]) -> f64 {
    let finite = numbers.iter().filter(|number| number.is_finite());
    finite.map(|number| f64::from(*number).powi(2)).sum::<f64>().sqrt()
}

fn relative_error(numbers: &[f32], rounded: &[f32]) -> f64 {
    let pairs = numbers.iter().zip(rounded);
    let squares = pairs.map(|(was, is)| (f64::from(*was) - f64::from(*is)).powi(2));
    let error = squares.sum::<f64>().sqrt();
    if error > 0.0 { error / norm(numbers) } else { 0.0 }
}

fn outliers(numbers: &[f32], channels: usize) -> Vec<usize> {
    let mut sums = vec![(0.0, 0_u32); channels];
    for row in numbers.chunks_exact(channels) {
        for ((sum, count), number) in sums.iter_mut().zip(row) {
            if number.is_finite() {
                *sum += f64::from(number.abs());
                *count += 1;
            }
        }
    }
    let means: Vec<f64> =
        sums.iter().map(|(sum, count)| sum / f64::from((*count).max(1))).collect();
    let mut sorted = means.clone();
    sorted.sort_by(f64::total_cmp);
    let middle = channels / 2;
    let median = if channels % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    };
    let is_outlier = |channel: &usize| means[*channel] > OUTLIER_FACTOR * median;
    (0..channels).filter(is_outlier).collect()
}

pub(super) fn percent(part: f64) -> String {
    format!("{}%", short(100.0 * part))
}

/// Why a head has no error.
pub(super) fn not_rounded(why: Unsuitable) -> &'static str {
    match why {
        Unsuitable::Dtype => "such elements are not rounded",
        Unsuitable::RowLength => "rows that are no multiple of 32 values are not rounded",
        Unsuitable::NotFinite => "NaN, infinite or very large values are not rounded",
    }
}

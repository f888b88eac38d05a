//! Positions of a run of pages that moved: q is rotated instead of K.
//!
//! With rotary embedding (Su et al. 2021) a logit depends on the difference of positions alone:
//! `q . R(d) k = R(-d) q . k`. Tokens that now stand `d` positions after the ones they were rotated
//! for are attended to with `q` rotated by `-d`, and sealed pages stay as they are. One rotated
//! copy of the queries serves all pages with the same shift.

use std::f64::consts::TAU;

use serde_json::{Map, Value};

use super::AttentionError;
use crate::page::Rope;

/// Which two elements of a row turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// `i` and `i + dims / 2` (`GPT-NeoX`, Llama in Hugging Face's order).
    Halves,
    /// `2i` and `2i + 1` (`GPT-J`, Llama's original order).
    Interleaved,
}

/// A rotary position encoding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    /// Radians for each position, of each pair.
    frequencies: Vec<f64>,
    pairing: Pairing,
    /// First rotated element.
    first: usize,
}

impl Rotation {
    /// The encoding that a manifest names, for rows of `head_dim`. The manifest does not tell the
    /// pairing.
    ///
    /// `scaling` is Hugging Face's object: `linear`, `llama3` and `yarn` change the frequencies;
    /// types whose frequencies depend on the length of the sequence cannot be shifted.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`] for another scaling, [`AttentionError::Arguments`] for
    /// numbers that make no sense.
    pub fn new(rope: &Rope, head_dim: usize, pairing: Pairing) -> Result<Self, AttentionError> {
        let dims = rope.dims.map_or(head_dim, |dims| dims as usize);
        if dims > head_dim || !dims.is_multiple_of(2) || rope.theta.is_nan() || rope.theta <= 0.0 {
            return Err(AttentionError::Arguments(format!(
                "rotation of {dims} of {head_dim} elements with theta {}",
                rope.theta
            )));
        }
        #[allow(clippy::cast_precision_loss, reason = "at most 4096 elements")]
        let frequency = |pair: usize| rope.theta.powf(-2.0 * pair as f64 / dims as f64);
        let mut frequencies: Vec<f64> = (0..dims / 2).map(frequency).collect();
        match &rope.scaling {
            None | Some(Value::Null) => {}
            Some(Value::Object(scaling)) => scale(&mut frequencies, scaling, rope.theta)?,
            Some(other) => return Err(unsupported(other)),
        }
        Ok(Self { frequencies, pairing, first: 0 })
    }

    /// The same for rows whose rotated elements start at `first`, as those of latent attention do.
    #[must_use]
    pub fn starting_at(mut self, first: usize) -> Self {
        self.first = first;
        self
    }

    /// The element after the last rotated one.
    pub(super) fn end(&self) -> usize {
        self.first + 2 * self.frequencies.len()
    }

    /// How many pairs of elements turn.
    pub(crate) fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Which elements pair.
    pub(crate) fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// The first rotated element.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// `(cos, sin)` of what each pair turns by in a number of positions.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "positions are far below 2^53; queries are f32"
    )]
    pub(crate) fn turns(&self, positions: i64) -> impl Iterator<Item = (f32, f32)> {
        self.frequencies.iter().map(move |frequency| {
            let (sin, cos) = (positions as f64 * frequency % TAU).sin_cos();
            (cos as f32, sin as f32)
        })
    }

    /// Turns a row, `[head_dim]`, by a number of positions.
    ///
    /// # Panics
    /// If the row is shorter than what is rotated.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "positions are far below 2^53; rows are f32"
    )]
    pub fn rotate(&self, row: &mut [f32], positions: i64) {
        let half = self.frequencies.len();
        for (pair, frequency) in self.frequencies.iter().enumerate() {
            let (a, b) = match self.pairing {
                Pairing::Halves => (pair, pair + half),
                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
            };
            let (a, b) = (self.first + a, self.first + b);
            let (sin, cos) = (positions as f64 * frequency % TAU).sin_cos();
            let (x, y) = (f64::from(row[a]), f64::from(row[b]));
            row[a] = (x * cos - y * sin) as f32;
            row[b] = (x * sin + y * cos) as f32;
        }
    }
}

fn unsupported(scaling: &Value) -> AttentionError {
    AttentionError::Unsupported(format!("a shift under rope scaling {scaling}"))
}

/// Applies Hugging Face's `rope_scaling` (`modeling_rope_utils`).
fn scale(
    frequencies: &mut [f64], scaling: &Map<String, Value>, theta: f64,
) -> Result<(), AttentionError> {
    let number = |name: &str, default: Option<f64>| {
        scaling
            .get(name)
            .and_then(Value::as_f64)
            .filter(|n| n.is_finite() && *n > 0.0)
            .or(default)
            .ok_or_else(|| AttentionError::Arguments(format!("rope scaling without {name}")))
    };
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
    match kind {
        Some("default") => {}
        Some("linear") => {
            let factor = number("factor", None)?;
            for frequency in frequencies {
                *frequency /= factor;
            }
        }
        Some("llama3") => {
            let factor = number("factor", None)?;
            let (low, high) = (number("low_freq_factor", None)?, number("high_freq_factor", None)?);
            let original = number("original_max_position_embeddings", None)?;
            for frequency in frequencies {
                // Turns within the original context, from `low` (stretched) to `high` (kept).
                let turns = original * *frequency / TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                *frequency *= kept + (1.0 - kept) / factor;
            }
        }
        Some("yarn") => {
            let factor = number("factor", None)?;
            let (fast, slow) = (number("beta_fast", Some(32.0))?, number("beta_slow", Some(1.0))?);
            let original = number("original_max_position_embeddings", None)?;
            let truncate = scaling.get("truncate").and_then(Value::as_bool).unwrap_or(true);
            yarn(frequencies, theta, factor, original, [fast, slow], truncate);
        }
        _ => return Err(unsupported(&Value::Object(scaling.clone()))),
    }
    Ok(())
}

/// `YaRN` (Peng et al. 2023): pairs that turn more than `betas[0]` times within the original
/// context are kept, those below `betas[1]` are stretched, with a ramp between.
#[allow(clippy::cast_precision_loss, reason = "at most 4096 elements")]
fn yarn(
    frequencies: &mut [f64], theta: f64, factor: f64, original: f64, betas: [f64; 2],
    truncate: bool,
) {
    let dims = 2.0 * frequencies.len() as f64;
    let pair_of = |turns: f64| dims * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
    let [mut low, mut high] = betas.map(pair_of);
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    low = low.max(0.0);
    high = high.min(dims - 1.0);
    let width = if high > low { high - low } else { 0.001 };
    for (pair, frequency) in frequencies.iter_mut().enumerate() {
        let stretched = ((pair as f64 - low) / width).clamp(0.0, 1.0);
        *frequency *= 1.0 - stretched + stretched / factor;
    }
}

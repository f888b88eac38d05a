//! Two pages or tails, value by value.

#![expect(clippy::cast_precision_loss, reason = "counts of a page are far below 2^52")]

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use super::{Found, Verdict, add_both};
use crate::cli::output::{Failure, short};
use crate::cli::page_values::{Away, PageValues, Part};
use crate::cli::summary::Summary;
use crate::tier::encoding::Quantisation;

/// How a page relates to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    /// K and V have the same bits, and so has what is beside them.
    Identical,
    /// K and V have the same bits, and what is beside them has not.
    OtherSide,
    /// The second is what the first becomes as a lossy cold copy.
    Rounded(Quantisation),
    /// The first is what the second becomes.
    RoundedFirst(Quantisation),
    Different,
}

impl Relation {
    pub(super) fn of(a: &PageValues, b: &PageValues) -> Relation {
        if !have_one_shape(a, b) || a.tokens != b.tokens || a.geometry.dtype() != b.geometry.dtype()
        {
            return Relation::Different;
        }
        let has_same_side = a.side_rows() == b.side_rows();
        if first_difference(a, b).is_none() {
            return if has_same_side { Relation::Identical } else { Relation::OtherSide };
        }
        // No cold copy changes side rows.
        if !has_same_side {
            return Relation::Different;
        }
        for quantisation in [Quantisation::Q8_0, Quantisation::Q4_0] {
            if is_rounded(a, b, quantisation) {
                return Relation::Rounded(quantisation);
            }
            if is_rounded(b, a, quantisation) {
                return Relation::RoundedFirst(quantisation);
            }
        }
        Relation::Different
    }

    fn in_words(self) -> String {
        let rounded = |which: &str, other: &str, quantisation: Quantisation| {
            let name = quantisation.encoding().extension();
            format!("{which} is the lossy copy of {other}, rounded to {name}")
        };
        match self {
            Relation::Identical => "K and V have the same bits".to_owned(),
            Relation::OtherSide => "K and V have the same bits, the side rows differ".to_owned(),
            Relation::Rounded(quantisation) => rounded("b", "a", quantisation),
            Relation::RoundedFirst(quantisation) => rounded("a", "b", quantisation),
            Relation::Different => "K or V differ".to_owned(),
        }
    }
}

/// Whether rows can be compared one by one.
fn have_one_shape(a: &PageValues, b: &PageValues) -> bool {
    let shape = |values: &PageValues| {
        let geometry = &values.geometry;
        (geometry.num_kv_heads(), geometry.head_dim(), geometry.v_head_dim())
    };
    shape(a) == shape(b)
}

/// The first token, of those that both have, with another K or V in any head.
fn first_difference(a: &PageValues, b: &PageValues) -> Option<u32> {
    let heads = a.geometry.num_kv_heads();
    let has_same_dtype = a.geometry.dtype() == b.geometry.dtype();
    let differs = |token: u32| {
        a.parts().any(|part| {
            (0..heads).any(|head| {
                if has_same_dtype {
                    a.row(part, head, token) != b.row(part, head, token)
                } else {
                    a.row_numbers(part, head, token) != b.row_numbers(part, head, token)
                }
            })
        })
    };
    (0..a.tokens.min(b.tokens)).find(|token| differs(*token))
}

fn is_rounded(full: &PageValues, rounded: &PageValues, quantisation: Quantisation) -> bool {
    let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits);
    full.parts().all(|part| {
        (0..full.geometry.num_kv_heads()).all(|head| {
            full.rounded(part, head, quantisation)
                .is_ok_and(|expected| bits(expected).eq(bits(rounded.numbers(part, head))))
        })
    })
}

/// How far the values of a head are from each other.
struct Distance {
    part: Part,
    head: u32,
    largest: f64,
    mean: f64,
    /// Pairs of which one is no finite number and the other is not the same; they are in neither.
    not_finite: u64,
}

impl Distance {
    fn of(a: &PageValues, b: &PageValues, part: Part, head: u32) -> Distance {
        let (mut largest, mut sum, mut count, mut not_finite) = (0.0_f64, 0.0, 0_u64, 0);
        for (a, b) in a.numbers(part, head).into_iter().zip(b.numbers(part, head)) {
            let distance = (f64::from(a) - f64::from(b)).abs();
            if distance.is_finite() {
                largest = largest.max(distance);
                sum += distance;
                count += 1;
            } else if a.to_bits() != b.to_bits() {
                not_finite += 1;
            }
        }
        Distance { part, head, largest, mean: sum / count.max(1) as f64, not_finite }
    }
}

pub(super) fn compare(a: &Path, b: &Path, away: Away) -> Result<Found, Failure> {
    let a = PageValues::read(a, away)?;
    let b = PageValues::read(b, away)?;
    let relation = Relation::of(&a, &b);
    let mut summary = Summary::default();
    summary.add("values", relation.in_words());
    for (name, of) in FACTS {
        add_both(&mut summary, name, [of(&a), of(&b)]);
    }
    let side = [&a, &b].map(|page| page.geometry.side_row_bytes());
    if side != [0; 2] {
        add_both(&mut summary, "side_row_bytes", side.map(|bytes| json!(bytes)));
        let is_same = a.side_rows() == b.side_rows();
        summary.add("side_rows", if is_same { "the same bytes" } else { "differ" });
    }
    let mut table = String::new();
    if have_one_shape(&a, &b) {
        let first = first_difference(&a, &b);
        summary.add_with_text(
            "first_different_token",
            json!(first),
            first.map_or("none".to_owned(), |token| format!("{token}, from 0")),
        );
        let heads = 0..a.geometry.num_kv_heads();
        let distances: Vec<Distance> = a
            .parts()
            .flat_map(|part| heads.clone().map(move |head| (part, head)))
            .map(|(part, head)| Distance::of(&a, &b, part, head))
            .collect();
        table = text(&distances);
        summary.add_with_text("heads", as_json(&distances), heads.len().to_string());
    }
    Ok(Found { verdict: Verdict::of(relation == Relation::Identical), summary, table })
}

type OfPage = fn(&PageValues) -> Value;

/// What is told of both.
const FACTS: [(&str, OfPage); 8] = [
    ("layer", |page| json!(page.layer.map(|layer| layer.0))),
    ("start", |page| json!(page.start.map(|start| start.0))),
    ("tokens", |page| json!(page.tokens)),
    ("num_kv_heads", |page| json!(page.geometry.num_kv_heads())),
    ("head_dim", |page| json!(page.geometry.head_dim())),
    ("v_head_dim", |page| json!(page.geometry.v_head_dim())),
    ("dtype", |page| json!(page.geometry.dtype().name())),
    ("layout", |page| json!(page.geometry.layout().name())),
];

fn text(distances: &[Distance]) -> String {
    let mut text = "part head  largest difference  mean difference\n".to_owned();
    for Distance { part, head, largest, mean, not_finite } in distances {
        let (part, largest, mean) = (part.name(), short(*largest), short(*mean));
        // Writing to a String cannot fail.
        let _ = write!(text, "{part:<4} {head:>4}  {largest:<18}  {mean:<15}");
        if *not_finite > 0 {
            let _ = write!(text, "  {not_finite} NaN or infinite");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

fn as_json(distances: &[Distance]) -> Value {
    let heads = distances.iter().map(|distance| {
        json!({
            "part": distance.part.name(),
            "head": distance.head,
            "largest_difference": distance.largest,
            "mean_difference": distance.mean,
            "not_finite": distance.not_finite,
        })
    });
    heads.collect()
}

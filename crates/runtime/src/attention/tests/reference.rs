//! Attention by its definition, in f64.

use super::fixture::Cache;
use crate::attention::{Mask, Options, Queries};

/// `[num_queries, num_qo_heads, v_head_dim]`, 0 for queries that see nothing.
pub(super) fn attend(
    cache: &Cache, queries: &Queries<'_>, options: &Options<'_>, sinks: Option<&[f32]>,
) -> Vec<f64> {
    let shape = cache.shape;
    let mut out = Vec::new();
    for query in 0..queries.positions.len() {
        for head in 0..shape.num_qo_heads() {
            let weights = weights(cache, queries, options, (query, head));
            let sink = sinks.map(|sinks| f64::from(sinks[head]));
            out.extend(normalise(cache, head / shape.group(), &weights, sink));
        }
    }
    out
}

/// The logit of each token, -infinity for those that the query does not see.
pub(super) fn weights(
    cache: &Cache, queries: &Queries<'_>, options: &Options<'_>, row: (usize, usize),
) -> Vec<f64> {
    let (shape, dim, (query, head)) = (cache.shape, cache.shape.head_dim(), row);
    let q = &queries.q[(query * shape.num_qo_heads() + head) * dim..][..dim];
    let position = queries.positions[query];
    let scale =
        options.sm_scale.map_or(1.0 / f64::from(u32::try_from(dim).unwrap()).sqrt(), f64::from);
    let positions = cache.positions();
    let logit = |token: usize| {
        let k = &cache.k[(token * shape.num_kv_heads() + head / shape.group()) * dim..][..dim];
        let mut logit: f64 =
            q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale;
        if let Some(cap) = options.soft_cap.map(f64::from) {
            logit = cap * (logit / cap).tanh();
        }
        let distance = i128::from(positions[token]) - i128::from(position);
        if let Some(slopes) = options.alibi_slopes {
            logit += f64::from(slopes[head]) * f64::from(i32::try_from(distance).unwrap());
        }
        let index = query * positions.len() + token;
        logit += match options.mask {
            Some(Mask::F32(mask)) => f64::from(mask[index]),
            Some(Mask::F16(mask)) => mask[index].to_f64(),
            None => 0.0,
        };
        let hidden = options.causal && distance > 0
            || options.window.is_some_and(|window| -distance >= i128::from(window))
            || options.selection.is_some_and(|selection| !selection.contains(token));
        if hidden { f64::NEG_INFINITY } else { logit }
    };
    (0..positions.len()).map(logit).collect()
}

fn normalise(cache: &Cache, kv_head: usize, logits: &[f64], sink: Option<f64>) -> Vec<f64> {
    let (heads, dim) = (cache.shape.num_kv_heads(), cache.shape.v_head_dim());
    let largest = logits.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let mut sum = sink.map_or(0.0, |sink| (sink - largest).exp());
    let mut out = vec![0.0; dim];
    for (token, logit) in
        logits.iter().enumerate().filter(|(_, logit)| **logit != f64::NEG_INFINITY)
    {
        let weight = (logit - largest).exp();
        sum += weight;
        for (out, v) in out.iter_mut().zip(&cache.v[(token * heads + kv_head) * dim..][..dim]) {
            *out += weight * f64::from(*v);
        }
    }
    if sum > 0.0 {
        for out in &mut out {
            *out /= sum;
        }
    }
    out
}

/// `|a - b| / |b|`
pub(super) fn relative_l2(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - b));
    let size = norm(&mut expected.iter().copied());
    if size == 0.0 { error } else { error / size }
}

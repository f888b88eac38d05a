//! Attention over the pages of a sequence, on the processor.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use kvfs_page::{Layer, LayerKind, Manifest};
use kvfs_runtime::attention::{self, Attention, Options, Pairing, Queries, Rotation, Shape};
use pyo3::prelude::*;

use crate::array::Array;
use crate::errors::Failure;
use crate::fork::{OfProcess, Process};
use crate::sequence::Sequence;
use crate::tensor::Tensor;

/// What attention to some tokens gives, to be merged with that to others: for each query and head the sum of V
/// weighted by `exp(logit - m)`, the largest logit `m`, and the sum `l` of the weights.
#[pyclass(frozen, module = "kvfs")]
#[derive(Debug)]
pub(crate) struct Partials(attention::Partials);

impl Partials {
    fn shape(&self, is_of_rows: bool) -> Vec<usize> {
        let mut shape = vec![self.0.num_queries(), self.0.shape().num_qo_heads()];
        shape.extend(is_of_rows.then(|| self.0.shape().v_head_dim()));
        shape
    }
}

#[pymethods]
impl Partials {
    /// `[queries, heads, v_head_dim]`: the weighted sum of V.
    #[getter]
    fn o(&self) -> Array {
        Array::of_floats(self.0.o().to_vec(), &self.shape(true))
    }

    /// `[queries, heads]`: the largest logit.
    #[getter]
    fn m(&self) -> Array {
        Array::of_floats(self.0.m().to_vec(), &self.shape(false))
    }

    /// `[queries, heads]`: the sum of the weights.
    #[getter]
    fn l(&self) -> Array {
        Array::of_floats(self.0.l().to_vec(), &self.shape(false))
    }

    /// `[queries, heads]`: the logarithm of the sum of `exp(logit)`, as engines keep it.
    #[getter]
    fn lse(&self) -> Array {
        Array::of_floats(self.0.lse(), &self.shape(false))
    }

    /// These tokens and those of other partial results, which must not be among these.
    fn merge(&self, other: &Bound<'_, Self>) -> PyResult<Self> {
        let mut all = self.0.clone();
        all.merge(&other.get().0).map_err(Failure::from)?;
        Ok(Self(all))
    }

    /// The same with what an engine computed itself: its output `[queries, heads, v_head_dim]`, and `lse`
    /// `[queries, heads]`.
    fn merge_output(&self, output: &Bound<'_, PyAny>, lse: &Bound<'_, PyAny>) -> PyResult<Self> {
        let output = Tensor::take(output, "output")?.to_f32()?;
        let m = Tensor::take(lse, "lse")?.to_f32()?;
        // Without tokens there is no weight either, whatever the output holds.
        let l: Vec<f32> =
            m.iter().map(|m| if *m == f32::NEG_INFINITY { 0.0 } else { 1.0 }).collect();
        let m = m.into_iter().map(|m| m.max(attention::EMPTY_M)).collect();
        let part = attention::Partials::from_parts(self.0.shape(), output, m, l);
        let mut all = self.0.clone();
        all.merge(&part.map_err(Failure::from)?).map_err(Failure::from)?;
        Ok(Self(all))
    }

    /// The result, `[queries, heads, v_head_dim]`. `sinks` has a logit for each head that takes part in the
    /// softmax without a value, as in gpt-oss.
    #[pyo3(signature = (sinks = None))]
    fn finish(&self, sinks: Option<Vec<f32>>) -> PyResult<Array> {
        let values = self.0.clone().finish(sinks.as_deref()).map_err(Failure::from)?;
        Ok(Array::of_floats(values, &self.shape(true)))
    }
}

/// Attention with its threads, of which each shape has one.
type Shared = Arc<OfProcess<Attention>>;

fn shared(shape: Shape, threads: usize) -> Result<Shared, Failure> {
    static MADE: Mutex<Vec<(Process, Shape, usize, Shared)>> = Mutex::new(Vec::new());
    let this = Process::this();
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    // What came along in a fork has no threads.
    made.retain(|(process, ..)| *process == this);
    if let Some((.., found)) =
        made.iter().find(|(_, of, count, _)| (*of, *count) == (shape, threads))
    {
        return Ok(Arc::clone(found));
    }
    let attention = Arc::new(OfProcess::new(Attention::new(shape, threads)?));
    made.push((this, shape, threads, Arc::clone(&attention)));
    Ok(attention)
}

/// What a call gives beside queries.
struct Settings {
    layer: Layer,
    positions: Option<Vec<u64>>,
    end: Option<u64>,
    threads: usize,
    causal: bool,
    window: Option<u64>,
    sm_scale: Option<f32>,
    soft_cap: Option<f32>,
    alibi_slopes: Option<Vec<f32>>,
}

/// Attends with `q`, `[queries, heads, head_dim]` or `[heads, head_dim]`, to the pages and the tail of a layer where
/// they lie.
///
/// Queries stand at `positions`; where none are given they are those of the last tokens. `end` says how many
/// tokens they see at most. A layer with a sliding window has that of the manifest.
#[pyfunction]
#[pyo3(signature = (q, sequence, layer, *, positions = None, end = None, causal = true, window = None,
    sm_scale = None, soft_cap = None, alibi_slopes = None, threads = None))]
#[allow(clippy::too_many_arguments, reason = "Python names them")]
pub(crate) fn attend(
    q: &Bound<'_, PyAny>, sequence: &Bound<'_, Sequence>, layer: u32, positions: Option<Vec<u64>>,
    end: Option<u64>, causal: bool, window: Option<u64>, sm_scale: Option<f32>,
    soft_cap: Option<f32>, alibi_slopes: Option<Vec<f32>>, threads: Option<usize>,
) -> PyResult<Partials> {
    let py = q.py();
    let q = Tensor::take(q, "q")?;
    let threads = threads.unwrap_or_else(|| available_parallelism().map_or(1, Into::into));
    let layer = Layer(layer);
    let settings = Settings {
        layer,
        positions,
        end,
        threads,
        causal,
        window,
        sm_scale,
        soft_cap,
        alibi_slopes,
    };
    let sequence = sequence.get();
    Ok(Partials(py.detach(|| run(&q, sequence, &settings))?))
}

fn run(
    q: &Tensor, sequence: &Sequence, settings: &Settings,
) -> Result<attention::Partials, Failure> {
    let values = q.to_f32()?;
    sequence.read(|sequence| {
        let layer = settings.layer;
        // Whoever follows a writer layer by layer says how far, before every layer has come there.
        let end = match settings.end {
            Some(end) => sequence.wait_for(layer, end, Duration::ZERO)?.min(end),
            None => sequence.valid_tokens()?.min(sequence.layer_tokens(layer)?),
        };
        let manifest = sequence.manifest();
        let (num_queries, shape) = shape_of(q, manifest)?;
        let behind = sequence.positions().ends(end).map_or(0, |(_, last)| last + 1);
        let positions = settings
            .positions
            .clone()
            .unwrap_or_else(|| (behind.saturating_sub(num_queries as u64)..behind).collect());
        let window = settings.window.or(match manifest.layer_kind(layer) {
            Some(LayerKind::Sliding { window }) => Some(u64::from(window)),
            _ => None,
        });
        let rotation = rotation(manifest)?;
        let options = Options {
            sm_scale: settings.sm_scale,
            causal: settings.causal,
            window,
            soft_cap: settings.soft_cap,
            alibi_slopes: settings.alibi_slopes.as_deref(),
            rotation: rotation.as_ref(),
            ..Options::default()
        };
        let attention = shared(shape, settings.threads)?;
        let queries = Queries { q: &values, positions: &positions };
        let mut stream = sequence.stream_layers(&[layer], 0..end)?;
        Ok(stream.attend(attention.peek()?, &queries, &options)?)
    })
}

fn shape_of(q: &Tensor, manifest: &Manifest) -> Result<(usize, Shape), Failure> {
    let geometry = manifest.geometry();
    let (num_queries, heads, dim) = match q.shape[..] {
        [heads, dim] => (1, heads, dim),
        [queries, heads, dim] => (queries, heads, dim),
        _ => (0, 0, 0),
    };
    let head_dim = geometry.head_dim() as usize;
    let kv_heads = geometry.num_kv_heads() as usize;
    if dim != head_dim || heads == 0 || heads % kv_heads != 0 {
        return Err(Failure::argument(format!(
            "q has shape {:?}: [queries, heads, {head_dim}] is needed, heads a multiple of {kv_heads}",
            q.shape
        )));
    }
    let shape = Shape::new(heads, kv_heads, head_dim, geometry.v_head_dim() as usize)?;
    Ok((num_queries, shape))
}

/// For tokens that were moved, where the manifest says how K was rotated.
fn rotation(manifest: &Manifest) -> Result<Option<Rotation>, Failure> {
    let Some(rope) = manifest.fields().rope.as_ref() else { return Ok(None) };
    let pairing = match rope.pairing() {
        Some("interleaved") => Pairing::Interleaved,
        _ => Pairing::Halves,
    };
    Ok(Some(Rotation::new(rope, manifest.geometry().head_dim() as usize, pairing)?))
}

//! What an engine has of some tokens, as it hands it over: an array for each layer, or one for all of them.

use kvfs_page::{Layer, Manifest};
use pyo3::prelude::*;

use crate::errors::Failure;
use crate::rows::{Plane, Rows, SidePlane, layout};
use crate::tensor::Tensor;

/// The arrays of each layer: one with a dimension for layers, or a list.
pub(crate) fn tensors(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<Tensor>> {
    let is_list = object.is_instance_of::<pyo3::types::PyList>()
        || object.is_instance_of::<pyo3::types::PyTuple>();
    if !is_list {
        return Ok(vec![Tensor::take(object, what)?]);
    }
    let items = object.try_iter()?.enumerate();
    items.map(|(index, item)| Tensor::take(&item?, &format!("{what}[{index}]"))).collect()
}

/// What an engine has of some tokens.
#[derive(Debug)]
pub(crate) struct Arrays {
    k: Vec<Tensor>,
    v: Vec<Tensor>,
    side: Vec<Tensor>,
}

impl Arrays {
    pub(crate) fn take(
        k: Vec<Tensor>, v: Option<&Bound<'_, PyAny>>, side: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let v = v.map(|v| tensors(v, "v")).transpose()?.unwrap_or_default();
        let side = side.map(|side| tensors(side, "side")).transpose()?.unwrap_or_default();
        Ok(Self { k, v, side })
    }

    /// K and V of layers, and side rows of those that keep some.
    pub(crate) fn rows<'a>(
        &'a self, manifest: &Manifest, layers: &[Layer], order: Option<&str>,
    ) -> Result<Vec<Rows<'a>>, Failure> {
        let Self { k, v, side } = self;
        let geometry = manifest.geometry();
        let order = layout(order, geometry)?;
        let planes = |tensors: &'a [Tensor], is_v| -> Result<Vec<Plane<'a>>, Failure> {
            let all = tensors.iter().map(|tensor| Plane::all_of(tensor, geometry, is_v, order));
            Ok(all.collect::<Result<Vec<_>, _>>()?.concat())
        };
        let (k, v) = (planes(k, false)?, planes(v, true)?);
        let wanted = if geometry.v_head_dim() > 0 { k.len() } else { 0 };
        if v.len() != wanted {
            return Err(Failure::argument(format!(
                "{} layers of K and {} of V: {wanted} of V are needed",
                k.len(),
                v.len()
            )));
        }
        let side = side.iter().map(SidePlane::all_of).collect::<Result<Vec<_>, _>>()?.concat();
        let keeps = |layer: &Layer| manifest.side_rows(*layer).is_some();
        let wanted = layers.iter().filter(|layer| keeps(layer)).count();
        if side.len() != wanted && !side.is_empty() {
            let found = side.len();
            return Err(Failure::argument(format!(
                "side rows of {found} layers: {wanted} of these keep any"
            )));
        }
        let (mut v, mut side) = (v.into_iter(), side.into_iter());
        let rows = k.into_iter().enumerate().map(|(index, k)| Rows {
            k,
            v: v.next(),
            side: layers.get(index).filter(|layer| keeps(layer)).and_then(|_| side.next()),
        });
        Ok(rows.collect())
    }
}

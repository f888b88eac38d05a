//! Token ids: a list, or an array of whole numbers.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::errors::Failure;
use crate::tensor::Tensor;

/// What was given, as the mount has it.
pub(crate) fn token_ids(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(list) = object.cast::<PyList>() {
        return of_items(list.iter(), list.len());
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return of_items(tuple.iter(), tuple.len());
    }
    Ok(of_tensor(&Tensor::take(object, "tokens")?)?)
}

fn of_items<'py>(
    items: impl Iterator<Item = Bound<'py, PyAny>>, count: usize,
) -> PyResult<Vec<u32>> {
    let mut ids = Vec::with_capacity(count);
    for (index, item) in items.enumerate() {
        match item.extract() {
            Ok(id) => ids.push(id),
            Err(_) => return Err(no_id(index, &item.repr()?.to_string()).into()),
        }
    }
    Ok(ids)
}

fn no_id(index: usize, value: &str) -> Failure {
    Failure::argument(format!("token {index} is {value}: ids are whole numbers from 0 to 2^32 - 1"))
}

fn of_tensor(tensor: &Tensor) -> Result<Vec<u32>, Failure> {
    let is_flat = tensor.shape.iter().rev().skip(1).all(|length| *length == 1);
    if tensor.shape.is_empty() || !is_flat || !tensor.is_contiguous_from(0) {
        let shape = &tensor.shape;
        return Err(Failure::argument(format!(
            "tokens has shape {shape:?}: one row of ids is needed, contiguous"
        )));
    }
    let element = tensor.element;
    if !element.is_integer() || ![4, 8].contains(&element.bytes()) {
        let name = element.name();
        return Err(Failure::argument(format!(
            "tokens is {name}: int32, uint32, int64 or uint64 is needed"
        )));
    }
    let bytes = tensor.bytes();
    let wide = |index: usize, value: i128| {
        u32::try_from(value).map_err(|_| no_id(index, &value.to_string()))
    };
    if element.bytes() == 4 {
        let items = bytes.as_chunks().0.iter().enumerate();
        return items
            .map(|(index, item)| {
                if element.is_signed() {
                    wide(index, i32::from_le_bytes(*item).into())
                } else {
                    Ok(u32::from_le_bytes(*item))
                }
            })
            .collect();
    }
    let items = bytes.as_chunks().0.iter().enumerate();
    items
        .map(|(index, item)| {
            let value = i64::from_le_bytes(*item);
            wide(
                index,
                if element.is_signed() { value.into() } else { value.cast_unsigned().into() },
            )
        })
        .collect()
}

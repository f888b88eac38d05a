//! The first 4096 bytes of a page file: a safetensors header that leaves no choice.

mod json;
mod state;

use serde_json::json;

use self::json::{Header, Value};
use super::Layer;
use super::error::{PageError, quoted};
use super::geometry::{Geometry, Layout};
use super::limits::{HEADER_JSON_BYTES, LENGTH_PREFIX_BYTES, PAYLOAD_OFFSET, index};
use super::manifest::Manifest;
use super::metadata::{Declared, Metadata};

pub(super) use self::state::{build_state_header, parse_state_header};

const METADATA: &str = "__metadata__";
const SIDE: &str = "side";
const PAD: &str = "_pad";
/// Of what is not made of elements, as far as anybody here knows.
const BYTES_DTYPE: &str = "U8";

/// What the header of an accepted page says beyond the geometry it was compared with.
///
/// ```text
/// byte 0     u64 little endian: 4088, the length of the JSON
/// byte 8     JSON object, then spaces up to byte 4096:
///            "__metadata__"  optional, strings by name
///            "k"             {"dtype", "shape", "data_offsets": [0, k_bytes]}
///            "v"             right behind k; absent where v_head_dim is 0
///            "side"          U8 [tokens, bytes of a side row], right behind; only where the layer has some
///            "_pad"          U8, right behind; absent where nothing is to be filled
/// byte 4096  the payload; offsets count from here
/// ```
///
/// Any order of the keys and any spacing is read. For a geometry and a number of tokens, the
/// shapes, the offsets and the length of the file have one allowed value each, so they are
/// compared, never computed with: no number from a header can overflow anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageHeader {
    /// Tokens in the page, from 1 to the geometry's `page_tokens`.
    pub tokens: u32,
    /// The `kvfs.*` part of the metadata.
    pub declared: Declared,
    /// All of the metadata.
    pub metadata: Metadata,
}

impl PageHeader {
    /// Reads a header and accepts it only as that of a page of `geometry`.
    ///
    /// `first_bytes` are the first 4096 bytes of the file (or more), `file_bytes` is its length.
    ///
    /// # Errors
    /// [`PageError::Header`], [`PageError::Shape`], [`PageError::Dtype`], [`PageError::Offsets`]
    /// and [`PageError::Size`], checked in this order.
    pub fn parse(
        first_bytes: &[u8], file_bytes: u64, geometry: &Geometry,
    ) -> Result<Self, PageError> {
        let mut header = json::parse(json_text(first_bytes, file_bytes)?)?;
        let metadata = take_metadata(&mut header)?;
        let declared = Declared::from_metadata(&metadata)?;
        let tokens = check_tensors(header, geometry)?;
        check_file_bytes(file_bytes, geometry.file_bytes(tokens))?;
        Ok(Self { tokens, declared, metadata })
    }

    /// Reads the header of a page of which nobody tells the layer, as that of one that keeps what the page has.
    ///
    /// # Errors
    /// As [`parse`](Self::parse), of the first layer.
    pub fn parse_of_any_layer(
        first_bytes: &[u8], file_bytes: u64, manifest: &Manifest,
    ) -> Result<(Geometry, Self), PageError> {
        let layers = (0..manifest.geometry().num_layers()).map(Layer);
        let mut geometries: Vec<_> = layers.map(|layer| manifest.layer_geometry(layer)).collect();
        geometries.dedup();
        let mut refused = None;
        for geometry in geometries {
            match Self::parse(first_bytes, file_bytes, &geometry) {
                Ok(header) => return Ok((geometry, header)),
                Err(error) => refused.get_or_insert(error),
            };
        }
        Err(refused.unwrap_or_else(|| PageError::Manifest("no layers".to_owned())))
    }
}

/// The 4096 header bytes of a page with `tokens` tokens; equal arguments give equal bytes.
///
/// # Errors
/// [`PageError::Shape`] if the page cannot have that many tokens, [`PageError::Header`] if the
/// metadata does not fit.
pub fn build_header(
    geometry: &Geometry, tokens: u32, metadata: &Metadata,
) -> Result<Vec<u8>, PageError> {
    check_tokens(u64::from(tokens), geometry)?;
    header_text(&expected_tensors(geometry, tokens), metadata)
}

fn header_text(tensors: &[Tensor<'_>], metadata: &Metadata) -> Result<Vec<u8>, PageError> {
    let mut entries = Vec::new();
    if !metadata.is_empty() {
        entries.push(format!("\"{METADATA}\":{}", json!(metadata)));
    }
    for tensor in tensors {
        // Written out by hand: the order of keys must not depend on a feature of serde_json.
        entries.push(format!(
            r#""{}":{{"dtype":"{}","shape":{},"data_offsets":{}}}"#,
            tensor.name,
            tensor.dtype,
            json!(tensor.shape),
            json!(tensor.offsets),
        ));
    }
    let text = format!("{{{}}}", entries.join(","));
    let json_bytes = index(HEADER_JSON_BYTES);
    if text.len() > json_bytes {
        return Err(PageError::Header(format!(
            "header would be {} bytes, the limit is {HEADER_JSON_BYTES}: shorten the metadata",
            text.len()
        )));
    }
    let mut header = HEADER_JSON_BYTES.to_le_bytes().to_vec();
    header.extend(text.as_bytes());
    header.resize(index(PAYLOAD_OFFSET), b' ');
    Ok(header)
}

/// The length of a file must be what its header describes.
fn check_file_bytes(file_bytes: u64, expected: u64) -> Result<(), PageError> {
    if file_bytes == expected {
        return Ok(());
    }
    Err(PageError::Size(format!(
        "file is {file_bytes} bytes, its header describes {expected}: {}",
        if file_bytes < expected {
            "the copy or the writer has not finished"
        } else {
            "there are bytes behind the last tensor"
        }
    )))
}

/// A tensor as the manifest asks for it.
struct Tensor<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: Vec<u64>,
    offsets: [u64; 2],
}

/// The tensors of a page with `tokens` tokens, in file order.
fn expected_tensors(geometry: &Geometry, tokens: u32) -> Vec<Tensor<'static>> {
    let dtype = geometry.dtype().safetensors_name();
    let pad_bytes = geometry.pad_bytes(tokens);
    let k_end = geometry.k_bytes(tokens);
    let v_end = k_end + geometry.v_bytes(tokens);
    let side_end = v_end + geometry.side_bytes(tokens);
    let mut tensors = vec![Tensor {
        name: "k",
        dtype,
        shape: geometry.k_shape(tokens).to_vec(),
        offsets: [0, k_end],
    }];
    if geometry.v_head_dim() > 0 {
        tensors.push(Tensor {
            name: "v",
            dtype,
            shape: geometry.v_shape(tokens).to_vec(),
            offsets: [k_end, v_end],
        });
    }
    if geometry.side_row_bytes() > 0 {
        tensors.push(Tensor {
            name: SIDE,
            dtype: BYTES_DTYPE,
            shape: geometry.side_shape(tokens).to_vec(),
            offsets: [v_end, side_end],
        });
    }
    if pad_bytes > 0 {
        tensors.push(Tensor {
            name: PAD,
            dtype: BYTES_DTYPE,
            shape: vec![pad_bytes],
            offsets: [side_end, side_end + pad_bytes],
        });
    }
    tensors
}

/// The JSON object of the header, without its padding.
fn json_text(first_bytes: &[u8], file_bytes: u64) -> Result<&str, PageError> {
    let refuse = |text: String| Err(PageError::Header(text));
    let Some(length) = first_bytes.first_chunk().copied().map(u64::from_le_bytes) else {
        return refuse(format!("file is {file_bytes} bytes: not a kvfs page"));
    };
    if length > HEADER_JSON_BYTES {
        return refuse(format!(
            "header length {length} exceeds the limit {HEADER_JSON_BYTES}: not a kvfs page"
        ));
    }
    if length < HEADER_JSON_BYTES {
        return refuse(format!(
            "header length {length} is not {HEADER_JSON_BYTES}: pad the header with spaces so \
             that the payload starts at byte {PAYLOAD_OFFSET}"
        ));
    }
    let Some(json) = first_bytes.get(index(LENGTH_PREFIX_BYTES)..index(PAYLOAD_OFFSET)) else {
        return refuse(format!(
            "header ends after {} of {PAYLOAD_OFFSET} bytes: the copy or the writer has not \
             finished",
            first_bytes.len()
        ));
    };
    if json.ends_with(b"\0") {
        return refuse("header is padded with NUL bytes: pad it with spaces".to_owned());
    }
    let Ok(json) = str::from_utf8(json) else {
        return refuse("header is not UTF-8: not a safetensors file".to_owned());
    };
    let object = json.trim_end_matches(' ');
    if !object.starts_with('{') || !object.ends_with('}') {
        return refuse(
            "header is not a JSON object padded with spaces: not a safetensors file".to_owned(),
        );
    }
    Ok(object)
}

fn take_metadata(header: &mut Header) -> Result<Metadata, PageError> {
    let entries = header.remove(METADATA).unwrap_or_default();
    entries
        .into_iter()
        .map(|(name, value)| match value {
            Value::Text(text) => Ok((name, text)),
            Value::Numbers(_) | Value::Other => Err(PageError::Header(format!(
                "header metadata {} is not a string: safetensors allows nothing else",
                quoted(&name)
            ))),
        })
        .collect()
}

/// Compares the tensors with those of the geometry and gives the number of tokens.
fn check_tensors(mut header: Header, geometry: &Geometry) -> Result<u32, PageError> {
    let found_tokens = check_tokens(token_dimension(&header, geometry)?, geometry)?;
    if geometry.side_row_bytes() == 0 && header.contains_key(SIDE) {
        return Err(PageError::Shape(
            "tensor side is present, the manifest says of no side rows in this layer: leave it out"
                .to_owned(),
        ));
    }
    for expected in expected_tensors(geometry, found_tokens) {
        let Some(entry) = header.remove(expected.name) else {
            return Err(PageError::Shape(format!(
                "tensor {} is missing: {} tokens need one of shape {:?}",
                expected.name, found_tokens, expected.shape
            )));
        };
        check_tensor(entry, &expected)?;
    }
    match header.keys().next().map(String::as_str) {
        None => Ok(found_tokens),
        Some("v") => Err(PageError::Shape(
            "tensor v is present, the manifest says v_head_dim 0: leave it out".to_owned(),
        )),
        Some(PAD) => Err(PageError::Shape(
            "tensor _pad is present, the others already fill the file: leave it out".to_owned(),
        )),
        Some(name) => Err(PageError::Shape(format!(
            "tensor {} is unknown: a page holds k, v, side and _pad",
            quoted(name)
        ))),
    }
}

/// The number that stands where `k` says its tokens.
fn token_dimension(header: &Header, geometry: &Geometry) -> Result<u64, PageError> {
    let Some(entry) = header.get("k") else {
        return Err(PageError::Shape("tensor k is missing: not a kvfs page".to_owned()));
    };
    let Some(Value::Numbers(shape)) = entry.get("shape") else {
        return Err(PageError::Header("tensor k has no shape: not a safetensors file".to_owned()));
    };
    match (geometry.layout(), shape.as_slice()) {
        (Layout::Hnd, [_, tokens, _]) | (Layout::Nhd, [tokens, _, _]) => Ok(*tokens),
        _ => Err(PageError::Shape(format!(
            "tensor k has {} dimensions: a page has 3, layout {}",
            shape.len(),
            geometry.layout().name()
        ))),
    }
}

fn check_tokens(tokens: u64, geometry: &Geometry) -> Result<u32, PageError> {
    let page_tokens = geometry.page_tokens();
    match u32::try_from(tokens) {
        Ok(tokens) if (1..=page_tokens).contains(&tokens) => Ok(tokens),
        _ => Err(PageError::Shape(format!(
            "page has {tokens} tokens, the manifest allows 1 to {page_tokens} (layout {})",
            geometry.layout().name()
        ))),
    }
}

fn check_tensor(
    mut entry: std::collections::BTreeMap<String, Value>, expected: &Tensor<'_>,
) -> Result<(), PageError> {
    let name = expected.name;
    let (
        Some(Value::Text(dtype)),
        Some(Value::Numbers(shape)),
        Some(Value::Numbers(offsets)),
        None,
    ) = (
        entry.remove("dtype"),
        entry.remove("shape"),
        entry.remove("data_offsets"),
        entry.keys().next(),
    )
    else {
        return Err(PageError::Header(format!(
            "tensor {name} is not described by dtype, shape and data_offsets alone: not a \
             safetensors file"
        )));
    };
    if dtype != expected.dtype {
        return Err(PageError::Dtype(format!(
            "tensor {name} has dtype {}, this cache has {}",
            quoted(&dtype),
            expected.dtype
        )));
    }
    if shape != expected.shape {
        return Err(PageError::Shape(format!(
            "tensor {name} has shape {}, this cache has {:?}",
            dimensions(&shape),
            expected.shape
        )));
    }
    if offsets != expected.offsets {
        return Err(PageError::Offsets(format!(
            "tensor {name} has data_offsets {}, must have {:?}: k, v, side and _pad follow each other \
             without holes",
            dimensions(&offsets),
            expected.offsets
        )));
    }
    Ok(())
}

/// Numbers from a header for an error line, which a list of hundreds would fill.
fn dimensions(numbers: &[u64]) -> String {
    const SHOWN_MAX: usize = 4;
    match numbers.get(..=SHOWN_MAX) {
        None => format!("{numbers:?}"),
        Some(_) => format!("of {} numbers", numbers.len()),
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

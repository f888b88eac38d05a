//! Reading tensors `[batch, kv_heads, tokens, head_dim]`, in pieces: files are larger than memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use safetensors::tensor::{Dtype, TensorInfo};

use super::header::Header;
use super::names::{self, Part};
use super::{MASK, TOKEN_IDS};
use crate::Rows;
use kvfs_page::{Geometry, Layer, LayerKind, Manifest};

/// What is taken of a file.
#[derive(Debug, Default)]
pub struct Selection {
    /// Which sequence of the batch; needed where there are several.
    pub batch_row: Option<usize>,
    /// Ids that are not in the file.
    pub token_ids: Option<Vec<u32>>,
    /// Tokens that are there, padding and all, where the tensors have room for more.
    pub num_tokens: Option<usize>,
}

/// K or V of one layer.
#[derive(Clone, Copy, Debug)]
struct Tensor {
    dtype: Dtype,
    batch: usize,
    heads: usize,
    /// That it has room for.
    tokens: usize,
    dim: usize,
    /// In the file.
    offset: u64,
}

/// A file whose parts have been found.
#[derive(Debug)]
pub struct Tensors {
    file: File,
    /// K, and V unless the model has none.
    layers: Vec<(Tensor, Option<Tensor>)>,
    batch_row: usize,
    token_ids: Vec<u32>,
    /// Tokens of padding before the first one of the sequence.
    padding: usize,
    num_tokens: u32,
}

impl Tensors {
    /// Finds the parts of a file.
    ///
    /// # Errors
    /// The end of a line that says what is wrong with it, or what to select.
    pub fn of(file: File, selection: Selection) -> Result<Self, String> {
        let header = Header::read(&file)?;
        check_class(&header)?;
        let layers = find_layers(&header)?;
        let Some((first, _)) = layers.first() else {
            return Err("has no tensors named like layers.0.keys".to_owned());
        };
        let (batch, tokens) = (first.batch, first.tokens);
        let batch_row = match selection.batch_row {
            Some(row) if row < batch => row,
            Some(row) => {
                return Err(format!("has {batch} sequences, counted from 0: no --row {row}"));
            }
            None if batch == 1 => 0,
            None => return Err(format!("has {batch} sequences: say which one with --row, from 0")),
        };
        let used = match selection.num_tokens {
            Some(count) if count > tokens => return Err(format!("has room for {tokens} tokens")),
            Some(count) => count,
            None => read_length(&file, &header)?.unwrap_or(tokens).min(tokens),
        };
        let whole = |name| read_of_batch(&file, &header, name, (batch, batch_row));
        let padding = count_padding(&whole(MASK)?.unwrap_or_default(), used)?;
        let token_ids = match (selection.token_ids, whole(TOKEN_IDS)?) {
            (Some(ids), _) => ids,
            (None, Some(ids)) => to_ids(&ids[padding.min(ids.len())..])?,
            (None, None) => return Err("has no input_ids: name a file with --tokens".to_owned()),
        };
        let (num_tokens, ids) = (used - padding, token_ids.len());
        if num_tokens == 0 {
            return Err("has no tokens".to_owned());
        }
        if ids < num_tokens {
            return Err(format!(
                "has {num_tokens} tokens, and there are ids of {ids}: if the rest is room, say so \
                 with --num-tokens"
            ));
        }
        // Of the token that was computed last there may be an id and no row yet.
        if ids > num_tokens + 1 {
            return Err(format!("has {num_tokens} tokens, and there are ids of {ids}"));
        }
        let num_tokens = u32::try_from(num_tokens).map_err(|_| "has too many tokens")?;
        Ok(Self { file, layers, batch_row, token_ids, padding, num_tokens })
    }

    /// Compares it with the shape of a model's pages.
    ///
    /// # Errors
    /// The end of a line that says what does not fit.
    pub fn check(&self, manifest: &Manifest) -> Result<(), String> {
        let geometry = manifest.geometry();
        let (found, expected) = (self.layers.len(), geometry.num_layers());
        if found != expected as usize {
            return Err(format!("has {found} layers, the manifest {expected}"));
        }
        for (layer, (k, v)) in (0..).map(Layer).zip(&self.layers) {
            let kind = manifest.layer_kind(layer);
            if !kind.as_ref().is_some_and(LayerKind::has_rows_of_tokens) {
                return Err(format!("cannot have layer {layer}, which keeps no K and V of tokens"));
            }
            if let Some(side) = manifest.side_rows(layer) {
                return Err(format!(
                    "has K and V alone, and layer {layer} keeps {} beside them",
                    side.name
                ));
            }
            check_tensor(k, geometry, geometry.head_dim())
                .map_err(|why| format!("layer {layer} has K {why}"))?;
            match (v, geometry.v_head_dim()) {
                (None, 0) => {}
                (Some(v), dim @ 1..) => check_tensor(v, geometry, dim)
                    .map_err(|why| format!("layer {layer} has V {why}"))?,
                (Some(_), 0) => return Err("has V, the manifest's model has none".to_owned()),
                (None, _) => return Err(format!("has no V of layer {layer}")),
            }
        }
        Ok(())
    }

    /// Puts the rows of a tensor where they belong in rows of tokens.
    fn scatter(
        &self, tensor: &Tensor, first: u32, rows: &mut [u8], (row_bytes, offset): (usize, usize),
    ) -> io::Result<()> {
        let dim_bytes = tensor.dim_bytes();
        let count = rows.len() / row_bytes;
        let mut of_head = vec![0; count * dim_bytes];
        for head in 0..tensor.heads {
            let index = (self.batch_row * tensor.heads + head) * tensor.tokens;
            let index = index + self.padding + first as usize;
            self.file.read_exact_at(&mut of_head, tensor.offset + (index * dim_bytes) as u64)?;
            let at = offset + head * dim_bytes;
            for (row, values) in
                rows.chunks_exact_mut(row_bytes).zip(of_head.chunks_exact(dim_bytes))
            {
                row[at..at + dim_bytes].copy_from_slice(values);
            }
        }
        Ok(())
    }
}

impl Rows for Tensors {
    fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    fn read_rows(&self, layer: Layer, first: u32, count: u32) -> io::Result<Vec<u8>> {
        let (k, v) = &self.layers[layer.0 as usize];
        let k_bytes = k.heads * k.dim_bytes();
        let row_bytes = k_bytes + v.as_ref().map_or(0, |v| v.heads * v.dim_bytes());
        let mut rows = vec![0; row_bytes * count as usize];
        self.scatter(k, first, &mut rows, (row_bytes, 0))?;
        if let Some(v) = v {
            self.scatter(v, first, &mut rows, (row_bytes, k_bytes))?;
        }
        Ok(rows)
    }
}

impl Tensor {
    fn new(name: &str, info: &TensorInfo, payload: u64) -> Result<Self, String> {
        let &[batch, heads, tokens, dim] = &info.shape[..] else {
            return Err(format!("has {name} of {} dimensions, not 4", info.shape.len()));
        };
        let offset = payload + info.data_offsets.0 as u64;
        Ok(Self { dtype: info.dtype, batch, heads, tokens, dim, offset })
    }

    /// Bytes of one head's row. Of the types that a manifest knows, none has less than a byte.
    fn dim_bytes(&self) -> usize {
        self.dim * self.dtype.bitsize() / 8
    }
}

/// MLX-LM says of what classes its caches are. What the others have is not the rows in their order.
fn check_class(header: &Header) -> Result<(), String> {
    let mut classes = header.texts.values().filter(|text| text.ends_with("Cache"));
    match classes.find(|class| *class != "KVCache") {
        Some(class) => Err(format!("is a {class} of MLX-LM, of which only KVCache is known")),
        None => Ok(()),
    }
}

/// K and V by layer; whatever has another name is no part of the cache.
fn find_layers(header: &Header) -> Result<Vec<(Tensor, Option<Tensor>)>, String> {
    let mut parts = BTreeMap::new();
    for (name, info) in &header.tensors {
        let Some((layer, part @ (Part::K | Part::V))) = names::parse(name) else { continue };
        let tensor = Tensor::new(name, info, header.payload)?;
        if let Some((other, _)) = parts.insert((layer, part), (name, tensor)) {
            return Err(format!("has two tensors for {part:?} of layer {layer}: {other}, {name}"));
        }
    }
    let Some((_, (first_name, first))) = parts.first_key_value() else { return Ok(Vec::new()) };
    for (name, tensor) in parts.values() {
        if (tensor.batch, tensor.tokens) != (first.batch, first.tokens) {
            return Err(format!(
                "has {name} of another batch or number of tokens than {first_name}"
            ));
        }
    }
    let last = parts.last_key_value().map_or(0, |((layer, _), _)| *layer);
    // No more layers than tensors: the number may be any.
    let layers = (0..=last).take(parts.len() + 1).map(|layer| {
        let part = |part| parts.get(&(layer, part)).map(|(_, tensor)| *tensor);
        let k = part(Part::K).ok_or_else(|| format!("has no K of layer {layer}"))?;
        Ok((k, part(Part::V)))
    });
    layers.collect()
}

fn check_tensor(tensor: &Tensor, geometry: &Geometry, dim: u32) -> Result<(), String> {
    let dtype = geometry.dtype();
    if dtype.block_elements() != 1 {
        return Err(format!("of {}, which are no pages of {dtype}", tensor.dtype));
    }
    if tensor.dtype.to_string() != dtype.safetensors_name() {
        return Err(format!("of {}, the manifest says {dtype}", tensor.dtype));
    }
    let (found, expected) = ([tensor.heads, tensor.dim], [geometry.num_kv_heads(), dim]);
    if found != expected.map(|number| number as usize) {
        let ([heads, dim], [expected_heads, expected_dim]) = (found, expected);
        return Err(format!(
            "of {heads} heads with {dim} elements, the manifest has {expected_heads} with \
             {expected_dim}"
        ));
    }
    Ok(())
}

/// Tokens that are there of those that tensors have room for, if the file says so.
fn read_length(file: &File, header: &Header) -> Result<Option<usize>, String> {
    let is_length = |name: &str| matches!(names::parse(name), Some((_, Part::Length)));
    let mut lengths = header.tensors.iter().filter(|(name, _)| is_length(name));
    let Some((first_name, info)) = lengths.next() else { return Ok(None) };
    let whole = |info: &TensorInfo| info.shape.iter().product();
    let first = read_integers(file, header, first_name, info, 0..whole(info))?;
    for (name, info) in lengths {
        if read_integers(file, header, name, info, 0..whole(info))? != first {
            return Err(format!("has another length in {name} than in {first_name}"));
        }
    }
    match first[..] {
        [length] => usize::try_from(length).map(Some).map_err(|_| format!("has {length} tokens")),
        _ => Err(format!("has {first_name}, which is no length")),
    }
}

/// What a tokenizer has made, `[batch, tokens]` or `[tokens]`, of one sequence.
fn read_of_batch(
    file: &File, header: &Header, name: &str, (batch, row): (usize, usize),
) -> Result<Option<Vec<i64>>, String> {
    let Some((_, info)) = header.tensors.iter().find(|(found, _)| found == name) else {
        return Ok(None);
    };
    let count = match info.shape[..] {
        [count] if batch == 1 => count,
        [found, count] if found == batch => count,
        _ => return Err(format!("has {name} of shape {:?}, not [{batch}, tokens]", info.shape)),
    };
    read_integers(file, header, name, info, row * count..(row + 1) * count).map(Some)
}

fn read_integers(
    file: &File, header: &Header, name: &str, info: &TensorInfo, elements: Range<usize>,
) -> Result<Vec<i64>, String> {
    let size = info.dtype.bitsize() / 8;
    let mut bytes = vec![0; elements.len() * size];
    let offset = header.payload + (info.data_offsets.0 + elements.start * size) as u64;
    file.read_exact_at(&mut bytes, offset).map_err(|error| format!("{name}: {error}"))?;
    Ok(match info.dtype {
        Dtype::I64 => bytes.as_chunks().0.iter().map(|id| i64::from_le_bytes(*id)).collect(),
        Dtype::I32 => bytes.as_chunks().0.iter().map(|id| i32::from_le_bytes(*id).into()).collect(),
        Dtype::U32 => bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id).into()).collect(),
        Dtype::BOOL => bytes.into_iter().map(i64::from).collect(),
        other => return Err(format!("has {name} of {other}, not I64, I32 or U32")),
    })
}

/// Tokens that a mask hides before the first one that it shows. Rows of generation are padded on the left.
fn count_padding(mask: &[i64], tokens: usize) -> Result<usize, String> {
    let padding = mask.iter().take_while(|shown| **shown == 0).count();
    if mask[padding..].contains(&0) || padding > tokens {
        return Err(format!("has an {MASK} that hides more than the beginning"));
    }
    Ok(padding)
}

fn to_ids(numbers: &[i64]) -> Result<Vec<u32>, String> {
    let ids = numbers.iter().map(|number| u32::try_from(*number));
    ids.collect::<Result<_, _>>().map_err(|_| format!("has {TOKEN_IDS} that are no ids"))
}

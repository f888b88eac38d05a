//! K and V of a page or a tail as numbers, for commands that look into them.

use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::history::shown;
use super::inspect::{is_away, layer_of, manifest_above};
use super::output::Failure;

use crate::page::limits::{MAX_FILE_BYTES, index};
use crate::page::names::{LayerEntry, layer_entry};
use crate::page::{
    Dtype, Geometry, Layer, Metadata, PageHeader, PageView, TokenStart, pack_rows, row_f32,
};
use crate::tier::encoding::{Quantisation, Unsuitable, round_rows};

/// One of the two tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    K,
    V,
}

impl Part {
    pub(super) const BOTH: [Part; 2] = [Part::K, Part::V];

    pub(super) fn name(self) -> &'static str {
        match self {
            Part::K => "k",
            Part::V => "v",
        }
    }
}

/// What happens to a page whose bytes are elsewhere, or stored in another form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Away {
    Refuse,
    /// Opening it brings it here.
    Fetch,
}

/// A page, or a tail as the page that it would be.
#[derive(Debug)]
pub(super) struct PageValues {
    pub(super) geometry: Geometry,
    pub(super) tokens: u32,
    /// Where it belongs, as far as its path or its header says so.
    pub(super) layer: Option<Layer>,
    pub(super) start: Option<TokenStart>,
    file: Vec<u8>,
}

impl PageValues {
    pub(super) fn read(path: &Path, away: Away) -> Result<PageValues, Failure> {
        let refuse = |why: &dyn Display| Failure::Failed(format!("{}: {why}", shown(path)));
        let absolute = std::path::absolute(path).map_err(|error| refuse(&error))?;
        let name = absolute.file_name().unwrap_or_default().as_bytes();
        let entry = layer_entry(name);
        if matches!(entry, LayerEntry::State(_)) {
            return Err(refuse(&"is the state of a recurrent layer, which has no K and V"));
        }
        let metadata = absolute.metadata().map_err(|error| refuse(&error))?;
        if !metadata.is_file() {
            return Err(refuse(&"is no file: name a page or a tail"));
        }
        let Some((_, manifest)) = manifest_above(&absolute) else {
            let why = "no manifest.json above says where heads and tokens begin: copy the page into \
                       a directory below one";
            return Err(refuse(&why));
        };
        if away == Away::Refuse && is_away(&absolute) {
            let why = "its bytes are not here as they are read: kvfs promote brings them";
            return Err(refuse(&why));
        }
        if metadata.len() > MAX_FILE_BYTES {
            return Err(refuse(&"is larger than any page"));
        }
        let bytes = std::fs::read(&absolute).map_err(|error| refuse(&error))?;
        let layer = layer_of(&absolute);
        let of_layer = layer.map(|layer| manifest.layer_geometry(layer));
        if let LayerEntry::Tail(start) = entry {
            let geometry = match of_layer {
                None if manifest.has_side_rows() => {
                    let why = "is not in the directory of a layer, and not all layers of the model have the same rows";
                    return Err(refuse(&why));
                }
                geometry => geometry.unwrap_or(*manifest.geometry()),
            };
            let (tokens, file) = page_of_tail(&geometry, &bytes).map_err(|why| refuse(&why))?;
            return Ok(PageValues { geometry, tokens, layer, start: Some(start), file });
        }
        let length = bytes.len() as u64;
        let parsed = match of_layer {
            Some(geometry) => {
                PageHeader::parse(&bytes, length, &geometry).map(|header| (geometry, header))
            }
            None => PageHeader::parse_of_any_layer(&bytes, length, &manifest),
        };
        let (geometry, header) = parsed.map_err(|error| refuse(&error))?;
        let start = if let LayerEntry::Page(start) = entry { Some(start) } else { None };
        Ok(PageValues {
            geometry,
            tokens: header.tokens,
            layer: layer.or(header.declared.layer),
            start: start.or(header.declared.start),
            file: bytes,
        })
    }

    fn view(&self) -> PageView<'_> {
        PageView::new(&self.file, &self.geometry, self.tokens)
            .expect("the file was compared with this geometry when it was read")
    }

    /// What is kept beside K and V; bytes that only the engine can read.
    pub(super) fn side_rows(&self) -> &[u8] {
        self.view().side()
    }

    /// Values of a row.
    pub(super) fn row_elements(&self, part: Part) -> u32 {
        match part {
            Part::K => self.geometry.head_dim(),
            Part::V => self.geometry.v_head_dim(),
        }
    }

    /// The parts that there are: latent attention keeps no V.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> + use<> {
        let has_v = self.geometry.v_head_dim() > 0;
        Part::BOTH.into_iter().filter(move |part| *part == Part::K || has_v)
    }

    pub(super) fn row(&self, part: Part, head: u32, token: u32) -> &[u8] {
        match part {
            Part::K => self.view().k_row(head, token),
            Part::V => self.view().v_row(head, token),
        }
    }

    /// A head's rows behind each other, as they are stored.
    fn rows(&self, part: Part, head: u32) -> Vec<u8> {
        let row_bytes = self.geometry.dtype().row_bytes(self.row_elements(part));
        let mut rows = Vec::with_capacity(index(row_bytes) * self.tokens as usize);
        for token in 0..self.tokens {
            rows.extend_from_slice(self.row(part, head, token));
        }
        rows
    }

    pub(super) fn row_numbers(&self, part: Part, head: u32, token: u32) -> Vec<f32> {
        as_numbers(self.geometry.dtype(), self.row(part, head, token))
    }

    /// `[tokens, row_elements]`.
    pub(super) fn numbers(&self, part: Part, head: u32) -> Vec<f32> {
        as_numbers(self.geometry.dtype(), &self.rows(part, head))
    }

    /// The same after a lossy cold copy. What is no float of 16 or 32 bits is taken as one of 32, which no
    /// mount does.
    pub(super) fn rounded(
        &self, part: Part, head: u32, quantisation: Quantisation,
    ) -> Result<Vec<f32>, Unsuitable> {
        let elements = self.row_elements(part);
        let (dtype, mut rows) = match self.geometry.dtype() {
            dtype @ (Dtype::F16 | Dtype::Bf16 | Dtype::F32) => (dtype, self.rows(part, head)),
            Dtype::F8E4m3 | Dtype::Q8_0 | Dtype::Q4_0 => {
                let numbers = self.numbers(part, head);
                (Dtype::F32, numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
            }
        };
        round_rows(dtype, elements, quantisation, &mut rows)?;
        Ok(as_numbers(dtype, &rows))
    }
}

/// Tokens of a tail, and its whole rows as a page.
fn page_of_tail(geometry: &Geometry, bytes: &[u8]) -> Result<(u32, Vec<u8>), String> {
    let tokens = geometry.rows_in(bytes.len() as u64);
    if tokens == 0 && bytes.len() as u64 > geometry.row_bytes() {
        let row_bytes = geometry.row_bytes();
        return Err(format!(
            "is a tail of {} bytes, no whole rows of {row_bytes}: side rows are missing, or a write is under way",
            bytes.len()
        ));
    }
    if tokens == 0 {
        return Err("is a tail without rows".to_owned());
    }
    let tokens = u32::try_from(tokens).map_err(|error| error.to_string())?;
    let whole = &bytes[..index(u64::from(tokens) * geometry.row_bytes())];
    let page = pack_rows(geometry, whole, tokens, &Metadata::new());
    Ok((tokens, page.map_err(|error| error.to_string())?))
}

fn as_numbers(dtype: Dtype, rows: &[u8]) -> Vec<f32> {
    let blocks = rows.len() / dtype.block_bytes() as usize;
    let mut numbers = vec![0.0; blocks * dtype.block_elements() as usize];
    row_f32(dtype, rows, &mut numbers);
    numbers
}

//! The header of a safetensors file, of which only that much is read.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use safetensors::tensor::{Metadata, TensorInfo};

/// What the format allows for the JSON (`MAX_HEADER_SIZE` of the crate).
const JSON_BYTES_MAX: u64 = 100_000_000;
/// Its length, a u64, stands before it.
const LENGTH_BYTES: usize = size_of::<u64>();

/// The tensors of a file, in their order.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: Vec<(String, TensorInfo)>,
    /// What is said beside them.
    pub(super) texts: HashMap<String, String>,
    /// Where offsets count from.
    pub(super) payload: u64,
}

/// Whether a file begins as such files do: a length, and the brace of a JSON object.
pub fn is_safetensors(file: &File) -> bool {
    let mut start = [0; 9];
    let was_read = file.read_exact_at(&mut start, 0).is_ok();
    let [length @ .., brace] = start;
    was_read && brace == b'{' && u64::from_le_bytes(length) <= JSON_BYTES_MAX
}

impl Header {
    /// # Errors
    /// The end of a line that says what is wrong with the file.
    pub(super) fn read(file: &File) -> Result<Self, String> {
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        let mut number = [0; LENGTH_BYTES];
        file.read_exact_at(&mut number, 0).map_err(|_| "is no safetensors file")?;
        let json_bytes = u64::from_le_bytes(number);
        if json_bytes > JSON_BYTES_MAX.min(length) {
            return Err("is no safetensors file".to_owned());
        }
        let mut json = vec![0; usize::try_from(json_bytes).map_err(|error| error.to_string())?];
        let cut = |_| "ends within its header".to_owned();
        file.read_exact_at(&mut json, LENGTH_BYTES as u64).map_err(cut)?;
        let refused = |error: &dyn std::fmt::Display| format!("has a header that is none: {error}");
        let found: Metadata = serde_json::from_slice(&json).map_err(|error| refused(&error))?;
        let info = |name: String| found.info(&name).cloned().map(|info| (name, info));
        let tensors: Vec<_> = found.offset_keys().into_iter().filter_map(info).collect();
        // Parsing does not compare the offsets, making one anew does.
        let whole = Metadata::new(None, tensors.clone()).map_err(|error| refused(&error))?;
        let payload = LENGTH_BYTES as u64 + json_bytes;
        let expected = payload + whole.data_len() as u64;
        if expected != length {
            return Err(format!("has {length} bytes, and its header says {expected}"));
        }
        let texts = found.metadata().clone().unwrap_or_default();
        Ok(Self { tensors, texts, payload })
    }

    /// The bytes before the tensors.
    ///
    /// # Errors
    /// If the tensors do not follow one another.
    pub(super) fn build(tensors: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
        // Loaders of PyTorch ask for it.
        let format = [("format".to_owned(), "pt".to_owned())].into();
        let metadata = Metadata::new(Some(format), tensors).map_err(|error| error.to_string())?;
        let mut json = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
        json.resize(json.len().next_multiple_of(LENGTH_BYTES), b' ');
        let length = (json.len() as u64).to_le_bytes();
        Ok([&length[..], &json].concat())
    }
}

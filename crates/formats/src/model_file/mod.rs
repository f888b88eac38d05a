//! What the files of a model say about the cache that an engine keeps for it: Hugging Face's `config.json`
//! (`config`) and llama.cpp's GGUF (`gguf`).
//!
//! Nothing is guessed that would give the pages of two models one meaning: what a manifest cannot say, or the file
//! does not tell, is refused with the field's name.

mod config;
mod gguf;
mod index_keys;

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use kvfs_page::limits::MAX_LAYERS;
use kvfs_page::{Dtype, LayerKind, Layout, Rope, SideRows};

pub use self::index_keys::IndexKeys;

/// Bytes of a `config.json`. Those of this year's largest models have 10 KiB.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// The cache of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFile {
    /// The family, as the file calls it.
    pub architecture: String,
    /// What each layer keeps.
    pub layers: Vec<LayerKind>,
    /// What of them also keeps index keys.
    pub index_keys: Option<IndexKeys>,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Elements of a K row.
    pub head_dim: u32,
    /// Elements of a V row; 0 where V is part of K.
    pub v_head_dim: u32,
    /// The element type that engines of this kind of file keep unless they are told otherwise.
    /// Where the file names one that no manifest has, that is why, and somebody must say it.
    pub dtype: Result<Dtype, String>,
    /// The order of heads and tokens in their caches.
    pub layout: Layout,
    /// The position encoding in K, where the file tells.
    pub rope: Option<Rope>,
}

impl ModelFile {
    /// Reads a `config.json`, a directory with one, or a GGUF (of a split one the first file).
    ///
    /// # Errors
    /// A line that says what the file lacks, or has and a manifest cannot say.
    pub fn read(path: &Path) -> Result<Self, String> {
        let path = if path.is_dir() { &path.join("config.json") } else { path };
        let told = |error: String| format!("{}: {error}", path.display());
        // Nobody waits for the writer of a FIFO.
        let is_regular = path.metadata().map_err(|error| told(error.to_string()))?.is_file();
        if !is_regular {
            return Err(told("is no regular file".to_owned()));
        }
        let mut file = File::open(path).map_err(|error| told(error.to_string()))?;
        let mut magic = Vec::new();
        file.by_ref().take(4).read_to_end(&mut magic).map_err(|error| told(error.to_string()))?;
        file.rewind().map_err(|error| told(error.to_string()))?;
        let found = if magic == gguf::MAGIC {
            let length = file.metadata().map_err(|error| told(error.to_string()))?.len();
            gguf::describe(BufReader::new(file), length)
        } else {
            let mut text = Vec::new();
            file.take(CONFIG_BYTES_MAX + 1)
                .read_to_end(&mut text)
                .map_err(|error| told(error.to_string()))?;
            if text.len() as u64 > CONFIG_BYTES_MAX {
                return Err(told("neither a GGUF nor a config.json, which is short".to_owned()));
            }
            config::describe(&text)
        };
        let mut found = found.and_then(Self::checked).map_err(told)?;
        found.dtype = found.dtype.map_err(told);
        Ok(found)
    }

    /// What each layer keeps if those with index keys, or where the file tells of none all that see everything, have
    /// such rows beside K and V.
    pub fn layers_with(&self, side: &SideRows) -> Vec<LayerKind> {
        let has_keys = |layer: usize| {
            self.index_keys.as_ref().is_none_or(|keys| keys.layers.get(layer) == Some(&true))
        };
        let layers = self.layers.iter().enumerate().map(|(layer, kind)| match kind {
            LayerKind::Attention if has_keys(layer) => LayerKind::WithSide(side.clone()),
            kind => kind.clone(),
        });
        layers.collect()
    }

    /// Refuses what no manifest can say.
    fn checked(self) -> Result<Self, String> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS as usize {
            return Err(format!("it has {} layers", self.layers.len()));
        }
        if self.layers.iter().all(|kind| *kind == LayerKind::Recurrent) {
            return Err("no layer keeps K and V: there is nothing to cache in pages".to_owned());
        }
        Ok(self)
    }
}

/// What hybrid models keep in layer `number` of those of which every `interval`th attends.
fn every(interval: u64, number: u64, other: LayerKind) -> LayerKind {
    if (number + 1).is_multiple_of(interval.max(1)) { LayerKind::Attention } else { other }
}

/// A number that a field of a manifest has room for.
fn narrow(number: u64, name: &str) -> Result<u32, String> {
    u32::try_from(number).map_err(|_| format!("{name} is {number}"))
}

/// A position encoding of which `pairing` may be known.
fn rope(theta: f64, dims: Option<u32>, pairing: Option<&str>) -> Rope {
    let pairing = pairing.map(|name| ("pairing".to_owned(), name.into()));
    Rope { theta, scaling: None, dims, other: pairing.into_iter().collect() }
}

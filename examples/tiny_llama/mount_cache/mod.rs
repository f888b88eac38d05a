//! A KV cache in a sequence directory of a mount.
//!
//! ```text
//! MOUNT/models/tiny-llama/manifest.json
//! MOUNT/models/tiny-llama/sequences/ruth/tokens                     ids of the valid tokens
//! MOUNT/models/tiny-llama/sequences/ruth/000/0000000.safetensors    page: tokens 0..256
//! MOUNT/models/tiny-llama/sequences/ruth/000/0000256.tail           rows of the open page
//! ```
//!
//! Rows are appended to the tail of each layer; the append that fills a page seals it. Where a
//! chunk covers a whole page, the page file is written at once, under a temporary name that is
//! then renamed. The ids go into `tokens` when every layer has their rows, so `tokens` says how
//! many rows are valid, whenever a run is interrupted: what lies beyond is dropped by the next
//! one. Attention reads the f16 rows where they lie: pages are mapped, tails are read. Beside a GPU
//! rows are appended in the background, and the open page is read from memory.

mod files;
mod layer;
mod page;
#[allow(dead_code, reason = "examples/demo has these files too, and drops no tokens")]
mod shift;
#[cfg(test)]
mod tests;
mod tokens;

use std::borrow::Cow;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use kvfs::attention::{Pairing, Shape};
use kvfs::cuda::WriteBack;
use kvfs::page::{Dtype, Layer, Layout, Manifest, Positions, Rope, names};
use kvfs::reader::Backend;

use self::files::about;
use self::layer::{LayerFiles, Writer};
use self::shift::{Shift, Shifted};
use self::tokens::TokenFile;
use crate::Result;
use crate::attention::{CausalAttention, interleave, interleave_halves, kv_width, query_width};
use crate::generate::prefill;
use crate::model::{KeyValueCache, Model};
use crate::weights::Config;

const _: () = assert!(cfg!(target_endian = "little"), "rows are used as they lie in the files");

/// The cache of one sequence.
#[derive(Debug)]
pub(crate) struct MountCache {
    sequence: PathBuf,
    manifest: Arc<Manifest>,
    attention: CausalAttention,
    /// Of K in the pages.
    pairing: Pairing,
    page_tokens: usize,
    layers: Vec<LayerFiles>,
    tokens: TokenFile,
    counts: Counts,
    /// Who writes new rows while the next token is computed, if a GPU attends.
    write_back: Option<WriteBack>,
    /// Whether a missing page was written since the last complete chunk.
    has_refilled: bool,
    /// Where the rows stand.
    positions: Positions,
    /// Rows that are not there for attention any more: the last row's number less its position.
    dropped: usize,
    shift: Option<Shift>,
    shifted: Vec<Shifted>,
}

/// Tokens that ran through the model since the sequence was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// To put missing pages back.
    pub(crate) refilled: usize,
    /// With all of their rows in the cache, to get the logits after them.
    pub(crate) repeated: usize,
    /// For the first time.
    pub(crate) added: usize,
}

/// What a sequence holds of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resumed {
    /// Tokens from the first on, including those of missing pages.
    pub(crate) held: usize,
    /// The missing pages. Later pages were computed after the same tokens and stay valid.
    pub(crate) missing: Vec<Range<usize>>,
}

impl Resumed {
    /// Tokens that need not run through the model.
    pub(crate) fn usable(&self) -> usize {
        self.held - self.missing.iter().map(ExactSizeIterator::len).sum::<usize>()
    }
}

impl MountCache {
    /// Opens a sequence of a model with this configuration; it is made if it is missing.
    pub(crate) fn open(sequence: &Path, config: &Config) -> Result<Self> {
        let manifest = Arc::new(read_manifest(sequence, config)?);
        let pairing = read_pairing(&manifest)?;
        fs::create_dir_all(sequence).map_err(about(sequence))?;
        if sequence.join(names::POSITIONS).exists() {
            let path = sequence.display();
            return Err(format!("{path}: its tokens were removed or moved (kvfs seq show)").into());
        }
        let layers = (0..manifest.geometry().num_layers())
            .map(|layer| LayerFiles::open(sequence, Layer(layer), &manifest))
            .collect::<Result<_>>()?;
        Ok(Self {
            sequence: sequence.to_owned(),
            attention: CausalAttention::of_model(config, pairing)?,
            pairing,
            write_back: None,
            page_tokens: manifest.geometry().page_tokens() as usize,
            layers,
            tokens: TokenFile::open(sequence)?,
            counts: Counts::default(),
            has_refilled: false,
            positions: Positions::default(),
            dropped: 0,
            shift: None,
            shifted: Vec::new(),
            manifest,
        })
    }

    /// As [`CausalAttention::use_gpu`]; with one, new rows are written in the background.
    #[allow(dead_code, reason = "examples/demo has these files too, and asks for no GPU")]
    pub(crate) fn use_gpu(&mut self) -> Result<Backend> {
        self.attention.use_gpu()
    }

    /// The ids of the tokens that the sequence holds.
    pub(crate) fn tokens(&self) -> &[u32] {
        self.tokens.ids()
    }

    /// Tokens of a full page.
    #[allow(dead_code, reason = "examples/demo has no use for it")]
    pub(crate) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// What ran through the model.
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Finds what the sequence holds of `tokens` and drops everything else.
    ///
    /// An interrupted run can leave rows without ids, and more rows in one layer than in another.
    /// Valid is what all of them have, as far as the ids are those of `tokens`.
    pub(crate) fn resume(&mut self, tokens: &[u32]) -> Result<Resumed> {
        self.settle()?;
        let known = self.tokens.ids().iter().zip(tokens);
        let mut held = known.take_while(|(known, token)| known == token).count();
        loop {
            let usable = self.layers.iter().fold(held, |held, layer| layer.usable(held));
            if usable == held {
                break;
            }
            held = usable;
        }
        // First the ids: rows beyond them mean nothing, so this may be interrupted anywhere.
        self.tokens.truncate(held)?;
        for layer in &mut self.layers {
            layer.trim(held)?;
        }
        let missing = (0..held / self.page_tokens)
            .filter(|&number| !self.layers.iter().all(|layer| layer.has_page(number)))
            .map(|number| number * self.page_tokens..(number + 1) * self.page_tokens)
            .collect();
        Ok(Resumed { held, missing })
    }

    /// Has in the files what a writer beside the GPU still has to write.
    fn settle(&mut self) -> Result<()> {
        let Some(mut write_back) = self.write_back.take() else { return Ok(()) };
        write_back.flush()?;
        self.layers.iter_mut().try_for_each(LayerFiles::settle)
    }

    /// Returns when everything so far survives a crash.
    pub(crate) fn durable(&mut self) -> Result<()> {
        self.finish_shift()?;
        if let Some(write_back) = &mut self.write_back {
            write_back.sync()?;
        }
        for layer in &mut self.layers {
            layer.sync()?;
        }
        self.tokens.sync()
    }
}

/// Makes `cache` hold `tokens` and returns the logits after the last of them. Only what the
/// cache does not hold runs through the model, and the last token, since logits are not kept.
pub(crate) fn read(
    model: &Model, cache: &mut MountCache, tokens: &[u32],
) -> Result<(Vec<f32>, Resumed)> {
    let resumed = cache.resume(tokens)?;
    for page in &resumed.missing {
        model.forward(&tokens[page.clone()], page.start, cache)?;
    }
    let last = tokens.len().checked_sub(1).ok_or("no tokens")?;
    let position = resumed.held.min(last);
    let logits = prefill(model, cache, position, &tokens[position..])?;
    Ok((logits, resumed))
}

impl KeyValueCache for MountCache {
    fn append(
        &mut self, layer: usize, position: usize, keys: &[f16], values: &[f16],
    ) -> Result<()> {
        let shape = self.attention.shape();
        let rows = interleave(shape, &in_order(self.pairing, shape, keys), values);
        let tokens = keys.len() / kv_width(shape);
        if layer == 0 {
            self.end_shift_if_due(tokens)?;
        }
        let row = position + self.dropped;
        let end = layer_of(&mut self.layers, layer)?.end();
        if self.shift.is_none() && self.write_back.is_none() && row + tokens > end {
            self.write_back = self.attention.write_back(&self.sequence, &self.manifest, end)?;
        }
        let files = layer_of(&mut self.layers, layer)?;
        let writer = match &mut self.write_back {
            _ if self.shift.is_some() => Writer::Memory,
            Some(write_back) => Writer::Later(write_back),
            None => Writer::Now,
        };
        self.has_refilled |= files.append(row, &rows, writer)?;
        Ok(())
    }

    fn attend(
        &mut self, layer: usize, position: usize, queries: &[f32], out: &mut [f32],
    ) -> Result<()> {
        let end = position + queries.len() / query_width(self.attention.shape());
        let queries = in_order(self.pairing, self.attention.shape(), queries);
        let blocks = layer_of(&mut self.layers, layer)?.blocks(end + self.dropped)?;
        let placed = blocks.into_iter().flat_map(|block| block.placed(&self.positions));
        let blocks: Vec<_> = placed.map(|(_, block)| block).collect();
        self.attention.attend(&blocks, &queries, position, out)
    }

    fn complete(&mut self, position: usize, tokens: &[u32]) -> Result<()> {
        let known = self.tokens.ids().len().saturating_sub(position + self.dropped);
        let known = known.min(tokens.len());
        if std::mem::take(&mut self.has_refilled) {
            self.counts.refilled += known;
        } else {
            self.counts.repeated += known;
        }
        self.counts.added += tokens.len() - known;
        if self.holds_back(&tokens[known..]) {
            return Ok(());
        }
        match &mut self.write_back {
            Some(write_back) => {
                write_back.complete(&tokens[known..])?;
                self.tokens.note(&tokens[known..]);
                Ok(())
            }
            None => self.tokens.append(&tokens[known..]),
        }
    }
}

/// Queries or keys, which the model has in halves, as the pages have them.
fn in_order<T: Copy>(pairing: Pairing, shape: Shape, heads: &[T]) -> Cow<'_, [T]> {
    match pairing {
        Pairing::Halves => heads.into(),
        Pairing::Interleaved => interleave_halves(heads, shape.head_dim()).into(),
    }
}

fn layer_of(layers: &mut [LayerFiles], layer: usize) -> Result<&mut LayerFiles> {
    layers.get_mut(layer).ok_or_else(|| format!("no layer {layer} in the cache").into())
}

/// How K is rotated in the pages; in halves, as the model does it, unless the manifest tells.
fn read_pairing(manifest: &Manifest) -> Result<Pairing> {
    match manifest.fields().rope.as_ref().and_then(Rope::pairing) {
        None | Some("halves") => Ok(Pairing::Halves),
        Some("interleaved") => Ok(Pairing::Interleaved),
        Some(other) => Err(format!("the manifest's rope.pairing is {other}").into()),
    }
}

/// The manifest above a sequence, if its pages are those of a model with this configuration.
fn read_manifest(sequence: &Path, config: &Config) -> Result<Manifest> {
    let sequence = std::path::absolute(sequence).map_err(about(sequence))?;
    let model = sequence.ancestors().nth(2).ok_or("not in a model")?;
    let path = model.join(names::MANIFEST);
    let (layers, shape) = (config.num_hidden_layers, config.shape()?);
    let create = format!(
        "make it with: kvfs create MOUNT/models/NAME --layers {layers} --kv-heads {} --head-dim {}",
        shape.num_kv_heads(),
        shape.head_dim()
    );
    let json = fs::read(&path).map_err(|error| format!("{}: {error}; {create}", path.display()))?;
    let manifest = Manifest::parse(&json)?;
    let geometry = manifest.geometry();
    let found = [
        geometry.num_layers() as usize,
        geometry.num_kv_heads() as usize,
        geometry.head_dim() as usize,
        geometry.v_head_dim() as usize,
    ];
    let expected = [layers, shape.num_kv_heads(), shape.head_dim(), shape.v_head_dim()];
    let same_format = (geometry.dtype(), geometry.layout()) == (Dtype::F16, Layout::Hnd);
    if found != expected || !same_format {
        let path = path.display();
        return Err(format!("{path} is that of another model; {create}").into());
    }
    Ok(manifest)
}

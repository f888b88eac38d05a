//! A context that is full: the engine drops its oldest tokens but the first few, moves the rest up,
//! and goes on. Without the first ones attention has nowhere to go (Xiao et al. 2023, attention
//! sinks).
//!
//! In a mount nothing is lost by it: a snapshot that shares the pages is made on a thread of its own
//! while the next tokens are computed, and whoever comes with the same beginning again finds it.
//! [`MemoryCache`] does what engines do in memory, where every K behind the gap is rotated anew.

use std::fs;
use std::ops::Range;
use std::path::Path;

use half::f16;
use kvfs::attention::{KvBlock, Shape, Values};
use kvfs::page::names;
use kvfs::reader::{ReadError, longest_prefix};
use kvfs::sequence::Sequences;

use crate::Result;
use crate::attention::kv_width;
use crate::compare::{self, Compared};
use crate::memory_cache::MemoryCache;
use crate::model::{KeyValueCache, Model};
use crate::mount_cache::MountCache;
use crate::sample::greedy;

/// Tokens at the beginning that stay for ever.
const KEPT: usize = 4;

/// A cache whose tokens can be dropped and moved.
pub(crate) trait Shifting: KeyValueCache {
    /// Drops the tokens at these positions; those behind move up.
    fn shift(&mut self, model: &Model, dropped: Range<usize>) -> Result<()>;
}

/// As [`continue_greedily`](crate::generate::continue_greedily), in a context of so many tokens.
pub(crate) fn continue_greedily(
    model: &Model, cache: &mut dyn Shifting, (mut position, context): (usize, usize),
    mut logits: Vec<f32>, count: usize, emit: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<()> {
    if context < 2 * KEPT || position > context {
        return Err(format!("a context of {context} for a prompt of {position} tokens").into());
    }
    for index in 0..count {
        let token = greedy(&logits).ok_or("no prompt to continue")?;
        emit(token)?;
        if index + 1 == count {
            break;
        }
        if position == context {
            let dropped = KEPT..KEPT + (context - KEPT) / 2;
            position -= dropped.len();
            cache.shift(model, dropped)?;
        }
        logits = model.forward(&[token], position, cache)?;
        position += 1;
    }
    Ok(())
}

impl Shifting for MemoryCache {
    fn shift(&mut self, model: &Model, dropped: Range<usize>) -> Result<()> {
        let shape = model.config().shape()?;
        let width = kv_width(shape);
        let mut moved = self.empty_like()?;
        for layer in 0..model.config().num_hidden_layers {
            let blocks = self.blocks(layer)?;
            let mut keys = rows(&blocks, shape, |block| (block.k.bytes, block.k.strides));
            let mut values = rows(&blocks, shape, |block| match block.v {
                Values::Rows(values) => (values.bytes, values.strides),
                Values::Latent => (block.k.bytes, block.k.strides),
            });
            let gone = dropped.start * width..dropped.end * width;
            keys.drain(gone.clone());
            values.drain(gone);
            model.move_keys(&mut keys[dropped.start * width..], -i64::try_from(dropped.len())?);
            moved.append(layer, 0, &keys, &values)?;
        }
        *self = moved;
        Ok(())
    }
}

impl Shifting for MountCache {
    /// Nothing is rotated or written: rows stay, and the sequence says where they stand.
    fn shift(&mut self, _model: &Model, dropped: Range<usize>) -> Result<()> {
        let name = self.name()?;
        let all = self.sequences()?;
        let free = |snapshot: &String| !all.path(snapshot).exists();
        let mut names = (1_u64..).map(|number| format!("{name}.{number}"));
        let snapshot = names.find(free).ok_or("no name is left")?;
        self.start_shift(&all, dropped, &snapshot)
    }
}

/// `[tokens, kv_heads, head_dim]`
fn rows<'a>(
    blocks: &[KvBlock<'a>], shape: Shape,
    part: impl Fn(&KvBlock<'a>) -> (&'a [u8], kvfs::page::Strides),
) -> Vec<f16> {
    let row_bytes = shape.head_dim() * size_of::<f16>();
    let mut rows = Vec::new();
    for block in blocks {
        let (bytes, strides) = part(block);
        for token in 0..block.tokens {
            for head in 0..shape.num_kv_heads() {
                let row = &bytes[head * strides.head + token * strides.token..][..row_bytes];
                let (halves, _) = row.as_chunks();
                rows.extend(halves.iter().map(|half| f16::from_le_bytes(*half)));
            }
        }
    }
    rows
}

/// What a sequence began with, taken from another one that has it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Restored {
    pub(crate) from: String,
    pub(crate) tokens: u64,
}

/// Makes a sequence that is not there, or whose tokens were moved, of what others have of a prompt:
/// it shares their pages. `None` if it is there, or nobody has anything.
pub(crate) fn restore(sequence: &Path, prompt: &[u32]) -> Result<Option<Restored>> {
    let is_moved = sequence.join(names::POSITIONS).exists();
    if sequence.exists() && !is_moved {
        return Ok(None);
    }
    let absolute = std::path::absolute(sequence)?;
    let model = absolute.ancestors().nth(2).ok_or("not in a model")?;
    let found = match longest_prefix(model, prompt) {
        // No mount, or no model yet: there is nothing to be found.
        Err(ReadError::Manifest { .. }) => return Ok(None),
        outcome => outcome?,
    };
    let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
    let (to, from) = (name(&absolute), found.sequence.as_deref().and_then(name));
    let all = Sequences::open(model)?;
    let to = to.ok_or("a sequence has a name")?;
    if is_moved {
        all.clear(&to)?;
    }
    let Some(from) = from.filter(|from| *from != to) else { return Ok(None) };
    all.seq_cp(&from, &to, ..found.tokens)?;
    Ok(Some(Restored { from, tokens: found.tokens }))
}

/// Restoring what was dropped against computing it; medians of some rounds.
pub(crate) fn compare(
    model: &Model, sequence: &Path, prompt: &[u32], rounds: usize,
) -> Result<Compared> {
    let again = sequence.with_extension("again");
    compare::compare(model, prompt, rounds, &mut || {
        if again.exists() {
            fs::remove_dir_all(&again)?;
        }
        let started = std::time::Instant::now();
        restore(&again, prompt)?.ok_or("what was dropped is not found again")?;
        let (page_tokens, logits) = compare::restore(model, &again, prompt)?;
        Ok((started.elapsed(), page_tokens, logits))
    })
}

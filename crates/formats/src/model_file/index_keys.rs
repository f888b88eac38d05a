//! Index keys of sparse attention: one small row for each token and layer, by which the layer chooses the tokens
//! that it attends to. Families in which every token has one are `deepseek_v32` and `glm_moe_dsa` (GLM-5); where keys
//! stand for several tokens, as in `deepseek_v4`, no row of a token has them.
//!
//! From GLM-5.2 on, most layers use the choice of one before them and have no keys of their own. Which ones do is
//! said by `indexer_types`, else by `index_topk_pattern`, else by `index_topk_freq` and `index_skip_topk_offset`, as
//! transformers' `GlmMoeDsaConfig` and vLLM's `DeepseekV32Attention` read them.

use kvfs_page::{Dtype, SideRows};
use serde_json::Value;

use super::config::{Fields, count_of, needed, said};
use super::narrow;

/// Families of which it is known that each token has an index key.
const FAMILIES: [&str; 2] = ["deepseek_v32", "glm_moe_dsa"];

/// The fields by which a model says that it has index keys.
const NAMES: [&str; 3] = ["index_head_dim", "index_topk", "index_n_heads"];

/// The name of index keys in the model's own element type.
const NAME: &str = "index_k";

/// What layers keep for the choice of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexKeys {
    /// Elements of a token's key.
    pub head_dim: u32,
    /// Of each layer whether it has keys of its own.
    pub layers: Vec<bool>,
}

impl IndexKeys {
    pub(super) fn of(
        fields: &Fields, architecture: &str, count: u64,
    ) -> Result<Option<Self>, String> {
        let is_said =
            |name: &&str| said(fields, name).is_some_and(|value| value.as_u64() != Some(0));
        let Some(name) = NAMES.into_iter().find(is_said) else { return Ok(None) };
        if !FAMILIES.contains(&architecture) {
            return Err(format!(
                "{name}: its layers keep index keys, and of {architecture:?} it is not known which of them and of \
                 which tokens: write manifest.json by hand"
            ));
        }
        let head_dim = narrow(needed(fields, &["index_head_dim"])?, "index_head_dim")?;
        let layers = (0..count.min(super::config::MAX)).map(|layer| has_keys(fields, layer, count));
        Ok(Some(Self { head_dim, layers: layers.collect::<Result<_, _>>()? }))
    }

    /// What an engine keeps that computes in an element type, and does not say otherwise.
    ///
    /// # Errors
    /// The end of a line that says what is to be told.
    pub fn rows(&self, dtype: Dtype) -> Result<SideRows, String> {
        match dtype {
            Dtype::F16 | Dtype::Bf16 | Dtype::F32 => {
                let row_bytes = narrow(dtype.row_bytes(self.head_dim), "index_head_dim")?;
                Ok(SideRows { name: NAME.to_owned(), row_bytes })
            }
            Dtype::F8E4m3 | Dtype::Q8_0 | Dtype::Q4_0 => Err(format!(
                "index keys of {} elements beside K and V in {dtype}: say with --side NAME:BYTES what the engine \
                 keeps of each token",
                self.head_dim
            )),
        }
    }
}

fn has_keys(fields: &Fields, layer: u64, count: u64) -> Result<bool, String> {
    let at = usize::try_from(layer).unwrap_or(usize::MAX);
    if let Some(types) = said(fields, "indexer_types") {
        let types = types.as_array().ok_or("indexer_types is no list")?;
        if types.len() as u64 != count {
            return Err(format!("indexer_types has {} of {count} layers", types.len()));
        }
        return match types.get(at).and_then(Value::as_str) {
            Some("full") => Ok(true),
            Some("shared") => Ok(false),
            other => Err(format!("indexer_types has {other:?}: full and shared are known")),
        };
    }
    if let Some(pattern) = said(fields, "index_topk_pattern") {
        let pattern = pattern.as_str().ok_or("index_topk_pattern is no text")?;
        if pattern.len() as u64 != count {
            return Err(format!("index_topk_pattern has {} of {count} layers", pattern.len()));
        }
        return match pattern.as_bytes().get(at) {
            Some(b'F') => Ok(true),
            Some(b'S') => Ok(false),
            _ => Err(format!("index_topk_pattern is {pattern:?}: F and S are known")),
        };
    }
    let every = count_of(fields, &["index_topk_freq"])?.unwrap_or(1);
    if every <= 1 {
        return Ok(true);
    }
    // The default differs from one version to another.
    let offset = needed(fields, &["index_skip_topk_offset"])?;
    Ok((layer + 1).saturating_sub(offset) % every == 0)
}

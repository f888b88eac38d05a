//! `config.json` of Hugging Face's transformers.
//!
//! Field names are those of the classes `*Config` in `transformers/models`, of versions 4 and 5.

use kvfs_page::{Dtype, LayerKind, Layout, Rope};
use serde_json::{Map, Value};

use super::index_keys::IndexKeys;
use super::{ModelFile, every, narrow, rope};

pub(super) type Fields = Map<String, Value>;

/// Families of which it is known that elements `i` and `i + dims / 2` turn together.
const HALVES: [&str; 14] = [
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
];

/// Families that have a window in each layer where `layer_types` does not say otherwise.
const ALL_SLIDING: [&str; 4] = ["mistral", "mixtral", "phi3", "starcoder2"];

/// Of families without `layer_types`: every how many layers one sees everything.
const PATTERNS: [(&str, u64); 4] =
    [("gemma2", 2), ("gemma3", 6), ("gemma3_text", 6), ("cohere2", 4)];

pub(super) fn describe(text: &[u8]) -> Result<ModelFile, String> {
    let whole: Value = serde_json::from_slice(text).map_err(|error| {
        let first = error.to_string();
        format!("neither a GGUF nor a config.json: {first}")
    })?;
    let whole = whole.as_object().ok_or("no JSON object")?;
    // Models that also see or hear have that of the language model inside.
    let inner = ["text_config", "llm_config", "language_config"]
        .iter()
        .find_map(|name| whole.get(*name)?.as_object())
        .filter(|inner| count_of(inner, &LAYERS).is_ok_and(|count| count.is_some()));
    let fields = inner.unwrap_or(whole);
    let architecture = text_of(fields, "model_type").or_else(|| text_of(whole, "model_type"));
    let architecture = architecture.unwrap_or("unknown").to_owned();

    refuse_other_rows(whole, fields)?;
    let count = needed(fields, &LAYERS)?;
    let layers = layers(fields, &architecture, count)?;
    let rows = rows(fields)?;
    Ok(ModelFile {
        index_keys: IndexKeys::of(fields, &architecture, count)?,
        rope: position_encoding(fields, &architecture, &rows)?,
        architecture,
        layers,
        kv_heads: rows.kv_heads,
        head_dim: rows.head_dim,
        v_head_dim: rows.v_head_dim,
        dtype: element_type([fields, whole]),
        layout: Layout::Hnd,
    })
}

/// What engines keep the cache in by themselves: the type in which the model computes.
fn element_type(places: [&Fields; 2]) -> Result<Dtype, String> {
    let named = places.iter().find_map(|fields| {
        ["dtype", "torch_dtype"].into_iter().find_map(|name| Some((name, said(fields, name)?)))
    });
    let Some((name, value)) = named else { return Ok(Dtype::F16) };
    match value.as_str().map(|text| text.strip_prefix("torch.").unwrap_or(text)) {
        Some("bfloat16") => Ok(Dtype::Bf16),
        Some("float32") => Ok(Dtype::F32),
        Some("float16") => Ok(Dtype::F16),
        _ => Err(format!("{name} is {value}: say with --dtype what the engine keeps K and V in")),
    }
}

const LAYERS: [&str; 4] = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const HEADS: [&str; 3] = ["num_attention_heads", "n_head", "n_heads"];
const KV_HEADS: [&str; 3] = ["num_key_value_heads", "num_kv_heads", "multi_query_group_num"];
const WIDTH: [&str; 3] = ["hidden_size", "n_embd", "d_model"];

/// What layers keep beside, or instead of, rows of one shape.
fn refuse_other_rows(whole: &Fields, fields: &Fields) -> Result<(), String> {
    let is_said = |name: &str| {
        let value = fields.get(name).or_else(|| whole.get(name)).unwrap_or(&Value::Null);
        !matches!(value, Value::Null | Value::Bool(false)) && value.as_u64() != Some(0)
    };
    for (names, keeps) in [
        (["is_encoder_decoder", "cross_attention_layers", ""], "rows of two kinds"),
        (["compress_ratios", "compress_ratio", ""], "rows that stand for several tokens"),
        (
            ["global_head_dim", "swa_head_dim", "swa_num_key_value_heads"],
            "rows of different shapes",
        ),
        (["num_kv_shared_layers", "use_cla", ""], "rows for one another"),
    ] {
        if let Some(name) = names.into_iter().find(|name| is_said(name)) {
            return Err(format!("{name}: its layers keep {keeps}, which a manifest cannot say"));
        }
    }
    Ok(())
}

/// One token's row in a layer.
struct RowShape {
    kv_heads: u32,
    head_dim: u32,
    v_head_dim: u32,
    /// How many of its elements can be rotated.
    rotated: u32,
}

fn rows(fields: &Fields) -> Result<RowShape, String> {
    if let Some(latent) = count_of(fields, &["kv_lora_rank"])? {
        // One row per token: what K and V are made of, and the rotated part that all heads share.
        let rotated = narrow(needed(fields, &["qk_rope_head_dim"])?, "qk_rope_head_dim")?;
        let head_dim = narrow(latent + u64::from(rotated), "kv_lora_rank")?;
        return Ok(RowShape { kv_heads: 1, head_dim, v_head_dim: 0, rotated });
    }
    let heads = needed(fields, &HEADS)?;
    let is_multi_query = fields.get("multi_query").and_then(Value::as_bool) == Some(true);
    let kv_heads = match count_of(fields, &KV_HEADS)? {
        _ if is_multi_query && count_of(fields, &KV_HEADS[..2])?.is_none() => 1,
        Some(kv_heads) => kv_heads,
        None => heads,
    };
    let head_dim = narrow(head_dim(fields, heads)?, "head_dim")?;
    let v_head_dim = count_of(fields, &["v_head_dim"])?.map(|dim| narrow(dim, "v_head_dim"));
    Ok(RowShape {
        kv_heads: narrow(kv_heads, "num_key_value_heads")?,
        head_dim,
        v_head_dim: v_head_dim.transpose()?.unwrap_or(head_dim),
        rotated: head_dim,
    })
}

/// Elements of a head: stated, or the model's width shared among its heads.
fn head_dim(fields: &Fields, heads: u64) -> Result<u64, String> {
    if let Some(stated) = count_of(fields, &["head_dim", "kv_channels", "attention_head_dim"])? {
        return Ok(stated);
    }
    let width = needed(fields, &WIDTH)?;
    if heads == 0 || width % heads != 0 {
        return Err(format!("head_dim is missing, and {width} elements are not {heads} heads"));
    }
    Ok(width / heads)
}

fn layers(fields: &Fields, architecture: &str, count: u64) -> Result<Vec<LayerKind>, String> {
    let window = window(fields)?;
    let named = ["layer_types", "layers_block_type", "block_types"];
    if let Some(types) = named.iter().find_map(|name| fields.get(*name)?.as_array()) {
        if types.len() as u64 != count {
            return Err(format!("{} kinds for {count} layers", types.len()));
        }
        return types.iter().map(|name| kind(name, window)).collect();
    }
    if let Some(interval) = count_of(fields, &["full_attention_interval", "attn_layer_period"])? {
        let offset =
            count_of(fields, &["attn_layer_offset"])?.unwrap_or(interval.saturating_sub(1));
        // The offset is that of the first layer that attends.
        let number = |layer: u64| layer + interval.saturating_sub(1).saturating_sub(offset);
        return Ok((0..count.min(MAX))
            .map(|layer| every(interval, number(layer), LayerKind::Recurrent))
            .collect());
    }
    let has_state = [
        "attn_type_list",
        "linear_attn_config",
        "ssm_state_size",
        "mamba_d_state",
        "state_size",
        "linear_num_value_heads",
        "conv_L_cache",
    ];
    if let Some(name) = has_state.into_iter().find(|name| fields.contains_key(*name)) {
        return Err(format!(
            "{name}, and nothing that says which layers attend: give --layers and the rest by hand"
        ));
    }
    let Some(window) = window else { return Ok(same(&LayerKind::Attention, count)) };
    let sliding = LayerKind::Sliding { window };
    if ALL_SLIDING.contains(&architecture) {
        return Ok(same(&sliding, count));
    }
    let usual = PATTERNS.iter().find(|(name, _)| *name == architecture).map(|(_, every)| *every);
    match count_of(fields, &["sliding_window_pattern", "_sliding_window_pattern"])?.or(usual) {
        Some(interval) => {
            Ok((0..count.min(MAX)).map(|layer| every(interval, layer, sliding.clone())).collect())
        }
        None => Err(format!(
            "sliding_window is {window}, and no layer_types says which layers have it: give --layers and the rest \
             by hand"
        )),
    }
}

/// One more than a manifest can have, which is refused later.
pub(super) const MAX: u64 = kvfs_page::limits::MAX_LAYERS as u64 + 1;

fn same(kind: &LayerKind, count: u64) -> Vec<LayerKind> {
    (0..count.min(MAX)).map(|_| kind.clone()).collect()
}

fn window(fields: &Fields) -> Result<Option<u32>, String> {
    if fields.get("use_sliding_window").and_then(Value::as_bool) == Some(false) {
        return Ok(None);
    }
    let window =
        count_of(fields, &["sliding_window", "sliding_window_size", "attention_chunk_size"])?;
    window.filter(|window| *window > 0).map(|window| narrow(window, "sliding_window")).transpose()
}

/// What `layer_types` calls a layer.
fn kind(name: &Value, window: Option<u32>) -> Result<LayerKind, String> {
    let name = name.as_str().unwrap_or_default();
    match name {
        "full_attention" | "attention" | "global_attention" => Ok(LayerKind::Attention),
        "sliding_attention" | "chunked_attention" | "local_attention" => {
            let window =
                window.ok_or("layer_types has sliding layers, and sliding_window is missing")?;
            Ok(LayerKind::Sliding { window })
        }
        "linear_attention" | "recurrent" | "mamba" | "mamba2" | "conv" => Ok(LayerKind::Recurrent),
        other => Err(format!("layer_types has {other:?}, which no manifest can say")),
    }
}

fn position_encoding(
    fields: &Fields, architecture: &str, rows: &RowShape,
) -> Result<Option<Rope>, String> {
    let parameters = fields.get("rope_parameters").and_then(Value::as_object);
    let of = |name: &str| said(fields, name).or_else(|| said(parameters?, name));
    let scaling = said(fields, "rope_scaling");
    scaling.map_or(Ok(()), |scaling| check_scaling("rope_scaling", scaling))?;
    let kind = parameters.and_then(|all| all.get("rope_type")?.as_str());
    let parameters = parameters.filter(|_| kind.is_some_and(|kind| kind != "default"));
    let parameters = parameters.map(|all| Value::Object(all.clone()));
    parameters.as_ref().map_or(Ok(()), |all| check_scaling("rope_parameters", all))?;
    let positive = |name| of(name).map(|value| number_above_0(name, value)).transpose();
    positive("rope_local_base_freq")?;
    let Some(theta) = positive("rope_theta")? else { return Ok(None) };
    let factor = of("partial_rotary_factor");
    let factor = factor.map(|value| number("partial_rotary_factor", value)).transpose()?;
    let dims = factor.map(|factor| f64::from(rows.rotated) * factor);
    let dims = match dims {
        Some(dims) if dims.fract() != 0.0 || dims < 0.0 || dims > f64::from(rows.rotated) => {
            return Err(format!("partial_rotary_factor gives {dims} of {} elements", rows.rotated));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it was looked at"
        )]
        Some(dims) => Some(dims as u32),
        None => Some(rows.rotated),
    };
    let dims = dims.filter(|dims| *dims != rows.head_dim);
    let mut found = rope(theta, dims, HALVES.contains(&architecture).then_some("halves"));
    found.scaling = scaling.cloned().or(parameters);
    if let Some(local) = said(fields, "rope_local_base_freq") {
        found.other.insert("local_theta".to_owned(), local.clone());
    }
    Ok(Some(found))
}

/// Kinds of scaling that mean nothing without a factor.
const SCALED_BY_FACTOR: [&str; 4] = ["linear", "dynamic", "yarn", "llama3"];

/// What the scaling of positions consists of, of which each kind has some.
const SCALING_NUMBERS: [&str; 9] = [
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
];

/// It becomes part of what K means, so that what nobody can compute positions with is refused.
fn check_scaling(place: &str, scaling: &Value) -> Result<(), String> {
    let fields =
        scaling.as_object().ok_or_else(|| format!("{place} is {scaling}, and no object"))?;
    let kind = said(fields, "rope_type").or_else(|| said(fields, "type"));
    let kind = kind.ok_or_else(|| format!("{place} has no rope_type"))?;
    let kind = kind.as_str().ok_or_else(|| format!("{place} has the rope_type {kind}"))?;
    let in_place = |why: String| format!("{place}: {why}");
    for name in SCALING_NUMBERS {
        let Some(value) = said(fields, name) else { continue };
        if name == "factor" {
            number_above_0(name, value).map_err(in_place)?;
        } else {
            number(name, value).map_err(in_place)?;
        }
    }
    for name in ["short_factor", "long_factor"] {
        let Some(value) = said(fields, name) else { continue };
        let is_of_numbers =
            value.as_array().is_some_and(|all| all.iter().all(|one| number(name, one).is_ok()));
        if !is_of_numbers {
            return Err(in_place(format!("{name} is no list of numbers")));
        }
    }
    if SCALED_BY_FACTOR.contains(&kind) && said(fields, "factor").is_none() {
        return Err(format!("{place} has no factor, which {kind} needs"));
    }
    Ok(())
}

/// A field; `null` is absent.
pub(super) fn said<'a>(fields: &'a Fields, name: &str) -> Option<&'a Value> {
    fields.get(name).filter(|value| !value.is_null())
}

fn number(name: &str, value: &Value) -> Result<f64, String> {
    value.as_f64().ok_or_else(|| format!("{name} is {value}, and no number"))
}

fn number_above_0(name: &str, value: &Value) -> Result<f64, String> {
    let number = number(name, value)?;
    if number > 0.0 { Ok(number) } else { Err(format!("{name} is {value}, and no number above 0")) }
}

fn text_of<'a>(fields: &'a Fields, name: &str) -> Option<&'a str> {
    fields.get(name)?.as_str()
}

/// The first of these fields that is there; `null` is absent.
pub(super) fn count_of(fields: &Fields, names: &[&str]) -> Result<Option<u64>, String> {
    for name in names {
        match fields.get(*name) {
            None | Some(Value::Null) => {}
            Some(value) => match value.as_u64() {
                Some(count) => return Ok(Some(count)),
                None => return Err(format!("{name} is {value}, and no count")),
            },
        }
    }
    Ok(None)
}

pub(super) fn needed(fields: &Fields, names: &[&str]) -> Result<u64, String> {
    count_of(fields, names)?.ok_or_else(|| format!("{} is missing", names[0]))
}

#[cfg(test)]
mod tests;

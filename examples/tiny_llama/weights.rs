//! The configuration and the weights of a Llama model in Hugging Face files.

use std::fs;
use std::path::Path;

use half::f16;
use half::slice::HalfFloatSliceExt;
use kvfs::attention::Shape;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::Result;
use crate::matrix::Matrix;

/// The fields of `config.json` that the forward pass depends on.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) model_type: String,
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rms_norm_eps: f32,
    pub(crate) rope_theta: f64,
    pub(crate) hidden_act: String,
    #[serde(default)]
    pub(crate) attention_bias: bool,
    #[serde(default)]
    pub(crate) mlp_bias: bool,
    #[serde(default)]
    pub(crate) tie_word_embeddings: bool,
    pub(crate) rope_scaling: Option<serde_json::Value>,
}

impl Config {
    /// The heads of the attention layers.
    pub(crate) fn shape(&self) -> Result<Shape> {
        let (query_heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        Ok(Shape::new(query_heads, kv_heads, self.head_dim, self.head_dim)?)
    }

    /// Refuses a variant of Llama that this code would compute wrongly.
    fn check(&self) -> Result<()> {
        if self.model_type != "llama" || self.hidden_act != "silu" {
            let (model, act) = (&self.model_type, &self.hidden_act);
            return Err(format!("config.json: {model} with {act} is not supported").into());
        }
        if self.attention_bias || self.mlp_bias || self.tie_word_embeddings {
            return Err("config.json: biases and tied embeddings are not supported".into());
        }
        if self.rope_scaling.is_some() {
            return Err("config.json: rope_scaling is not supported".into());
        }
        self.shape().map_err(|error| format!("config.json: {error}"))?;
        if !self.head_dim.is_multiple_of(2) {
            return Err("config.json: head_dim must be even".into());
        }
        Ok(())
    }
}

/// One transformer block. Projections are `[out, in]`, as in the file.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query: Matrix,
    pub(crate) key: Matrix,
    pub(crate) value: Matrix,
    pub(crate) output: Matrix,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

/// Every tensor of the model, converted to f32 once.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) config: Config,
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
    pub(crate) head: Matrix,
}

impl Weights {
    /// Reads `config.json` and `model.safetensors` from `directory`.
    pub(crate) fn load(directory: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let config: Config = serde_json::from_slice(&read("config.json")?)?;
        config.check()?;
        let bytes = read("model.safetensors")?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| load_layer(&tensors, &config, index))
            .collect::<Result<_>>()?;
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        Ok(Self {
            embedding: matrix(&tensors, "model.embed_tokens", vocabulary, hidden)?,
            layers,
            norm: floats(&tensors, "model.norm", &[hidden])?,
            head: matrix(&tensors, "lm_head", vocabulary, hidden)?,
            config,
        })
    }
}

fn load_layer(tensors: &SafeTensors<'_>, config: &Config, index: usize) -> Result<Layer> {
    let name = |part: &str| format!("model.layers.{index}.{part}");
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let q_width = config.num_attention_heads * config.head_dim;
    let kv_width = config.num_key_value_heads * config.head_dim;
    Ok(Layer {
        attention_norm: floats(tensors, &name("input_layernorm"), &[hidden])?,
        query: matrix(tensors, &name("self_attn.q_proj"), q_width, hidden)?,
        key: matrix(tensors, &name("self_attn.k_proj"), kv_width, hidden)?,
        value: matrix(tensors, &name("self_attn.v_proj"), kv_width, hidden)?,
        output: matrix(tensors, &name("self_attn.o_proj"), hidden, q_width)?,
        mlp_norm: floats(tensors, &name("post_attention_layernorm"), &[hidden])?,
        gate: matrix(tensors, &name("mlp.gate_proj"), inner, hidden)?,
        up: matrix(tensors, &name("mlp.up_proj"), inner, hidden)?,
        down: matrix(tensors, &name("mlp.down_proj"), hidden, inner)?,
    })
}

fn matrix(tensors: &SafeTensors<'_>, name: &str, rows: usize, columns: usize) -> Result<Matrix> {
    Ok(Matrix::new(columns, floats(tensors, name, &[rows, columns])?))
}

fn floats(tensors: &SafeTensors<'_>, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let name = format!("{name}.weight");
    let tensor = tensors.tensor(&name)?;
    if tensor.dtype() != Dtype::F16 || tensor.shape() != shape {
        let (dtype, found) = (tensor.dtype(), tensor.shape());
        return Err(format!("{name}: {dtype:?} {found:?}, expected F16 {shape:?}").into());
    }
    let (pairs, _) = tensor.data().as_chunks::<2>();
    let halves: Vec<f16> = pairs.iter().map(|pair| f16::from_le_bytes(*pair)).collect();
    Ok(halves.to_f32_vec())
}

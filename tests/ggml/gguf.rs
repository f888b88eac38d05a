//! Models as GGUF files: the tiny real one, and generated ones of any shape.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use safetensors::SafeTensors;

use crate::common::fill;

const VERSION: u32 = 3;
/// Tensors start at multiples of this.
const ALIGNMENT: usize = 32;
const TYPE_F32: u32 = 0;
const TYPE_F16: u32 = 1;
/// Of a recurrent layer: tokens that its convolution sees, elements of its state for each of those that come in, and
/// those of which the time step is made.
const CONVOLVED: usize = 4;
const STATE: usize = 16;
const TIME_STEP_RANK: usize = 16;

/// The shape of a model, in ggml's words.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    /// `llama`, `gemma2` or `gemma3`, whose layers see 48 tokens, but for each second or sixth, or `jamba`, of whose
    /// layers each third attends and the others are recurrent
    pub(crate) architecture: &'static str,
    pub(crate) vocabulary: usize,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) feed_forward: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) context: usize,
}

enum Value {
    Number(u32),
    Numbers(Vec<u32>),
    Float(f32),
    Text(&'static str),
}

/// A file in the making.
#[derive(Default)]
struct Gguf {
    fields: Vec<u8>,
    field_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl Gguf {
    fn text(to: &mut Vec<u8>, text: &str) {
        to.extend((text.len() as u64).to_le_bytes());
        to.extend(text.as_bytes());
    }

    fn field(&mut self, key: &str, value: &Value) {
        self.field_count += 1;
        Self::text(&mut self.fields, key);
        let (kind, bytes): (u32, _) = match value {
            Value::Number(number) => (4, number.to_le_bytes().to_vec()),
            Value::Numbers(numbers) => {
                let head =
                    [4_u32.to_le_bytes().to_vec(), (numbers.len() as u64).to_le_bytes().to_vec()];
                let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
                (9, head.concat().into_iter().chain(numbers).collect())
            }
            Value::Float(number) => (6, number.to_le_bytes().to_vec()),
            Value::Text(text) => {
                let mut bytes = Vec::new();
                Self::text(&mut bytes, text);
                (8, bytes)
            }
        };
        self.fields.extend(kind.to_le_bytes());
        self.fields.extend(bytes);
    }

    /// `shape` in C order; a vector is f32, as llama.cpp has norms, a matrix f16, unless it is no factor of a product.
    fn tensor(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        self.tensor_count += 1;
        Self::text(&mut self.tensors, name);
        self.tensors.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
        for length in shape.iter().rev() {
            self.tensors.extend((*length as u64).to_le_bytes());
        }
        let is_factor = shape.len() > 1 && !name.contains("ssm_conv1d") && !name.contains("ssm_a");
        let kind = if is_factor { TYPE_F16 } else { TYPE_F32 };
        self.tensors.extend(kind.to_le_bytes());
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        for value in values {
            if kind == TYPE_F32 {
                self.data.extend(value.to_le_bytes());
            } else {
                self.data.extend(f16::from_f32(*value).to_le_bytes());
            }
        }
    }

    fn write(self, path: &Path) {
        let mut file = b"GGUF".to_vec();
        file.extend(VERSION.to_le_bytes());
        file.extend(self.tensor_count.to_le_bytes());
        file.extend(self.field_count.to_le_bytes());
        file.extend(self.fields);
        file.extend(self.tensors);
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(self.data);
        std::fs::write(path, file).unwrap();
    }
}

impl Model {
    /// The model of `tests/fixtures/tiny-llama`.
    pub(crate) fn tiny() -> Self {
        Self {
            architecture: "llama",
            vocabulary: 256,
            layers: 4,
            hidden: 256,
            feed_forward: 704,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            context: 2048,
        }
    }

    fn header(&self) -> Gguf {
        let mut gguf = Gguf::default();
        let number = |value: usize| Value::Number(u32::try_from(value).unwrap());
        gguf.field("general.architecture", &Value::Text(self.architecture));
        let fields = [
            ("vocab_size", number(self.vocabulary)),
            ("context_length", number(self.context)),
            ("embedding_length", number(self.hidden)),
            ("block_count", number(self.layers)),
            ("feed_forward_length", number(self.feed_forward)),
            ("attention.head_count", number(self.heads)),
            ("attention.head_count_kv", Value::Numbers(self.kv_heads_of_layers())),
            ("attention.key_length", number(self.head_dim)),
            ("attention.value_length", number(self.head_dim)),
            ("rope.dimension_count", number(self.head_dim)),
            ("attention.layer_norm_rms_epsilon", Value::Float(1e-5)),
            ("rope.freq_base", Value::Float(10000.0)),
        ];
        for (key, value) in &fields {
            gguf.field(&format!("{}.{key}", self.architecture), value);
        }
        if self.architecture == "gemma3" {
            gguf.field("gemma3.attention.sliding_window", &Value::Number(48));
        }
        if self.architecture == "jamba" {
            for (key, value) in [
                ("conv_kernel", CONVOLVED),
                ("inner_size", 2 * self.hidden),
                ("state_size", STATE),
                ("time_step_rank", TIME_STEP_RANK),
            ] {
                gguf.field(&format!("jamba.ssm.{key}"), &number(value));
            }
        }
        if self.architecture == "gemma2" {
            gguf.field("gemma2.attention.sliding_window", &Value::Number(48));
            gguf.field("gemma2.attn_logit_softcapping", &Value::Float(2.0));
            gguf.field("gemma2.final_logit_softcapping", &Value::Float(30.0));
        }
        // Tokens are numbers: there is nothing to split into them.
        gguf.field("tokenizer.ggml.model", &Value::Text("no_vocab"));
        gguf
    }

    fn is_recurrent(&self, layer: usize) -> bool {
        self.architecture == "jamba" && layer % 3 != 2
    }

    fn kv_heads_of_layers(&self) -> Vec<u32> {
        let heads = u32::try_from(self.kv_heads).unwrap();
        (0..self.layers).map(|layer| if self.is_recurrent(layer) { 0 } else { heads }).collect()
    }

    /// Those of a layer of Mamba.
    fn recurrent_tensors(&self, layer: usize) -> Vec<(String, Vec<usize>)> {
        let inner = 2 * self.hidden;
        let all: [(&str, &[usize]); 12] = [
            ("ssm_in.weight", &[2 * inner, self.hidden]),
            ("ssm_conv1d.weight", &[inner, CONVOLVED]),
            ("ssm_conv1d.bias", &[inner]),
            ("ssm_x.weight", &[TIME_STEP_RANK + 2 * STATE, inner]),
            ("ssm_dt_norm.weight", &[TIME_STEP_RANK]),
            ("ssm_dt.weight", &[inner, TIME_STEP_RANK]),
            ("ssm_dt.bias", &[inner]),
            ("ssm_b_norm.weight", &[STATE]),
            ("ssm_c_norm.weight", &[STATE]),
            ("ssm_a", &[inner, STATE]),
            ("ssm_d", &[inner]),
            ("ssm_out.weight", &[self.hidden, inner]),
        ];
        all.map(|(name, shape)| (format!("blk.{layer}.{name}"), shape.to_vec())).into()
    }

    /// Names and shapes of the tensors, in C order.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut all = vec![
            ("token_embd.weight".to_owned(), vec![self.vocabulary, self.hidden]),
            ("output_norm.weight".to_owned(), vec![self.hidden]),
        ];
        let gemma = self.architecture.starts_with("gemma");
        if !gemma {
            all.push(("output.weight".to_owned(), vec![self.vocabulary, self.hidden]));
        }
        let norms = ["post_attention_norm", "post_ffw_norm"].iter().filter(|_| gemma);
        for layer in 0..self.layers {
            for norm in norms.clone().chain(&["attn_norm", "ffn_norm"]) {
                all.push((format!("blk.{layer}.{norm}.weight"), vec![self.hidden]));
            }
            if self.architecture == "gemma3" {
                for norm in ["attn_q_norm", "attn_k_norm"] {
                    all.push((format!("blk.{layer}.{norm}.weight"), vec![self.head_dim]));
                }
            }
            if self.is_recurrent(layer) {
                all.extend(self.recurrent_tensors(layer));
            } else {
                for (name, shape) in [
                    ("attn_q", [q, self.hidden]),
                    ("attn_k", [kv, self.hidden]),
                    ("attn_v", [kv, self.hidden]),
                    ("attn_output", [self.hidden, q]),
                ] {
                    all.push((format!("blk.{layer}.{name}.weight"), shape.to_vec()));
                }
            }
            for (name, shape) in [
                ("ffn_gate", [self.feed_forward, self.hidden]),
                ("ffn_up", [self.feed_forward, self.hidden]),
                ("ffn_down", [self.hidden, self.feed_forward]),
            ] {
                all.push((format!("blk.{layer}.{name}.weight"), shape.to_vec()));
            }
        }
        all
    }

    /// Writes the model with weights that depend on `seed` alone.
    #[allow(clippy::cast_precision_loss, reason = "rows are short")]
    pub(crate) fn write_random(&self, seed: u64, path: &Path) {
        let mut gguf = self.header();
        for (index, (name, shape)) in self.tensors().into_iter().enumerate() {
            let count = shape.iter().product();
            let noise = fill(seed * 1000 + index as u64, count);
            // Rows of length n keep the size of what they are multiplied with; attention is made
            // sharper, so that it matters which token is seen.
            let sharp = if name.contains("attn_q") || name.contains("attn_k") { 2.0 } else { 1.0 };
            let scale = sharp / 74.0 / (shape[shape.len() - 1] as f32).sqrt();
            let values: Vec<f32> = match shape.len() {
                1 => vec![1.0; count],
                // So much of the state is kept that one of many tokens before matters.
                _ if name.ends_with("ssm_a") => vec![-0.05; count],
                _ => noise.iter().map(|byte| f32::from(byte.cast_signed()) * scale).collect(),
            };
            gguf.tensor(&name, &shape, &values);
        }
        gguf.write(path);
    }

    /// Converts `tests/fixtures/tiny-llama`.
    pub(crate) fn write_tiny(path: &Path) {
        let model = Self::tiny();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
        let bytes = std::fs::read(fixture.join("model.safetensors")).unwrap();
        let source = SafeTensors::deserialize(&bytes).unwrap();
        let names = BTreeMap::from([
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ]);
        let mut gguf = model.header();
        for (name, shape) in model.tensors() {
            let words: Vec<&str> = name.split('.').collect();
            let from = match words[..] {
                ["token_embd", _] => "model.embed_tokens.weight".to_owned(),
                ["output_norm", _] => "model.norm.weight".to_owned(),
                ["output", _] => "lm_head.weight".to_owned(),
                [_, layer, name, _] => format!("model.layers.{layer}.{}.weight", names[name]),
                _ => unreachable!("{name}"),
            };
            let tensor = source.tensor(&from).unwrap();
            assert_eq!(tensor.shape(), shape, "{from}");
            let halves = tensor.data().chunks_exact(2);
            let values = halves.map(|half| f16::from_le_bytes([half[0], half[1]]).to_f32());
            let mut values: Vec<f32> = values.collect();
            if name.contains("attn_q") || name.contains("attn_k") {
                values = interleave(&values, model.head_dim, model.hidden);
            }
            gguf.tensor(&name, &shape, &values);
        }
        gguf.write(path);
    }
}

/// Hugging Face rotates the halves of a head against each other, ggml neighbours: row `i` of the
/// first half becomes row `2i`, of the second half `2i + 1`.
fn interleave(values: &[f32], head_dim: usize, columns: usize) -> Vec<f32> {
    let mut rows = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_dim * columns) {
        for row in 0..head_dim {
            let from = row / 2 + row % 2 * (head_dim / 2);
            rows.extend_from_slice(&head[from * columns..][..columns]);
        }
    }
    rows
}

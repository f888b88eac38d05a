//! K and V of Hugging Face's shape, `[batch, kv_heads, tokens, head_dim]`, in a safetensors file.
//!
//! Nobody has laid down what the tensors are called, so `names.rs` takes what is in use. Beside them stand
//! the ids, `input_ids`, and where the batch was padded `attention_mask`, as a tokenizer makes them.
//! What is written here has `layers.N.keys`, `layers.N.values` and `input_ids`: what
//! `transformers.DynamicCache` calls its parts.

mod header;
mod names;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use header::is_safetensors;
pub use read::{Selection, Tensors};
pub use write::{Part, Run, Writer};

/// Token ids, `[batch, tokens]` or `[tokens]`.
const TOKEN_IDS: &str = "input_ids";
/// 0 where a batch was padded, of the same shape.
const MASK: &str = "attention_mask";

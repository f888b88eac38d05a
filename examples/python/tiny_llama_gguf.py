"""Writes the model of tests/fixtures/tiny-llama as GGUF, so that llama.cpp runs it.

    pip install gguf numpy safetensors
    python tiny_llama_gguf.py tests/fixtures/tiny-llama tiny.gguf

Its tokens are bytes: prompts are text, or lists of numbers below 256.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    layer, inner = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours, Hugging Face the two halves of a head."""
    count, width = rows.shape
    return rows.reshape(heads, 2, count // heads // 2, width).swapaxes(1, 2).reshape(count, width)


def write(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    count = config["vocab_size"]
    writer.add_vocab_size(count)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{byte:02X}>" for byte in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([gguf.TokenType.BYTE] * count)
    # No byte ends a text: 0 stands in none.
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    for name, tensor in load_file(source / "model.safetensors").items():
        if "q_proj" in name:
            tensor = interleave(tensor, config["num_attention_heads"])
        if "k_proj" in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
        if tensor.ndim == 1:
            tensor = tensor.astype(np.float32)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]))

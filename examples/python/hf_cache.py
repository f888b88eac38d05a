"""Moves a Hugging Face style cache, [batch, heads, tokens, head_dim] per layer, to pages and back.

    pip install numpy safetensors

    from hf_cache import load_sequence, save_sequence
    tokens, layers = load_sequence("/mnt/kv/models/tiny/sequences/chat")
    save_sequence("/mnt/kv/models/tiny/sequences/copy", tokens, layers)

`layers` is a list of (k, v), batch 1, as `DynamicCache.to_legacy_cache()` has them (`.numpy()` of
each; bf16 has no NumPy type). For models whose manifest says f16 or f32; `kvfs import` and `kvfs export`
do it with safetensors files of any dtype. What is behind the last full page becomes a short page; a
sequence that ends so is complete: rows are appended to sequences that end with a tail.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

# Pages are read by mapping them, so their payload starts where an OS page does.
PAYLOAD_BYTE = 4096
DTYPES = {"f16": np.float16, "f32": np.float32}


def load_manifest(sequence: Path) -> dict:
    manifest = json.loads((sequence.parent.parent / "manifest.json").read_text())
    if manifest["dtype"] not in DTYPES:
        raise ValueError(f"{sequence}: only pages of f16 or f32")
    return manifest


def swap_if_nhd(tensor: np.ndarray, manifest: dict) -> np.ndarray:
    """From the order of heads and tokens in a page to heads, tokens; and back."""
    return tensor.swapaxes(0, 1) if manifest.get("layout") == "nhd" else tensor


def load_sequence(path):
    """Token ids and (k, v) of every layer, as far as all layers have pages and rows."""
    sequence = Path(path)
    manifest = load_manifest(sequence)
    tokens = np.fromfile(sequence / "tokens", dtype="<u4")
    layers = [load_layer(sequence / f"{layer:03}", manifest) for layer in range(manifest["num_layers"])]
    count = min(len(tokens), *(k.shape[1] for k, _ in layers))
    return tokens[:count], [(k[None, :, :count], v[None, :, :count]) for k, v in layers]


def load_layer(directory: Path, manifest: dict):
    pages = [load_file(page) for page in sorted(directory.glob("[0-9]*.safetensors"))]
    k, v = ([swap_if_nhd(page[name], manifest) for page in pages] for name in "kv")
    for tail in directory.glob("[0-9]*.tail"):
        tail_k, tail_v = load_rows(tail, manifest)
        k.append(tail_k)
        v.append(tail_v)
    return np.concatenate(k, axis=1), np.concatenate(v, axis=1)


def load_rows(tail: Path, manifest: dict):
    """Rows are K of all heads, then V of all heads, of one token after the other."""
    heads, dim = manifest["num_kv_heads"], manifest["head_dim"]
    dim_v = manifest.get("v_head_dim") or dim
    rows = np.fromfile(tail, dtype=DTYPES[manifest["dtype"]])
    rows = rows[: len(rows) - len(rows) % (heads * (dim + dim_v))].reshape(-1, heads * (dim + dim_v))
    k = rows[:, : heads * dim].reshape(-1, heads, dim)
    v = rows[:, heads * dim :].reshape(-1, heads, dim_v)
    return k.swapaxes(0, 1), v.swapaxes(0, 1)


def save_sequence(path, tokens, layers):
    """Makes a sequence; its model's directory must have a manifest."""
    sequence = Path(path)
    manifest = load_manifest(sequence)
    size = manifest["page_tokens"]
    dtype = DTYPES[manifest["dtype"]]
    sequence.mkdir()
    np.asarray(tokens, dtype="<u4").tofile(sequence / "tokens")
    for layer, (k, v) in enumerate(layers):
        directory = sequence / f"{layer:03}"
        directory.mkdir()
        for start in range(0, len(tokens), size):
            page = [np.asarray(part[0, :, start : start + size], dtype=dtype) for part in (k, v)]
            page = [swap_if_nhd(part, manifest) for part in page]
            save_page(directory / f"{start:07}.safetensors", *page)


def save_page(path: Path, k: np.ndarray, v: np.ndarray):
    """Writes under a temporary name; the rename makes it a page, or fails with EINVAL."""
    names = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
    body = k.tobytes() + v.tobytes()
    padding = -len(body) % PAYLOAD_BYTE
    header, at = {}, 0
    for name, tensor in (("k", k), ("v", v)):
        end = at + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    if padding:
        header["_pad"] = {"dtype": "U8", "shape": [padding], "data_offsets": [at, at + padding]}
    text = json.dumps(header).encode().ljust(PAYLOAD_BYTE - 8)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(struct.pack("<Q", len(text)) + text + body + bytes(padding))
    os.rename(temporary, path)

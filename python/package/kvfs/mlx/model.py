"""The model in the mount that belongs to one of MLX-LM, and what its caches keep."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from .._kvfs import Model
from ..manifest import manifest_of, refused

DTYPES = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}

# Why no rows are taken from caches of other classes, and what to do.
_OTHERS = {
    "QuantizedKVCache": "keeps rows of a few bits in an order of its own: save before it is quantised (no kv_bits)",
    "RotatingKVCache": "forgets tokens: a model whose layers all look at every token, and no max_kv_size, is needed",
    "BatchKVCache": "has rows of several prompts: save what its extract() gives, one after the other",
}


def model_for(
    config: dict[str, Any] | str | os.PathLike[str] | object,
    mount: str | os.PathLike[str],
    name: str,
    *,
    dtype: mx.Dtype | None = None,
    page_tokens: int | None = None,
    **identity: Any,
) -> Model:
    """Opens the model `name` of a mount, or makes it: layers, heads, element type and position encoding are those of
    the configuration (what `mlx_lm.load(..., return_config=True)` gives, a `config.json` or its directory, or `model.args`).

    A model that is there and keeps something else is refused (`kvfs.Refused`), so rows of one geometry are never
    read as those of another. The configuration does not say which weights there are: `model_revision`, `lora`,
    `tenant` and `salt` keep apart what only they tell apart. `layout="nhd"` opens one that transformers has made.
    """
    fields = _fields(config)
    identity.setdefault("layout", "hnd")
    if fields.get("rope_traditional"):
        # Only MLX's configurations say so; in those of Hugging Face halves turn together.
        identity.setdefault("rope", {}).setdefault("pairing", "interleaved")
    manifest = manifest_of(json.dumps(fields), name, _dtype(fields, dtype), identity["layout"], page_tokens)
    if "rope" in identity:
        identity["rope"] = {**manifest.get("rope", {}), **identity["rope"]}
    if "quantization" in fields:
        # Rows of quantised weights have other values, and the same shape.
        identity.setdefault("mlx", {"quantization": fields["quantization"]})
    return Model.create(os.path.join(os.fspath(mount), "models", name), **{**manifest, **identity})


def _fields(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        return json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        # What an argument has no value for, a configuration does not have.
        return {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    if not isinstance(config, dict):
        raise refused(f"a configuration is a dict, a config.json or model.args, and this is a {type(config).__name__}")
    return config


def _dtype(fields: dict[str, Any], dtype: mx.Dtype | None) -> str:
    said = dtype or fields.get("dtype") or fields.get("torch_dtype")
    for known, name in DTYPES.items():
        if str(said).removeprefix("mlx.core.") == str(known).removeprefix("mlx.core."):
            return name
    raise refused(f"rows of {said}: give dtype=, one of mx.float32, mx.float16 and mx.bfloat16, in which the model computes")


def check_model(model: nn.Module, store: Model) -> None:
    """Refuses a model whose rows the one in the mount does not keep, before anything is read."""
    kinds = [kind for kind in store.manifest.get("layers", ()) if kind != "attention"]
    if kinds:
        raise refused(f"{store.path} keeps {kinds[0]!r} for a layer: only K and V of every token make a prompt cache")
    cache = make_prompt_cache(model)
    check_classes(cache)
    # MLX computes what is asked for, and here nothing is: the pass only says of what shape and type rows would be.
    model(mx.array([[0]]), cache=cache)
    check_rows(cache, store)


def check_classes(cache: list[Any]) -> None:
    """Refuses caches that keep something else than a row of every token."""
    for layer, each in enumerate(cache):
        if type(each) is not KVCache:
            name = type(each).__name__
            raise refused(f"layer {layer} has a {name}, which {_OTHERS.get(name, 'is no KVCache: nobody here knows it')}")


def check_rows(cache: list[KVCache], store: Model) -> None:
    """Refuses rows of another shape or type."""
    keeps = (store.num_kv_heads, store.head_dim, store.v_head_dim, store.dtype)
    if len(cache) != store.num_layers:
        raise refused(f"{store.path} keeps {store.num_layers} layers, and these are {len(cache)}: kvfs.mlx.model_for")
    for layer, each in enumerate(cache):
        rows, heads, _, dim = each.keys.shape
        if rows != 1:
            raise refused(f"layer {layer} has rows of {rows} prompts: a prompt cache of one is needed")
        has = (heads, dim, each.values.shape[3], DTYPES.get(each.keys.dtype, str(each.keys.dtype)))
        if has != keeps:
            named = "KV heads, elements of K and of V, and their type"
            raise refused(f"{store.path} keeps {keeps} ({named}), and layer {layer} has {has}: kvfs.mlx.model_for")

"""The model in the mount that belongs to a configuration of transformers."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .._kvfs import InvalidArgument, Model
from ..manifest import manifest_of, refused

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def model_for(
    config: PreTrainedConfig,
    mount: str | os.PathLike[str],
    name: str,
    *,
    dtype: torch.dtype | None = None,
    page_tokens: int | None = None,
    **identity: Any,
) -> Model:
    """Opens the model `name` of a mount, or makes it: layers, heads, element type and position encoding are those of
    the configuration.

    A model that is there and keeps something else is refused (`kvfs.Refused`), so rows of one geometry are never
    read as those of another. The configuration does not say which weights there are: `model_revision`, `lora`,
    `tenant` and `salt` keep apart what only they tell apart. The revision is that of the hub where it is known.
    """
    dtype = dtype or config.dtype
    if dtype not in DTYPES:
        raise refused(f"rows of {dtype}: give dtype=model.dtype, one of float32, float16 and bfloat16")
    revision = getattr(config, "_commit_hash", None)
    if revision:
        identity.setdefault("model_revision", revision)
    # All of it: what the class of the configuration has by default is not in the short form.
    text = config.get_text_config(decoder=True).to_json_string(use_diff=False)
    manifest = manifest_of(text, name, DTYPES[dtype], "nhd", page_tokens)
    return Model.create(os.path.join(os.fspath(mount), "models", name), **{**manifest, **identity})


def check(model: PreTrainedModel, store: Model) -> None:
    """Refuses a model whose rows the one in the mount cannot keep, before anything is computed."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise refused("an encoder's rows belong to no prefix: a KvfsCache is for models that only decode")
    if model.device.type != "cpu":
        raise refused(f"the model is on {model.device}: a KvfsCache takes rows on the CPU: model.to('cpu')")
    if getattr(config, "use_bidirectional_attention", False):
        raise refused("rows of this model depend on later tokens and belong to no prefix: give generate() no KvfsCache")
    kept = _kept_windows(store)
    for number, (window, keeps) in enumerate(zip(windows(config), kept)):
        if keeps not in (None, window):
            looks = "every token" if window is None else f"the last {window}"
            raise refused(f"{store.path} keeps the last {keeps} tokens in layer {number}, which looks at {looks}: kvfs.transformers.model_for")
    if store.v_head_dim != store.head_dim:
        raise refused(f"{store.path}: rows of K and V differ ({store.head_dim} and {store.v_head_dim} elements)")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    has = (config.num_hidden_layers, heads, dim, DTYPES.get(model.dtype, str(model.dtype)))
    keeps = (store.num_layers, store.num_kv_heads, store.head_dim, store.dtype)
    if has != keeps:
        named = "layers, KV heads, elements of a row and their type"
        raise refused(f"{store.path} keeps {keeps} ({named}), and the model has {has}: kvfs.transformers.model_for")


def windows(config: PreTrainedConfig) -> list[int | None]:
    """To how many tokens each layer looks back, itself included; None is all of them. Refuses other kinds of layers."""
    if getattr(config, "num_kv_shared_layers", 0):
        raise _other("shared K and V")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        if getattr(config, "attention_chunk_size", None):
            raise _other("chunked_attention")
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    for kind in kinds:
        if kind != "full_attention" and not (kind == "sliding_attention" and window):
            raise _other(kind)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _kept_windows(store: Model) -> list[int | None]:
    """The same of the layers in the mount."""
    kinds = store.manifest.get("layers") or ["attention"] * store.num_layers
    kept = []
    for kind in kinds:
        window = kind["sliding"]["window"] if isinstance(kind, dict) and "sliding" in kind else None
        if window is None and kind != "attention":
            raise _other(kind)
        kept.append(window)
    return kept


def _other(kind: object) -> InvalidArgument:
    return refused(f"layers of the kind {kind!r} keep something else than K and V of every token: give generate() no KvfsCache")

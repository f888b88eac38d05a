"""What a user has set, and what is refused before an engine starts: rows that pages could not be read back from."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any

from .._kvfs import InvalidArgument, Model, Refused
from ..mount import Mount

# A page is about so large where nothing else was said.
_PAGE_BYTES = 4 << 20
_DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


def refused(reason: str) -> InvalidArgument:
    """What a configuration is answered that does not fit."""
    return InvalidArgument(errno.EINVAL, f"kvfs.vllm: {reason}")


@dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`: `mount`, the mountpoint; `model`, the directory below its `models/` (the last part of the
    model's name where it is not given); `page_tokens`; `salt`, which keeps caches apart; `ttl_seconds` of a prompt's sequence."""

    mount: str
    model: str
    page_tokens: int | None = None
    salt: str | None = None
    ttl_seconds: int | None = None

    @classmethod
    def of(cls, extra: dict[str, Any], model: str) -> Settings:
        """Takes the settings of a model."""
        names = {"mount": str, "model": str, "page_tokens": int, "salt": str, "ttl_seconds": int}
        unknown = sorted(set(extra) - set(names))
        if unknown:
            raise refused(f"no such kv_connector_extra_config {unknown}: {', '.join(names)}")
        for name, value in extra.items():
            if not isinstance(value, names[name]) or not value or value is True or (names[name] is int and value < 0):
                raise refused(f"{name} is {value!r}: {'a number above 0' if names[name] is int else 'a text'} is needed")
        if "mount" not in extra:
            raise refused('"mount" is missing in kv_connector_extra_config: where kvfs is mounted')
        name = extra.get("model", os.path.basename(model.rstrip("/")))
        if "/" in name or name in (".", "..", ""):
            raise refused(f"model is {name!r}: the name of a directory below models/ of the mount is needed")
        # Refused where nothing is mounted: pages would fill the disk below the mountpoint, and nobody would find them.
        Mount.at(extra["mount"])
        return cls(**{**extra, "model": name})

    def directory(self, rank: int, ranks: int) -> str:
        """The model of a rank, which has heads of its own."""
        name = self.model if ranks == 1 else f"{self.model}-tp{rank}of{ranks}"
        return os.path.join(os.path.abspath(self.mount), "models", name)


def check_engine(config: Any) -> None:
    """Refuses an engine whose steps, requests or ranks do not fit."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise refused('set "kv_load_failure_policy": "recompute", or a page that is lost ends the request that wanted it')
    if config.scheduler_config.async_scheduling:
        raise refused(
            "rows are loaded within a step, and with asynchronous scheduling the next one begins before anybody knows "
            "that a page was lost: start vLLM with --no-async-scheduling"
        )
    if config.speculative_config is not None:
        raise refused("the rows of a draft model are not kept: start vLLM without speculative decoding")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise refused(f"{name} is {size}: ranks of tensor parallelism on one machine are kept, and no others")


def layers_of(cache_config: Any) -> dict[str, Any]:
    """The layers and what each keeps, in the order of their numbers; refuses those that keep anything but K and V of
    every token."""
    groups = cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise refused(f"the model has {len(groups)} groups of layers ({', '.join(kinds)}): one of full attention is needed")
    spec = groups[0].kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(groups[0].layer_names, spec)
    for layer, own in each.items():
        _check_layer(layer, own)
        if _shape(own) != _shape(next(iter(each.values()))):
            raise refused(f"rows of {layer} are {_shape(own)}, those of the first layer are not: pages are of one shape")
    return {layer: each[layer] for layer in sorted(each, key=_number)}


def _check_layer(layer: str, spec: Any) -> None:
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if window:
        raise refused(f"{layer} looks at {window} tokens only: a model whose layers all look at every token is needed")
    if type(spec).__name__ != "FullAttentionSpec":
        raise refused(f"{layer} keeps a {type(spec).__name__}: full attention is needed")
    if int(getattr(spec, "kv_quant_mode", 0)) != 0 or str(spec.dtype) not in _DTYPES:
        raise refused(f"rows of {layer} are quantised or {spec.dtype}: start vLLM with --kv-cache-dtype auto")
    packed = [name for name in ("num_head_slots", "state_content_bytes") if getattr(spec, name, None) is not None]
    if packed or getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "non_causal", False):
        raise refused(f"{layer} packs its rows in an order of its own ({', '.join(packed) or 'states'})")
    if spec.head_size_v != spec.head_size:
        raise refused(f"rows of K and V of {layer} differ: {spec.head_size} and {spec.head_size_v} elements")


def _shape(spec: Any) -> tuple[Any, ...]:
    return (spec.block_size, spec.num_kv_heads, spec.head_size, str(spec.dtype))


def _number(layer: str) -> tuple[list[int], str]:
    return ([int(part) for part in layer.split(".") if part.isdecimal()], layer)


def open_model(settings: Settings, config: Any, layers: dict[str, Any], rank: int) -> Model:
    """Makes the model of a rank in the mount, or opens it; one that keeps something else is refused."""
    spec, ranks = next(iter(layers.values())), config.parallel_config.tensor_parallel_size
    row_bytes = 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    page_tokens = settings.page_tokens or spec.block_size
    while settings.page_tokens is None and 2 * page_tokens * row_bytes <= _PAGE_BYTES:
        page_tokens *= 2
    if page_tokens % spec.block_size:
        raise refused(f"page_tokens is {page_tokens}: a multiple of vLLM's block size {spec.block_size} is needed")
    model = config.model_config
    text = model.hf_text_config
    manifest = {
        "model_id": model.model,
        "model_revision": model.revision,
        "engine": "vllm",
        "num_layers": len(layers),
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "dtype": _DTYPES[str(spec.dtype)],
        "page_tokens": page_tokens,
        "layout": "hnd",
        "salt": settings.salt,
        "shard": {"rank": rank, "size": ranks} if ranks > 1 else None,
        # What changes the values of rows, and not their shape.
        "vllm": {
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "rope": getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None),
        },
    }
    path = settings.directory(rank, ranks)
    try:
        return Model.create(path, **{name: value for name, value in manifest.items() if value is not None})
    except Refused as error:
        raise Refused(
            error.errno, f'{error.strerror}: name another "model" in kv_connector_extra_config, or remove {path}'
        ) from None

"""Attention over mapped pages: `model.set_attn_implementation("kvfs")`.

The prefix of a prompt stays where it is. K and V of its pages are attended to in the mapping, K and V of the rows since in
memory, and the two results are merged by the logarithms of their sums, as in "FlashAttention" (Dao et al., 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .._kvfs import attend
from ..manifest import refused
from .layer import KvfsLayer

# What a configuration calls the implementation.
NAME = "kvfs"
OTHERWISE = "model.set_attn_implementation('sdpa') copies the prefix into memory"

# So many queries of one KV head are worth a matrix product, at which torch is faster: 16 over 16,384 tokens took `attend` 41 ms
# and torch 17, 4 took 12 and 10, one took 11 and 31 (8 heads of 64, float32, two processors, a development build).
_MANY = 16

# [heads, queries, dim], and the logarithms of the sums [heads, queries].
_Partial = tuple[torch.Tensor, torch.Tensor]


def maps(model: PreTrainedModel) -> bool:
    """Whether a model attends to mapped pages."""
    return model.config.get_text_config(decoder=True)._attn_implementation == NAME


def check_mapped(model: PreTrainedModel) -> None:
    """Refuses, before anything is computed, what attention over mapped pages does not know."""
    config = model.config.get_text_config(decoder=True)
    for name, what in (("attn_logit_softcapping", "soft caps"), ("alibi", "ALiBi")):
        if getattr(config, name, None):
            raise refused(f"attention over mapped pages knows no {what} ({name} of the configuration): {_otherwise('eager')}")
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        raise refused(f"attention over mapped pages knows no sinks: {_otherwise('eager')}")
    if model.training and getattr(config, "attention_dropout", 0.0):
        raise refused("attention over mapped pages drops nothing out: model.eval()")


def _otherwise(name: str) -> str:
    return OTHERWISE.replace("sdpa", name)


def mapped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `AttentionInterface` calls it: queries [1, heads, queries, dim], rows since the prefix [1, kv_heads, rows, dim].

    Without a prefix that is mapped it is what torch has (`sdpa`).
    """
    layer: KvfsLayer | None = getattr(key, "kvfs_layer", None)
    if layer is None or layer.first == 0:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    # `check_mapped` knows what configurations say of it, and a model may have it from somewhere else.
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise refused(f"attention over mapped pages knows no {name!r}: {_otherwise('eager')}")
    if dropout:
        raise refused("attention over mapped pages drops nothing out: model.eval()")
    query = query.detach()
    since = _attend_in_memory(query, key, value, attention_mask, scaling)
    many = query.shape[2] > 1 and query.shape[1] // layer.heads * query.shape[2] >= _MANY
    # Of a window, `attend` reads what it covers.
    if many and layer.window is None:
        output = _attend_to_pieces(query, layer, since, scaling)
    else:
        output = _attend_in_place(query, layer, since, scaling)
    layer.is_attended = True
    return output[None].to(query.dtype), None


def _attend_in_place(query: torch.Tensor, layer: KvfsLayer, since: _Partial, scaling: float | None) -> torch.Tensor:
    """Few queries, by the program's own kernels: [queries, heads, dim]."""
    queries = query[0].transpose(0, 1).contiguous()
    partials = attend(
        queries,
        layer.source,
        layer.number,
        positions=list(range(layer.length - len(queries), layer.length)),
        end=layer.first,
        window=layer.window,
        sm_scale=scaling,
        threads=torch.get_num_threads(),
    )
    layer.check_source()
    output, sums = (part.transpose(0, 1).contiguous() for part in since)
    return torch.from_dlpack(partials.merge_output(output, sums).finish())


def _attend_to_pieces(query: torch.Tensor, layer: KvfsLayer, since: _Partial, scaling: float | None) -> torch.Tensor:
    """Many queries, each of which sees all of the prefix, by torch, page after page: [queries, heads, dim]."""
    heads, queries, dim = query.shape[1:]
    # The queries of a group see the same rows: no row is copied for each of them.
    grouped = query.reshape(1, layer.heads, heads // layer.heads * queries, dim)
    output, sums = since[0].float(), since[1]
    for key, value in layer.pieces():
        part, of_part = _flash(grouped, key[None], value[None], None, False, scaling)
        of_part = of_part.reshape(heads, queries)
        both = torch.logaddexp(sums, of_part)
        output = output * (sums - both).exp()[..., None]
        output += part.reshape(heads, queries, dim) * (of_part - both).exp()[..., None]
        sums = both
    return output.transpose(0, 1)


def _attend_in_memory(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> _Partial:
    """The rows since."""
    heads, queries = query.shape[1:3]
    group = heads // key.shape[1]
    if queries == 1:
        query = query.view(1, key.shape[1], group, -1)
        mask = mask if mask is None else mask.expand(-1, -1, group, -1)
    elif group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    output, sums = _flash(query, key, value, mask, mask is None and queries > 1, scaling)
    return output.reshape(heads, queries, -1), sums.reshape(heads, queries)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
) -> _Partial:
    # The only call of torch on the CPU that tells the sums.
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
    )


AttentionInterface.register(NAME, mapped_attention)
# The rows since the prefix are masked as torch masks all of them (`KvfsLayer.get_mask_sizes`).
AttentionMaskInterface.register(NAME, sdpa_mask)

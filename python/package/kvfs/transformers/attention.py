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


def maps(model: PreTrainedModel) -> bool:
    """Whether a model attends to mapped pages."""
    return model.config.get_text_config(decoder=True)._attn_implementation == NAME


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
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise refused(f"attention over mapped pages knows no {name!r}: {OTHERWISE}")
    if dropout:
        raise refused("attention over mapped pages drops nothing out: model.eval()")
    output, sums = _attend_in_memory(query.detach(), key, value, attention_mask, scaling)
    queries = query[0].detach().transpose(0, 1).contiguous()
    partials = attend(queries, layer.source, layer.number, end=layer.first, causal=False, sm_scale=scaling)
    layer.is_attended = True
    merged = partials.merge_output(output.contiguous(), sums.contiguous()).finish()
    return torch.from_dlpack(merged)[None].to(query.dtype), None


def _attend_in_memory(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows since: [queries, heads, dim], and the logarithms of the sums [queries, heads]."""
    heads, queries = query.shape[1:3]
    group = heads // key.shape[1]
    if queries == 1 and mask is None:
        # The queries of a group see the same rows: no row is copied for each of them.
        query = query.view(1, key.shape[1], group, -1)
    elif group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    # The only call of torch on the CPU that tells the sums.
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask is None and queries > 1, attn_mask=mask, scale=scaling
    )
    output, sums = output.reshape(heads, queries, -1), sums.reshape(heads, queries)
    return output.transpose(0, 1), sums.transpose(0, 1)


AttentionInterface.register(NAME, mapped_attention)
# The rows since the prefix are masked as torch masks all of them (`KvfsLayer.get_mask_sizes`).
AttentionMaskInterface.register(NAME, sdpa_mask)

"""The rows of a sequence that are in no page yet. Needs torch."""

from __future__ import annotations

import errno

import torch

from ._kvfs import Missing, Sequence


def read_tail(sequence: Sequence, layer: int, start: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The first rows of the open page that begins at `start`: for each token K of all heads, then V; as
    `[tokens, 2, heads, dim]`. For models whose rows of K and V are equally long."""
    path = sequence.path / f"{layer:03}" / f"{start:07}.tail"
    heads, dim = sequence.model.num_kv_heads, sequence.model.head_dim
    row = 2 * heads * dim
    try:
        content = bytearray(path.read_bytes())
    except FileNotFoundError:
        content = bytearray()
    if len(content) < tokens * row * dtype.itemsize:
        raise Missing(errno.ENOENT, f"{path}: {tokens} tokens are not there any more: compute them again")
    return torch.frombuffer(content, dtype=dtype, count=tokens * row).view(tokens, 2, heads, dim)

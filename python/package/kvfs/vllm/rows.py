"""Where K and V of a token lie in the blocks of an engine, as views of `[blocks, heads, tokens, dim]`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .settings import refused

# These keep, for each head and token, the row of K and behind it that of V.
_BESIDE = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")


@dataclass(frozen=True)
class Rows:
    """The blocks of one layer. A block of the scheduler is `split` blocks of the kernel."""

    k: torch.Tensor
    v: torch.Tensor
    split: int

    def take(self, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies K and V of some blocks to the processor, `[heads, tokens, dim]` each."""
        _, heads, tokens, dim = self.k.shape
        taken = [torch.empty(heads, len(blocks) * self.split, tokens, dim, dtype=self.k.dtype) for _ in range(2)]
        for at, first, count in self._runs(blocks):
            for rows, part in zip(taken, (self.k, self.v)):
                rows[:, at : at + count].copy_(part[first : first + count].transpose(0, 1))
        k, v = (rows.flatten(1, 2) for rows in taken)
        return k, v

    def put(self, blocks: list[int], k: torch.Tensor, v: torch.Tensor, skipped_blocks: int) -> None:
        """Fills blocks with rows `[pages, heads, tokens, dim]`, whose first blocks are skipped."""
        tokens = self.k.shape[2]
        page_blocks = k.shape[2] // (tokens * self.split)
        begin = 0
        for page in range(len(k)):
            skipped = skipped_blocks if page == 0 else 0
            end = min(begin + page_blocks - skipped, len(blocks))
            for at, first, count in self._runs(blocks[begin:end]):
                start = (skipped * self.split + at) * tokens
                for part, rows in ((self.k, k[page]), (self.v, v[page])):
                    inner = rows[:, start : start + count * tokens].unflatten(1, (count, tokens))
                    part[first : first + count].copy_(inner.transpose(0, 1))
            begin = end

    def _runs(self, blocks: list[int]) -> Iterator[tuple[int, int, int]]:
        """Blocks of the kernel that lie one behind the other: their place in the list, the first one, and how many. To copy a
        run at a time takes a tenth of the time of picking blocks by an index."""
        begin = 0
        for at in range(1, len(blocks) + 1):
            if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
                yield begin * self.split, blocks[begin] * self.split, (at - begin) * self.split
                begin = at


def rows_of(layer: str, backend: str, cache: torch.Tensor, block_tokens: int, heads: int, dim: int) -> Rows:
    """The rows of a layer; refuses a layout that is not known."""
    if not isinstance(cache, torch.Tensor) or cache.ndim != 4 or cache.shape[1] != heads or cache.shape[3] != 2 * dim:
        shape = tuple(getattr(cache, "shape", ())) or type(cache).__name__
        raise refused(f"the cache of {layer} is {shape}: [blocks, {heads}, tokens, {2 * dim}] of {backend} is needed")
    tokens = cache.shape[2]
    if block_tokens % tokens:
        raise refused(f"blocks of {layer} have {tokens} tokens, those of the scheduler {block_tokens}: no whole number")
    split = block_tokens // tokens
    if backend in _BESIDE:
        return Rows(cache[..., :dim], cache[..., dim:], split)
    if backend != "CPU_ATTN":
        known = ", ".join(("CPU_ATTN", *_BESIDE))
        raise refused(f"{layer} uses {backend}, and nobody knows how its blocks lie: known are {known}")
    if cache.stride()[2:] != (2 * dim, 1):
        raise refused(f"blocks of {layer} have strides {cache.stride()}: one token behind the other is needed")
    return Rows(*_of_processor(cache, dim), split)


def _of_processor(cache: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's attention on the processor keeps, in a block of a head, K with the tokens of each element side by side, then V."""
    blocks, heads, tokens, _ = cache.shape
    outer = cache.stride()[:2]
    k = cache.as_strided((blocks, heads, tokens, dim), (*outer, 1, tokens))
    v = cache.as_strided((blocks, heads, tokens, dim), (*outer, dim, 1), cache.storage_offset() + tokens * dim)
    return k, v

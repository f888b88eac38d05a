"""K and V of one layer: what the mount had, in memory or mapped, and what was computed since."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch
from transformers.cache_utils import CacheLayerMixin

from .._kvfs import Changed, Missing, Model, Page, Sequence, read_pages
from ..manifest import refused
from .model import DTYPES

# Room for so many more tokens than there are, at least.
_AHEAD = 256


class KvfsLayer(CacheLayerMixin):
    """Rows in buffers [tokens, heads, dim] that grow ahead: to add a token does not copy all that are there, as
    concatenating does. In that order projections make rows, and pages of the layout `nhd` lie one behind the other.

    The buffers begin with the token `first`. Those before it are attended to in `source`, where they are mapped."""

    # Also one with a window has all rows, and the mask hides those that it does not look at.
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, store: Model, number: int, window: int | None) -> None:
        super().__init__()
        self.number, self.window, self.first = number, window, 0
        self.source: Sequence | None = None
        # Whether this pass has attended to what is mapped.
        self.is_attended = False
        self.heads, self.dim, self.length = store.num_kv_heads, store.head_dim, 0
        self.dtype = next(dtype for dtype, name in DTYPES.items() if name == store.dtype)
        self.device = torch.device("cpu")
        self.is_initialized = True
        self.k, self.v = [torch.empty(0, self.heads, self.dim, dtype=self.dtype) for _ in range(2)]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to wait for: the model in the mount says what rows are."""

    def map(self, sequence: Sequence, tokens: int) -> None:
        """Leaves the first rows in a sequence."""
        self.source, self.first, self.length = sequence, tokens, tokens
        self.check_source()

    def check_source(self) -> None:
        """Refuses a prefix whose end is gone: attention sees what there is, and does not say how much that was."""
        has = self.source.wait_for(self.number, self.first, 0.0)
        if has < self.first:
            raise Missing(
                errno.ENOENT, f"{self.source.path}: layer {self.number} has {has} of {self.first} tokens: make another KvfsCache"
            )

    def unmap(self) -> None:
        """There is no prefix."""
        self.source, self.first, self.length = None, 0, 0

    def forget(self, tokens: int) -> None:
        """A pass begins where so many tokens are there; what a failed one has left behind them goes."""
        self.length, self.is_attended = tokens, False

    def load(self, sequence: Sequence, tokens: int) -> None:
        """Copies the first rows from the pages of a sequence, and those behind its last page from the tail."""
        layer, page_tokens = self.number, sequence.model.page_tokens
        self.length = 0
        self._reserve(-(-tokens // page_tokens) * page_tokens)
        pages = [page for page in sequence.pages(layer) if page.start < tokens]
        if [page.start for page in pages] != [number * page_tokens for number in range(len(pages))]:
            raise Missing(errno.ENOENT, f"{sequence.path}: layer {layer} lacks pages: compute them again")
        # Only the last one of a sequence may be short.
        at = len(pages) * page_tokens
        if pages and pages[-1].tokens < page_tokens:
            at = pages[-1].start + pages[-1].tokens
            self._copy(pages.pop(), sequence.model.layout)
        self._read(pages, sequence.model.layout)
        if at < tokens:
            tail = sequence.tail(layer, tokens)
            if tail is None or tail.start != at:
                raise Changed(errno.ESTALE, f"{sequence.path}: layer {layer} was sealed meanwhile: load it again")
            self._copy(tail, sequence.model.layout)
        self.length = tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds rows, and returns all."""
        fits = (1, self.heads, key_states.shape[-2], self.dim)
        for states in (key_states, value_states):
            if states.shape != fits or states.dtype != self.dtype or states.device != self.device:
                raise refused(
                    f"rows {tuple(states.shape)} of {states.dtype} on {states.device}: this cache takes {fits} of "
                    f"{self.dtype} on the CPU"
                )
        begin, end = self.length - self.first, self.length - self.first + key_states.shape[-2]
        self._reserve(end)
        for rows, states in ((self.k, key_states), (self.v, value_states)):
            rows[begin:end] = states[0].detach().transpose(0, 1)
        self.length += key_states.shape[-2]
        # [1, heads, tokens, dim], as attention takes them.
        keys, values = self.k[:end].transpose(0, 1)[None], self.v[:end].transpose(0, 1)[None]
        # Attention finds what is mapped by it.
        keys.kvfs_layer = self
        return keys, values

    def rows(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some tokens since the first one in memory, [tokens, heads, dim]."""
        return self.k[begin - self.first : end - self.first], self.v[begin - self.first : end - self.first]

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V before the first row in memory, [heads, tokens, dim]: each full page where it lies, then the rest."""
        prefix = self.source.prefix(self.number, self.first)
        at = prefix.tokens if prefix else 0
        if prefix:
            for k, v in zip(torch.from_dlpack(prefix.k), torch.from_dlpack(prefix.v)):
                yield self._by_heads(k), self._by_heads(v)
        if at == self.first:
            return
        # The last page may be short, or the prefix end within it.
        behind = [page for page in self.source.pages(self.number) if page.start == at]
        remainder = behind[0] if behind else self.source.tail(self.number, self.first)
        if remainder is None or remainder.start != at or at + remainder.tokens < self.first:
            raise Changed(errno.ESTALE, f"{self.source.path}: layer {self.number} changed behind token {at}: make another KvfsCache")
        k, v = (self._by_heads(torch.from_dlpack(array))[:, : self.first - at] for array in (remainder.k, remainder.v))
        yield k, v

    def _by_heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.source.model.layout == "hnd" else rows.transpose(0, 1)

    def get_seq_length(self) -> int:
        """Tokens that are there."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens in memory, from the first one on."""
        return self.length - self.first + query_length, self.first

    def get_max_length(self) -> int:
        """There is none."""
        return -1

    def _reserve(self, tokens: int) -> None:
        if tokens <= self.k.shape[0]:
            return
        room = tokens + max(_AHEAD, tokens // 4)
        for name in ("k", "v"):
            old = getattr(self, name)
            new = torch.empty(room, self.heads, self.dim, dtype=self.dtype)
            kept = min(self.length - self.first, old.shape[0])
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def _read(self, pages: list[Page], layout: str) -> None:
        """Whole pages. Reading costs less than half of what it costs to map them for one copy."""
        if layout == "hnd":
            for page in pages:
                self._copy(page, layout)
        elif pages:
            tokens = pages[-1].start + pages[-1].tokens
            shape = (len(pages), -1, self.heads, self.dim)
            read_pages(pages, self.k[:tokens].view(shape), self.v[:tokens].view(shape))

    def _copy(self, page: Page, layout: str) -> None:
        there = slice(page.start, page.start + page.tokens)
        for rows, array in ((self.k, page.k), (self.v, page.v)):
            content = torch.from_dlpack(array)
            rows[there] = content.transpose(0, 1) if layout == "hnd" else content

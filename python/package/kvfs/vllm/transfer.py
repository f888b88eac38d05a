"""A worker's side: rows of pages into the blocks of an engine and back, one layer after the other."""

from __future__ import annotations

import contextlib
import errno
import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from .._kvfs import Changed, Missing, Model, Sequence, read_pages
from .plan import Part, Trouble
from .rows import Rows

# Layers that are read before the engine asks for them: a whole prompt in memory once more would be too much.
_AHEAD = 2


class Loads:
    """The requests of a step that take rows from the mount."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # A call of it reads many pages at a time.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvfs_load")
        self._loads: list[_Load] = []
        self._trouble = Trouble()
        self.failed: set[int] = set()

    def start(self, model: Model | None, parts: list[Part], layers: int) -> None:
        """Begins to read the first layers."""
        self._loads = []
        for part in parts:
            if part.load is None:
                continue
            begin, end = part.load
            load = _Load(begin, end, part.blocks[begin // self._block_tokens : end // self._block_tokens], layers)
            try:
                if model is None:
                    raise Missing(errno.ENOENT, "the model is not there")
                # Asked anew: what the scheduler was told may have gone since, and here somebody else may have it.
                load.sequence, found = model.match(part.tokens[:end])
                if load.sequence is None or found < end:
                    raise Missing(errno.ENOENT, f"{model.path}: {found} of {end} tokens are left")
            except OSError as error:
                self._give_up(load, error)
                continue
            self._loads.append(load)
            for layer in range(min(_AHEAD, layers)):
                load.read(self._reader, layer)

    def wait_for(self, layer: int, rows: Rows) -> None:
        """Fills the blocks of one layer, and begins to read another one."""
        for load in list(self._loads):
            try:
                k, v = load.take(self._reader, layer)
            except OSError as error:
                self._loads.remove(load)
                self._give_up(load, error)
                continue
            page_tokens = load.sequence.model.page_tokens
            rows.put(load.blocks, k, v, load.begin % page_tokens // self._block_tokens)
            self._trouble.is_over()

    def end(self) -> None:
        """Whatever was not asked for has not been loaded."""
        for load in self._loads:
            if load.layers_taken < load.layers:
                self._give_up(load, Missing(errno.ENOENT, f"{load.layers_taken} of {load.layers} layers were loaded"))
        self._loads = []

    def close(self) -> None:
        """Waits for what runs."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _give_up(self, load: _Load, error: OSError) -> None:
        self.failed.update(load.blocks)
        self._trouble.tell(f"{load.end - load.begin} tokens are computed again", error)


@dataclass
class _Load:
    begin: int
    end: int
    blocks: list[int]
    layers: int
    sequence: Sequence | None = None
    layers_taken: int = 0
    coming: dict[int, Future[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def read(self, reader: ThreadPoolExecutor, layer: int) -> None:
        self.coming[layer] = reader.submit(read_layer, self.sequence, layer, self.begin, self.end)

    def take(self, reader: ThreadPoolExecutor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.coming:
            self.read(reader, layer)
        taken = self.coming.pop(layer).result()
        self.layers_taken += 1
        if layer + _AHEAD < self.layers:
            self.read(reader, layer + _AHEAD)
        return taken


def read_layer(sequence: Sequence, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the pages that have the tokens from `begin` to `end`, `[pages, heads, page_tokens, dim]`; what lies behind
    `end` is undefined."""
    model = sequence.model
    size = model.page_tokens
    first = begin // size * size
    count = -(-(end - first) // size)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[model.dtype]
    k, v = (torch.empty(count, model.num_kv_heads, size, model.head_dim, dtype=dtype) for _ in range(2))
    whole = (end - first) // size
    if whole:
        read_pages([sequence.page(layer, first + at * size) for at in range(whole)], k[:whole], v[:whole])
    if whole < count:
        _read_last(sequence, layer, first + whole * size, end, k[whole], v[whole])
    return k, v


def _read_last(sequence: Sequence, layer: int, start: int, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """A page that may be short, and the rows behind it."""
    at = start
    # Where there is no page yet its rows are in the tail.
    with contextlib.suppress(Missing):
        page = sequence.page(layer, start)
        tokens = min(page.tokens, end - start)
        k[:, :tokens], v[:, :tokens] = (torch.from_dlpack(part)[:, :tokens] for part in (page.k, page.v))
        at += tokens
    if at < end:
        tail = sequence.tail(layer, end)
        if tail is None or tail.start != at:
            raise Changed(errno.ESTALE, f"{sequence.path}: layer {layer} was sealed meanwhile: load it again")
        k[:, : tail.tokens], v[:, : tail.tokens] = (torch.from_dlpack(part) for part in (tail.k, tail.v))


class Saves:
    """The requests whose prompts are written, each to a sequence of its own: two engines that compute the same prompt at
    once never write to the same files, and the mount stores equal pages once."""

    def __init__(self, block_tokens: int, ttl_seconds: int | None) -> None:
        self._block_tokens, self._ttl_seconds = block_tokens, ttl_seconds
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvfs_save")
        self._open: dict[str, _Save] = {}
        self._now: list[_Save] = []
        self._trouble = Trouble()

    def start(self, model: Model | None, parts: list[Part]) -> None:
        """Finds out what of a step is to be written."""
        self._now = []
        for part in parts:
            save = self._open.get(part.request)
            try:
                if save is None and model is not None:
                    save = self._open[part.request] = _Save(*model.match(part.tokens), model)
                if save is not None and save.begin(part):
                    self._now.append(save)
                    if save.sequence is None:
                        # To share the pages of a long prompt takes a while, and the engine computes meanwhile.
                        save.writing.append(self._writer.submit(save.make, self._ttl_seconds))
            except OSError as error:
                self._give_up(part.request, error)

    def save(self, layer: int, rows: Rows) -> None:
        """Takes the rows of a layer, and begins to write them."""
        for save in self._now:
            for start, end in save.pages:
                blocks = save.part.blocks[start // self._block_tokens : end // self._block_tokens]
                k, v = rows.take(blocks)
                save.writing.append(self._writer.submit(save.write, layer, start, k, v))

    def wait(self, failed_blocks: set[int]) -> None:
        """Writes the ids when all rows are there. Rows that were computed from blocks that could not be loaded are none."""
        for save in self._now:
            try:
                for written in save.writing:
                    written.result()
                if not failed_blocks.isdisjoint(save.part.blocks):
                    self._give_up(save.part.request, None)
                    continue
                save.finish()
                self._trouble.is_over()
            except OSError as error:
                self._give_up(save.part.request, error)
        self._now = []

    def end(self, requests: set[str]) -> None:
        """These requests are over."""
        for request in requests:
            self._open.pop(request, None)

    def close(self) -> None:
        """Waits for what runs."""
        self._writer.shutdown(wait=True)

    def _give_up(self, request: str, error: OSError | None) -> None:
        """Nothing more of this request is written: what it had so far stays, as long as its ids are there."""
        save = self._open.setdefault(request, _Save(None, 0, None))
        for written in save.writing:
            # One that runs writes to what is to be removed.
            if not written.cancel():
                written.exception()
        if save.sequence is not None and save.kept == save.copied:
            shutil.rmtree(save.sequence.path, ignore_errors=True)
        save.is_over = True
        if error is not None:
            self._trouble.tell("a prompt is not kept", error)


@dataclass
class _Save:
    """One request: what the mount has of it (`source`, `found`), and the sequence that gets the rest."""

    source: Sequence | None
    found: int
    model: Model | None
    sequence: Sequence | None = None
    copied: int = 0
    kept: int = 0
    is_over: bool = False
    part: Part | None = None
    pages: list[tuple[int, int]] = field(default_factory=list)
    writing: list[Future[None]] = field(default_factory=list)

    def begin(self, part: Part) -> bool:
        """Whether this step has pages to write: those that are full after it, and at the prompt's end the last one."""
        size, last = self.model.page_tokens if self.model else 1, len(part.tokens)
        if self.is_over or self.found >= last:
            return False
        if self.sequence is None:
            self.copied = self.kept = self.found // size * size
        end = part.end if part.end == last else part.end // size * size
        self.part, self.writing = part, []
        self.pages = [(start, min(start + size, end)) for start in range(self.kept, end, size)]
        return bool(self.pages)

    def make(self, ttl_seconds: int | None) -> None:
        """A sequence that shares the pages that the mount has."""
        name = f"vllm-{uuid.uuid4().hex[:16]}"
        if self.source is not None and self.copied:
            self.sequence = self.source.copy(name, 0, self.copied)
        else:
            self.sequence = self.model.create_sequence(name)
        if ttl_seconds is not None:
            self.sequence.ttl = ttl_seconds

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """One page; nothing where there is no sequence, which whoever waits for it is told."""
        if self.sequence is not None:
            self.sequence.write_page(layer, start, k, v, layout="hnd")

    def finish(self) -> None:
        end = self.pages[-1][1]
        there = self.sequence.append_tokens(self.part.tokens[self.kept : end])
        if there != end:
            raise Changed(errno.ESTALE, f"{self.sequence.path}: {there} tokens instead of {end}: somebody else writes to it")
        self.kept = end
        self.writing = []

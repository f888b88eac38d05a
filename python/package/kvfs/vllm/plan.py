"""The scheduler's side: which tokens of a request the mount has, and what the workers are told about each step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy

from .._kvfs import Disconnected, Model

logger = logging.getLogger("kvfs.vllm")


class Trouble:
    """What goes wrong with a mount: one line in the log until it is well again, for every request meets it."""

    # All of a process meet a mount that is gone.
    _is_gone_told = False

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, what: str, error: BaseException) -> None:
        """Says it, the first time as a warning."""
        is_gone = isinstance(error, Disconnected)
        is_told = Trouble._is_gone_told if is_gone else self._is_told
        logger.log(logging.DEBUG if is_told else logging.WARNING, "kvfs: %s: %s", what, error)
        if is_gone:
            Trouble._is_gone_told = True
        else:
            self._is_told = True

    def is_over(self) -> None:
        """Something has worked."""
        self._is_told = Trouble._is_gone_told = False


@dataclass
class Part:
    """A request in a step. `tokens` are those of the whole blocks of its prompt, `end` so many of them are computed after
    the step; those from `load[0]` to `load[1]` are to be loaded into `blocks` before."""

    request: str
    tokens: numpy.ndarray
    blocks: list[int]
    end: int
    load: tuple[int, int] | None = None


@dataclass
class _Tracked:
    tokens: numpy.ndarray
    blocks: list[int] = field(default_factory=list)
    load_tokens: int = 0
    is_told: bool = False


class Plan:
    """Requests from their first block to the end of their prompt. `directories` are the models of all ranks: a token is
    there if every rank has it."""

    def __init__(self, directories: list[str], block_tokens: int) -> None:
        self._directories, self._block_tokens = directories, block_tokens
        self._models: list[Model] = []
        self._found: dict[str, int] = {}
        self._requests: dict[str, _Tracked] = {}
        self._trouble = Trouble()

    def find(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens behind those that are computed can be loaded; `None` if the answer has to wait for a step."""
        tokens = self._prompt(request)
        if tokens is None or len(tokens) <= computed_tokens:
            return 0
        if computed_tokens and self._is_loaded_now(tokens):
            # Its blocks are those that another request loads in this very step, and nobody knows whether that works.
            return None
        if request.request_id not in self._found:
            self._found[request.request_id] = self._match(tokens)
        # The last token is computed in any case: its logits are what an answer begins with.
        there = min(self._found[request.request_id], request.num_tokens - 1)
        return max(there // self._block_tokens * self._block_tokens - computed_tokens, 0)

    def allocate(self, request: Any, load_tokens: int) -> None:
        """The request has its blocks, and so many tokens of them are to be loaded."""
        self._found.pop(request.request_id, None)
        tokens = self._prompt(request)
        if tokens is not None:
            self._requests[request.request_id] = _Tracked(tokens, load_tokens=load_tokens)

    def step(self, output: Any) -> list[Part]:
        """What the workers have to know about the requests of a step."""
        for new in output.scheduled_new_reqs:
            self._add_blocks(new.req_id, new.block_ids, is_all=True)
        cached = output.scheduled_cached_reqs
        for request, blocks in zip(cached.req_ids, cached.new_block_ids):
            self._add_blocks(request, blocks, is_all=request in cached.resumed_req_ids)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens))
        parts = [self._part(request, tokens, output) for request, tokens in computed.items()]
        return [part for part in parts if part is not None]

    def end(self, requests: Iterable[str]) -> None:
        """These requests are over."""
        for request in requests:
            self._requests.pop(request, None)
            self._found.pop(request, None)

    def _part(self, request: str, computed: int, output: Any) -> Part | None:
        tracked = self._requests.get(request)
        if tracked is None or (tracked.is_told and not tracked.load_tokens):
            return None
        size = self._block_tokens
        end = min((computed + output.num_scheduled_tokens[request]) // size * size, len(tracked.tokens))
        load = (computed - tracked.load_tokens, computed) if tracked.load_tokens else None
        tracked.load_tokens, tracked.is_told = 0, end == len(tracked.tokens)
        return Part(request, tracked.tokens, tracked.blocks[: -(-end // size)], end, load)

    def _add_blocks(self, request: str, blocks: tuple[list[int], ...] | None, *, is_all: bool) -> None:
        tracked = self._requests.get(request)
        if tracked is not None:
            tracked.blocks = [*([] if is_all else tracked.blocks), *(blocks[0] if blocks else [])]

    def _is_loaded_now(self, tokens: numpy.ndarray) -> bool:
        first = tokens[: self._block_tokens]
        coming = (tracked for tracked in self._requests.values() if tracked.load_tokens)
        return any(numpy.array_equal(first, tracked.tokens[: self._block_tokens]) for tracked in coming)

    def _match(self, tokens: numpy.ndarray) -> int:
        try:
            if not self._models:
                self._models = [Model(directory) for directory in self._directories]
            found = min(model.match(tokens).tokens for model in self._models)
        except OSError as error:
            self._models = []
            self._trouble.tell("prompts are computed, for nothing is found", error)
            return 0
        self._trouble.is_over()
        return found

    def _prompt(self, request: Any) -> numpy.ndarray | None:
        """Ids of the whole blocks of a prompt; `None` where ids do not tell what rows are."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            return tracked.tokens
        other = (getattr(request, name, None) for name in ("mm_features", "lora_request", "cache_salt", "prompt_embeds"))
        if not request.prompt_token_ids or any(each is not None and each != [] for each in other):
            return None
        whole = len(request.prompt_token_ids) // self._block_tokens * self._block_tokens
        return numpy.asarray(request.prompt_token_ids[:whole], numpy.uint32) if whole else None

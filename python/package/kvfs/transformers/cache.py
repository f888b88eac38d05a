"""The cache that `generate()` is given."""

from __future__ import annotations

import errno
import uuid
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import torch
from transformers import Cache, PreTrainedModel

from .._kvfs import Changed, Missing, Model, Sequence
from ..continuation import continued
from ..manifest import refused
from .attention import NAME, OTHERWISE, check_mapped, maps
from .layer import KvfsLayer
from .model import check, windows


class KvfsCache(Cache):
    """K and V of one prompt and its answer: the longest prefix that the mount has, and what is computed behind it.

    `tokens` of the prompt are there from the beginning (one less than all of it at most, for the last one's logits are
    what an answer begins with). What a forward pass computes is appended to the sequence `name` when it is through:
    rows first, ids last, so other processes see all of it or nothing. What the mount has is not written again. A cache never sees token ids, so two hooks on
    the model tell it: they go when the cache is closed, or nobody has it any more.

    One cache is for one prompt and what follows upon it; the same prompt in another cache finds what this one left.
    With `ttl` the sequence is deleted so many seconds after its last use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: Model,
        prompt: torch.Tensor | list[int],
        *,
        name: str | None = None,
        ttl: int | None = None,
    ) -> None:
        check(model, store)
        self.store, self.name, self.ttl = store, name or f"hf-{uuid.uuid4().hex[:16]}", ttl
        self.sequence: Sequence | None = None
        self._prompt = _one_prompt(prompt)
        # Tokens that the layers have, and that the mount has: one more of these if it has all of the prompt.
        self._computed = self._kept = 0
        self._coming: list[int] | None = None
        self._maps = maps(model)
        if self._maps:
            check_mapped(model)
        looks_back = windows(model.config.get_text_config(decoder=True))
        super().__init__(layers=[KvfsLayer(store, number, window) for number, window in enumerate(looks_back)])
        self._source, self._kept = self._load()
        self.tokens = self._computed = min(self._kept, len(self._prompt) - 1)
        self._hooks = _follow(model, self)

    def _load(self) -> tuple[Sequence | None, int]:
        # A page may go, or a tail become a page, between the answer and the reading: ask again, then do without.
        for _ in range(2):
            source, found = self.store.match(self._prompt)
            tokens = min(found, len(self._prompt) - 1)
            if source is None or tokens == 0:
                break
            try:
                if self._maps:
                    self._map(source, found, tokens)
                else:
                    for layer in self.layers:
                        layer.load(source, tokens)
                return source, found
            except (Missing, Changed):
                continue
        self._forget()
        return None, 0

    def _map(self, source: Sequence, found: int, tokens: int) -> None:
        """Has the layers attend to a sequence of this cache, which shares the pages: the other one may go."""
        sequence, has = continued(self.store, source, self.name, self._prompt, found)
        try:
            if has < found:
                raise Missing(errno.ENOENT, f"{source.path}: has no longer {found} tokens: compute them again")
            for layer in self.layers:
                layer.map(sequence, tokens)
        except (Missing, Changed):
            for layer in self.layers:
                layer.unmap()
            sequence.clear()
            raise
        self.sequence = self._limited(sequence)

    def _begin(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass: what cannot be kept is refused while nothing has been computed."""
        if self._maps and not maps(model):
            raise refused(f"this cache leaves its prefix in the mount: model.set_attn_implementation({NAME!r}), or another KvfsCache")
        if self._maps:
            check_mapped(model)
        # What a pass left that failed half-way.
        self._forget()
        self._coming = _checked_ids(args, kwargs, self._computed)
        expected = self._prompt[self._computed : self._computed + len(self._coming)]
        if self._coming[: len(expected)] != expected:
            raise refused("these are not the tokens that this cache was made for: each prompt needs a KvfsCache of its own")

    def _end(self) -> None:
        """After it: every layer has its rows."""
        blind = [layer.number for layer in self.layers if layer.first and not layer.is_attended]
        if blind:
            self._forget()
            raise refused(f"layer {blind[0]} did not attend to its prefix: this model takes no attention of others: {OTHERWISE}")
        ids, self._coming = self._coming or [], None
        end = self._computed + len(ids)
        begin = max(self._computed, self._kept)
        if begin < end:
            self._append(self._open(), ids[begin - self._computed :], begin)
            self._kept = end
        self._computed = end

    def _open(self) -> Sequence:
        if self.sequence is None:
            self.sequence = self._limited(self._beginning())
        return self.sequence

    def _limited(self, sequence: Sequence) -> Sequence:
        if self.ttl is not None:
            sequence.ttl = self.ttl
        return sequence

    def _beginning(self) -> Sequence:
        """A sequence with what the mount had: it shares the pages, and has again what went meanwhile."""
        sequence, has = continued(self.store, self._source, self.name, self._prompt, self._kept)
        if has < self._kept:
            self._append(sequence, self._prompt[has : self._kept], has)
        return sequence

    def _append(self, sequence: Sequence, ids: list[int], begin: int) -> None:
        end = begin + len(ids)
        # An append goes on behind what is there, and rows belong to what they were computed behind.
        if len(sequence) != begin:
            raise self._was_changed(sequence, begin)
        k, v = zip(*(layer.rows(begin, end) for layer in self.layers))
        has = sequence.append(ids, list(k), list(v), layout="nhd")
        if has != end:
            # Somebody took tokens out right then.
            sequence.remove(has - len(ids))
            raise self._was_changed(sequence, begin)

    def _was_changed(self, sequence: Sequence, expected: int) -> Changed:
        reason = f"{sequence.path}: has {len(sequence)} tokens and had {expected}: somebody took some out, make another KvfsCache"
        return Changed(errno.ESTALE, reason)

    def _forget(self) -> None:
        for layer in self.layers:
            layer.forget(self._computed)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the rows of a layer, and returns all that it has."""
        if self._coming is None:
            raise refused("nobody told this cache which tokens these are: it was closed, or made for another model")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def close(self) -> None:
        """Lets other writers have the sequence. What was computed is there already."""
        self._hooks()
        if self.sequence is not None:
            self.sequence.close()

    def __enter__(self) -> KvfsCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        """Refused: a sequence has one continuation."""
        raise refused("beams share no sequence: num_beams=1, or give generate() no KvfsCache")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: a sequence has one row."""
        raise refused("a KvfsCache has one row: num_return_sequences=1, or one cache for each")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refused: a sequence has one row."""
        raise refused("a KvfsCache has one row: there is nothing to select from it")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: others may have read what was written."""
        raise refused("what was written stays: make another KvfsCache, which begins with what the two have in common")

    def activate_past_recording(self) -> NoReturn:
        """Refused: assisted generation takes tokens back."""
        raise refused("assisted generation takes tokens back, which were written: give generate() no KvfsCache")

    def early_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: rows of static shapes are not the mount's."""
        raise refused("a KvfsCache grows: what is exported or compiled with static shapes needs a StaticCache")

    def reset(self) -> NoReturn:
        """Refused: a cache belongs to its prompt."""
        raise refused("a KvfsCache belongs to one prompt: make another one for the next")


# Pictures and sound, of which ids only say where they are.
_OTHER_INPUTS = ("pixel_values", "image_", "video_", "input_features", "audio_")


def _one_prompt(prompt: torch.Tensor | list[int]) -> list[int]:
    ids = torch.as_tensor(prompt)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.numel() == 0 or ids.is_floating_point():
        raise refused(f"a prompt is one row of token ids, and these are {tuple(ids.shape)}: one KvfsCache for each row")
    return ids.tolist()


def _checked_ids(args: tuple[Any, ...], kwargs: dict[str, Any], begin: int) -> list[int]:
    """The ids of a forward pass, if they go on where the cache ends."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        raise refused("embeddings have no token ids, by which their rows could be found again: give input_ids")
    for name, value in kwargs.items():
        if value is not None and name.startswith(_OTHER_INPUTS):
            raise refused(f"{name} is not in the token ids, by which rows are found again: give generate() no KvfsCache")
    if ids.shape[0] != 1:
        raise refused(f"{ids.shape[0]} rows (of a batch, or beams): a KvfsCache has one, so generate for each by itself")
    mask = kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not bool((mask != 0).all())):
        raise refused("the attention mask hides tokens: give the prompt without padding, and no mask of your own")
    positions = kwargs.get("position_ids")
    if positions is not None:
        expected = torch.arange(begin, begin + ids.shape[1])
        if positions.numel() != expected.numel() or not torch.equal(positions.flatten().to(expected), expected):
            raise refused(f"positions other than those from {begin} on: the tokens of a KvfsCache follow one another")
    return ids[0].tolist()


def _is_given(cache: KvfsCache, kwargs: dict[str, Any]) -> bool:
    # transformers calls it `cache` since 5.24.
    return any(kwargs.get(name) is cache for name in ("cache", "past_key_values"))


def _follow(model: PreTrainedModel, cache: KvfsCache) -> Callable[[], Any]:
    """Tells a cache of the model's passes with it; the model does not keep it alive. Returns what ends that."""
    known = weakref.ref(cache)

    def before(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = known()
        if found is not None and _is_given(found, kwargs):
            found._begin(module, args, kwargs)

    def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = known()
        if found is not None and _is_given(found, kwargs):
            found._end()

    hooks = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    )
    return weakref.finalize(cache, lambda: [hook.remove() for hook in hooks])

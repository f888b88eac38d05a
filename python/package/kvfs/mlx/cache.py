"""From the mount into a prompt cache, and back."""

from __future__ import annotations

import errno
import logging
import shutil
import uuid
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy
from mlx_lm.models.cache import KVCache, make_prompt_cache

from .._kvfs import Changed, Error, InvalidArgument, Missing, Model, Page, Sequence
from ..continuation import continued
from ..manifest import refused
from .model import DTYPES, check_classes, check_model, check_rows

logger = logging.getLogger("kvfs.mlx")


def load(model: nn.Module, store: Model, ids: Any) -> tuple[list[KVCache], int]:
    """A prompt cache with the longest prefix of `ids` that the mount has, and how many tokens that is: one less than
    there are ids at most, for the last one's logits are what an answer begins with.

    `mlx_lm.stream_generate(model, tokenizer, ids[tokens:], prompt_cache=cache)` computes the others. A mount that is gone,
    and rows that went or are damaged, are an empty cache and a line in the log; what does not fit is refused.
    """
    prompt = _one_prompt(ids)
    check_model(model, store)
    trouble: Error | None = None
    # A page may go, or a tail become a page, between the answer and the reading: ask again, then do without.
    for _ in range(2):
        try:
            source, found = store.match(prompt)
            tokens = min(found, len(prompt) - 1)
            if source is None or tokens == 0:
                return make_prompt_cache(model), 0
            return _read(source, tokens, len(prompt)), tokens
        except InvalidArgument:
            raise
        except (Missing, Changed) as error:
            trouble = error
        except Error as error:
            trouble = error
            break
    logger.warning("kvfs: a prompt of %s tokens is computed: %s", len(prompt), trouble)
    return make_prompt_cache(model), 0


def save(cache: list[Any], store: Model, ids: Any, *, name: str | None = None, ttl: int | None = None) -> int:
    """Leaves in the mount what a prompt cache has of `ids`, and returns how many of them the mount then has.

    `ids` are those of the prompt and of the answer: the last one of an answer may have no rows yet, and is left
    out. What the mount has is not written again: the new sequence `name` shares its pages, and ids come last, so
    other processes see all of it or nothing. With `ttl` the sequence is deleted so many seconds after its last use.
    """
    prompt = _one_prompt(ids)
    check_classes(cache)
    rows = {each.offset for each in cache}
    if len(rows) != 1:
        raise refused(f"layers have rows of {sorted(rows)} tokens: a prompt cache between two passes is needed")
    prompt = prompt[: rows.pop()]
    if not prompt:
        return 0
    check_rows(cache, store)
    source, found = store.match(prompt)
    if found == len(prompt):
        return found
    sequence, has = continued(store, source, name or f"mlx-{uuid.uuid4().hex[:16]}", prompt, found)
    try:
        if ttl is not None:
            sequence.ttl = ttl
        k, v = [[getattr(each, part)[0, :, has : len(prompt)] for each in cache] for part in ("keys", "values")]
        return sequence.append(prompt[has:], k, v, layout="hnd")
    except BaseException:
        # Of a sequence that is no more than a part of another one nobody has any use.
        shutil.rmtree(sequence.path, ignore_errors=True)
        raise
    finally:
        sequence.close()


def _one_prompt(ids: Any) -> list[int]:
    prompt = numpy.asarray(ids)
    if prompt.ndim == 2 and len(prompt) == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
        raise refused(f"a prompt is one row of token ids, and these are {prompt.shape} of {prompt.dtype}")
    return prompt.tolist()


def _read(source: Sequence, tokens: int, prompt_tokens: int) -> list[KVCache]:
    """Layer after layer; the next one is read meanwhile."""
    store = source.model
    dtype = next(dtype for dtype, name in DTYPES.items() if name == store.dtype)
    # Room for what is computed of the prompt, in MLX's own steps: to grow is to copy all that is there.
    room = -(-(prompt_tokens + 1) // KVCache.step) * KVCache.step
    caches = [KVCache() for _ in range(store.num_layers)]
    end = [0] * store.num_layers
    keys = values = numpy.empty(0)
    with source.stream(0, tokens) as parts:
        for part in parts:
            cache = caches[part.layer]
            if cache.keys is None:
                cache.keys, keys = _empty(store.num_kv_heads, room, store.head_dim, dtype)
                cache.values, values = _empty(store.num_kv_heads, room, store.v_head_dim, dtype)
            for page in [*part.pages, *([part.tail] if part.tail is not None else [])]:
                end[part.layer] = _copy(page, store.layout, tokens, keys, values, end[part.layer])
    if any(each != tokens for each in end):
        raise Missing(errno.ENOENT, f"{source.path}: {min(end)} of {tokens} tokens are left: they are computed again")
    for cache in caches:
        cache.offset = tokens
    return caches


def _empty(heads: int, room: int, dim: int, dtype: mx.Dtype) -> tuple[mx.array, numpy.ndarray]:
    """Rows of MLX, and their bits as NumPy sees them in the same memory: it has no bfloat16."""
    bits = mx.zeros((1, heads, room, dim), mx.uint32 if dtype.size == 4 else mx.uint16)
    # Where there is nothing yet there is no memory to look at.
    mx.eval(bits)
    return bits.view(dtype), numpy.array(bits, copy=False)[0]


def _copy(page: Page, layout: str, tokens: int, keys: numpy.ndarray, values: numpy.ndarray, begin: int) -> int:
    """Takes the rows of a page that follow `begin`, up to `tokens`; returns where they end."""
    if page.start != begin:
        raise Changed(errno.ESTALE, f"{page.path}: begins at token {page.start} instead of {begin}: load it again")
    end = min(page.start + page.tokens, tokens)
    for rows, array in ((keys, page.k), (values, page.v)):
        content = array.bits().numpy()
        if layout == "nhd":
            content = content.swapaxes(0, 1)
        rows[:, begin:end] = content[:, : end - begin]
    return end

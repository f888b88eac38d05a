"""Decoding over a long prompt in mapped pages and in memory: `python mapped_attention.py DIRECTORY [TOKENS]`.

DIRECTORY on a disk; the wheel, torch and transformers installed. The Llama of `first_token.py`, with its rows in float32 and
in bfloat16, in `ROUNDS` rounds, each of them in turns: attention alone over the first layer, of one query (also four to a KV head, as with
grouped queries) and of `MANY`, as a pass over more of a prompt has them, and a step of the whole model.
With `sdpa` the rows lie in memory, with `kvfs` in the pages of the mount, which are in the page cache.
"""

import statistics
import sys
import time

import torch
from first_token import llama
from scratch import mounted

from kvfs.transformers import KvfsCache, model_for
from kvfs.transformers.attention import mapped_attention

ROUNDS = 5
STEPS = 8
MANY = 256
KINDS = ("sdpa", "kvfs")


def timed(work, steps):
    work()
    begin = time.perf_counter()
    for _ in range(steps):
        work()
    return (time.perf_counter() - begin) / steps * 1e3


def attending(cache, queries, group=1):
    """Attention of the last queries to all that a layer has, as a model calls it."""
    layer = cache.layers[0]
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = group, True
    query = torch.randn(1, 8 * group, queries, 64, dtype=layer.dtype)
    keys, values = (rows.transpose(0, 1)[None] for rows in layer.rows(layer.first, layer.length))
    keys.kvfs_layer = layer
    mask = None
    if queries > 1:
        # Each sees itself, as many of those before it as are in memory, and all of the prefix.
        mask = torch.ones(queries, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - queries)[None, None]
    return lambda: mapped_attention(module, query, keys, values, mask, scaling=0.125)


def stepping(model, cache, ids):
    """The whole model computes the next token, again and again."""
    last = ids[:, -1:]
    return lambda: model(last, past_key_values=cache)


def show(name, times):
    print(f"{name}: {statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})", flush=True)
    return statistics.median(times)


@torch.no_grad()
def measure(mount, tokens, dtype):
    model = llama().to(dtype)
    ids = torch.randint(0, 4096, (1, tokens))
    store = model_for(model.config, mount, f"llama-{str(dtype)[6:]}", dtype=dtype)
    with KvfsCache(model, store, ids[:, :-MANY]) as cache:
        model(ids[:, :-MANY], past_key_values=cache)
    caches = {}
    for kind in KINDS:
        model.set_attn_implementation(kind)
        caches[kind] = KvfsCache(model, store, ids)
    for kind, cache in caches.items():
        model.set_attn_implementation(kind)
        assert cache.tokens == tokens - MANY
        model(ids[:, -MANY:], past_key_values=cache)
    print(f"{tokens} tokens of {dtype}, {torch.get_num_threads()} threads, pages of {store.page_tokens} tokens")
    compare(model, caches, ids)
    for cache in caches.values():
        cache.close()


@torch.no_grad()
def compare(model, caches, ids):
    works = {
        "attention of one query": (lambda cache: attending(cache, 1), STEPS),
        "attention of one query, four for a KV head": (lambda cache: attending(cache, 1, group=4), STEPS),
        f"attention of {MANY} queries": (lambda cache: attending(cache, MANY), 1),
        "step": (lambda cache: stepping(model, cache, ids), STEPS),
    }
    times = {(kind, what): [] for what in works for kind in KINDS}
    for _ in range(ROUNDS):
        for what, (work, steps) in works.items():
            for kind in KINDS:
                model.set_attn_implementation(kind)
                times[kind, what].append(timed(work(caches[kind]), steps))
    for what in works:
        memory, mapped = (show(f"{what}, {kind}", times[kind, what]) for kind in KINDS)
        print(f"{what}: {memory / mapped:.2f} times as fast over mapped pages")


def main():
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 16384
    with mounted(sys.argv[1]) as (mount, _):
        for dtype in (torch.float32, torch.bfloat16):
            measure(mount, tokens, dtype)


if __name__ == "__main__":
    main()

"""Decoding over a long prompt in mapped pages and in memory: `python mapped_attention.py DIRECTORY [TOKENS]`.

DIRECTORY on a disk; the wheel, torch and transformers installed. The Llama of `first_token.py`, with its rows in float32 and
in bfloat16, in `ROUNDS` rounds, each of them in turns: attention alone (one query, over the first layer), and a step of the whole model.
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

ROUNDS = 9
STEPS = 16


def timed(work):
    work()
    begin = time.perf_counter()
    for _ in range(STEPS):
        work()
    return (time.perf_counter() - begin) / STEPS * 1e3


def attending(model, cache):
    """Attention of one query to all that a layer has, as the model calls it."""
    layer, module = cache.layers[0], model.model.layers[0].self_attn
    query = torch.randn(1, 8, 1, 64, dtype=model.dtype)
    keys, values = (rows.transpose(0, 1)[None] for rows in layer.rows(layer.first, layer.length))
    keys.kvfs_layer = layer
    return lambda: mapped_attention(module, query, keys, values, None, scaling=0.125)


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
    with KvfsCache(model, store, ids) as cache:
        model(ids, past_key_values=cache)
    kinds = ("sdpa", "kvfs")
    times = {(kind, what): [] for what in ("attention", "step") for kind in kinds}
    caches = {}
    for kind in kinds:
        model.set_attn_implementation(kind)
        caches[kind] = KvfsCache(model, store, ids)
        # The last token of the prompt: then the cache has all of it.
        model(ids[:, caches[kind].tokens :], past_key_values=caches[kind])
    for _ in range(ROUNDS):
        for kind in kinds:
            model.set_attn_implementation(kind)
            times[kind, "attention"].append(timed(attending(model, caches[kind])))
            times[kind, "step"].append(timed(stepping(model, caches[kind], ids)))
    print(f"{tokens} tokens of {dtype}, {torch.get_num_threads()} threads, pages of {store.page_tokens} tokens")
    for what in ("attention", "step"):
        memory, mapped = (show(f"{what}, {kind}", times[kind, what]) for kind in kinds)
        print(f"{what}: {memory / mapped:.2f} times as fast over mapped pages")
    for cache in caches.values():
        cache.close()


def main():
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 16384
    with mounted(sys.argv[1]) as (mount, _):
        for dtype in (torch.float32, torch.bfloat16):
            measure(mount, tokens, dtype)


if __name__ == "__main__":
    main()

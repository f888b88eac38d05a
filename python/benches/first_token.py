"""Time to the first token of a long prompt, computed and from the mount: `python first_token.py DIRECTORY [TOKENS]`.

DIRECTORY on a disk; the wheel, torch and transformers installed. A Llama of random weights, 4 layers with 8 heads of 64
in float32, in `ROUNDS` rounds, each of them in turns. What is timed is everything from the ids to the first token: with
the mount to find the prefix, to read it, to compute the last token, and to write a sequence of its own.
"""

import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scratch import mounted

from kvfs.transformers import KvfsCache, model_for

ROUNDS = 5


def llama():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def timed(work):
    begin = time.perf_counter()
    token = work()
    return time.perf_counter() - begin, token


def first_token(model, ids, **more):
    return model.generate(ids, max_new_tokens=1, do_sample=False, **more)[0, -1].item()


def from_mount(model, store, ids):
    with KvfsCache(model, store, ids) as cache:
        token = first_token(model, ids, past_key_values=cache)
        return token, cache.tokens


def show(name, seconds):
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    print(f"{name}: {middle * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})", flush=True)
    return middle


def measure(mount, tokens):
    model = llama()
    ids = torch.randint(0, 4096, (1, tokens))
    store = model_for(model.config, mount, "llama", dtype=model.dtype)
    writing, (expected, found) = timed(lambda: from_mount(model, store, ids))
    assert found == 0
    computed, taken = [], []
    for _ in range(ROUNDS):
        seconds, token = timed(lambda: first_token(model, ids))
        assert token == expected
        computed.append(seconds)
        seconds, answer = timed(lambda: from_mount(model, store, ids))
        assert answer == (expected, tokens - 1)
        taken.append(seconds)
    print(f"{tokens} tokens, {torch.get_num_threads()} threads, pages of {store.page_tokens} tokens")
    ratio = show("computed", computed) / show("from the mount", taken)
    print(f"ratio: {ratio:.1f}; computed and written, once: {writing * 1e3:.0f} ms")


def main():
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 8192
    with mounted(sys.argv[1]) as (mount, _):
        measure(mount, tokens)


if __name__ == "__main__":
    main()

"""Time to the first token of a prompt in MLX-LM, computed and from the mount: `python mlx_first_token.py DIRECTORY [TOKENS]`.

DIRECTORY on a disk; the wheel, mlx and mlx-lm installed. A Llama of random weights, 4 layers with 8 heads of 64 in float32, in
`ROUNDS` rounds, each of them in turns: computed, from the mount (find the prefix, read it, compute the last token), and from a
file of MLX-LM's own `save_prompt_cache` on the same disk, which has the whole prompt and must be known by its name. MLX computes
slowly on a processor, so a prompt of `LONG` tokens is only loaded, and its rows are random.
"""

import statistics
import sys
import time

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from scratch import mounted

from kvfs.mlx import load, model_for, save

ROUNDS, LONG = 5, 8192


def llama():
    mx.random.seed(1)
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    model = Model(ModelArgs(model_type="llama", num_attention_heads=8, num_key_value_heads=8, rms_norm_eps=1e-5, **sizes))
    mx.eval(model.parameters())
    return model


def timed(work):
    begin = time.perf_counter()
    answer = work()
    return time.perf_counter() - begin, answer


def first_token(model, ids, cache):
    token, _ = next(generate_step(mx.array(ids), model, max_tokens=1, prompt_cache=cache))
    return int(token)


def from_mount(model, store, ids):
    cache, tokens = load(model, store, ids)
    return first_token(model, ids[tokens:], cache), tokens


def from_file(model, file, ids):
    cache = load_prompt_cache(str(file))
    return first_token(model, ids[-1:], cache)


def show(name, seconds):
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    print(f"{name}: {middle * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})", flush=True)
    return middle


def measure(mount, plain, tokens):
    model = llama()
    ids = mx.random.randint(0, 4096, (tokens,)).tolist()
    store = model_for(model.args, mount, "llama", dtype=mx.float32)
    cache = make_prompt_cache(model)
    expected = first_token(model, ids, cache)
    trim_prompt_cache(cache, cache[0].offset - tokens)
    writing, _ = timed(lambda: save(cache, store, ids))
    trim_prompt_cache(cache, 1)
    saving, _ = timed(lambda: save_prompt_cache(str(plain / "prompt.safetensors"), cache))
    computed, taken, read = [], [], []
    for _ in range(ROUNDS):
        seconds, token = timed(lambda: first_token(model, ids, make_prompt_cache(model)))
        assert token == expected
        computed.append(seconds)
        seconds, answer = timed(lambda: from_mount(model, store, ids))
        assert answer == (expected, tokens - 1)
        taken.append(seconds)
        seconds, token = timed(lambda: from_file(model, plain / "prompt.safetensors", ids))
        assert token == expected
        read.append(seconds)
    print(f"{tokens} tokens, pages of {store.page_tokens} tokens")
    ratio = show("computed", computed) / show("from the mount", taken)
    show("from a file of save_prompt_cache", read)
    print(f"ratio: {ratio:.1f}; saved, once: {writing * 1e3:.0f} ms; by save_prompt_cache: {saving * 1e3:.0f} ms")


def measure_loading(mount, plain):
    model = llama()
    ids = mx.random.randint(0, 4096, (LONG,)).tolist()
    store = model_for(model.args, mount, "long", dtype=mx.float32)
    cache = make_prompt_cache(model)
    for layer in cache:
        layer.update_and_fetch(*(mx.random.normal((1, 8, LONG, 64)) for _ in range(2)))
    mx.eval([layer.state for layer in cache])
    save(cache, store, ids)
    file = str(plain / "long.safetensors")
    save_prompt_cache(file, cache)
    taken, read = [], []
    for _ in range(ROUNDS):
        seconds, (_, tokens) = timed(lambda: load(model, store, ids))
        assert tokens == LONG - 1
        taken.append(seconds)
        seconds, _ = timed(lambda: mx.eval([layer.state for layer in load_prompt_cache(file)]))
        read.append(seconds)
    size = sum(layer.nbytes for layer in cache) >> 20
    show(f"{LONG} tokens, {size} MiB, loaded from the mount", taken)
    show("from a file of save_prompt_cache", read)


def main():
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 1024
    with mounted(sys.argv[1]) as (mount, plain):
        measure_loading(mount, plain)
        measure(mount, plain, tokens)


if __name__ == "__main__":
    main()

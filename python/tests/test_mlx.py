"""A small random Llama of MLX-LM, with and without the mount; mount-scripts/test-engines.sh has what it needs."""

import gc
import json
import os
import signal
import subprocess
import sys

import numpy
import pytest

import kvfs

mx = pytest.importorskip("mlx.core", reason="no MLX here: pip install 'mlx[cpu]' mlx-lm")
pytest.importorskip("mlx_lm", reason="no MLX-LM here: pip install mlx-lm")

from mlx.utils import tree_map  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import llama as llamas  # noqa: E402
from mlx_lm.models.cache import (  # noqa: E402
    BatchKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from kvfs.mlx import load, model_for, save  # noqa: E402

PAGE, ANSWER = 16, 12
# What a process runs that has nothing but the mount: the prompt again.
AGAIN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_mlx as test
model = test.llama()
ids = test.prompt(int(sys.argv[3]))
cache, found = test.load(model, test.store_of(model, sys.argv[2]), ids)
print(json.dumps([found, *test.answer(model, ids[found:], cache)]))
"""


def llama(dtype=mx.float32, **fields):
    """Always the same weights."""
    mx.random.seed(7)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    model = llamas.Model(llamas.ModelArgs(model_type="llama", **{**sizes, **heads, **fields}))
    # As they are made weights are so small that all prompts have one answer.
    model.update(tree_map(lambda weight: weight * 4 if weight.ndim > 1 else weight, model.parameters()))
    model.set_dtype(dtype)
    return model


def prompt(tokens, seed=3):
    return numpy.random.default_rng(seed).integers(0, 97, tokens).tolist()


def answer(model, ids, cache=None, tokens=ANSWER, **options):
    """The likeliest tokens, and how many tokens each pass of the model computed."""
    passes = []

    def counted(inputs, *args, **kwargs):
        passes.append(inputs.shape[1])
        return model(inputs, *args, **kwargs)

    counted.layers, counted.make_cache = model.layers, model.make_cache
    steps = generate_step(mx.array(ids), counted, max_tokens=tokens, prompt_cache=cache, **options)
    return [int(token) for token, _ in steps], passes


def store_of(model, mount, **fields):
    dtype = model.layers[0].input_layernorm.weight.dtype
    return model_for(model.args, mount, "tiny", **{"dtype": dtype, "page_tokens": PAGE, **fields})


def kept(model, store, ids, **more):
    """A prompt that is computed and saved, and its answer."""
    cache, found = load(model, store, ids)
    tokens, _ = answer(model, ids[found:], cache)
    save(cache, store, ids + tokens, **more)
    return tokens


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def store(model, mount):
    return store_of(model, mount)


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("length", [1, PAGE - 1, 3 * PAGE, 5 * PAGE + 3, 300])
def test_the_same_tokens_with_the_cache(model, mount, length, layout):
    store = store_of(model, mount, layout=layout)
    ids = prompt(length)
    expected, _ = answer(model, ids)
    cache, found = load(model, store, ids)
    assert found == 0
    tokens, passes = answer(model, ids, cache)
    assert tokens == expected
    computed = sum(passes)
    # MLX-LM computes a token ahead, and the last one of an answer may have no rows.
    there = save(cache, store, ids + tokens)
    assert there == min(length + ANSWER, computed)
    cache, found = load(model, store, ids)
    assert found == length - 1
    tokens, passes = answer(model, ids[found:], cache)
    assert tokens == expected and set(passes) == {1}


def test_what_is_there_is_not_written_again(model, store):
    ids = prompt(3 * PAGE + 2)
    kept(model, store, ids, name="first")
    kept(model, store, ids)
    assert store.sequences() == ["first"]
    # A longer one has pages of its own only behind what the two have in common.
    longer = ids + prompt(3 * PAGE, seed=5)
    kept(model, store, longer, name="second", ttl=3600)
    first, second = (store.sequence(name) for name in ("first", "second"))
    assert second.ttl == 3600 and second.tokens[: len(longer)] == longer
    inodes = [[os.stat(page.path).st_ino for page in each.pages(0)] for each in (first, second)]
    assert inodes[0][:3] == inodes[1][:3] and len(inodes[1]) > len(inodes[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_are_the_same_bits(mount, dtype):
    model = llama(dtype)
    store = store_of(model, mount)
    ids = prompt(3 * PAGE + 5)
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    assert save(cache, store, ids) == len(ids)
    again, found = load(model, store, [*ids, 1])
    assert found == len(ids)
    for layer, expected in zip(again, cache):
        assert layer.keys.dtype == dtype and layer.offset == found
        for part in ("keys", "values"):
            rows, computed = (getattr(each, part)[..., :found, :] for each in (layer, expected))
            assert mx.array_equal(rows, computed)


def test_prompts_that_begin_alike_share_their_beginning(model, store):
    first, other = prompt(4 * PAGE), prompt(5 * PAGE, seed=4)
    shared = 2 * PAGE + 5
    other[: shared + 1] = [*first[:shared], (first[shared] + 1) % 97]
    kept(model, store, first)
    expected, _ = answer(model, other)
    cache, found = load(model, store, other)
    assert found == shared
    tokens, passes = answer(model, other[found:], cache)
    assert tokens == expected
    assert sum(passes) < 3 * PAGE - 5 + ANSWER + 1


def test_a_conversation_goes_on(model, store):
    ids = prompt(PAGE + 3)
    said = kept(model, store, ids)
    longer = ids + said + prompt(7, seed=5)
    expected, _ = answer(model, longer)
    cache, found = load(model, store, longer)
    assert len(ids + said) - 1 <= found <= len(ids + said)
    assert answer(model, longer[found:], cache)[0] == expected


def test_another_process_takes_it_from_a_mount_that_was_killed(place, mount, model, store):
    ids = prompt(6 * PAGE + 4)
    expected = kept(model, store, ids)
    mount.sync()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    again = kvfs.Mount(place / "store", mount.mountpoint)
    line = [sys.executable, "-c", AGAIN, os.path.dirname(__file__), again.mountpoint, str(len(ids))]
    done = subprocess.run(line, check=True, timeout=300, stdout=subprocess.PIPE)
    found, tokens, passes = json.loads(done.stdout.splitlines()[-1])
    assert tokens == expected
    assert found == len(ids) - 1 and set(passes) == {1}


def test_a_cache_that_is_shorter_or_longer_than_its_ids(model, store):
    ids = prompt(3 * PAGE)
    cache = make_prompt_cache(model)
    assert save(cache, store, ids) == 0 and store.sequences() == []
    model(mx.array([ids[: PAGE + 3]]), cache=cache)
    assert save(cache, store, ids) == PAGE + 3
    model(mx.array([ids[PAGE + 3 :]]), cache=cache)
    # Only of tokens that are told is it known which they are.
    assert save(cache, store, ids[:-2]) == 3 * PAGE - 2
    trim_prompt_cache(cache, PAGE)
    assert save(cache, store, [*ids[:PAGE], 96, 96]) == PAGE + 2
    assert store.match(ids).tokens == 3 * PAGE - 2


def test_a_cache_that_is_quantised_afterwards(mount):
    model = llama(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    store = store_of(model, mount)
    ids = prompt(3 * PAGE)
    kept(model, store, ids)
    options = {"kv_bits": 8, "quantized_kv_start": 0}
    alone = make_prompt_cache(model)
    model(mx.array([ids[:-1]]), cache=alone)
    expected, _ = answer(model, ids[-1:], alone, **options)
    cache, found = load(model, store, ids)
    assert answer(model, ids[found:], cache, **options)[0] == expected
    with pytest.raises(kvfs.InvalidArgument, match="QuantizedKVCache, which keeps rows of a few bits .*no kv_bits"):
        save(cache, store, ids + expected)


def test_a_save_that_fails_leaves_nothing(model, store):
    ids = prompt(2 * PAGE)
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    with pytest.raises(OverflowError):
        save(cache, store, ids, ttl=-1)
    assert store.sequences() == []
    assert save(cache, store, ids) == len(ids)


def test_rows_that_went_are_computed_again(model, store, caplog):
    ids = prompt(2 * PAGE)
    expected = kept(model, store, ids)
    store.match(ids).sequence.page(1, 0).path.unlink()
    cache, found = load(model, store, ids)
    # The mount's answer tells it already.
    assert found == 0 and caplog.text == ""
    assert answer(model, ids, cache)[0] == expected
    # What was lost is there again.
    assert save(cache, store, ids) == len(ids)
    assert load(model, store, ids)[1] == len(ids) - 1


def test_a_damaged_page_never_changes_an_answer(place, mount, model, store, caplog):
    ids = prompt(5 * PAGE)
    expected = kept(model, store, ids)
    page = store.match(ids).sequence.page(1, 2 * PAGE)
    content = page.k.tobytes()
    del page
    gc.collect()
    mount.umount()
    assert damage(place / "store", content) == 1
    kvfs.Mount(place / "store", mount.mountpoint)
    cache, found = load(model, store, ids)
    assert found == 0 and "80 tokens is computed: " in caplog.text
    assert answer(model, ids, cache)[0] == expected


def damage(store, content):
    """Changes bytes of a row where the store has this content; returns in how many files."""
    done = 0
    for path in (*store.glob("objects/**/*"), *store.glob("packs/*")):
        if path.is_file() and content in (whole := path.read_bytes()):
            with path.open("r+b") as file:
                file.seek(whole.index(content) + 100)
                file.write(b"\x40" * 4)
            done += 1
    return done


def test_a_mount_that_is_gone_is_an_empty_cache(place, mount, model, store, caplog):
    ids = prompt(2 * PAGE)
    expected = kept(model, store, ids)
    mount.sync()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    cache, found = load(model, store, ids)
    assert found == 0 and "the mount is gone" in caplog.text
    assert answer(model, ids, cache)[0] == expected
    with pytest.raises(kvfs.Disconnected):
        save(cache, store, ids)
    kvfs.Mount(place / "store", mount.mountpoint)
    assert load(model, store, ids)[1] == len(ids) - 1


def test_caches_that_keep_something_else_are_refused(model, store):
    ids = prompt(PAGE)

    def computed(cache, rows=1):
        model(mx.array([ids] * rows), cache=cache)
        return cache

    half = computed(make_prompt_cache(model))
    trim_prompt_cache(half[:1], 3)
    for cache, why in (
        (half, "between two passes"),
        (computed([RotatingKVCache(8) for _ in range(3)]), "RotatingKVCache, which forgets tokens"),
        (computed([BatchKVCache([0, 0]) for _ in range(3)], rows=2), "BatchKVCache, which has rows of several prompts"),
        (computed(make_prompt_cache(model), rows=2), "rows of 2 prompts"),
    ):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            save(cache, store, ids)
    sliding = llama(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=8)
    with pytest.raises(kvfs.InvalidArgument, match="layer 1 has a RotatingKVCache"):
        load(sliding, store, ids)
    for wrong in ([ids, ids], [], [0.5]):
        with pytest.raises(kvfs.InvalidArgument, match="one row of token ids"):
            load(model, store, wrong)
    kept(model, store, ids, name="taken")
    with pytest.raises(kvfs.Busy, match="sequence taken has tokens"):
        save(computed(make_prompt_cache(model)), store, ids[::-1], name="taken")
    assert store.sequences() == ["taken"]


def test_models_that_differ_are_refused(model, store, mount):
    for fields in ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"rope_theta": 5e5}, {"rope_traditional": True}):
        with pytest.raises(kvfs.Refused, match="something else"):
            store_of(llama(**fields), mount)
    with pytest.raises(kvfs.Refused, match="something else"):
        store_of(model, mount, model_revision="another one")
    for other in (llama(num_hidden_layers=2), llama(num_key_value_heads=4), llama(mx.float16)):
        with pytest.raises(kvfs.InvalidArgument, match="keeps .*model_for"):
            load(other, store, prompt(PAGE))
        cache = make_prompt_cache(other)
        other(mx.array([prompt(PAGE)]), cache=cache)
        with pytest.raises(kvfs.InvalidArgument, match="keeps .*model_for"):
            save(cache, store, prompt(PAGE))
    for config, options, why in (
        (model.args, {}, "give dtype="),
        (model.args, {"dtype": mx.float64}, "float64"),
        (7, {}, "this is a int"),
    ):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            model_for(config, mount, "other", **options)
    with pytest.raises(kvfs.InvalidArgument, match="no name"):
        model_for(model.args, mount, "../tiny", dtype=mx.float32)


def test_the_model_of_a_configuration(place, mount, model):
    config = {**model.args.__dict__, "torch_dtype": "bfloat16", "quantization": {"bits": 4, "group_size": 64}}
    config = {name: value for name, value in config.items() if value is not None}
    (place / "config.json").write_text(json.dumps(config))
    made = [model_for(each, mount, "quantised") for each in (config, place, place / "config.json")]
    assert {each.dtype for each in made} == {"bf16"} and made[0].layout == "hnd"
    assert made[0].manifest["mlx"] == {"quantization": {"bits": 4, "group_size": 64}}
    pairs = model_for({**config, "rope_traditional": True}, mount, "pairs").manifest["rope"]
    assert pairs == {**made[0].manifest["rope"], "pairing": "interleaved"}

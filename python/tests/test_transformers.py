"""A small random Llama of transformers, with and without the mount; mount-scripts/test-engines.sh has what it needs."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import kvfs

torch = pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")
hf = pytest.importorskip("transformers", minversion="5", reason="no transformers 5 here: mount-scripts/test-engines.sh")

from kvfs.transformers import KvfsCache, model_for  # noqa: E402

PAGE = 16
# What a process runs that has nothing but the mount: the prompt again, and three tokens more.
AGAIN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_transformers as test
model = test.llama()
passes = test.counted(model)
store = test.store_of(model, sys.argv[2])
ids = test.prompt(int(sys.argv[3]))
with test.KvfsCache(model, store, ids) as cache:
    found = cache.tokens
    print(json.dumps([found, passes, test.answer(model, ids, past_key_values=cache)]))
"""


def llama(dtype=torch.float32, **fields):
    """Always the same weights."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    config = hf.LlamaConfig(**{**sizes, **fields}, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return hf.LlamaForCausalLM(config).to(dtype).eval()


def prompt(tokens, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (1, tokens), generator=generator)


def answer(model, ids, tokens=12, **more):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **more)[0, ids.shape[1] :].tolist()


def counted(model):
    """How many tokens each pass of the model computes."""
    passes = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    return passes


def store_of(model, mount, **fields):
    return model_for(model.config, mount, "tiny", **{"dtype": model.dtype, "page_tokens": PAGE, **fields})


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def store(model, mount):
    return store_of(model, mount)


@pytest.mark.parametrize("length", [1, PAGE - 1, 3 * PAGE, 5 * PAGE + 3])
def test_the_same_tokens_with_the_cache(model, store, length):
    ids = prompt(length)
    expected = answer(model, ids)
    passes = counted(model)
    with KvfsCache(model, store, ids) as cache:
        assert cache.tokens == 0
        assert answer(model, ids, past_key_values=cache) == expected
    assert passes == [length] + [1] * 11
    # The last token is the answer's, and nobody has computed its rows.
    assert cache.sequence.tokens == ids[0].tolist() + expected[:-1]
    passes.clear()
    with KvfsCache(model, store, ids) as cache:
        assert cache.tokens == length - 1
        assert answer(model, ids, past_key_values=cache) == expected
    assert passes == [1] * 12


def test_what_is_there_is_not_written_again(model, store):
    ids = prompt(3 * PAGE + 2)
    with KvfsCache(model, store, ids, name="first") as cache:
        expected = answer(model, ids, tokens=1, past_key_values=cache)
    with KvfsCache(model, store, ids) as cache:
        assert answer(model, ids, tokens=1, past_key_values=cache) == expected
        assert cache.sequence is None
    assert store.sequences() == ["first"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_the_same_bits(mount, dtype):
    model = llama(dtype)
    store = store_of(model, mount)
    ids = prompt(3 * PAGE + 5)
    with torch.no_grad():
        rows = model(ids, past_key_values=hf.DynamicCache()).past_key_values.layers
        with KvfsCache(model, store, ids) as cache:
            model(ids, past_key_values=cache)
    again = KvfsCache(model, store, ids)
    assert again.tokens == 3 * PAGE + 4
    for layer, expected in zip(again.layers, rows):
        for part in ("keys", "values"):
            rows = getattr(layer, part[0])[: again.tokens]
            assert torch.equal(rows.transpose(0, 1), getattr(expected, part)[0, :, :-1])


def test_rows_of_the_other_layout(model, mount):
    ids = prompt(2 * PAGE + 3)
    store = store_of(model, mount, layout="hnd")
    expected = answer(model, ids)
    for found in (0, 2 * PAGE + 2):
        with KvfsCache(model, store, ids) as cache:
            assert cache.tokens == found
            assert answer(model, ids, past_key_values=cache) == expected


def test_prompts_that_begin_alike_share_their_beginning(model, store):
    first, other = prompt(4 * PAGE), prompt(5 * PAGE, seed=4)
    shared = 2 * PAGE + 5
    other[0, :shared] = first[0, :shared]
    other[0, shared] = (first[0, shared] + 1) % 97
    with KvfsCache(model, store, first) as cache:
        answer(model, first, past_key_values=cache)
    expected = answer(model, other)
    passes = counted(model)
    with KvfsCache(model, store, other, name="other", ttl=3600) as cache:
        assert cache.tokens == shared
        assert answer(model, other, past_key_values=cache) == expected
    assert passes[0] == 3 * PAGE - 5
    assert cache.sequence.ttl == 3600
    assert store.sequence("other").tokens == other[0].tolist() + expected[:-1]


def test_a_conversation_goes_on_in_one_cache(model, store):
    ids = prompt(PAGE + 3)
    with KvfsCache(model, store, ids) as cache:
        said = answer(model, ids, past_key_values=cache)
        longer = torch.cat([ids, torch.tensor([said]), prompt(7, seed=5)], dim=1)
        expected = answer(model, longer)
        passes = counted(model)
        assert answer(model, longer, past_key_values=cache) == expected
        assert passes[0] == 8
    assert len(cache.sequence) == longer.shape[1] + 11


def test_another_process_takes_it_from_a_mount_that_was_killed(place, mount, model, store):
    length = 6 * PAGE + 4
    ids = prompt(length)
    expected = answer(model, ids)
    with KvfsCache(model, store, ids) as cache:
        answer(model, ids, past_key_values=cache)
    mount.sync()
    del cache
    gc.collect()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    again = kvfs.Mount(place / "store", mount.mountpoint)
    line = [sys.executable, "-c", AGAIN, os.path.dirname(__file__), again.mountpoint, str(length)]
    done = subprocess.run(line, check=True, timeout=300, stdout=subprocess.PIPE)
    found, passes, tokens = json.loads(done.stdout.splitlines()[-1])
    assert tokens == expected
    assert (found, passes) == (length - 1, [1] * 12)


def test_chunks_of_a_prompt_are_kept_one_by_one(model, store):
    ids = prompt(3 * PAGE)
    passes = counted(model)
    with KvfsCache(model, store, ids) as cache:
        answer(model, ids, tokens=1, past_key_values=cache, prefill_chunk_size=20)
    assert passes == [20, 20, 8]
    assert cache.sequence.tokens == ids[0].tolist()


def test_a_pass_that_fails_leaves_nothing(model, store):
    ids = prompt(2 * PAGE)
    expected = answer(model, ids)

    def fail(*_):
        raise RuntimeError("half-way")

    hook = model.model.layers[1].register_forward_hook(fail)
    with KvfsCache(model, store, ids) as cache:
        with pytest.raises(RuntimeError, match="half-way"):
            answer(model, ids, past_key_values=cache)
        hook.remove()
        assert store.sequences() == []
        assert answer(model, ids, past_key_values=cache) == expected


def test_rows_that_went_are_computed_again(model, store):
    ids = prompt(2 * PAGE)
    expected = answer(model, ids)
    with KvfsCache(model, store, ids) as cache:
        answer(model, ids, past_key_values=cache)
    cache.sequence.page(1, 0).path.unlink()
    with KvfsCache(model, store, ids) as cache:
        assert cache.tokens == 0
        assert answer(model, ids, past_key_values=cache) == expected


@pytest.mark.parametrize(
    "go",
    [
        lambda sequence: sequence.clear(),
        lambda sequence: shutil.rmtree(sequence.path),
        lambda sequence: sequence.remove(PAGE + 1),
    ],
    ids=["emptied", "removed", "shorter"],
)
def test_rows_that_went_meanwhile_are_written_again(model, store, go):
    ids = prompt(2 * PAGE + 3)
    expected = answer(model, ids)
    with KvfsCache(model, store, ids, name="first") as first:
        answer(model, ids, past_key_values=first)
    with KvfsCache(model, store, ids) as cache:
        go(first.sequence)
        assert answer(model, ids, past_key_values=cache) == expected
    assert store.match(cache.sequence.tokens).tokens == 2 * PAGE + 3 + 11


def test_what_has_more_than_one_sequence_is_refused(model, store):
    ids = prompt(PAGE)
    cases = [
        (ids.repeat(2, 1), {}, "2 rows"),
        (ids, {"num_beams": 2}, "2 rows"),
        (ids, {"attention_mask": torch.tensor([[0] * 3 + [1] * (PAGE - 3)])}, "padding"),
        (prompt(PAGE, seed=9), {}, "not the tokens"),
        (ids, {"assistant_model": llama()}, "assisted"),
    ]
    for given, options, why in cases:
        cache = KvfsCache(model, store, ids)
        with pytest.raises(kvfs.InvalidArgument, match=why):
            answer(model, given, past_key_values=cache, **options)
    cache = KvfsCache(model, store, ids)
    for call in (
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.crop(-1),
        lambda: cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu")),
        lambda: cache.reset(),
    ):
        with pytest.raises(kvfs.InvalidArgument):
            call()
    for options, why in (
        ({"inputs_embeds": torch.zeros(1, 2, 64)}, "input_ids"),
        ({"input_ids": ids, "position_ids": torch.arange(1, PAGE + 1)[None]}, "positions"),
    ):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            model(**options, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values|cache_implementation"):
        answer(model, ids, past_key_values=cache, cache_implementation="static")
    for wrong in (ids.repeat(2, 1), [], torch.zeros(3)):
        with pytest.raises(kvfs.InvalidArgument, match="one row"):
            KvfsCache(model, store, wrong)
    assert store.sequences() == []


def test_a_cache_knows_its_model(model, store):
    ids = prompt(PAGE)
    cache = KvfsCache(model, store, ids)
    with pytest.raises(kvfs.InvalidArgument, match="another model"):
        answer(llama(), ids, past_key_values=cache)
    hooks = len(model._forward_hooks)
    del cache
    gc.collect()
    assert len(model._forward_hooks) == hooks - 1


def test_models_that_differ_are_refused(model, store, mount):
    ids = prompt(PAGE)
    for fields in ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"rope_theta": 5e5}):
        with pytest.raises(kvfs.Refused, match="something else"):
            store_of(llama(**rope(fields)), mount)
    with pytest.raises(kvfs.Refused, match="something else"):
        store_of(model, mount, model_revision="another one")
    for other in (llama(num_hidden_layers=2), llama(torch.float16)):
        with pytest.raises(kvfs.InvalidArgument, match="model_for"):
            KvfsCache(other, store, ids)
    with pytest.raises(kvfs.InvalidArgument, match="float64"):
        model_for(model.config, mount, "double", dtype=torch.float64)
    with pytest.raises(kvfs.InvalidArgument, match="no name"):
        model_for(model.config, mount, "../tiny", dtype=model.dtype)
    with pytest.raises(kvfs.InvalidArgument, match="meta"):
        KvfsCache(llama().to("meta"), store, ids)


def rope(fields):
    theta = fields.pop("rope_theta", None)
    return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": theta}} if theta else fields


def test_layers_that_keep_something_else_are_refused(model, store, mount):
    for fields, why in (
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"attention_chunk_size": 8}, "chunked_attention"),
        ({"num_kv_shared_layers": 1}, "shared"),
        ({"use_bidirectional_attention": True}, "later tokens"),
    ):
        other = llama()
        for name, value in fields.items():
            setattr(other.config, name, value)
        with pytest.raises(kvfs.InvalidArgument, match=why):
            KvfsCache(other, store, prompt(PAGE))
    forgetful = kvfs.Model.create(
        mount.model("forgetful"), **{**store.manifest, "layers": ["attention", {"sliding": {"window": 8}}, "attention"]}
    )
    with pytest.raises(kvfs.InvalidArgument, match="last 8 tokens in layer 1"):
        KvfsCache(model, forgetful, prompt(PAGE))


def test_what_ids_do_not_say_is_refused(model, store):
    ids = prompt(PAGE)
    cache = KvfsCache(model, store, ids)
    with pytest.raises(kvfs.InvalidArgument, match="pixel_values"):
        model(ids, past_key_values=cache, pixel_values=torch.zeros(1, 3, 8, 8))
    assert store.sequences() == []

"""Attention over mapped pages, against the same model without a mount."""

import os
import shutil
import subprocess
import sys

import pytest

import kvfs

torch = pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")
hf = pytest.importorskip("transformers", minversion="5", reason="no transformers 5 here: mount-scripts/test-engines.sh")

from test_transformers import PAGE, answer, counted, llama, prompt, store_of  # noqa: E402

from kvfs.transformers import KvfsCache, model_for  # noqa: E402
from kvfs.transformers import attention as attention_module  # noqa: E402


def mapping(dtype=torch.float32, **fields):
    """The same weights as `llama`, attending to mapped pages."""
    model = llama(dtype, **fields)
    model.set_attn_implementation("kvfs")
    return model


def left(model, store, ids, **more):
    """What a cache leaves in the mount, and what is answered with it."""
    with KvfsCache(model, store, ids, **more) as cache:
        return cache.tokens, answer(model, ids, past_key_values=cache)


@pytest.fixture
def model():
    return mapping()


@pytest.fixture
def store(model, mount):
    return store_of(model, mount)


@pytest.mark.parametrize("tokens", [2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 5])
def test_answers_are_those_without_a_mount(store, model, tokens):
    ids = prompt(tokens)
    expected = answer(llama(), ids)
    assert answer(model, ids) == expected, "without a cache it is what torch has"
    assert left(model, store, ids) == (0, expected)
    passes = counted(model)
    found, told = left(model, store, ids)
    assert (found, told) == (tokens - 1, expected)
    assert passes[0] == 1, "nothing but the last token is computed"


def test_logits_are_those_of_a_copy(store, model):
    ids = prompt(5 * PAGE + 3)
    left(model, store, ids)
    logits = []
    for each in (model, llama()):
        with KvfsCache(each, store, ids) as cache, torch.no_grad():
            logits.append(each(ids[:, cache.tokens :], past_key_values=cache).logits)
    # Sums in another order: 80 rows of float32 differ in the last bits.
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        whole = llama()(ids).logits[:, -1:]
    torch.testing.assert_close(logits[0], whole, rtol=1e-4, atol=1e-5)


def test_bfloat16_and_grouped_queries(mount):
    for heads in (1, 2, 4):
        fields = {"num_key_value_heads": heads}
        model = mapping(torch.bfloat16, **fields)
        store = model_for(model.config, mount, f"heads{heads}", dtype=model.dtype, page_tokens=PAGE)
        ids = prompt(4 * PAGE + 2)
        left(model, store, ids)
        with KvfsCache(model, store, ids) as cache, torch.no_grad():
            assert cache.tokens == ids.shape[1] - 1
            told = model(ids[:, cache.tokens :], past_key_values=cache).logits
        with torch.no_grad():
            whole = llama(torch.bfloat16, **fields)(ids).logits[:, -1:]
        # Eight bits of a significand, and sums of them.
        torch.testing.assert_close(told, whole, rtol=0.05, atol=0.05)


def test_a_longer_prompt_goes_on_in_chunks(store, model):
    left(model, store, prompt(3 * PAGE))
    ids = torch.cat([prompt(3 * PAGE), prompt(2 * PAGE + 7, seed=9)], dim=1)
    with torch.no_grad():
        whole = llama()(ids).logits
    for chunk in (1, 5, PAGE, 1000):
        with KvfsCache(model, store, ids, name=f"chunk{chunk}") as cache, torch.no_grad():
            begin = cache.tokens
            assert begin >= 3 * PAGE
            while begin < ids.shape[1]:
                told = model(ids[:, begin : begin + chunk], past_key_values=cache).logits
                torch.testing.assert_close(told, whole[:, begin : begin + chunk], rtol=1e-4, atol=1e-5)
                begin += told.shape[1]
        shutil.rmtree(store.sequence(f"chunk{chunk}").path)
    expected = answer(llama(), ids)
    assert answer(model, ids, past_key_values=KvfsCache(model, store, ids), prefill_chunk_size=7) == expected


def test_nothing_of_the_prefix_is_in_memory(store, model):
    ids = prompt(20 * PAGE)
    left(model, store, ids)
    with KvfsCache(model, store, ids) as cache:
        assert answer(model, ids, past_key_values=cache) == answer(llama(), ids)
        rows = [layer.length - layer.first for layer in cache.layers]
        assert rows == [12] * 3, "one token of the prompt, and all of the answer but the last one"
        assert {layer.first for layer in cache.layers} == {20 * PAGE - 1}
        kept = cache.sequence.name
    assert len(store.sequence(kept).tokens) == 20 * PAGE + 11


def test_the_sequence_that_was_found_may_go(store, model):
    ids = prompt(6 * PAGE)
    left(model, store, ids, name="first")
    with KvfsCache(model, store, ids) as cache:
        shutil.rmtree(store.sequence("first").path)
        assert answer(model, ids, past_key_values=cache) == answer(llama(), ids)


def test_a_page_that_goes_meanwhile_ends_the_pass_and_leaves_nothing(store, model):
    ids = prompt(6 * PAGE)
    left(model, store, ids, name="first")
    with KvfsCache(model, store, ids) as cache:
        os.unlink(cache.sequence.page(1, 2 * PAGE).path)
        with pytest.raises(kvfs.Error, match="layer 1: the page with token 32 is missing"):
            answer(model, ids, past_key_values=cache)
        assert len(cache.sequence.tokens) == 6 * PAGE
    # Another one finds the first sequence still.
    assert left(model, store, ids)[1] == answer(llama(), ids)


def test_a_prefix_is_not_lost_without_a_word(store, model, monkeypatch):
    ids = prompt(3 * PAGE)
    left(model, store, ids)
    with KvfsCache(model, store, ids) as cache:
        model.set_attn_implementation("sdpa")
        with pytest.raises(kvfs.InvalidArgument, match="set_attn_implementation"):
            answer(model, ids, past_key_values=cache)
        model.set_attn_implementation("kvfs")
        # A model that gives attention a copy of the rows.
        update = KvfsCache.update
        monkeypatch.setattr(KvfsCache, "update", lambda *args, **more: tuple(x.clone() for x in update(*args, **more)))
        with pytest.raises(kvfs.InvalidArgument, match="layer 0 did not attend"):
            answer(model, ids, past_key_values=cache)
        monkeypatch.undo()
        assert answer(model, ids, past_key_values=cache) == answer(llama(), ids)


def test_what_attention_over_pages_does_not_know_is_refused(store, model):
    ids = prompt(3 * PAGE)
    left(model, store, ids)
    with KvfsCache(model, store, ids) as cache:
        layer = cache.layers[0]
        query = torch.zeros(1, 4, 1, 16)
        key = layer.k[:1].transpose(0, 1)[None] if len(layer.k) else torch.zeros(1, 2, 1, 16)
        key.kvfs_layer = layer
        for more in ({"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}):
            with pytest.raises(kvfs.InvalidArgument, match="mapped pages"):
                attention_module.mapped_attention(model, query, key, key, None, **more)


def test_a_cache_that_copies_serves_the_same_model_and_mount(store, model):
    ids = prompt(4 * PAGE + 1)
    copying = llama()
    assert left(copying, store, ids) == (0, answer(copying, ids))
    assert left(model, store, ids) == (4 * PAGE, answer(copying, ids))
    assert left(copying, store, ids) == (4 * PAGE, answer(copying, ids))


def test_many_queries_see_the_same_as_few(mount, monkeypatch):
    """Of 16 queries for a KV head on torch attends to the pages: both ways, in each layout, a prefix that ends within a page."""
    pieces = []
    attend = attention_module._attend_to_pieces
    monkeypatch.setattr(attention_module, "_attend_to_pieces", lambda *given: pieces.append(1) or attend(*given))
    for layout in ("nhd", "hnd"):
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
            model = mapping(dtype)
            store = model_for(model.config, mount, f"{layout}-{str(dtype)[6:]}", dtype=dtype, page_tokens=PAGE, layout=layout)
            for has in (3 * PAGE, 3 * PAGE + 5, PAGE - 1):
                begin = prompt(has, seed=has)
                left(model, store, begin, name=f"begin{has}")
                ids = torch.cat([begin, prompt(40, seed=9)], dim=1)
                with torch.no_grad():
                    whole = llama(dtype)(ids).logits
                for many in (1, 1000):
                    monkeypatch.setattr(attention_module, "_MANY", many)
                    pieces.clear()
                    with KvfsCache(model, store, ids, name=f"{has}-{many}") as cache, torch.no_grad():
                        found = cache.tokens
                        assert found >= has
                        told = model(ids[:, found:], past_key_values=cache).logits
                    torch.testing.assert_close(told, whole[:, found:], rtol=tolerance, atol=tolerance)
                    assert len(pieces) == (3 if many == 1 else 0)
                    shutil.rmtree(store.sequence(f"{has}-{many}").path)


def test_many_queries_behind_a_prefix_that_ends_within_a_full_page(store, model):
    ids = prompt(4 * PAGE)
    left(model, store, ids)
    more = torch.cat([ids, prompt(40, seed=9)], dim=1)
    with torch.no_grad():
        whole = llama()(more).logits
        with KvfsCache(model, store, ids) as cache:
            assert cache.tokens == 4 * PAGE - 1
            model(ids[:, -1:], past_key_values=cache)
            told = model(more[:, 4 * PAGE :], past_key_values=cache).logits
    torch.testing.assert_close(told, whole[:, 4 * PAGE :], rtol=1e-4, atol=1e-5)


def test_many_short_prompts(store, model):
    prompts = [prompt(tokens, seed=tokens) for tokens in range(2, 2 * PAGE)]
    plain = llama()
    for ids in prompts:
        with KvfsCache(model, store, ids) as cache:
            answer(model, ids, tokens=3, past_key_values=cache)
    for ids in prompts:
        with KvfsCache(model, store, ids) as cache:
            assert cache.tokens == ids.shape[1] - 1
            assert answer(model, ids, tokens=3, past_key_values=cache) == answer(plain, ids, tokens=3)


@pytest.mark.parametrize("gone", ["all", "last", "first"])
@pytest.mark.parametrize("passes", [1, 2])
def test_pages_that_go_between_two_passes(store, model, gone, passes):
    """What was mapped stays. What would be appended behind a hole is refused: it would be rows of other tokens."""
    ids = prompt(6 * PAGE)
    left(model, store, ids, name="first")
    expected = answer(llama(), ids)
    truth = ids[0].tolist() + expected
    with KvfsCache(model, store, ids) as cache, torch.no_grad():
        told = []

        def step():
            given = ids[:, cache.tokens :] if not told else torch.tensor([told[-1:]])
            told.append(model(given, past_key_values=cache).logits[0, -1].argmax().item())

        # The first one appends nothing: the mount has all of the prompt.
        for _ in range(passes):
            step()
        pages = cache.sequence.pages(1)
        for page in {"all": pages, "last": pages[-1:], "first": pages[:1]}[gone]:
            os.unlink(page.path)
        try:
            for _ in range(5):
                step()
        except (kvfs.Missing, kvfs.Changed):
            pass
        else:
            assert passes == 2, "the first append looks at what is there"
        assert told == expected[: len(told)]
        has = cache.sequence.tokens
        assert has == truth[: len(has)]
    assert left(model, store, ids)[1] == expected


def test_pages_that_are_evicted_come_back(place, model):
    (place / "remote").mkdir()
    mount = kvfs.Mount(place / "moving", place / "there", remote=place / "remote")
    store = store_of(model, mount)
    ids = prompt(6 * PAGE)
    left(model, store, ids, name="first")
    expected = answer(llama(), ids)
    with KvfsCache(model, store, ids) as cache, torch.no_grad():
        begin = model(ids[:, cache.tokens :], past_key_values=cache).logits[0, -1].argmax()
        # They leave the disk for the remote, and the sequence that was found goes.
        kept = [store.sequence(name) for name in store.sequences()]
        mount.sync()
        for sequence in kept:
            sequence.evict()
        shutil.rmtree(store.sequence("first").path)
        told = [begin.item()]
        while len(told) < 12:
            told.append(model(torch.tensor([[told[-1]]]), past_key_values=cache).logits[0, -1].argmax().item())
    assert told == expected


def test_what_a_model_needs_beside_is_refused_before_anything_is_computed(store, model):
    ids = prompt(3 * PAGE)
    left(model, store, ids)
    passes = counted(model)
    capped = mapping()
    capped.config.attn_logit_softcapping = 50.0
    with pytest.raises(kvfs.InvalidArgument, match="soft caps"):
        KvfsCache(capped, store, ids)
    biased = mapping()
    biased.config.alibi = True
    with pytest.raises(kvfs.InvalidArgument, match="ALiBi"):
        KvfsCache(biased, store, ids)
    sinking = mapping()
    sinking.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(kvfs.InvalidArgument, match="sinks"):
        KvfsCache(sinking, store, ids)
    model.config.attention_dropout = 0.1
    with KvfsCache(model, store, ids) as cache:
        model.train()
        with pytest.raises(kvfs.InvalidArgument, match=r"model\.eval"):
            model(ids[:, cache.tokens :], past_key_values=cache)
    assert passes == []


# A process that forks with a cache: its child has to open everything anew. One thread, for those of torch do not come along.
FORKING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import test_transformers_mapped as test
test.torch.set_num_threads(1)
model = test.mapping()
store = test.store_of(model, sys.argv[2])
ids = test.prompt(5 * test.PAGE + 3)
expected = test.answer(test.llama(), ids)
with test.KvfsCache(model, store, ids) as cache:
    assert cache.tokens == ids.shape[1] - 1
    assert test.answer(model, ids, past_key_values=cache) == expected
    longer = test.torch.cat([ids, test.torch.tensor([expected])], dim=1)
    child = os.fork()
    if child == 0:
        try:
            test.answer(model, longer, past_key_values=cache)
        except test.kvfs.Changed:
            again = test.store_of(model, sys.argv[2])
            with test.KvfsCache(model, again, ids) as own:
                same = own.tokens == ids.shape[1] - 1 and test.answer(model, ids, past_key_values=own) == expected
            os._exit(0 if same else 4)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    assert test.answer(model, longer, past_key_values=cache) == test.answer(test.llama(), longer)
print("done")
"""


def test_a_process_that_forks(store, model, mount):
    left(model, store, prompt(5 * PAGE + 3))
    line = [sys.executable, "-c", FORKING, os.path.dirname(__file__), mount.mountpoint]
    done = subprocess.run(line, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr

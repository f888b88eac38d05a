"""Attention over mapped pages, against the same model without a mount."""

import os
import shutil

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

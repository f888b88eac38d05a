"""Models whose layers look back a window only, copied and mapped, against the same model without a mount."""

import os

import pytest

import kvfs

torch = pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")
hf = pytest.importorskip("transformers", minversion="5", reason="no transformers 5 here: mount-scripts/test-engines.sh")

from test_transformers import PAGE, answer, prompt, store_of  # noqa: E402

from kvfs.transformers import KvfsCache  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def mistral(window):
    """All layers look back so many tokens."""
    torch.manual_seed(7)
    config = hf.MistralConfig(**SIZES, num_hidden_layers=3, sliding_window=window)
    return hf.MistralForCausalLM(config).eval()


def gemma(window):
    """Every third layer looks at everything."""
    torch.manual_seed(7)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**SIZES, num_hidden_layers=3, sliding_window=window, layer_types=kinds)
    return hf.Gemma3ForCausalLM(config).eval()


@pytest.fixture(params=["sdpa", "kvfs", "eager"])
def implementation(request):
    return request.param


@pytest.mark.parametrize("make", [mistral, gemma])
# Less than a page, not a page's end, and more than all that there is.
@pytest.mark.parametrize("window", [7, PAGE + 5, 500])
def test_answers_and_logits_are_those_without_a_mount(mount, implementation, make, window):
    plain, model = make(window), make(window)
    model.set_attn_implementation(implementation)
    store = store_of(model, mount)
    kinds = store.manifest["layers"]
    assert kinds[0] == {"sliding": {"window": window}}
    for tokens in (PAGE - 3, 4 * PAGE + 5):
        ids = prompt(tokens, seed=tokens)
        expected = answer(plain, ids)
        for found in (0, tokens - 1):
            with KvfsCache(model, store, ids) as cache:
                assert cache.tokens == found
                assert answer(model, ids, past_key_values=cache) == expected
    # Many new tokens behind a prefix, in one pass and in pieces.
    ids = torch.cat([ids, prompt(2 * PAGE + 3, seed=9)], dim=1)
    with torch.no_grad():
        whole = plain(ids).logits
    for chunk in (1000, 5):
        with KvfsCache(model, store, ids, name=f"chunk{chunk}") as cache, torch.no_grad():
            begin = cache.tokens
            assert begin >= 4 * PAGE + 5
            while begin < ids.shape[1]:
                told = model(ids[:, begin : begin + chunk], past_key_values=cache).logits
                torch.testing.assert_close(told, whole[:, begin : begin + chunk], rtol=1e-4, atol=1e-4)
                begin += told.shape[1]


def test_pages_outside_of_the_window(mount, implementation):
    """Whoever keeps only what a window covers: mapped it suffices, a copy computes all of it anew."""
    model = mistral(PAGE + 2)
    model.set_attn_implementation(implementation)
    store = store_of(model, mount)
    ids = prompt(5 * PAGE + 3)
    expected = answer(mistral(PAGE + 2), ids)
    with KvfsCache(model, store, ids, name="first") as cache:
        assert answer(model, ids, past_key_values=cache) == expected
    for layer in range(3):
        os.unlink(store.sequence("first").page(layer, 0).path)
    assert store.match(ids[0].tolist()).tokens == 5 * PAGE + 3
    with KvfsCache(model, store, ids, name="second") as cache:
        assert cache.tokens == (5 * PAGE + 2 if implementation == "kvfs" else 0)
        assert answer(model, ids, past_key_values=cache) == expected
    assert store.sequence("second").tokens == ids[0].tolist() + expected[:-1]


def test_another_window_is_another_model(mount):
    store = store_of(mistral(8), mount)
    with pytest.raises(kvfs.Refused, match="something else"):
        store_of(mistral(9), mount)
    with pytest.raises(kvfs.InvalidArgument, match="last 8 tokens in layer 0, which looks at the last 9"):
        KvfsCache(mistral(9), store, prompt(PAGE))

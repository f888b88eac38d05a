"""Side rows: what a layer keeps of each token beside K and V."""

import numpy
import pytest
from conftest import DIM, HEADS, LAYERS, PAGE, create, rows

import kvfs

ELEMENTS = 6
SIDE = {"attention": {"side": {"name": "index_k", "row_bytes": 4 * ELEMENTS}}}


@pytest.fixture
def sparse(mount):
    """The first and the last layer have side rows, the one between them has none."""
    return create(mount, "sparse", layers=[SIDE, "attention", SIDE])


def keys(tokens):
    return numpy.arange(2 * tokens * ELEMENTS, dtype=numpy.float32).reshape(2, tokens, ELEMENTS)


@pytest.mark.parametrize("step", [1, 3, PAGE, 2 * PAGE + 3, 5 * PAGE])
def test_what_is_appended_is_in_pages(sparse, step):
    tokens = 5 * PAGE
    k, v = rows(tokens)
    side = keys(tokens)
    sequence = sparse.create_sequence("chat")
    for start in range(0, tokens, step):
        there = slice(start, min(tokens, start + step))
        ids = list(range(there.start, there.stop))
        sequence.append(ids, k[:, :, there], v[:, :, there], side=side[:, there])
    assert len(sequence) == tokens
    for layer, own in ((0, side[0]), (1, None), (2, side[1])):
        for page in sequence.pages(layer):
            there = slice(page.start, page.start + page.tokens)
            numpy.testing.assert_array_equal(page.k.numpy(), k[layer, :, there])
            if own is None:
                assert page.side is None
                continue
            found = page.side.numpy()
            assert (found.dtype, found.shape) == (numpy.uint8, (PAGE, 4 * ELEMENTS))
            numpy.testing.assert_array_equal(found.view(numpy.float32), own[there])
    found, matched = sparse.match(list(range(tokens)))
    assert (found.name, matched) == ("chat", tokens)


def test_pages_are_read_with_their_side_rows(sparse):
    k, v = rows(2 * PAGE)
    side = keys(2 * PAGE)
    sequence = sparse.create_sequence("chat")
    for start in (0, PAGE):
        there = slice(start, start + PAGE)
        sequence.write_page(1, start, k[1, :, there], v[1, :, there])
        for layer, own in ((0, side[0]), (2, side[1])):
            sequence.write_page(layer, start, k[layer, :, there], v[layer, :, there], side=own[there])
    assert sequence.append_tokens(list(range(2 * PAGE))) == 2 * PAGE
    into = [numpy.zeros((2, HEADS, PAGE, DIM), numpy.float32) for _ in "kv"]
    read = numpy.zeros((2, PAGE, ELEMENTS), numpy.float32)
    kvfs.read_pages(sequence.pages(2), *into, side=read)
    numpy.testing.assert_array_equal(read.reshape(2 * PAGE, ELEMENTS), side[1])
    numpy.testing.assert_array_equal(into[0][1], k[2, :, PAGE:])
    kvfs.read_pages(sequence.pages(1), *into)
    with pytest.raises(kvfs.InvalidArgument, match="side is missing: these pages have 24 bytes"):
        kvfs.read_pages(sequence.pages(2), *into)
    with pytest.raises(kvfs.InvalidArgument, match="nothing beside K and V"):
        kvfs.read_pages(sequence.pages(1), *into, side=read)
    with pytest.raises(kvfs.InvalidArgument, match="24 bytes in a row"):
        kvfs.read_pages(sequence.pages(2), *into, side=numpy.zeros((2, PAGE, 5), numpy.float32))
    with pytest.raises(kvfs.InvalidArgument, match="layers that keep different rows"):
        kvfs.read_pages([sequence.page(0, 0), sequence.page(1, 0)], *into, side=read)


@pytest.mark.parametrize(
    ("side", "line"),
    [
        (None, "layer 0 keeps index_k of 24 bytes beside K and V of each token: give them as side"),
        (numpy.zeros((2, 3, ELEMENTS), numpy.float16), "side has rows of 12 bytes, layer 0 keeps index_k of 24"),
        (numpy.zeros((3, 3, ELEMENTS), numpy.float32), "side rows of 3 layers: 2 of these keep any"),
        (numpy.zeros((1, 3, ELEMENTS), numpy.float32), "side rows of 1 layers: 2 of these keep any"),
        (numpy.zeros((2, 2, ELEMENTS), numpy.float32), "3 token ids and 2 rows"),
        (numpy.zeros(12, numpy.float32), r"side has shape \[12\]"),
        (numpy.zeros((2, 3, 2 * ELEMENTS), numpy.float32)[:, :, ::2], "rows that are not contiguous"),
    ],
)
def test_rows_without_theirs_are_refused(sparse, side, line):
    sequence = sparse.create_sequence("chat")
    k, v = rows(3)
    with pytest.raises(kvfs.InvalidArgument, match=line):
        sequence.append([1, 2, 3], k, v, side=side)
    assert sequence.tokens == [] and len(sequence) == 0
    sequence.append([1, 2, 3], k, v, side=keys(3))
    assert len(sequence) == 3


def test_a_layer_that_keeps_none_takes_none(model, sparse):
    k, v = rows(PAGE)
    plain = model.create_sequence("plain")
    with pytest.raises(kvfs.InvalidArgument, match="side rows of 2 layers: 0 of these keep any"):
        plain.append(list(range(PAGE)), k, v, side=keys(PAGE))
    sequence = sparse.create_sequence("chat")
    with pytest.raises(kvfs.InvalidArgument, match="side rows of 1 layers: 0 of these keep any"):
        sequence.write_page(1, 0, k[1], v[1], side=keys(PAGE)[0])
    with pytest.raises(kvfs.InvalidArgument, match="layer 2 keeps index_k"):
        sequence.write_page(2, 0, k[2], v[2])
    assert LAYERS == 3 and not sequence.pages(2)

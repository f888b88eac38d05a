"""Rows that are in no page yet."""

import gc
import threading
import time

import numpy
import pytest
from conftest import DIM, HEADS, LAYERS, PAGE, create, filled, rows, scribble

import kvfs


def same(page, k, v):
    """Compares rows with what was appended to their layer."""
    there = slice(page.start, page.start + page.tokens)
    numpy.testing.assert_array_equal(page.k.numpy(), k[page.layer, :, there])
    numpy.testing.assert_array_equal(page.v.numpy(), v[page.layer, :, there])


def test_rows_behind_the_pages(model):
    sequence, k, v = filled(model, "chat", 2 * PAGE + 3)
    for layer in range(LAYERS):
        tail = sequence.tail(layer)
        assert (tail.layer, tail.start, tail.tokens, tail.mapped) == (layer, 2 * PAGE, 3, False)
        assert tail.path.name == "0000016.tail" and tail.path.exists()
        assert tail.k.shape == (HEADS, 3, DIM) and tail.k.readonly and tail.side is None
        same(tail, k, v)
        short = sequence.tail(layer, 2 * PAGE + 1)
        assert short.tokens == 1
        same(short, k, v)


def test_both_layouts_and_bits(mount):
    bits = numpy.arange(2 * LAYERS * HEADS * 3 * DIM, dtype=numpy.uint16).reshape(2, LAYERS, HEADS, 3, DIM)
    for layout in ("hnd", "nhd"):
        sequence = create(mount, layout, dtype="bf16", layout=layout).create_sequence("chat")
        sequence.append([1, 2, 3], *bits, layout="hnd")
        tail = sequence.tail(1)
        assert tail.k.dtype == "bfloat16"
        for array, own in ((tail.k, bits[0, 1]), (tail.v, bits[1, 1])):
            expected = own if layout == "hnd" else own.swapaxes(0, 1)
            numpy.testing.assert_array_equal(array.bits().numpy(), expected)


def test_side_rows_of_any_length(mount):
    side = {"attention": {"side": {"name": "index_k", "row_bytes": 5}}}
    model = create(mount, "sparse", layers=[side, "attention", side])
    k, v = rows(3)
    keys = numpy.arange(2 * 3 * 5, dtype=numpy.uint8).reshape(2, 3, 5)
    sequence = model.create_sequence("chat")
    sequence.append([1, 2, 3], k, v, side=keys)
    for layer, own in ((0, keys[0]), (2, keys[1])):
        tail = sequence.tail(layer)
        same(tail, k, v)
        numpy.testing.assert_array_equal(tail.side.numpy(), own)
    assert sequence.tail(1).side is None
    same(sequence.tail(1), k, v)


def test_a_model_without_v(mount):
    sequence = create(mount, "latent", v_head_dim=0, num_kv_heads=1).create_sequence("chat")
    k, _ = rows(2)
    sequence.append([1, 2], k[:, :1])
    assert sequence.tail(0).v is None
    numpy.testing.assert_array_equal(sequence.tail(0).k.numpy(), k[0, :1])


def test_where_there_is_none(mount, model):
    empty = model.create_sequence("empty")
    assert empty.tail(0) is None and empty.tail(0, 0) is None
    with pytest.raises(kvfs.Missing, match="token 0 is missing"):
        empty.tail(0, 1)
    whole, _, _ = filled(model, "whole", 2 * PAGE)
    assert whole.tail(0) is None and whole.tail(0, PAGE) is None
    with pytest.raises(kvfs.Missing, match="token 16 is missing"):
        whole.tail(0, 2 * PAGE + 1)
    more, _, _ = filled(model, "more", 2 * PAGE + 1)
    assert more.tail(0, 2 * PAGE) is None
    for end in (2 * PAGE + 2, 3 * PAGE + 1, 2**63):
        with pytest.raises(kvfs.Missing, match="token 17 is missing"):
            more.tail(0, end)
    for layer in (LAYERS, 2**31):
        with pytest.raises(kvfs.InvalidArgument, match=f"layer {layer} does not exist"):
            more.tail(layer)
    with pytest.raises(OverflowError):
        more.tail(-1)


def test_rows_without_ids_come_when_they_are_asked_for(model):
    sequence, k, v = filled(model, "chat", PAGE + 1)
    # A writer that has come further in one layer.
    more_k, more_v = rows(1, seed=5)
    with open(sequence.path / "001/0000008.tail", "ab", buffering=0) as tail:
        tail.write(more_k[1].tobytes() + more_v[1].tobytes())
    assert sequence.tail(1).tokens == 1
    both = sequence.tail(1, PAGE + 2)
    assert both.tokens == 2
    numpy.testing.assert_array_equal(both.k.numpy()[:, 1:], more_k[1])
    with pytest.raises(kvfs.Missing):
        sequence.tail(0, PAGE + 2)


def test_an_array_stays_what_it_was(mount, model):
    sequence, k, v = filled(model, "chat", PAGE + 2)
    before = sequence.tail(0)
    arrays = before.k.numpy(), before.v.numpy()
    assert not arrays[0].flags.writeable
    more_k, more_v = rows(PAGE, seed=3)
    for token in range(PAGE):
        sequence.append([token], more_k[:, :, token : token + 1], more_v[:, :, token : token + 1])
        assert sequence.tail(0) is None or sequence.tail(0).start in (PAGE, 2 * PAGE)
    assert sequence.tail(0).start == 2 * PAGE and sequence.tail(0).tokens == 2
    same(before, k, v)
    sequence.clear()
    assert sequence.tail(0) is None
    del sequence, before
    gc.collect()
    mount.umount()
    numpy.testing.assert_array_equal(arrays[0], k[0, :, PAGE:])
    numpy.testing.assert_array_equal(arrays[1], v[0, :, PAGE:])


def test_what_is_written_to_an_array_is_nobody_elses(model):
    sequence, k, v = filled(model, "chat", 3)
    q = numpy.ones((HEADS, DIM), numpy.float32)
    before = kvfs.attend(q, sequence, 0).finish().numpy().copy()
    tail = sequence.tail(0)
    scribble(tail.k)
    numpy.testing.assert_allclose(kvfs.attend(q, sequence, 0).finish().numpy(), before, rtol=1e-4)
    same(sequence.tail(0), k, v)


def test_a_tail_that_grows_and_is_sealed_meanwhile(model):
    """Two threads on one object, beside a writer: each sees rows of one moment."""
    tokens = 6 * PAGE
    k, v = rows(tokens)
    writer, reader = model.create_sequence("chat"), model.sequence("chat")
    failures, ended = [], threading.Event()

    def read():
        seen = 0
        while not ended.is_set():
            try:
                tail = reader.tail(1)
            except kvfs.Changed:
                continue
            except BaseException as error:
                failures.append(error)
                return
            try:
                if tail is not None:
                    same(tail, k, v)
                    assert tail.start + tail.tokens >= seen, (tail.start, tail.tokens, seen)
                    seen = tail.start + tail.tokens
            except AssertionError as error:
                failures.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for token in range(tokens):
        writer.append([token], k[:, :, token : token + 1], v[:, :, token : token + 1])
        time.sleep(0.001)
    ended.set()
    for thread in readers:
        thread.join()
    assert not failures, failures
    assert reader.tail(1) is None and len(reader) == tokens


def test_read_pages_takes_pages_only(model):
    sequence, _, _ = filled(model, "chat", 3)
    into = [numpy.zeros((1, HEADS, 3, DIM), numpy.float32) for _ in "kv"]
    with pytest.raises(kvfs.InvalidArgument, match="tail"):
        kvfs.read_pages([sequence.tail(0)], *into)

"""Sequences: rows in, pages out."""

import os
import threading
import time

import numpy
import pytest
from conftest import DIM, HEADS, LAYERS, PAGE, create, filled, rows

import kvfs


def whole(sequence, k, v, tokens):
    """Compares every full page with what was appended."""
    for layer in range(LAYERS):
        pages = sequence.pages(layer)
        assert [page.start for page in pages] == list(range(0, tokens // PAGE * PAGE, PAGE))
        for page in pages:
            there = slice(page.start, page.start + page.tokens)
            numpy.testing.assert_array_equal(page.k.numpy(), k[layer, :, there])
            numpy.testing.assert_array_equal(page.v.numpy(), v[layer, :, there])


@pytest.mark.parametrize("step", [1, 3, PAGE, 2 * PAGE + 3, 5 * PAGE])
def test_what_is_appended_is_in_pages(model, step):
    tokens = 5 * PAGE
    k, v = rows(tokens)
    sequence = model.create_sequence("chat")
    for start in range(0, tokens, step):
        end = min(tokens, start + step)
        ids = list(range(start, end))
        assert sequence.append(ids, k[:, :, start:end], v[:, :, start:end]) == end
    assert sequence.tokens == list(range(tokens))
    assert len(sequence) == tokens
    whole(sequence, k, v, tokens)


def test_a_list_of_layers_and_the_other_layout_are_the_same(model):
    k, v = rows(2 * PAGE)
    listed = model.create_sequence("listed")
    listed.append(list(range(2 * PAGE)), list(k), list(v))
    turned = model.create_sequence("turned")
    swapped = [numpy.swapaxes(x, 2, 1) for x in (k, v)]
    turned.append(numpy.arange(2 * PAGE), *swapped, layout="nhd")
    for sequence in (listed, turned):
        whole(sequence, k, v, 2 * PAGE)


def test_bytes_are_arrays_too(model):
    sequence = model.create_sequence("chat")
    k, v = rows(1)
    views = [[memoryview(layer) for layer in x] for x in (k, v)]
    assert sequence.append([7], *views) == 1
    assert sequence.tokens == [7]


def test_dtypes_that_numpy_lacks_come_as_their_bits(mount):
    model = create(mount, "brain", dtype="bf16")
    sequence = model.create_sequence("chat")
    bits = numpy.arange(LAYERS * HEADS * PAGE * DIM, dtype=numpy.uint16).reshape(LAYERS, HEADS, PAGE, DIM)
    sequence.append(list(range(PAGE)), bits, bits + 1)
    page = sequence.page(1, 0)
    assert page.k.dtype == "bfloat16"
    numpy.testing.assert_array_equal(page.k.bits().numpy(), bits[1])
    with pytest.raises(kvfs.InvalidArgument, match="bits"):
        page.k.numpy()


def test_a_model_without_v(mount):
    model = create(mount, "latent", v_head_dim=0, num_kv_heads=1)
    k, _ = rows(PAGE)
    sequence = model.create_sequence("chat")
    sequence.append(list(range(PAGE)), k[:, :1])
    assert sequence.page(0, 0).v is None
    numpy.testing.assert_array_equal(sequence.page(0, 0).k.numpy(), k[0, :1])


def test_whole_pages_are_written_with_their_checksum(model):
    k, v = rows(PAGE + 3)
    sequence = model.create_sequence("chat")
    for layer in range(LAYERS):
        page = sequence.write_page(layer, 0, k[layer, :, :PAGE], v[layer, :, :PAGE])
        assert b"kvfs.checksum" in page.path.read_bytes()[:4096]
        sequence.write_page(layer, PAGE, k[layer, :, PAGE:], v[layer, :, PAGE:])
    assert len(sequence) == 0
    assert sequence.append_tokens(list(range(PAGE + 3))) == PAGE + 3
    assert model.match(range_of(PAGE + 3)).tokens == PAGE + 3


def range_of(tokens):
    return numpy.arange(tokens, dtype=numpy.int64)


def test_a_prompt_finds_its_longest_beginning(model):
    sequence, _, _ = filled(model, "chat", 2 * PAGE + 3)
    for prompt in (range_of(100), list(range(100)), tuple(range(100))):
        found = model.match(prompt)
        assert (found.sequence.name, found.tokens) == ("chat", 2 * PAGE + 3)
    found, tokens = model.match([0, 1, 2, 99])
    assert (found.name, tokens) == (sequence.name, 3)
    assert tuple(model.match([99])) == (None, 0)


def test_many_prefixes_are_asked_at_once(model):
    filled(model, "chat", 3 * PAGE)
    hashes = model.prefix_hashes(range_of(5 * PAGE))
    assert model.has(hashes) == [True] * 3 + [False] * 2


def test_many_pages_are_read_at_once(model):
    sequence, k, v = filled(model, "chat", 4 * PAGE)
    pages = [page for layer in range(LAYERS) for page in sequence.pages(layer)]
    there = numpy.empty((2, len(pages), HEADS, PAGE, DIM), dtype=numpy.float32)
    kvfs.read_pages(pages, *there)
    for index, page in enumerate(pages):
        tokens = slice(page.start, page.start + PAGE)
        numpy.testing.assert_array_equal(there[0, index], k[page.layer, :, tokens])
        numpy.testing.assert_array_equal(there[1, index], v[page.layer, :, tokens])
    with pytest.raises(kvfs.InvalidArgument, match="shape"):
        kvfs.read_pages(pages[:2], *there)
    there.flags.writeable = False
    with pytest.raises(kvfs.InvalidArgument, match="read-only"):
        kvfs.read_pages(pages, *there)


def test_operations_have_llama_cpps_meaning(model):
    sequence, k, v = filled(model, "chat", 3 * PAGE)
    fork = sequence.copy("fork", 0, 2 * PAGE + 1)
    assert fork.tokens == list(range(2 * PAGE + 1))
    assert fork.append([77], k[:, :, :1], v[:, :, :1]) == 2 * PAGE + 2
    assert sequence.tokens == list(range(3 * PAGE))
    fork.remove(PAGE)
    assert len(fork) == PAGE
    sequence.shift(2, PAGE, "full")
    assert model.sequence("full").tokens == list(range(3 * PAGE))
    assert len(sequence) == 3 * PAGE
    sequence.clear()
    assert sequence.tokens == []
    assert model.sequences() == ["chat", "fork", "full"]


def test_a_reader_waits_for_a_writer(model):
    sequence = model.create_sequence("chat")
    assert sequence.wait_for(0, PAGE, 0.01) == 0
    writer = threading.Thread(target=lambda: (time.sleep(0.2), filled_again(model)))
    writer.start()
    assert sequence.wait_for(LAYERS - 1, PAGE, 60) == PAGE
    writer.join()


def filled_again(model):
    k, v = rows(PAGE)
    model.sequence("chat").append(list(range(PAGE)), k, v)


def test_what_has_a_path_is_taken_for_one(model):
    sequence, _, _ = filled(model, "chat", 2 * PAGE)
    page = sequence.page(0, 0)
    for thing in (model, sequence, page):
        assert os.fspath(thing) == str(thing.path)
        assert os.path.exists(thing)


def test_a_closed_sequence_lets_go_of_everything(mount, model):
    k, v = rows(PAGE)
    with model.create_sequence("chat") as sequence:
        sequence.append(list(range(PAGE)), k, v)
        assert len(sequence) == PAGE
    mount.umount()


def test_attributes_and_plan(model):
    sequence, _, _ = filled(model, "chat", 2 * PAGE)
    assert sequence.ttl is None
    sequence.ttl = 3600
    assert sequence.ttl == 3600
    sequence.ttl = None
    assert sequence.ttl is None
    sequence.pin()
    sequence.pin(False)
    plan = sequence.plan()
    assert (plan["tokens"], plan["layers"], plan["pages"]) == (2 * PAGE, LAYERS, 2 * LAYERS)
    assert sequence.page(0, 0).tier == "ssd"


def test_pages_move_between_tiers(place):
    with kvfs.Mount(place / "store", place / "mnt", ram="64M") as mount:
        sequence, k, _ = filled(create(mount, "tiny"), "chat", PAGE)
        mount.sync()
        sequence.evict("ssd")
        assert sequence.page(0, 0).tier == "ssd"
        sequence.promote()
        assert sequence.page(0, 0).tier == "ram"
        numpy.testing.assert_array_equal(sequence.page(0, 0).k.numpy(), k[0])


def test_sequences_go_to_files_and_come_back(model, place):
    sequence, k, v = filled(model, "chat", PAGE + 3)
    sequence.export(place / "cache.safetensors")
    again = model.import_file(place / "cache.safetensors", "again", sequence.tokens)
    assert again.tokens == sequence.tokens
    whole(again, k, v, PAGE)


def test_what_was_emptied_takes_rows_again(model):
    sequence, k, v = filled(model, "chat", 2 * PAGE + 1)
    sequence.clear()
    copied = sequence.copy("copied")
    written = sequence.copy("written")
    for emptied in (sequence, copied):
        assert emptied.append(list(range(PAGE + 1)), k[:, :, : PAGE + 1], v[:, :, : PAGE + 1]) == PAGE + 1
        assert emptied.tokens == list(range(PAGE + 1))
    for layer in range(LAYERS):
        written.write_page(layer, 0, k[layer, :, :PAGE], v[layer, :, :PAGE])
    assert written.append_tokens(list(range(PAGE))) == PAGE
    sequence.close()
    sequence.remove(0)
    assert sequence.append([5], k[:, :, :1], v[:, :, :1]) == 1

"""The beginning of a layer as one array."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading

import numpy
import pytest
from conftest import DIM, HEADS, LAYERS, PAGE, create, filled, rows

import kvfs


def whole(prefix, k, v, pages):
    """Compares with what was appended, as arrays over all tokens."""
    assert (prefix.pages, prefix.tokens) == (pages, pages * PAGE)
    for array, own in ((prefix.k, k), (prefix.v, v)):
        assert array.shape == (pages, HEADS, PAGE, DIM) and array.readonly
        found = array.numpy().swapaxes(1, 2).reshape(pages * PAGE, HEADS, DIM)
        numpy.testing.assert_array_equal(found, own[prefix.layer, :, : pages * PAGE].swapaxes(0, 1))


def test_pages_are_one_array(model):
    sequence, k, v = filled(model, "chat", 5 * PAGE + 3)
    for layer in range(LAYERS):
        prefix = sequence.prefix(layer)
        whole(prefix, k, v, 5)
        assert prefix.layer == layer and prefix.side is None
        # A page of 4 KiB of header, K, V and what fills it up.
        assert prefix.k.strides == (8192 // 4, PAGE * DIM, DIM, 1)
        assert prefix.mapped == sequence.page(layer, 0).mapped
        for end, pages in ((5 * PAGE + 3, 5), (5 * PAGE - 1, 4), (2 * PAGE, 2), (PAGE, 1)):
            whole(sequence.prefix(layer, end), k, v, pages)
    assert repr(prefix) == "<kvfs.Prefix of layer 2: 5 pages>"


def test_no_byte_is_copied(mount):
    model = kvfs.Model.create(
        mount.model("large"), num_layers=1, num_kv_heads=8, head_dim=128, dtype="f16", page_tokens=512
    )
    tokens = 16 * 512
    k = numpy.ones((8, tokens, 128), dtype=numpy.float16)
    sequence = model.create_sequence("chat")
    sequence.append(numpy.arange(tokens), [k], [k])
    prefix = sequence.prefix(0)
    if not prefix.mapped:
        pytest.skip("the daemon serves the bytes here")

    def anonymous_kib():
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    before = anonymous_kib()
    array = prefix.k.numpy()
    assert float(array[:, ::2, ::64, ::64].sum(dtype=numpy.float32)) == 16 * 4 * 8 * 2
    assert anonymous_kib() - before < 1024


def test_layouts_side_rows_and_models_without_v(mount):
    side = {"attention": {"side": {"name": "index_k", "row_bytes": 5}}}
    model = create(mount, "sparse", layers=[side, "attention", "attention"], layout="nhd", v_head_dim=0)
    k, _ = rows(2 * PAGE)
    keys = numpy.arange(2 * PAGE * 5, dtype=numpy.uint8).reshape(1, 2 * PAGE, 5)
    sequence = model.create_sequence("chat")
    sequence.append(list(range(2 * PAGE)), k, side=keys, layout="hnd")
    prefix = sequence.prefix(0)
    assert prefix.v is None and prefix.k.shape == (2, PAGE, HEADS, DIM)
    numpy.testing.assert_array_equal(prefix.k.numpy().reshape(-1, HEADS, DIM), k[0].swapaxes(0, 1))
    numpy.testing.assert_array_equal(prefix.side.numpy().reshape(-1, 5), keys[0])


def test_where_there_is_none(model):
    assert model.create_sequence("empty").prefix(0) is None
    short, _, _ = filled(model, "short", PAGE - 1)
    assert short.prefix(0) is None and short.prefix(0, 0) is None
    with pytest.raises(kvfs.Missing, match="token 7 is missing"):
        short.prefix(0, PAGE)
    with pytest.raises(kvfs.InvalidArgument, match=f"layer {LAYERS} does not exist"):
        short.prefix(LAYERS)
    holed, _, _ = filled(model, "holed", 3 * PAGE)
    os.remove(holed.page(1, PAGE))
    with pytest.raises(kvfs.Missing) as missing:
        holed.prefix(1)
    assert "0000008" in str(missing.value)
    assert holed.prefix(1, PAGE).pages == 1 and holed.prefix(0).pages == 3


def test_it_outlives_everything(mount, model):
    sequence, k, v = filled(model, "chat", 40 * PAGE)
    prefix = sequence.prefix(2)
    array = prefix.v.numpy()
    files = [page.path for page in sequence.pages(2)]
    with pytest.raises(OSError):
        os.truncate(files[3], 0)
    for file in files:
        os.remove(file)
    whole(prefix, k, v, 40)
    sequence.clear()
    mount.sync()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    del sequence, prefix
    gc.collect()
    numpy.testing.assert_array_equal(array.swapaxes(1, 2).reshape(-1, HEADS, DIM), v[2].swapaxes(0, 1))


def test_what_is_written_to_it_reaches_nobody(model):
    sequence, k, v = filled(model, "chat", 3 * PAGE)
    prefix = sequence.prefix(0)
    # Some bytes of the second page.
    second = prefix.k.numpy()[1]
    ctypes.memset(second.ctypes.data, 0, second.nbytes)
    assert not second.any()
    whole(sequence.prefix(0), k, v, 3)
    numpy.testing.assert_array_equal(sequence.page(0, PAGE).k.numpy(), k[0, :, PAGE : 2 * PAGE])


def test_memory_goes_back(model):
    sequence, _, _ = filled(model, "chat", 20 * PAGE)

    def mappings():
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum(os.fspath(model.path.parent.parent) in line for line in maps)

    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        array = sequence.prefix(1).k.numpy()
        assert mappings() - before <= 20
        del array
    assert mappings() == before and len(os.listdir("/proc/self/fd")) <= descriptors + 2


def exchange(one, other):
    """Gives two directories each other's name, as an operation on a sequence does; without the interpreter."""
    names = os.fsencode(one), os.fsencode(other)
    at_cwd, renameat2 = -100, ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(at_cwd, names[0], at_cwd, names[1], 2):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def test_an_edit_meanwhile(model):
    """A prefix is of before or after an operation on the whole sequence, never some of both; nor where one sequence has
    come back by the end, which no comparison of before and after tells."""
    pages = 100
    k, v = rows(pages * PAGE)
    sequences, contents = [], []
    for number in range(2):
        sequence = model.create_sequence(f"of-{number}")
        sequence.append(list(range(pages * PAGE)), k + number, v)
        sequence.close()
        sequences.append(sequence)
        contents.append((k + number)[1].swapaxes(0, 1))
    ended, edits = threading.Event(), 0

    def edit():
        nonlocal edits
        while not ended.is_set():
            exchange(*(sequence.path for sequence in sequences))
            edits += 1

    editor = threading.Thread(target=edit)
    editor.start()
    failures, seen, most = 0, 0, 0
    try:
        for _ in range(10):
            before = edits
            try:
                prefix = sequences[0].prefix(1)
            except kvfs.Changed:
                continue
            most, seen = max(most, edits - before), seen + 1
            found = prefix.k.numpy().swapaxes(1, 2).reshape(-1, HEADS, DIM)
            failures += not any(numpy.array_equal(found, content) for content in contents)
    finally:
        ended.set()
        editor.join()
    assert not failures and seen
    assert most > 1, "no sequence came back while a prefix was taken: this has tested nothing"


FORK = """
import os, sys, kvfs
sequence = kvfs.Model(sys.argv[1]).sequence("chat")
prefix = sequence.prefix(0)
array = prefix.k.numpy()
child = os.fork()
if child == 0:
    try:
        sequence.prefix(0)
        os._exit(1)
    except kvfs.Changed as error:
        assert "fork" in str(error), error
    assert float(array.sum()) == float(sys.argv[2])
    assert kvfs.Model(sys.argv[1]).sequence("chat").prefix(0).pages == 4
    del prefix, array, sequence
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert float(array.sum()) == float(sys.argv[2])
"""


def test_a_fork_has_it_too(model):
    sequence, _, _ = filled(model, "chat", 4 * PAGE)
    total = float(sequence.prefix(0).k.numpy().sum())
    sequence.close()
    line = [sys.executable, "-W", "ignore", "-c", FORK, os.fspath(model.path), repr(total)]
    subprocess.run(line, check=True, timeout=120)

"""Layers one after the other, the next one read ahead."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest
from conftest import DIM, HEADS, LAYERS, PAGE, create, filled, scribble

import kvfs

# Some dozen pages of each layer, of which a stream holds two at a time.
MANY = 24 * PAGE
FEW = {"ahead_bytes": 0}


def same(page, k, v):
    there = slice(page.start, page.start + page.tokens)
    numpy.testing.assert_array_equal(page.k.numpy(), k[page.layer, :, there])
    numpy.testing.assert_array_equal(page.v.numpy(), v[page.layer, :, there])


def threads():
    """Those that read."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm", encoding="ascii") as comm:
                names.append(comm.read())
        except FileNotFoundError:
            pass
    return sorted(name for name in names if name.startswith(("kvfs-layers", "kvfs-read")))


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left():
    """A stream leaves no thread and no descriptor behind, however it ends."""
    gc.collect()
    before = threads(), len(descriptors())
    assert not before[0]
    yield
    gc.collect()
    assert (threads(), len(descriptors())) == before


@pytest.mark.parametrize("ahead", [{}, FEW])
def test_all_layers_in_order(nothing_left, model, ahead):
    sequence, k, v = filled(model, "chat", MANY + 3)
    sequence.close()
    seen = {}
    parts = 0
    for part in sequence.stream(**ahead):
        assert list(seen) in (list(range(part.layer)), list(range(part.layer + 1)))
        pages, tails, ended = seen.setdefault(part.layer, ([], [], []))
        assert not ended and part.pages
        for page in part.pages:
            same(page, k, v)
            assert page.layer == part.layer
            pages.append(page.start)
        if part.tail is not None:
            assert part.last
            same(part.tail, k, v)
            tails.append((part.tail.start, part.tail.tokens))
        ended += [True] if part.last else []
        parts += 1
    everything = (list(range(0, MANY, PAGE)), [(MANY, 3)], [True])
    assert seen == {layer: everything for layer in range(LAYERS)}
    assert parts == LAYERS if not ahead else parts > 2 * LAYERS


def test_some_layers_and_tokens(model):
    sequence, k, v = filled(model, "chat", 4 * PAGE + 3)
    parts = list(sequence.stream(PAGE + 1, 2 * PAGE + 1, layers=[2, 0]))
    assert [(part.layer, [page.start for page in part.pages], part.tail) for part in parts] == [
        (2, [PAGE, 2 * PAGE], None),
        (0, [PAGE, 2 * PAGE], None),
    ]
    for part in parts:
        for page in part.pages:
            same(page, k, v)
    [part] = sequence.stream(end=4 * PAGE + 1, layers=[1])
    assert (len(part.pages), part.tail.tokens) == (4, 1)
    assert repr(part) == "<kvfs.Part of layer 1: 4 pages and a tail>"


def test_what_is_not_there(nothing_left, model):
    empty = model.create_sequence("empty")
    assert [(part.layer, part.pages, part.tail, part.last) for part in empty.stream()] == [
        (layer, [], None, True) for layer in range(LAYERS)
    ]
    sequence, _, _ = filled(model, "chat", 2 * PAGE)
    sequence.close()
    with pytest.raises(kvfs.Missing, match="token 16 is missing"):
        sequence.stream(end=2 * PAGE + 1)
    with pytest.raises(kvfs.InvalidArgument, match=f"layer {LAYERS} does not exist"):
        sequence.stream(layers=[0, LAYERS])
    with pytest.raises(kvfs.InvalidArgument, match="behind the end"):
        sequence.stream(2 * PAGE + 1)
    assert list(sequence.stream(layers=[])) == []
    sequence.clear()
    os.rename(sequence.path, sequence.path.with_name("elsewhere"))
    with pytest.raises(kvfs.Missing):
        sequence.stream(end=1)


def test_the_next_layer_is_read_meanwhile(nothing_left, model):
    sequence, k, v = filled(model, "chat", MANY)
    sequence.close()
    for wait in (0.2, 1, 5, 20):
        copied = sequence.copy(f"copied-{wait}".replace(".", "-"))
        with copied.stream() as stream:
            assert next(stream).layer == 0
            time.sleep(wait)
            # It is in memory by now, and its files are not needed any more.
            for page in copied.pages(1):
                os.remove(page)
            try:
                part = next(stream)
            except kvfs.Missing:
                continue
        assert (part.layer, len(part.pages)) == (1, MANY // PAGE)
        for page in part.pages:
            same(page, k, v)
        return
    pytest.fail("nothing was read ahead")


def anonymous_bytes():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def test_what_is_read_ahead_is_bounded(nothing_left, mount):
    model = kvfs.Model.create(mount.model("large"), num_layers=3, num_kv_heads=8, head_dim=64, dtype="f16", page_tokens=512)
    tokens = 64 * 512
    k = numpy.ones((3, 8, tokens, 64), numpy.float16)
    with model.create_sequence("chat") as sequence:
        sequence.append(numpy.arange(tokens), k, k)
    del k
    gc.collect()
    before = anonymous_bytes()
    # A layer has 64 MiB.
    stream = sequence.stream(ahead_bytes=16 << 20)
    layers, parts = [], 0
    for part in stream:
        time.sleep(0.02)
        layers += [part.layer] * len(part.pages)
        parts += 1
        assert float(part.pages[0].k.numpy()[0, 0, 0]) == 1
        # What the caller has, what waits, and what is on its way.
        assert anonymous_bytes() - before < 48 << 20
        del part
    assert layers == [layer for layer in range(3) for _ in range(64)] and parts >= 12


def test_a_million_tokens(nothing_left, mount):
    model = create(mount, "long", dtype="f16", num_layers=2, num_kv_heads=1, head_dim=8, page_tokens=1024)
    tokens = 1_000_000
    k = numpy.arange(tokens, dtype=numpy.uint32).view(numpy.float16).reshape(1, tokens, 2).repeat(4, axis=2)
    with model.create_sequence("chat") as sequence:
        sequence.append(numpy.arange(tokens), [k, k], [k, k])
    at = {0: 0, 1: 0}
    for part in sequence.stream(ahead_bytes=4 << 20):
        for page in [*part.pages, *([part.tail] if part.tail else [])]:
            end = at[part.layer] + page.tokens
            there = slice(at[part.layer], end)
            assert page.start == there.start
            for array in (page.k, page.v):
                numpy.testing.assert_array_equal(array.bits().numpy(), k[:, there].view(numpy.uint16))
            at[part.layer] = end
    assert at == {0: tokens, 1: tokens}


def test_a_failure_ends_it(nothing_left, model):
    sequence, k, v = filled(model, "chat", MANY)
    sequence.close()
    stream = sequence.stream(**FEW)
    os.remove(sequence.page(2, 12 * PAGE))
    given = []
    with pytest.raises(kvfs.Missing, match="layer 2: the page with token 96 is missing"):
        for part in stream:
            given += part.pages
    # What came before is whole.
    assert len(given) >= 2 * MANY // PAGE
    for page in given:
        same(page, k, v)
    for _ in range(2):
        with pytest.raises(kvfs.InvalidArgument, match="begin another"):
            next(stream)
    assert threads() == []


def test_a_page_that_is_replaced_ends_it(nothing_left, model):
    sequence, k, v = filled(model, "chat", MANY)
    stream = sequence.stream(**FEW)
    sequence.write_page(2, 12 * PAGE, k[0, :, :PAGE], v[0, :, :PAGE])
    sequence.close()
    with pytest.raises(kvfs.Changed, match="changed since"):
        list(stream)


@pytest.mark.parametrize("end", ["close", "with", "del", "raise"])
def test_whoever_stops_leaves_nothing(nothing_left, model, end):
    sequence, k, v = filled(model, "chat", MANY)
    sequence.close()
    if end == "with":
        with sequence.stream(**FEW) as stream:
            part = next(stream)
    elif end == "raise":
        with pytest.raises(ZeroDivisionError), sequence.stream(**FEW) as stream:
            for part in stream:
                part.layer / 0
    else:
        stream = sequence.stream(**FEW)
        part = next(stream)
        if end == "close":
            stream.close()
            stream.close()
    if end == "del":
        del stream
    else:
        with pytest.raises(kvfs.InvalidArgument, match="was closed"):
            next(stream)
    assert threads() == []
    # What was given stays.
    for page in part.pages:
        same(page, k, v)


def test_arrays_outlive_everything(mount, model):
    sequence, k, v = filled(model, "chat", MANY)
    arrays = [(page.layer, page.start, page.k.numpy()) for part in sequence.stream(**FEW) for page in part.pages]
    sequence.clear()
    del sequence
    gc.collect()
    mount.umount(lazy=True)
    for layer, start, array in arrays:
        assert not array.flags.writeable
        numpy.testing.assert_array_equal(array, k[layer, :, start : start + PAGE])


def test_pages_in_memory_are_mapped_and_nobody_elses(place):
    with kvfs.Mount(place / "store", place / "mnt", ram="64M") as mount:
        sequence, k, v = filled(create(mount, "tiny"), "chat", 4 * PAGE)
        q = numpy.ones((HEADS, DIM), numpy.float32)
        before = kvfs.attend(q, sequence, 0).finish().numpy().copy()
        served = sequence.page(0, 0).mapped
        [part] = sequence.stream(layers=[0])
        for page in part.pages:
            assert page.tier == "ram" and page.mapped == served
            scribble(page.k)
        numpy.testing.assert_allclose(kvfs.attend(q, sequence, 0).finish().numpy(), before, rtol=1e-4)
        for page in sequence.pages(0):
            same(page, k, v)
        # Mappings keep the mount busy.
        del part, page
        sequence.close()


def test_two_threads_share_one(nothing_left, model):
    sequence, k, v = filled(model, "chat", MANY)
    sequence.close()
    stream = sequence.stream(**FEW)
    taken, failures = [], []

    def take():
        try:
            for part in stream:
                for page in part.pages:
                    same(page, k, v)
                    taken.append((page.layer, page.start))
        except BaseException as error:
            failures.append(error)

    takers = [threading.Thread(target=take) for _ in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert not failures, failures
    assert sorted(taken) == [(layer, start) for layer in range(LAYERS) for start in range(0, MANY, PAGE)]
    assert list(stream) == []


def test_a_mount_that_goes_away(nothing_left, mount, model):
    sequence, k, v = filled(model, "chat", 4 * MANY)
    mount.sync()
    sequence.close()
    stream = sequence.stream(**FEW)
    given = [*next(stream).pages]
    os.kill(mount.status()["pid"], signal.SIGKILL)
    with pytest.raises(kvfs.Error) as gone:
        for part in stream:
            given += part.pages
    # What was under way with the daemon may say so in other words.
    assert isinstance(gone.value, kvfs.Disconnected) or gone.value.errno
    assert len(given) < 4 * LAYERS * MANY // PAGE
    for page in given:
        same(page, k, v)


FORK = """
import os, sys, kvfs
sequence = kvfs.Model(sys.argv[1]).sequence("chat")
stream = sequence.stream(ahead_bytes=0)
first = next(stream)
child = os.fork()
if child == 0:
    try:
        next(stream)
        os._exit(1)
    except kvfs.Changed as error:
        assert "fork" in str(error), error
    assert float(first.pages[0].k.numpy().sum()) == float(sys.argv[2])
    stream.close()
    assert sum(len(part.pages) for part in kvfs.Model(sys.argv[1]).sequence("chat").stream()) == 72
    del stream, first
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert len(first.pages) + sum(len(part.pages) for part in stream) == 72
"""


def test_a_fork_leaves_it_to_its_parent(model):
    sequence, k, _ = filled(model, "chat", MANY)
    line = [sys.executable, "-W", "ignore", "-c", FORK, os.fspath(model.path), repr(float(k[0, :, :PAGE].sum()))]
    subprocess.run(line, check=True, timeout=120)

"""What is wrong is an exception that says what to do, and nothing is half written."""

import errno
import os
import signal
import subprocess
import sys
import time

import numpy
import pytest
from conftest import DIM, HEADS, LAYERS, PAGE, create, filled, rows

import kvfs


class OnAnotherDevice:
    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        raise AssertionError("not asked for")


def test_rows_that_do_not_fit(model):
    sequence, k, v = filled(model, "chat", PAGE + 2)
    one_k, one_v = rows(1)
    cases = [
        ([1], one_k[:, :1], one_v, "shape"),
        ([1], one_k[..., :8], one_v, "shape"),
        ([1], one_k[:, :, :, ::2].repeat(2, -1)[..., ::2], one_v, "shape"),
        ([1], numpy.zeros((LAYERS, HEADS, 1, 2 * DIM), numpy.float32)[..., ::2], one_v, "contiguous"),
        ([1], one_k.astype(numpy.float16), one_v, "float16"),
        ([1], one_k.astype(">f4"), one_v, "byte order|endian"),
        ([1], one_k, one_v[:2], "2 of V"),
        ([1, 2], one_k, one_v, "2 token ids and 1 rows"),
        ([1], one_k[:2], one_v[:2], "2 layers: this model keeps 3"),
        ([1], OnAnotherDevice(), one_v, "another device"),
        ([1], "rows", one_v, "__dlpack__"),
        ([1], one_k, None, "V"),
        ([-1], one_k, one_v, "token 0 is -1"),
        ([2**32], one_k, one_v, "token 0"),
        (["a"], one_k, one_v, "token 0 is 'a'"),
        (numpy.zeros(1, numpy.float32), one_k, one_v, "int32"),
        (numpy.zeros((2, 2), numpy.int64), one_k, one_v, "one row"),
    ]
    for ids, bad_k, bad_v, why in cases:
        with pytest.raises(kvfs.InvalidArgument, match=why) as refused:
            sequence.append(ids, bad_k, bad_v)
        assert refused.value.errno == errno.EINVAL
        assert isinstance(refused.value, OSError)
    with pytest.raises(kvfs.InvalidArgument, match="layout"):
        sequence.append([1], one_k, one_v, layout="dhn")
    assert sequence.tokens == list(range(PAGE + 2))
    assert sequence.append([5], one_k, one_v) == PAGE + 3
    numpy.testing.assert_array_equal(sequence.page(0, 0).k.numpy(), k[0, :, :PAGE])


def test_pages_that_do_not_fit(model):
    sequence = model.create_sequence("chat")
    k, v = rows(PAGE + 1)
    for start, tokens, why in ((3, PAGE, "page"), (0, PAGE + 1, "1 to 8"), (0, 0, "1 to 8")):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            sequence.write_page(0, start, k[0, :, :tokens], v[0, :, :tokens])
    with pytest.raises(kvfs.InvalidArgument, match="layers|layer 9|place"):
        sequence.write_page(9, 0, k[0, :, :PAGE], v[0, :, :PAGE])
    with pytest.raises(kvfs.InvalidArgument, match="several layers"):
        sequence.write_page(0, 0, k[:, :, :PAGE], v[:, :, :PAGE])
    assert not list(sequence.path.glob("*/*"))


def test_names_that_are_not_there(mount, model):
    with pytest.raises(kvfs.Missing, match="create_sequence") as missing:
        model.sequence("nobody")
    assert missing.value.errno == errno.ENOENT
    with pytest.raises(kvfs.Missing):
        kvfs.Model(mount.model("nothing"))
    with pytest.raises(kvfs.Missing):
        model.create_sequence("chat").page(0, 0).k.numpy()
    with pytest.raises(kvfs.InvalidArgument, match="name of a sequence"):
        model.create_sequence(".hidden")
    with pytest.raises(kvfs.InvalidArgument, match="64 hexadecimal"):
        model.has(["abc"])


def test_a_model_of_another_geometry(mount, model):
    assert create(mount, "tiny").manifest == model.manifest
    with pytest.raises(kvfs.Refused, match="cache of something else"):
        create(mount, "tiny", head_dim=32)
    for wrong, why in (({"dtype": "f12"}, "f12"), ({"head_dim": 0}, "head_dim"), ({"num_layers": "x"}, "manifest")):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            create(mount, "other", **wrong)
    filled(model, "chat", PAGE)
    other = create(mount, "wide", head_dim=2 * DIM)
    sequence = other.create_sequence("chat")
    with pytest.raises(kvfs.InvalidArgument, match="shape"):
        sequence.append(list(range(PAGE)), *rows(PAGE))


def test_two_writers_of_one_sequence(model):
    first, _, _ = filled(model, "chat", PAGE + 1)
    k, v = rows(1)
    second = model.sequence("chat")
    with pytest.raises(kvfs.Busy, match="another writer") as busy:
        second.append([1], k, v)
    assert busy.value.errno == errno.EBUSY
    assert first.append([1], k, v) == PAGE + 2
    del first
    assert second.append([2], k, v) == PAGE + 3


def test_a_writer_without_the_lock_is_noticed(model):
    sequence, _, _ = filled(model, "chat", 3)
    k, v = rows(1)
    # As the files alone allow it: rows in a tail, which no id names.
    with open(sequence.path / "001" / "0000000.tail", "ab", buffering=0) as tail:
        tail.write(k[1].tobytes() + v[1].tobytes())
    with pytest.raises(kvfs.Busy, match="somebody else"):
        sequence.append([3], k, v)
    assert sequence.tokens == [0, 1, 2]
    # What nobody named was taken out, in all layers.
    assert sequence.append([3], k, v) == 4
    assert {len(path.read_bytes()) for path in sequence.path.glob("*/*.tail")} == {4 * 2 * k[1].nbytes}


def test_a_writer_that_was_killed_has_added_nothing(model):
    sequence, k, v = filled(model, "chat", PAGE - 1)
    del sequence
    one_k, one_v = rows(1, seed=5)
    # It has sealed the page of one layer, and came no further.
    with open(model.path / "sequences/chat/000/0000000.tail", "ab", buffering=0) as tail:
        tail.write(b"".join(x[0, head].tobytes() for x in (one_k, one_v) for head in range(HEADS)))
    sequence = model.sequence("chat")
    assert len(sequence) == PAGE - 1
    other_k, other_v = rows(1, seed=6)
    assert sequence.append([9], other_k, other_v) == PAGE
    for layer in range(LAYERS):
        page = sequence.page(layer, 0).k.numpy()
        numpy.testing.assert_array_equal(page[:, : PAGE - 1], k[layer])
        numpy.testing.assert_array_equal(page[:, PAGE - 1 :], other_k[layer])


def test_a_mount_that_is_gone_and_comes_back(place, mount, model):
    sequence, k, v = filled(model, "chat", PAGE + 1)
    mapped = sequence.page(0, 0).k.numpy()
    mount.sync()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    for call in (
        lambda: sequence.append([1], k[:, :, :1], v[:, :, :1]),
        lambda: model.match([1]),
        lambda: sequence.page(1, 0).k,
        lambda: sequence.tail(0),
        lambda: kvfs.attend(numpy.zeros((4, DIM), numpy.float32), sequence, 0),
        lambda: mount.status(),
        lambda: mount.sync(),
    ):
        gone_for_good(call)
    numpy.testing.assert_array_equal(mapped, k[0, :, :PAGE])
    again = kvfs.Mount(place / "store", mount.mountpoint)
    model = kvfs.Model(again.model("tiny"))
    sequence, tokens = model.match(list(range(PAGE + 1)))
    assert tokens == PAGE + 1
    assert sequence.append([1], k[:, :, :1], v[:, :, :1]) == PAGE + 2


def gone_for_good(call):
    """A call may still be under way with the daemon that ends; some moments later none is."""
    for _ in range(100):
        try:
            call()
        except kvfs.Disconnected as error:
            assert error.errno == errno.ENOTCONN
            assert "mount" in str(error)
            return
        except kvfs.Error:
            pass
        time.sleep(0.1)
    pytest.fail("the mount is not gone")


FORK = """
import os, sys, numpy, kvfs
model = kvfs.Model(sys.argv[1])
sequence = model.sequence("chat")
q = numpy.zeros((2, 2, 16), numpy.float32)
page = sequence.page(0, 0).k.numpy()
kvfs.attend(q, sequence, 0, threads=2)
rows = [numpy.zeros((3, 2, 1, 16), numpy.float32)] * 2
sequence.append([1], *rows)
child = os.fork()
if child == 0:
    for call in (
        lambda: sequence.tokens,
        lambda: sequence.tail(0),
        lambda: sequence.append([1], *rows),
        lambda: kvfs.attend(q, sequence, 0),
    ):
        try:
            call()
            os._exit(1)
        except kvfs.Changed as error:
            assert "fork" in str(error), error
    assert page.shape == (2, 8, 16) and float(page.sum()) == float(sys.argv[2])
    again = kvfs.Model(sys.argv[1]).sequence("chat")
    assert len(again) == 9 and again.tail(0).tokens == 1
    kvfs.attend(q, again, 0, threads=2)
    try:
        again.append([1], *rows)
        os._exit(2)
    except kvfs.Busy:
        pass
    del sequence, again
    # Not os._exit: what Python lets go of at the end must not wait for threads that are not there.
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert sequence.append([2], *rows) == 10
"""


def test_a_fork_leaves_alone_what_is_its_parents(model):
    sequence, k, _ = filled(model, "chat", PAGE)
    del sequence
    line = [sys.executable, "-W", "ignore", "-c", FORK, os.fspath(model.path), repr(float(k[0].sum()))]
    subprocess.run(line, check=True, timeout=120)


def test_threads_do_not_wait_for_each_other(model):
    import threading

    sequence, _, _ = filled(model, "chat", PAGE)
    ticks = []
    waiting = threading.Thread(target=lambda: sequence.wait_for(0, 10 * PAGE, 1.0))
    waiting.start()
    while waiting.is_alive():
        ticks.append(model.match([0, 1]).tokens)
    assert len(ticks) > 10

"""Many values under names in `files/`."""

import os
import threading

import numpy
import pytest

import kvfs


@pytest.fixture
def files(mount):
    return kvfs.Files(mount.files("engine/blocks"))


def blocks(count, length=5000):
    generator = numpy.random.default_rng(7)
    return [generator.integers(0, 256, length, numpy.uint8) for _ in range(count)]


def test_many_are_written_asked_and_read_at_once(files):
    names = [f"block-{index}" for index in range(200)]
    values = blocks(200)
    assert files.has(names) == [False] * 200
    assert files.write(names, values) == [None] * 200
    assert files.has(["other", *names, "block-200"]) == [False] + [True] * 200 + [False]
    assert files.count_leading([*names, "other", "block-1"]) == 200
    assert files.count_leading(["other", *names]) == 0
    into = [numpy.zeros(5000, numpy.uint8) for _ in names]
    assert files.read(names[::-1], into) == [None] * 200
    assert all(numpy.array_equal(there, value) for there, value in zip(into, values[::-1]))
    # Nothing else is left behind.
    assert sorted(os.listdir(files)) == sorted(names)
    assert files.remove([*names[:2], "other"]) == [True, True, False]
    assert files.has(names[:3]) == [False, False, True]


def test_each_says_what_went_wrong_with_it(files):
    good, longer = blocks(1)[0], numpy.zeros(5001, numpy.uint8)
    assert files.write(["good", "longer"], [good, longer]) == [None, None]
    os.mkdir(os.path.join(files, "directory"))
    into = [numpy.zeros(5000, numpy.uint8) for _ in range(4)]
    fine, missing, wrong, other = files.read(["good", "absent", "longer", "directory"], into)
    assert fine is None and numpy.array_equal(into[0], good)
    assert isinstance(missing, kvfs.Missing)
    assert isinstance(wrong, kvfs.Refused) and "5001 bytes" in str(wrong)
    assert isinstance(other, kvfs.Error)
    (shorter,) = files.read(["good"], [numpy.zeros(5001, numpy.uint8)])
    assert isinstance(shorter, kvfs.Refused) and "5000 bytes" in str(shorter)
    long_name, fine = files.write(["x" * 256, "fine"], [good, good])
    assert fine is None and isinstance(long_name, kvfs.Error)
    # What could not be published was taken away again.
    assert sorted(os.listdir(files)) == ["directory", "fine", "good", "longer"]


@pytest.mark.parametrize("name", ["", ".hidden", "..", "a/b", "nul\0"])
def test_names_that_are_paths_are_refused(files, name):
    for call in (
        lambda: files.has(["good", name]),
        lambda: files.write([name], blocks(1)),
        lambda: files.read([name], blocks(1)),
        lambda: files.remove([name]),
    ):
        with pytest.raises(kvfs.InvalidArgument, match="no name"):
            call()


def test_buffers_that_do_not_fit_are_refused(files):
    files.write(["block"], blocks(1))
    fixed = numpy.zeros(5000, numpy.uint8)
    fixed.flags.writeable = False
    for buffers, why in (
        ([], "1 names and 0 buffers"),
        ([numpy.zeros((5000, 2), numpy.uint8)[:, 0]], "contiguous"),
        ([bytes(5000)], "__dlpack__"),
        (["text"], "give an array"),
    ):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            files.read(["block"], buffers)
    with pytest.raises((kvfs.InvalidArgument, BufferError)):
        files.read(["block"], [fixed])
    assert not fixed.any()


def test_readers_see_the_old_value_or_the_new_one(files):
    old, new = (numpy.full(1 << 20, number, numpy.uint8) for number in (1, 2))
    files.write(["block"], [old])
    end = threading.Event()

    def replace():
        for turn in range(60):
            assert files.write(["block"], [(new, old)[turn % 2]]) == [None]
        end.set()

    writer = threading.Thread(target=replace)
    writer.start()
    seen = set()
    while not end.is_set():
        into = numpy.zeros(1 << 20, numpy.uint8)
        assert files.read(["block"], [into]) == [None]
        assert into[0] in (1, 2) and (into == into[0]).all()
        seen.add(int(into[0]))
    writer.join()
    assert seen


def test_a_mount_that_is_gone_says_so(mount, files):
    files.write(["block"], blocks(1))
    os.kill(mount.status()["pid"], 9)
    with pytest.raises(kvfs.Disconnected):
        files.has(["block", "other"])
    (gone,) = files.write(["block"], blocks(1))
    assert isinstance(gone, kvfs.Disconnected)

"""Pages as arrays of other libraries."""

import gc
import mmap
import os

import numpy
import pytest
from conftest import PAGE, filled

import kvfs


def resident_kib():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def test_a_page_is_not_copied(mount, model):
    sequence, _, _ = filled(model, "chat", PAGE)
    page = sequence.page(0, 0)
    assert page.mapped == (os.geteuid() == 0)
    arrays = [page.k.numpy(), page.k.numpy(), numpy.asarray(page.k)]
    addresses = {array.__array_interface__["data"][0] for array in arrays}
    assert len(addresses) == 1
    assert (addresses.pop() - 4096) % mmap.PAGESIZE == 0 or not page.mapped


def test_bytes_of_large_pages_stay_where_they_are(mount):
    model = kvfs.Model.create(
        mount.model("large"), num_layers=1, num_kv_heads=8, head_dim=128, dtype="f16", page_tokens=2048
    )
    k = numpy.ones((8, 2048, 128), dtype=numpy.float16)
    sequence = model.create_sequence("chat")
    sequence.append(numpy.arange(2048), [k], [k])
    page = sequence.page(0, 0)
    if not page.mapped:
        pytest.skip("the daemon serves the bytes here")
    before = resident_kib()
    array = sequence.page(0, 0).k.numpy()
    assert float(array[::2, ::64].sum(dtype=numpy.float32)) == 4 * 32 * 128
    # 8 MiB of page, nothing of it in memory of ours.
    assert resident_kib() - before < 1024


def test_arrays_are_read_only_and_outlive_everything(mount, model):
    sequence, k, _ = filled(model, "chat", PAGE)
    array = sequence.page(1, 0).k.numpy()
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    sequence.clear()
    del sequence
    gc.collect()
    with pytest.raises(kvfs.Error, match="in use"):
        mount.umount()
    mount.umount(lazy=True)
    numpy.testing.assert_array_equal(array, k[1])


def test_what_a_library_writes_reaches_no_file(model):
    sequence, k, _ = filled(model, "chat", PAGE)
    page = sequence.page(0, 0)

    class Careless:
        """Takes the capsule that cannot say read-only, as libraries do that know no such arrays."""

        def __dlpack__(self, **_):
            return page.k.__dlpack__()

        def __dlpack_device__(self):
            return page.k.__dlpack_device__()

    written = numpy.from_dlpack(Careless())
    if written.flags.writeable:
        written[...] = 0
    numpy.testing.assert_array_equal(sequence.page(0, 0).k.numpy(), k[0])
    with open(page.path, "rb") as file:
        assert k[0].tobytes() in file.read()


def test_capsules_that_nobody_takes_are_let_go(model):
    sequence, _, _ = filled(model, "chat", PAGE)
    page = sequence.page(0, 0)
    for versions in (None, (1, 0)):
        for _ in range(1000):
            page.k.__dlpack__(max_version=versions)
    assert page.k.shape == (2, PAGE, 16)
    assert page.k.tobytes() == page.k.numpy().tobytes()


def test_torch_takes_pages_and_gives_rows(model):
    torch = pytest.importorskip("torch")
    sequence, k, v = filled(model, "chat", PAGE)
    tensor = torch.from_dlpack(sequence.page(0, 0).k)
    assert tensor.shape == (2, PAGE, 16)
    numpy.testing.assert_array_equal(tensor.numpy(), k[0])
    other = model.create_sequence("torch")
    other.append(list(range(PAGE)), torch.from_numpy(k), torch.from_numpy(v))
    numpy.testing.assert_array_equal(other.page(2, 0).v.numpy(), v[2])
    with pytest.raises(kvfs.InvalidArgument, match="grad"):
        other.append([1], *[torch.zeros(3, 2, 1, 16, requires_grad=True)] * 2)

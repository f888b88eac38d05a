"""The program that the wheel brings along, and mounts from their beginning to their end."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvfs
from kvfs import program


def test_the_program_is_where_programs_are():
    assert Path(program.path()).parent == Path(sys.executable).parent
    assert program.run("version") == f"kvfs {kvfs.__version__}\n"
    ran = subprocess.run(
        [sys.executable, "-m", "kvfs.program", "version"], stdout=subprocess.PIPE, check=True
    )
    assert ran.stdout.decode() == program.run("version")


def test_importing_takes_along_nothing_that_is_large():
    code = "import sys, kvfs; print([m for m in ('numpy', 'torch', 'subprocess') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert ran.stdout == b"[]\n"


def test_the_package_is_typed():
    directory = Path(kvfs.__file__).parent
    assert (directory / "py.typed").exists()
    stubs = (directory / "_kvfs.pyi").read_text()
    module = sys.modules["kvfs._kvfs"]
    for name in dir(module):
        if not name.startswith("__"):
            assert f"class {name}" in stubs or f"def {name}" in stubs, name
            for member in vars(getattr(module, name)) if isinstance(getattr(module, name), type) else ():
                is_ours = not member.startswith("__") and not issubclass(getattr(module, name), Exception)
                assert not is_ours or f" {member}(" in stubs or f" {member}:" in stubs, (name, member)


def test_a_mount_is_a_context(place):
    with kvfs.Mount(place / "store", place / "mnt") as mount:
        assert os.path.ismount(mount.mountpoint)
        status = mount.status()
        assert status["state"] == "ok"
        assert isinstance(status["pid"], int)
        mount.sync()
        assert kvfs.Mount.at(mount.mountpoint).status()["pid"] == status["pid"]
    assert not os.path.ismount(mount.mountpoint)


def test_options_are_those_of_the_program(place):
    with kvfs.Mount(place / "store", place / "mnt", ram="64M", cold="zstd") as mount:
        assert any(name.startswith("ram_") for name in mount.status())
    with kvfs.Mount(place / "store", place / "mnt", read_only=True) as mount:
        with pytest.raises(OSError) as refused:
            kvfs.Model.create(
                mount.model("m"), num_layers=1, num_kv_heads=1, head_dim=16, dtype="f16"
            )
        assert refused.value.errno == errno.EROFS


def test_what_the_program_says_is_the_exception(place):
    with pytest.raises(kvfs.InvalidArgument, match="no-such-option") as refused:
        kvfs.Mount(place / "store", place / "mnt", no_such_option=1)
    assert refused.value.errno == errno.EINVAL
    with pytest.raises(kvfs.Error, match="kvfs"):
        kvfs.Mount.at(place)
    with pytest.raises(kvfs.Error, match="mount"):
        kvfs.Mount.at(place).umount()


def test_many_names_are_asked_and_read_at_once(mount):
    directory = os.path.join(mount.mountpoint, "files", "values")
    os.mkdir(directory)
    names = [f"n{index}\n" for index in range(3000)]
    for index, name in enumerate(names[::2]):
        with open(os.path.join(directory, name), "wb") as file:
            file.write(str(index).encode() * 100)
    # Larger than an answer takes.
    with open(os.path.join(directory, "large"), "wb") as file:
        file.write(b"x" * (3 << 20))
    os.mkdir(os.path.join(directory, "directory"))
    os.symlink("nowhere", os.path.join(directory, "link"))
    asked = [*names, "large", "directory", "link"]
    assert mount.have("files/values", asked) == [True, False] * 1500 + [True, True, False]
    values = mount.read_many("files/values", [*names, "large"])
    assert values[0:3000:2] == [str(index).encode() * 100 for index in range(1500)]
    assert values[1:3000:2] == [None] * 1500
    assert values[3000] == b"x" * (3 << 20)
    assert mount.have("files/values", []) == [] and mount.read_many("files/values", []) == []
    # Of a directory that is not there nothing is.
    assert mount.have("files/nowhere", names[:20]) == [False] * 20
    with pytest.raises(kvfs.InvalidArgument, match="no name of a file"):
        mount.have("files/values", ["../values"])
    with pytest.raises(kvfs.Error, match="directory") as refused:
        mount.read_many("files/values", ["directory", *names])
    assert refused.value.errno == errno.EISDIR

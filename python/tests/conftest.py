"""A mount for each test, and models in it. Stores lie below `$KVFS_TEST_DIR`, which must be on a disk."""

import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy
import pytest

import kvfs

LAYERS, HEADS, DIM, PAGE = 3, 2, 16, 8


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVFS_TEST_DIR")) as directory:
        yield Path(directory)
        # What a test left mounted, or it would be deleted from inside.
        with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
            left = [line.split()[4] for line in mounts]
        for path in left:
            if path.startswith(directory):
                daemon = daemon_of(path)
                subprocess.run(["umount", "-l", path], check=True)
                # It writes to its store until it ends, and a directory that grows cannot be deleted.
                deadline = time.monotonic() + 2
                while daemon and runs(daemon) and time.monotonic() < deadline:
                    time.sleep(0.01)


def runs(process):
    """Whether it has not ended; one that nobody has waited for is still listed then, without a command line."""
    try:
        return bool((process / "cmdline").read_bytes())
    except OSError:
        return False


def daemon_of(mountpoint):
    """The process that serves a mount; none if it is dead."""
    try:
        return Path("/proc", str(kvfs.Mount.at(mountpoint).status()["pid"]))
    except kvfs.Error:
        return None


@pytest.fixture
def mount(place):
    return kvfs.Mount(place / "store", place / "mnt")


@pytest.fixture
def model(mount):
    return create(mount, "tiny")


def create(mount, name, dtype="f32", **fields):
    return kvfs.Model.create(
        mount.model(name),
        **{
            "num_layers": LAYERS,
            "num_kv_heads": HEADS,
            "head_dim": DIM,
            "dtype": dtype,
            "page_tokens": PAGE,
            "layout": "hnd",
            **fields,
        },
    )


def rows(tokens, seed=0, dtype=numpy.float32):
    """K and V of all layers, [layers, heads, tokens, dim]."""
    generator = numpy.random.default_rng(seed)
    shape = (2, LAYERS, HEADS, tokens, DIM)
    k, v = generator.standard_normal(shape, dtype=numpy.float32).astype(dtype)
    return k, v


def filled(model, name, tokens, seed=0):
    """A sequence of token ids 0, 1, 2, ... and its K and V."""
    k, v = rows(tokens, seed)
    sequence = model.create_sequence(name)
    assert sequence.append(list(range(tokens)), k, v) == tokens
    return sequence, k, v


def scribble(array):
    """Writes to an array as a library does that knows no read-only ones."""
    ctypes.memset(array.bits().numpy().ctypes.data, 0, array.nbytes)

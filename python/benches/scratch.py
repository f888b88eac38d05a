"""A mount for a benchmark, and its end."""

import contextlib
import tempfile
import time
from pathlib import Path

import kvfs


@contextlib.contextmanager
def mounted(directory):
    """A new mount below `directory`, and a plain directory beside it on the same disk."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        plain = Path(place, "plain")
        plain.mkdir()
        mount = kvfs.Mount(Path(place, "store"), Path(place, "mnt"))
        try:
            yield mount, plain
        finally:
            # Arrays that are still there keep it; the store is deleted when nobody has it any more.
            mount.umount(lazy=True)
            while Path(mount.mountpoint).is_mount():
                time.sleep(0.1)

"""A mount, from its beginning to its end."""

from __future__ import annotations

import errno
import os
from types import TracebackType

from . import program
from ._kvfs import Disconnected, Error, have_many, read_many

# What the kernel answers where no daemon answers any more.
_GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED)


class Mount:
    """A store at a mountpoint.

    `Mount(store, mountpoint)` mounts it, as a context until its end (or until the last array of it goes);
    `Mount.at(mountpoint)` is one that is there. Options are those of `kvfs mount`: `Mount(store, mountpoint, ram="4G", read_only=True)`.
    """

    def __init__(
        self, store: str | os.PathLike[str], mountpoint: str | os.PathLike[str], **options: object
    ) -> None:
        self.mountpoint = os.path.abspath(mountpoint)
        os.makedirs(self.mountpoint, exist_ok=True)
        program.run("mount", *_line(options), store, self.mountpoint)

    @classmethod
    def at(cls, mountpoint: str | os.PathLike[str]) -> Mount:
        """The mount that is there."""
        mount = cls.__new__(cls)
        mount.mountpoint = os.path.abspath(mountpoint)
        mount.status()
        return mount

    def umount(self, *, lazy: bool = False) -> None:
        """Makes everything durable, and ends the mount.

        Arrays of mapped pages keep it busy, and sequences that were appended to until they are closed; with
        `lazy` it ends when the last of them goes.
        """
        program.run("umount", *(("--lazy",) if lazy else ()), self.mountpoint)

    def status(self) -> dict[str, str | int]:
        """What `.kvfs/status` says, by its names; whole numbers are numbers."""
        path = os.path.join(self.mountpoint, ".kvfs", "status")
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except OSError as error:
            raise _explained(error, path) from None
        pairs = (line.partition(": ") for line in lines)
        return {name: int(value) if value.isdecimal() else value for name, colon, value in pairs if colon}

    def sync(self, *, remote: bool = False, timeout: float | None = None) -> None:
        """Makes everything so far durable here, and with `remote` waits until the remote has it."""
        if remote:
            limit = () if timeout is None else ("--timeout", str(int(timeout)))
            program.run("sync", "--remote", *limit, self.mountpoint)
            return
        try:
            root = os.open(self.mountpoint, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(root)
            finally:
                os.close(root)
        except OSError as error:
            raise _explained(error, self.mountpoint) from None

    def model(self, name: str) -> str:
        """The path of a model, for `Model` and `Model.create`."""
        return os.path.join(self.mountpoint, "models", name)

    def files(self, name: str) -> str:
        """The path of a directory of values, for `Files`."""
        return os.path.join(self.mountpoint, "files", name)

    def have(self, directory: str | os.PathLike[str], names: list[str]) -> list[bool]:
        """Which of these names are there in a directory, given from the mountpoint (`files/values`)."""
        return have_many(os.path.join(self.mountpoint, directory), names)

    def read_many(self, directory: str | os.PathLike[str], names: list[str]) -> list[bytes | None]:
        """What the files of these names hold in such a directory, `None` for a name that nothing has."""
        return read_many(os.path.join(self.mountpoint, directory), names)

    def __enter__(self) -> Mount:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.umount()
        except Error:
            self.umount(lazy=True)

    def __fspath__(self) -> str:
        return self.mountpoint

    def __repr__(self) -> str:
        return f"kvfs.Mount.at({self.mountpoint!r})"


def _line(options: dict[str, object]) -> list[str]:
    line = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            line.append(option)
        elif value is not None and value is not False:
            line.append(f"{option}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    return line


def _explained(error: OSError, path: str) -> Error:
    if error.errno in _GONE:
        return Disconnected(errno.ENOTCONN, f"{path}: the mount is gone: mount the store again")
    if error.errno == errno.ENOENT:
        return Error(errno.ENOENT, f"{path}: not there: no kvfs is mounted here")
    return Error(error.errno, f"{path}: {error.strerror}")

"""The `kvfs` program, which the wheel brings along, and what it alone can do."""

from __future__ import annotations

import errno
import os
import re
import sys

from ._kvfs import Error, InvalidArgument

# Exit code of a command line that makes no sense.
_USAGE = 2


def path() -> str:
    """Where the program is: `$KVFS_PROGRAM`, beside this interpreter, or on the PATH."""
    import shutil
    import sysconfig

    beside = os.path.join(sysconfig.get_path("scripts"), "kvfs")
    for candidate in (os.environ.get("KVFS_PROGRAM"), beside, shutil.which("kvfs")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise Error(errno.ENOENT, f"no program kvfs, neither {beside} nor on the PATH: install the wheel again")


def run(*arguments: str | os.PathLike[str], stdin: bytes | None = None) -> str:
    """Runs a command and returns what it prints; what it complains about becomes the exception."""
    # Imported where it is needed: it takes half as long as everything else of this package.
    import subprocess

    line = [path(), *(os.fspath(argument) for argument in arguments)]
    source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **source)
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    said = (done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip())
    reason = said.removeprefix("kvfs: ") or f"kvfs {arguments[0]} ended with {done.returncode}"
    if done.returncode == _USAGE:
        raise InvalidArgument(errno.EINVAL, reason)
    number = re.search(r"\(os error (\d+)\)", reason)
    raise Error(int(number[1]) if number else errno.EIO, reason)


def import_file(file: str | os.PathLike[str], sequence: str | os.PathLike[str], tokens: bytes | None) -> None:
    """Makes a sequence of a file of another program."""
    if tokens is None:
        run("import", file, sequence)
    else:
        run("import", "--tokens", "-", file, sequence, stdin=tokens)


def export_file(sequence: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Writes a sequence to a file of another program."""
    run("export", sequence, file)


def promote(where: str | os.PathLike[str]) -> None:
    """Brings files nearer."""
    run("promote", where)


def evict(where: str | os.PathLike[str], to: str | None = None) -> None:
    """Sends files away."""
    run("evict", *(() if to is None else ("--to", to)), where)


def main() -> None:
    """Becomes the program: `python -m kvfs.program ...`."""
    os.execv(path(), ["kvfs", *sys.argv[1:]])


if __name__ == "__main__":
    main()

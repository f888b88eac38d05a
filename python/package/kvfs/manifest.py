"""The model in a mount that belongs to a `config.json`, for whichever engine has that."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from typing import Any

from . import program
from ._kvfs import InvalidArgument


def refused(reason: str) -> InvalidArgument:
    """What a call is answered that does not fit."""
    return InvalidArgument(errno.EINVAL, reason)


def manifest_of(config: str, name: str, dtype: str, layout: str, page_tokens: int | None) -> dict[str, Any]:
    """What `kvfs create --from` makes of the text of a configuration. In a directory of its own, so that what is in the
    mount can be compared with it."""
    if not name or "/" in name:
        raise refused(f"{name!r} is no name of a model")
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "config.json")
        with open(file, "w", encoding="utf-8") as written:
            written.write(config)
        path = os.path.join(directory, "models", name)
        os.mkdir(os.path.dirname(path))
        pages = () if page_tokens is None else ("--page-tokens", str(page_tokens))
        program.run("create", path, "--from", file, "--dtype", dtype, "--layout", layout, *pages)
        with open(os.path.join(path, "manifest.json"), encoding="utf-8") as made:
            return json.load(made)

"""The KV cache of a language model, in a mount of kvfs.

    >>> import kvfs
    >>> with kvfs.Mount("store", "mnt") as mount:
    ...     model = kvfs.Model.create(mount.model("llama"), num_layers=32, num_kv_heads=8, head_dim=128,
    ...                               dtype="f16")
    ...     sequence, tokens = model.match(prompt)

`Model`, `Sequence` and `Page` work on any mount, whoever made it. Everything that is refused is a `kvfs.Error`, which
is an `OSError` with its errno and the reason.
"""

from ._kvfs import (
    Array,
    Busy,
    Changed,
    Disconnected,
    Error,
    Files,
    InvalidArgument,
    Match,
    Missing,
    Model,
    Page,
    Part,
    Partials,
    Prefix,
    Refused,
    Sequence,
    Stream,
    __version__,
    attend,
    read_pages,
)
from .mount import Mount

__all__ = [
    "Array",
    "Busy",
    "Changed",
    "Disconnected",
    "Error",
    "Files",
    "InvalidArgument",
    "Match",
    "Missing",
    "Model",
    "Mount",
    "Page",
    "Part",
    "Partials",
    "Prefix",
    "Refused",
    "Sequence",
    "Stream",
    "__version__",
    "attend",
    "read_pages",
]

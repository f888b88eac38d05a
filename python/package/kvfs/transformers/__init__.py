"""A cache for transformers that begins with what the mount has, and leaves what is new there.

    >>> store = kvfs.transformers.model_for(model.config, mount, "llama", dtype=model.dtype)
    >>> with kvfs.transformers.KvfsCache(model, store, input_ids) as cache:
    ...     output = model.generate(input_ids, past_key_values=cache)

After `model.set_attn_implementation("kvfs")` nothing of the prefix is copied: the model attends to mapped pages.

`import kvfs.transformers` needs torch and transformers (5), which the wheel does not bring along.
"""

from .cache import KvfsCache
from .model import model_for

__all__ = ["KvfsCache", "model_for"]

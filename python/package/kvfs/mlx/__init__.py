"""Prompt caches of MLX-LM that begin with what the mount has, and leave there what is new.

    >>> model, tokenizer, config = mlx_lm.load("path", return_config=True)
    >>> store = kvfs.mlx.model_for(config, mount, "llama")
    >>> cache, tokens = kvfs.mlx.load(model, store, ids)
    >>> answer = [each.token for each in mlx_lm.stream_generate(model, tokenizer, ids[tokens:], prompt_cache=cache)]
    >>> kvfs.mlx.save(cache, store, ids + answer)

`import kvfs.mlx` needs mlx, mlx-lm and NumPy, which the wheel does not bring along.
"""

from .cache import load, save
from .model import model_for

__all__ = ["load", "model_for", "save"]

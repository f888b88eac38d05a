"""A KV connector for vLLM that keeps the blocks of prompts as pages in the models of a mount, and a tier for vLLM's own offloading.

    vllm serve MODEL --no-async-scheduling --kv-transfer-config '{"kv_connector": "KvfsConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvfs.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"mount": "/mnt/kv"}}'

A page is of one layer and a group of blocks, in an order that everybody can read. What vLLM calls a connector is in
`connector`; the other modules do not import vLLM, so that they can be tested without it. The tier is in `tier`, `lookups` and `lane`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvfsConnector
    from .tier import KvfsTier

__all__ = ["KvfsConnector", "KvfsTier"]


def __getattr__(name: str) -> Any:
    if name == "KvfsConnector":
        from .connector import KvfsConnector

        return KvfsConnector
    if name == "KvfsTier":
        from .tier import KvfsTier

        return KvfsTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

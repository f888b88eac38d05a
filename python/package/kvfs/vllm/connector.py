"""The connector: what vLLM calls, in the scheduler and in each worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import _custom_ops as operations
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from .._kvfs import Model
from .plan import Part, Plan
from .rows import Rows, rows_of
from .settings import Settings, check_engine, layers_of, open_model, refused
from .transfer import Loads, Saves


@dataclass
class KvfsMetadata(KVConnectorMetadata):
    """The requests of a step."""

    parts: list[Part] = field(default_factory=list)


class KvfsConnector(KVConnectorBase_V1):
    """Blocks of prompts as pages of a mount.

    A mount that is gone, or a page that is lost, costs computing: blocks that could not be loaded are reported, vLLM
    computes them again, and nothing that was computed from them is kept. Requests with images, adapters, embeddings or
    a cache salt of their own are computed as without a connector: token ids do not tell what their rows are.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_engine(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.of(transfer.kv_connector_extra_config, vllm_config.model_config.model)
        self._layers = layers_of(kv_cache_config)
        self._block_tokens = next(iter(self._layers.values())).block_size
        self._pool: Any = None
        self._rows: dict[str, Rows] = {}
        self._numbers = {layer: number for number, layer in enumerate(self._layers)}
        self._model: Model | None = None
        if role == KVConnectorRole.SCHEDULER:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            directories = [self._settings.directory(rank, ranks) for rank in range(ranks)]
            self._plan = Plan(directories, self._block_tokens)
        else:
            self._loads = Loads(self._block_tokens)
            self._saves = Saves(self._block_tokens, self._settings.ttl_seconds)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is one that is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for one by one."""
        return True

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Finds out where rows lie, and makes or opens the model; refuses what it does not understand."""
        modules = self._vllm_config.compilation_config.static_forward_context
        if set(kv_caches) != set(self._layers):
            odd = sorted(set(kv_caches) ^ set(self._layers))
            raise refused(f"layers {odd} have a cache that is another layer's, or none: this is not kept")
        for layer, cache in kv_caches.items():
            module, spec = modules[layer], self._layers[layer]
            backend = module.get_attn_backend().get_name()
            self._rows[layer] = rows_of(layer, backend, cache, spec.block_size, spec.num_kv_heads, spec.head_size)
            if backend == "CPU_ATTN":
                _try_out(layer, module.isa, cache)
        self._model = open_model(self._settings, self._vllm_config, self._layers, get_tensor_model_parallel_rank())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. Loads may be started only behind its forward pass, where there are none."""
        super().bind_connector_metadata(connector_metadata)
        if self._kv_transfer_config.is_kv_producer:
            self._saves.start(self._model, self._parts())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins to read the pages of the first layers."""
        self._loads.start(self._model, self._parts(), len(self._rows))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Fills the blocks of a layer."""
        self._loads.wait_for(self._numbers[layer_name], self._rows[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Begins to write the pages of a layer."""
        self._saves.save(self._numbers[layer_name], self._rows[layer_name])

    def wait_for_save(self) -> None:
        """Until the pages are in the mount, with their ids."""
        self._loads.end()
        self._saves.wait(self._loads.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing goes on behind a step."""
        self._saves.end(finished_req_ids)
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of this step that vLLM has to compute."""
        failed, self._loads.failed = self._loads.failed, set()
        return failed

    def shutdown(self) -> None:
        """Waits for what runs."""
        if self.role == KVConnectorRole.WORKER:
            self._loads.close()
            self._saves.close()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The blocks that vLLM keeps for prompts that begin alike."""
        self._pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the mount has beyond those that vLLM has; they are loaded within the step."""
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        return self._plan.find(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks."""
        self._plan.allocate(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers need in this step."""
        parts = self._plan.step(scheduler_output)
        self._plan.end(scheduler_output.finished_req_ids)
        return KvfsMetadata(parts)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes blocks that could not be loaded out of vLLM's own prefix cache: until they are computed again another
        prompt would find them there."""
        if connector_output.invalid_block_ids and self._pool is not None:
            self._pool.evict_blocks(connector_output.invalid_block_ids)

    def _parts(self) -> Iterable[Part]:
        metadata = self._get_connector_metadata()
        return metadata.parts if isinstance(metadata, KvfsMetadata) else []


def _try_out(layer: str, instructions: str, cache: torch.Tensor) -> None:
    """Lets vLLM write rows to a small cache, for their order depends on the processor: views that do not show them there
    would do so nowhere."""
    heads, tokens, dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2
    small = torch.zeros(2, *cache.shape[1:], dtype=cache.dtype)
    key, value = torch.randn(2, tokens, heads, dim).to(cache.dtype)
    k, v = small.view(2, heads, 2 * tokens, dim).chunk(2, dim=2)
    operations.cpu_attn_reshape_and_cache(
        key, value, k, v, torch.arange(tokens) + tokens, instructions, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    rows = rows_of(layer, "CPU_ATTN", small, tokens, heads, dim)
    if not (torch.equal(rows.k[1].transpose(0, 1), key) and torch.equal(rows.v[1].transpose(0, 1), value)):
        raise refused(f"{layer} keeps its blocks in the order of {instructions}, which nobody here can read")

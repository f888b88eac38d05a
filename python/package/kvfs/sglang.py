"""A storage for SGLang's hierarchical cache that keeps its pages in a mount.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config '{"backend_name": "kvfs", "module_path": "kvfs.sglang",
            "class_name": "KvfsHiCacheStorage", "interface_v1": 1, "mount": "/mnt/kv", "directory": "sglang"}'

A page is a file in `files/` and no page in `models/`: SGLang hands out one buffer with all layers of a page under a hash,
from which nobody can tell the tokens.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from ._kvfs import Error, Files, Missing
from .mount import Mount

logger = logging.getLogger(__name__)


class KvfsHiCacheStorage(HiCacheStorage):
    """Pages of SGLang as files of a mount, one for each page and pool, of each rank that has rows of its own.

    Everything that goes wrong in a batch is a page that is not there, and a line in the log. Files are never cached by
    name: the mount answers, so what another machine wrote or a quota took is known at once.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        if not extra.get("mount"):
            raise ValueError('kvfs.sglang needs "mount" in --hicache-storage-backend-extra-config: where kvfs is mounted')
        # Refused where nothing is mounted: pages would fill the disk below the mountpoint, and nobody would find them.
        mount, directory = Mount.at(extra["mount"]), str(extra.get("directory", "sglang"))
        if directory.startswith("/") or ".." in directory.split("/"):
            raise ValueError(f"directory is {directory!r}: a path below files/ of the mount is needed")
        self._files = Files(mount.files(directory))
        self._whole, self._of_rank = _suffixes(storage_config)
        self._pools: dict[str, Any] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of K and V."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[PoolName.KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Another pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools[host_pool_name] = host_pool

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Reads pages into the pool of K and V."""
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Writes pages of the pool of K and V."""
        return self._set(PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Reads pages into several pools."""
        return {each.name: self._get(each.name, each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Writes pages of several pools."""
        return {each.name: self._set(each.name, each.keys or [], each.host_indices) for each in transfers}

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages of K and V are there, from the first one on."""
        try:
            return self._files.count_leading([self._name(PoolName.KV, key) for key in keys])
        except OSError as error:
            logger.warning("kvfs: exists: %s", error)
            return 0

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that every pool can restore."""
        pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            there = self._restorable(transfer, keys[:pages])
            if there:
                hits[transfer.name] = max(there)
            restorable = [length for length in restorable if length in there]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _restorable(self, transfer: PoolTransfer, keys: list[str]) -> set[int]:
        """The lengths of a beginning that a pool has all pages for."""
        if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            raise ValueError(f"kvfs.sglang keeps no pool with hit policy {transfer.hit_policy}: all_pages, trailing_pages")
        try:
            has = self._files.has([self._name(transfer.name, key) for key in keys])
        except OSError as error:
            logger.warning("kvfs: exists in %s: %s", transfer.name, error)
            return set()
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, (has.index(False) if False in has else len(has)) + 1))
        window = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(has) + 1) if all(has[max(0, end - window) : end])}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Reads one page into a tensor."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Reads pages into tensors."""
        targets = list(target_locations or [])
        there = self._read([self._name(PoolName.KV, key) for key in keys], targets)
        return [target if is_there else None for target, is_there in zip(targets, there)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Writes one page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Writes pages."""
        return all(self._write([self._name(PoolName.KV, key) for key in keys], list(values or [])))

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Removes the pages of this model and rank, and nobody else's."""
        ends = tuple(f"{suffix}.bin" for suffix in (self._whole, self._of_rank))
        self._files.remove([name for name in os.listdir(self._files) if name.endswith(ends)])

    def close(self) -> None:
        """There is nothing open."""

    def _name(self, pool: str, key: str) -> str:
        # The state of recurrent layers is another one on each rank, also where all share K and V.
        if pool == PoolName.KV:
            return f"{key}{self._whole}.bin"
        return f"{key}.{pool}{self._of_rank if pool == PoolName.MAMBA else self._whole}.bin"

    def _offsets(self, pool: str, keys: list[str], indices: torch.Tensor | None) -> list[int] | None:
        """Where in a pool each page begins; `None` if it was not said for each."""
        size = getattr(self._pools[pool], "page_size", 1) or 1
        if indices is None or indices.numel() != len(keys) * size:
            count = 0 if indices is None else indices.numel()
            logger.error("kvfs: %s: %s rows for %s pages of %s", pool, count, len(keys), size)
            return None
        return indices[::size].tolist()

    def _get(self, pool: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        offsets = self._offsets(pool, keys, indices)
        if offsets is None:
            return [False] * len(keys)
        host = self._pools[pool]
        pages = [host.get_dummy_flat_data_page() for _ in keys]
        there = self._read([self._name(pool, key) for key in keys], pages)
        for offset, page, is_there in zip(offsets, pages, there):
            if is_there:
                host.set_from_flat_data_page(offset, page)
        return there

    def _set(self, pool: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        offsets = self._offsets(pool, keys, indices)
        if offsets is None:
            return [False] * len(keys)
        host = self._pools[pool]
        pages = [host.get_data_page(offset, flat=True) for offset in offsets]
        return self._write([self._name(pool, key) for key in keys], pages)

    def _read(self, names: list[str], targets: list[torch.Tensor]) -> list[bool]:
        try:
            return _told("read", self._files.read(names, [_flat(target) for target in targets]))
        except OSError as error:
            logger.warning("kvfs: read: %s", error)
            return [False] * len(names)

    def _write(self, names: list[str], pages: list[torch.Tensor]) -> list[bool]:
        # What has a name already is the same page: its name is the hash of all tokens up to its end.
        try:
            done = self._files.has(names)
            new = [index for index, is_there in enumerate(done) if not is_there]
            values = [_flat(pages[index].contiguous()) for index in new]
            written = _told("write", self._files.write([names[index] for index in new], values))
        except OSError as error:
            logger.warning("kvfs: write: %s", error)
            return [False] * len(names)
        for index, is_written in zip(new, written):
            done[index] = is_written
        return done


def _suffixes(config: HiCacheStorageConfig) -> tuple[str, str]:
    """What keeps files apart: of rows that every rank of a latent model shares, and of rows of one rank."""
    model = (config.model_name or "").replace("/", "-")
    part = f"_pp{config.pp_rank}of{config.pp_size}" if config.pp_size > 1 else ""
    if config.attn_cp_size > 1:
        part += f"_cp{config.attn_cp_rank}of{config.attn_cp_size}"
    if config.dcp_size > 1:
        part += f"_dcp{config.dcp_rank}of{config.dcp_size}_page{config.logical_page_size}"
    of_rank = f"_{model}_tp{config.tp_rank}of{config.tp_size}{part}"
    return (f"_{model}{part}" if config.is_mla_model else of_rank), of_rank


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, where they lie: one that is not contiguous raises, for a copy would be filled and thrown away."""
    return tensor.view(-1).view(torch.uint8)


def _told(what: str, outcomes: list[Error | None]) -> list[bool]:
    failed = [error for error in outcomes if error is not None and not isinstance(error, Missing)]
    if failed:
        logger.warning("kvfs: %s of %s pages: %s", what, len(failed), failed[0])
    return [error is None for error in outcomes]

"""A secondary tier for vLLM's `TieringOffloadingSpec` that keeps blocks in a mount.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{"type": "KvfsTier", "module_path": "kvfs.vllm.tier", "mount": "/mnt/kv"}]}}'

A block is a file in `files/` and no page in `models/`: vLLM hands a tier one buffer with all layers and ranks of some tokens
under a hash, from which nobody can tell the tokens. (`kvfs.vllm.KvfsConnector` writes pages.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from .._kvfs import Error, Files
from ..mount import Mount
from .lane import Job, Lane
from .lookups import Lookups
from .plan import Trouble
from .settings import refused

# A call of `Files` moves many files at a time by itself, so more threads would only need more buffers.
_THREADS = 2
_PIECE_BYTES = 16 << 20


class KvfsTier(SecondaryTierManager):
    """Blocks as files of a mount. `mount`: the mountpoint; `directory`: where below its `files/`; `wait_seconds`: after which a
    mount that does not answer is one that has nothing; `locality`: what vLLM is told, `LOCAL` or `REMOTE`.

    A mount that is gone or hangs, and a file that is lost, damaged or of another length, is a block that is computed, and a line in
    the log until the mount is well again. The scheduler, which calls all of this, never touches the mount.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        mount: str = "",
        directory: str = "vllm",
        wait_seconds: float = 10.0,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **unknown: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        _check(mount, directory, wait_seconds, locality, unknown)
        self.locality = Locality(locality) if locality is not None else None
        # The directory is of one geometry: vLLM puts the model, its layers, sizes and ranks into the name.
        mapper = FileMapper.from_offloading_spec(
            # Refused where nothing is mounted: blocks would fill the disk below the mountpoint, and nobody would find them.
            Mount.at(mount).files(directory),
            offloading_spec,
            blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )
        self._files = Files(f"{mapper.base_path}_r{mapper.rank}")
        self._memory: numpy.ndarray | None = numpy.asarray(primary_kv_view).view(numpy.uint8)
        # What waits to be stored cannot leave vLLM's memory: more than half of it would keep new blocks out.
        self._store_chunks = max(len(self._memory) // 2, 1)
        block_bytes = self._memory.shape[1]
        piece = (max(_PIECE_BYTES // block_bytes, 1), block_bytes)
        self._trouble = Trouble()
        self._late = TimeoutError(f"{mount}: the mount has not answered for {wait_seconds} s")
        self._lookups = Lookups(wait_seconds, self._has, lambda: self._trouble.tell("blocks are computed", self._late))
        self._stores = Lane("store", _THREADS, wait_seconds, piece, self._store)
        self._loads = Lane("load", _THREADS, wait_seconds, piece, self._load)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing is wanted of a request but its new blocks."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a block is there, once the thread that asks has an answer."""
        is_there = self._lookups.lookup(key, req_context.req_id)
        if is_there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """What a step has looked up is one question."""
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nobody wants its answers any more."""
        self._lookups.forget(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to write blocks, where not too many wait already."""
        job = _job(job_metadata)
        if not self._stores.submit(job, self._store_chunks) and not job.is_late:
            slow = TimeoutError("the mount is slower than the engine, half of whose memory waits to be stored")
            self._trouble.tell(f"{len(job.keys)} blocks are not kept", slow)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to read blocks."""
        self._loads.submit(_job(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What has come to its end; blocks that could not be loaded are not there for those who asked."""
        results = [self._result(job) for job in self._stores.take_finished()]
        for job in self._loads.take_finished():
            done = set(job.done)
            self._lookups.are_missing(key for key in job.keys if key not in done)
            results.append(self._result(job))
        return results

    def drain_jobs(self) -> None:
        """Until nothing of this tier touches vLLM's memory."""
        self._stores.drain()
        self._loads.drain()

    def shutdown(self) -> None:
        """Waits for what runs, as long as a mount may take to answer; what waits is not begun."""
        self._lookups.close()
        self._stores.close()
        self._loads.close()
        # vLLM unmaps it now.
        self._memory = None

    def _result(self, job: Job) -> JobResult:
        if job.is_late:
            self._trouble.tell(f"{len(job.keys) - len(job.done)} blocks are given up", self._late)
        is_whole = len(job.done) == len(job.keys)
        return JobResult(
            job_id=job.number,
            success=is_whole,
            successful_keys=None if is_whole or not job.done else tuple(job.done),
            transfer_time=job.seconds,
            transfer_bytes=len(job.done) * self.block_size_bytes,
        )

    # What a thread calls lets nothing through, or the thread would end, and everybody wait for it.

    def _has(self, keys: list[bytes]) -> list[bool]:
        try:
            there = self._files.has([_name(key) for key in keys])
        except Exception as error:
            self._trouble.tell(f"{len(keys)} blocks are computed", error)
            return [False] * len(keys)
        self._trouble.is_over()
        return there

    def _store(self, job: Job, piece: range, buffer: numpy.ndarray) -> None:
        keys = [job.keys[at] for at in piece]
        try:
            # What has a name already is the same block: its name is the hash of all tokens up to its end.
            there = self._files.has([_name(key) for key in keys])
            new = [at for at, is_there in enumerate(there) if not is_there]
            for at in new:
                with job.lock:
                    if job.is_over or self._memory is None:
                        return
                    buffer[at] = self._memory[job.chunks[piece[at]]]
            outcomes = self._files.write([_name(keys[at]) for at in new], [buffer[at] for at in new])
        except Exception as error:
            self._trouble.tell(f"{len(keys)} blocks are not kept", error)
            return
        failed = {at for at, error in zip(new, outcomes) if error is not None}
        self._tell(f"{len(failed)} blocks are not kept", outcomes)
        job.done.extend(key for at, key in enumerate(keys) if at not in failed)

    def _load(self, job: Job, piece: range, buffer: numpy.ndarray) -> None:
        keys = [job.keys[at] for at in piece]
        try:
            outcomes = self._files.read([_name(key) for key in keys], list(buffer))
        except Exception as error:
            self._trouble.tell(f"{len(keys)} blocks are computed", error)
            return
        self._tell(f"{sum(error is not None for error in outcomes)} blocks are computed", outcomes)
        for at, error in enumerate(outcomes):
            with job.lock:
                if error is None and not job.is_over and self._memory is not None:
                    self._memory[job.chunks[piece[at]]] = buffer[at]
                    job.done.append(keys[at])

    def _tell(self, what: str, outcomes: list[Error | None]) -> None:
        failed = [error for error in outcomes if error is not None]
        if failed:
            self._trouble.tell(what, failed[0])
        else:
            self._trouble.is_over()


def _check(mount: object, directory: object, wait_seconds: object, locality: object, unknown: dict[str, Any]) -> None:
    if unknown:
        known = "mount, directory, wait_seconds, locality, backpressure"
        raise refused(f"a tier has no setting {sorted(unknown)}: {known}")
    if not isinstance(mount, str) or not mount:
        raise refused('"mount" is missing in the entry of secondary_tiers: where kvfs is mounted')
    if not isinstance(directory, str) or not directory or os.path.isabs(directory) or ".." in directory.split("/"):
        raise refused(f"directory is {directory!r}: a path below files/ of the mount is needed")
    if isinstance(wait_seconds, bool) or not isinstance(wait_seconds, (int, float)) or not wait_seconds > 0:
        raise refused(f"wait_seconds is {wait_seconds!r}: a number above 0 is needed")
    if locality not in (None, *(each.value for each in Locality)):
        raise refused(f"locality is {locality!r}: LOCAL or REMOTE")


def _job(metadata: TransferJob) -> Job:
    return Job(metadata.job_id, list(metadata.keys), [int(chunk) for chunk in metadata.chunk_ids])


def _name(key: OffloadKey) -> str:
    return f"{get_offload_block_hash(key).hex()}_g{get_offload_group_idx(key)}.bin"

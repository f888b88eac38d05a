"""vLLM's tiering manager with a secondary tier: `python vllm_tier.py DIRECTORY [BLOCKS] [MIB]`; vLLM for the CPU and the wheel installed.

In `ROUNDS` rounds, each in turns with blocks that are new: `kvfs.vllm.tier` in a mount, vLLM's own tier `fs` in the same mount and `fs`
on the same disk beside it. What is timed: from the end of a request's stores until the tier has them; in an engine that
has nothing in memory, until all blocks are known to be there; and until they are in its memory. The longest call of
the scheduler's is told as well. Files are in the page cache, but for those that `fs` reads directly (`O_DIRECT`).
"""

import statistics
import sys
import time
import uuid

import numpy
from vllm.v1.kv_offload import config as configs
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from scratch import mounted

ROUNDS = 5


def manager_of(tier, blocks, block_bytes):
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 2 * blocks * block_bytes, "secondary_tiers": [tier]}
    return OffloadingSpecFactory.create_spec(
        configs.OffloadingConfig(
            groups=(configs.OffloadingGroupConfig(tokens_per_block=16, layer_names=("l0", "l1"), group_id=0),),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=False,
            engine_id=uuid.uuid4().hex,
            extra_config=extra,
            model=configs.OffloadingModelConfig("org/model", "bfloat16"),
            cache=configs.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=configs.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
    ).get_manager()


class Calls:
    """Of the scheduler's, and the longest of them."""

    def __init__(self):
        self.longest = 0.0

    def __call__(self, work, *arguments):
        begin = time.perf_counter()
        answer = work(*arguments)
        self.longest = max(self.longest, time.perf_counter() - begin)
        return answer


def memory_of(manager):
    return numpy.asarray(manager.primary_tier.get_kv_memoryview()).view(numpy.uint8)


def store(tier, keys, rows, call):
    manager, context = manager_of(tier, *rows.shape), ReqContext("store")
    manager.on_new_request(context)
    places = manager.prepare_store(keys, context).store_spec.chunk_ids
    memory_of(manager)[places] = rows
    begin = time.perf_counter()
    call(manager.complete_store, keys, context)
    manager.on_request_finished(context)
    while manager.has_pending_work():
        call(manager.on_schedule_end, ScheduleEndContext((), ()))
        time.sleep(0.0005)
    seconds = time.perf_counter() - begin
    manager.shutdown()
    return seconds


def load(tier, keys, rows, call):
    manager, context = manager_of(tier, *rows.shape), ReqContext("load")
    manager.on_new_request(context)
    begin, found = time.perf_counter(), None
    while True:
        states = [call(manager.lookup, key, context) for key in keys]
        assert LookupResult.MISS not in states
        if found is None and LookupResult.RETRY not in states:
            found = time.perf_counter() - begin
        if all(state is LookupResult.HIT for state in states):
            break
        call(manager.on_schedule_end, ScheduleEndContext((), ()))
        time.sleep(0.0005)
    seconds = time.perf_counter() - begin
    places = manager.prepare_load(keys, context).chunk_ids
    assert numpy.array_equal(memory_of(manager)[places], rows)
    manager.complete_load(keys, context)
    manager.on_request_finished(context)
    manager.shutdown()
    return found, seconds


def main():
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    block_bytes = (int(sys.argv[3]) if len(sys.argv) > 3 else 4) << 20
    with mounted(sys.argv[1]) as (mount, plain):
        tiers = {
            "kvfs.vllm.tier": {"type": "KvfsTier", "module_path": "kvfs.vllm.tier", "mount": mount.mountpoint},
            "fs in the mount": {"type": "fs", "root_dir": mount.files("fs")},
            "fs on the disk": {"type": "fs", "root_dir": str(plain)},
        }
        seconds = {name: [] for name in tiers}
        for turn in range(ROUNDS):
            for name, tier in tiers.items():
                generator = numpy.random.default_rng([turn, len(name)])
                keys = [make_offload_key(generator.bytes(32), 0) for _ in range(blocks)]
                rows, call = generator.integers(0, 256, (blocks, block_bytes), numpy.uint8), Calls()
                stored = store(tier, keys, rows, call)
                seconds[name].append((stored, *load(tier, keys, rows, call), call.longest))
        print(f"{blocks} blocks of {block_bytes >> 20} MiB, ms, median (range) of {ROUNDS} rounds")
        for name, rounds in seconds.items():
            for what, each in zip(("stored", "found", "in memory", "longest call"), zip(*rounds)):
                middle, low, high = (1e3 * pick(each) for pick in (statistics.median, min, max))
                print(f"{name}, {what}: {middle:.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()

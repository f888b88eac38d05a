"""The tier in vLLM's own tiering manager, made by vLLM's own factories, on the CPU; mount-scripts/test-engines.sh has what it needs."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy
import pytest

import kvfs

pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")
pytest.importorskip("vllm", reason="no vLLM here: mount-scripts/test-engines.sh")

from vllm.v1.kv_offload import config as configs  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402

BLOCK, CHUNKS, WAIT = 1 << 16, 24, 1.0
# How long the scheduler may be in one call: the mount never keeps it.
STEP_SECONDS = 0.3
# What a process runs that has nothing but the mount.
AGAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import test_vllm_tier as test
engine = test.Engine(sys.argv[2])
keys = test.keys(6)
assert engine.load(keys, "again") == test.contents(6), "other bytes"
engine.close()
"""


def keys(count, seed=1):
    return [make_offload_key(numpy.random.default_rng([seed, at]).bytes(32), 0) for at in range(count)]


def contents(count, seed=1):
    return [numpy.random.default_rng([seed, at, 7]).bytes(BLOCK) for at in range(count)]


class Engine:
    """What vLLM's scheduler does with its offloading manager."""

    def __init__(self, mount, chunks=CHUNKS, model="org/model", **tier):
        entry = {"type": "KvfsTier", "module_path": "kvfs.vllm.tier", "mount": mount, "wait_seconds": WAIT, **tier}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": chunks * BLOCK, "secondary_tiers": [entry]}
        self.manager = OffloadingSpecFactory.create_spec(
            configs.OffloadingConfig(
                groups=(configs.OffloadingGroupConfig(tokens_per_block=16, layer_names=("l0", "l1"), group_id=0),),
                worker_kv_bytes_per_block=BLOCK,
                enable_kv_cache_events=False,
                engine_id=uuid.uuid4().hex,
                extra_config=extra,
                model=configs.OffloadingModelConfig(model, "bfloat16"),
                cache=configs.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
                parallel=configs.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
            )
        ).get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.longest = 0.0

    def call(self, work, *arguments):
        begin = time.monotonic()
        answer = work(*arguments)
        self.longest = max(self.longest, time.monotonic() - begin)
        return answer

    def step(self):
        self.call(self.manager.on_schedule_end, ScheduleEndContext((), ()))

    def memory(self):
        return numpy.asarray(self.manager.primary_tier.get_kv_memoryview()).view(numpy.uint8)

    def begin_storing(self, names, values, request):
        context = ReqContext(request)
        self.manager.on_new_request(context)
        output = self.call(self.manager.prepare_store, names, context)
        for chunk, value in zip(output.store_spec.chunk_ids, values, strict=True):
            self.memory()[chunk] = numpy.frombuffer(value, numpy.uint8)
        self.call(self.manager.complete_store, names, context)
        self.manager.on_request_finished(context)

    def store(self, names, values, request="store"):
        self.begin_storing(names, values, request)
        self.wait()

    def wait(self, seconds=30):
        deadline = time.monotonic() + seconds
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "jobs that do not end"
            self.step()
            time.sleep(0.002)

    def load(self, names, request):
        """The bytes of each block, `None` for one that vLLM has to compute."""
        context, found = ReqContext(request), {}
        self.manager.on_new_request(context)
        deadline = time.monotonic() + 30
        while len(found) < len(names):
            assert time.monotonic() < deadline, "a request that waits for ever"
            for name in names:
                state = self.call(self.manager.lookup, name, context)
                if name not in found and state is LookupResult.HIT:
                    (chunk,) = self.manager.prepare_load([name], context).chunk_ids
                    found[name] = self.memory()[chunk].tobytes()
                    self.manager.complete_load([name], context)
                elif name not in found and state is LookupResult.MISS:
                    found[name] = None
            self.step()
            time.sleep(0.002)
        self.manager.on_request_finished(context)
        self.wait()
        return [found[name] for name in names]

    def files(self):
        return {path.name: path for path in Path(self.tier._files).iterdir()}

    def close(self):
        self.manager.shutdown()


@pytest.fixture
def engine(mount):
    made = []

    def make(**options):
        made.append(Engine(mount.mountpoint, **options))
        return made[-1]

    yield make
    for each in made:
        if each.tier._memory is not None:
            each.close()


def test_another_engine_finds_what_one_has_stored(engine):
    first = engine()
    first.store(keys(6), contents(6))
    assert len(first.files()) == 6 and {path.stat().st_size for path in first.files().values()} == {BLOCK}
    first.close()
    second = engine()
    assert second.load([*keys(6), *keys(2, seed=9)], "load") == [*contents(6), None, None]
    # Another model's rows are others, also where its tokens are the same.
    assert engine(model="org/other").load(keys(2), "other") == [None, None]
    assert engine(directory="else/where").load(keys(2), "elsewhere") == [None, None]


def test_another_process_takes_it_from_a_mount_that_was_killed(place, mount, engine):
    first = engine()
    first.store(keys(6), contents(6))
    mount.sync()
    first.close()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    again = kvfs.Mount(place / "store", mount.mountpoint)
    line = [sys.executable, "-c", AGAIN, os.path.dirname(__file__), again.mountpoint]
    subprocess.run(line, check=True, timeout=120)


def test_many_are_asked_in_one_question(engine):
    engine().store(keys(20), contents(20))
    other, questions = engine(), []
    has = other.tier._files.has
    other.tier._lookups._ask = lambda names: questions.append(len(names)) or other.tier._has(names)
    assert other.load([*keys(20), *keys(20, seed=2)], "load")[20:] == [None] * 20
    assert questions == [40]
    assert has([]) == []


def test_what_is_there_is_not_written_again(engine):
    first, second = engine(), engine()
    first.store(keys(6), contents(6))
    before = {name: path.stat().st_ino for name, path in first.files().items()}
    second.store(keys(8), contents(8))
    after = {name: path.stat().st_ino for name, path in first.files().items()}
    assert len(after) == 8 and before.items() <= after.items()


def test_two_engines_store_the_same_blocks_at_once(engine):
    both = [engine(), engine()]
    for turn in range(5):
        names, values = keys(10, seed=100 + turn), contents(10, seed=100 + turn)
        for each in both:
            each.begin_storing(names, values, f"turn-{turn}")
        for each in both:
            each.wait()
        assert engine(chunks=12).load(names, "load") == values
    assert len(both[0].files()) == 50


def test_lost_longer_and_shorter_files_are_computed(engine):
    first = engine()
    first.store(keys(6), contents(6))
    files = [first.files()[f"{key[:-4].hex()}_g0.bin"] for key in keys(6)]
    files[0].unlink()
    with files[1].open("ab") as file:
        file.write(b"more")
    os.truncate(files[2], BLOCK - 1)
    second, loaded = engine(), []
    submit = second.tier.submit_load
    second.tier.submit_load = lambda job: loaded.extend(job.keys) or submit(job)
    assert second.load(keys(6), "load") == [None, None, None, *contents(6)[3:]]
    # What was read beside what could not be is not read again.
    assert sorted(loaded) == sorted(keys(6)[1:])
    # A request asks once for what it cannot have, and the next one asks anew.
    shutil.rmtree(Path(second.tier._files))
    assert second.load(keys(6), "again")[:3] == [None] * 3


def test_a_damaged_file_is_computed(place, mount, engine):
    first = engine()
    first.store(keys(3), contents(3))
    first.close()
    mount.umount()
    assert damage(place / "store", contents(3)[1][:4096]) == 1
    kvfs.Mount(place / "store", mount.mountpoint)
    assert engine().load(keys(3), "load") == [contents(3)[0], None, contents(3)[2]]


def damage(store, content):
    """Changes a byte where the store has this content; returns in how many files."""
    done = 0
    for path in (*store.glob("objects/**/*"), *store.glob("packs/*")):
        if path.is_file() and content in (whole := path.read_bytes()):
            at = whole.index(content) + 100
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ 0x40]))
            done += 1
    return done


def test_a_mount_that_goes_and_comes_back(place, mount, engine, caplog):
    first, second = engine(), engine()
    first.store(keys(6), contents(6))
    mount.sync()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    assert second.load(keys(6, seed=3), "gone") == [None] * 6
    second.store(keys(6, seed=3), contents(6, seed=3))
    subprocess.run(["umount", "-l", mount.mountpoint], check=True)
    # Nothing is written to the disk below the mountpoint.
    second.store(keys(6, seed=4), contents(6, seed=4), "below")
    assert second.load(keys(6, seed=5), "below") == [None] * 6
    assert os.listdir(mount.mountpoint) == []
    assert [line.levelname for line in caplog.records if "kvfs: " in line.message].count("WARNING") <= 2
    kvfs.Mount(place / "store", mount.mountpoint)
    assert second.load(keys(6), "back") == contents(6)
    second.store(keys(6, seed=6), contents(6, seed=6), "back")
    assert engine().load(keys(6, seed=6), "load") == contents(6, seed=6)


@pytest.fixture
def stopped(mount):
    """Stops and continues the mount's daemon, which keeps whoever asks it."""
    daemon = mount.status()["pid"]

    def switch(is_stopped):
        os.kill(daemon, signal.SIGSTOP if is_stopped else signal.SIGCONT)

    yield switch
    os.kill(daemon, signal.SIGCONT)


def test_a_mount_that_hangs_keeps_nobody(engine, stopped):
    first, second = engine(), engine()
    first.store(keys(6), contents(6))
    stopped(True)
    begin = time.monotonic()
    # Lookups are given up, and stores; what waits after that is answered at once.
    assert second.load(keys(6), "hangs") == [None] * 6
    first.begin_storing(keys(6, seed=2), contents(6, seed=2), "hangs")
    first.wait()
    assert second.load(keys(3, seed=3), "again") == [None] * 3
    assert time.monotonic() - begin < 4 * WAIT
    assert max(first.longest, second.longest) < STEP_SECONDS
    stopped(False)
    wait_for(lambda: second.tier._lookups._began is None and not first.tier._stores._began)
    assert second.load(keys(6), "back") == contents(6)


class Held:
    """Files whose writes wait."""

    def __init__(self, files):
        self._files, self.has, self.go = files, files.has, threading.Event()

    def __fspath__(self):
        return os.fspath(self._files)

    def write(self, names, values):
        assert self.go.wait(30)
        return self._files.write(names, values)


def test_a_store_that_hangs_writes_the_bytes_of_its_blocks(engine):
    first = engine()
    first.tier._files = held = Held(first.tier._files)
    first.begin_storing(keys(6), contents(6), "hangs")
    first.wait(seconds=5 * WAIT)
    # Its places are others' by now, and what was begun is written with the old bytes all the same.
    first.memory()[:] = 0xFF
    held.go.set()
    wait_for(lambda: not first.tier._stores._began)
    assert engine().load(keys(6), "load") == contents(6)


def test_a_load_that_hangs_is_computed_and_touches_nothing_later(engine, stopped):
    engine().store(keys(6), contents(6))
    other = engine()
    context = ReqContext("hangs")
    other.manager.on_new_request(context)
    while other.manager.lookup(keys(1)[0], context) is not LookupResult.HIT_PENDING:
        other.tier._lookups.flush()
        time.sleep(0.002)
    stopped(True)
    other.step()
    other.wait(seconds=5 * WAIT)
    assert other.manager.lookup(keys(1)[0], context) is LookupResult.MISS
    other.memory()[:] = 0xEE
    stopped(False)
    wait_for(lambda: not other.tier._loads._began)
    assert (other.memory() == 0xEE).all()
    other.manager.on_request_finished(context)
    assert other.load(keys(6), "back") == contents(6)


def wait_for(is_true, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_waits_to_be_stored_is_bounded(engine, stopped, caplog):
    first = engine(chunks=16, wait_seconds=5.0)
    stopped(True)
    for turn in range(4):
        first.begin_storing(keys(4, seed=turn), contents(4, seed=turn), f"turn-{turn}")
        first.step()
    first.step()
    # Half of the memory: the others were not begun, and their places are free.
    assert len(first.manager._jobs) == 2
    assert "the mount is slower than the engine" in caplog.text
    assert first.longest < STEP_SECONDS
    stopped(False)
    first.wait()
    assert len(first.files()) == 8


@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_that_ends_waits_for_what_runs_and_begins_nothing(engine, stopped, hangs):
    first = engine()
    first.store(keys(1, seed=9), contents(1, seed=9))
    stopped(hangs)
    for turn in range(3):
        first.begin_storing(keys(4, seed=turn), contents(4, seed=turn), f"turn-{turn}")
    begin = time.monotonic()
    first.close()
    assert time.monotonic() - begin < 8 * WAIT
    # Whoever hangs has been told that it is over, before vLLM unmaps its memory.
    assert first.tier._memory is None and not first.tier._stores._jobs
    stopped(False)
    # What was begun is whole.
    second = engine()
    for turn in range(3):
        found = second.load(keys(4, seed=turn), f"load-{turn}")
        assert all(there in (None, right) for there, right in zip(found, contents(4, seed=turn)))


def test_a_reset_waits_until_nothing_touches_the_memory(engine):
    first = engine()
    first.begin_storing(keys(6), contents(6), "store")
    first.manager.reset_cache()
    assert not first.manager.has_pending_work()
    assert first.load(keys(6), "load") == contents(6)


def test_what_does_not_fit_is_refused(mount, place):
    for options, why in (
        ({"mount": ""}, '"mount" is missing'),
        ({"modle": 1}, "no setting .'modle'"),
        ({"directory": "../models"}, "below files/"),
        ({"wait_seconds": 0}, "above 0"),
        ({"wait_seconds": True}, "above 0"),
        ({"locality": "NEAR"}, "LOCAL or REMOTE"),
    ):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            Engine(**{"mount": mount.mountpoint, **options})
    nothing = place / "nothing"
    nothing.mkdir()
    with pytest.raises(kvfs.Error, match="no kvfs is mounted"):
        Engine(str(nothing))
    assert list(nothing.iterdir()) == []
    gc.collect()

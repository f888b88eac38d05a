"""LMCache's level 2 with its own objects; mount-scripts/test-engines.sh has what it needs."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

import kvfs

torch = pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")
pytest.importorskip("lmcache", reason="no LMCache here: mount-scripts/test-engines.sh")

from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects, make_object_keys  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config  # noqa: E402
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename  # noqa: E402
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig  # noqa: E402

from kvfs.lmcache import KvfsL2AdapterConfig, file_name  # noqa: E402

COUNT, SIZE = 6, 20_000


def plugin(mount, **more):
    return {
        "module_path": "kvfs.lmcache",
        "class_name": "KvfsL2Adapter",
        "adapter_params": {"mount": mount.mountpoint, **more},
    }


@pytest.fixture
def adapter(mount):
    """As LMCache's own factory makes it."""
    config = PluginL2AdapterConfig.from_dict(plugin(mount))
    assert get_type_name_for_config(config) == "plugin"
    made = create_l2_adapter(config)
    yield made
    made.close()


def wait(event):
    assert select.select([event], [], [], 30)[0], "nothing came of it"
    os.eventfd_read(event)


def store(adapter, keys, objects):
    task = adapter.submit_store_task(keys, objects)
    wait(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task]


def lookup(adapter, keys):
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return [found.test(index) for index in range(len(keys))]


def load(adapter, keys, objects):
    task = adapter.submit_load_task(keys, objects)
    wait(adapter.get_load_event_fd())
    found = adapter.query_load_result(task)
    return [found.test(index) for index in range(len(keys))]


def objects(fill):
    return make_memory_objects(torch.empty(COUNT * SIZE, dtype=torch.uint8), COUNT, SIZE, 0, fill)


def test_what_is_stored_is_found_and_loaded(mount, adapter):
    keys, stored, into = make_object_keys(COUNT), objects(1), objects(100)
    assert lookup(adapter, keys) == [False] * COUNT
    result = store(adapter, keys, stored)
    assert result.is_successful() and result.bytes_transferred() == COUNT * SIZE
    others = make_object_keys(2, key_offset=COUNT)
    assert lookup(adapter, [others[0], *keys, others[1]]) == [False] + [True] * COUNT + [False]
    assert load(adapter, keys, into) == [True] * COUNT
    assert all(torch.equal(old.raw_data, new.raw_data) for old, new in zip(stored, into))
    assert adapter.get_usage().total_bytes_used == COUNT * SIZE
    # What is there already is not written again.
    assert store(adapter, keys, stored).bytes_transferred() == 0
    adapter.delete(keys[:2])
    assert lookup(adapter, keys) == [False] * 2 + [True] * (COUNT - 2)
    assert adapter.get_usage().total_bytes_used == (COUNT - 2) * SIZE


def test_a_chunk_that_goes_or_has_another_length_is_a_miss(mount, adapter):
    keys = make_object_keys(COUNT)
    store(adapter, keys, objects(1))
    directory = Path(mount.files("lmcache"))
    (directory / file_name(keys[0])).unlink()
    with open(directory / file_name(keys[1]), "ab") as file:
        file.write(b"more")
    assert load(adapter, keys, objects(0)) == [False, False] + [True] * (COUNT - 2)
    assert adapter.report_status()["is_healthy"] is False


def test_a_daemon_that_dies_is_misses_until_it_is_back(place, mount, adapter):
    keys, stored, into = make_object_keys(COUNT), objects(1), objects(100)
    store(adapter, keys, stored)
    mount.sync()
    os.kill(mount.status()["pid"], 9)
    # Names that were asked lately are the kernel's to answer.
    assert lookup(adapter, make_object_keys(COUNT, key_offset=COUNT)) == [False] * COUNT
    assert load(adapter, keys, into) == [False] * COUNT
    assert not store(adapter, make_object_keys(COUNT, key_offset=COUNT), stored).is_successful()
    assert adapter.report_status()["is_healthy"] is False
    kvfs.Mount(place / "store", mount.mountpoint)
    assert lookup(adapter, keys) == [True] * COUNT
    assert load(adapter, keys, into) == [True] * COUNT
    assert all(torch.equal(old.raw_data, new.raw_data) for old, new in zip(stored, into))
    assert adapter.report_status()["is_healthy"] is True


def test_names_are_those_of_the_adapter_for_files():
    for key in (
        ObjectKey(b"\x01" * 32, "org/model-7b", 0x01000100),
        ObjectKey(b"\xff" * 16, "model", 0xFFFFFFFF, object_group_id=17, cache_salt="tenant"),
    ):
        assert file_name(key) == _object_key_to_filename(key)


def test_what_does_not_fit_is_refused(mount, place):
    for params, why in (
        ({}, "needs adapter_params"),
        ({"mount": "/x", "path": "/y"}, "path"),
        ({"mount": "/x", "directory": "../models"}, "below files/"),
    ):
        with pytest.raises(ValueError, match=why):
            KvfsL2AdapterConfig.from_dict(params)
    nothing = place / "nothing"
    nothing.mkdir()
    config = PluginL2AdapterConfig.from_dict({**plugin(mount), "adapter_params": {"mount": str(nothing)}})
    with pytest.raises(kvfs.Error, match="no kvfs is mounted"):
        create_l2_adapter(config)
    assert list(nothing.iterdir()) == []


def test_the_engines_own_verified_benchmark(mount):
    line = [Path(sys.executable).with_name("lmcache"), "bench", "l2", "--num-keys", "8", "--data-size-kb", "100"]
    line += ["--rounds", "2", "--no-skip-verify", "--lookup-max-hit-rate", "0.5", "--l2-adapter"]
    done = subprocess.run(
        [*line, json.dumps({"type": "plugin", **plugin(mount, directory="bench")})],
        timeout=120,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert "All 8 keys data verified OK" in done.stdout, done.stdout

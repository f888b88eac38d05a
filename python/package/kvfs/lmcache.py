"""A level 2 adapter for LMCache that keeps its chunks in a mount.

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "kvfs.lmcache", "class_name": "KvfsL2Adapter",
                                  "adapter_params": {"mount": "/mnt/kv", "directory": "lmcache"}}'

A chunk is a file in `files/` and no page in `models/`: its key is a hash, from which nobody can tell the tokens. Files are
called as those of LMCache's own adapter `fs`, so a directory of that one is taken over by moving it there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from ._kvfs import Error, Files, Missing
from .mount import Mount

logger = logging.getLogger(__name__)


class KvfsL2AdapterConfig(L2AdapterConfigBase):
    """`mount`: the mountpoint; `directory`: where below its `files/` (`lmcache` where it is not given)."""

    def __init__(self, mount: str, directory: str = "lmcache") -> None:
        self.mount, self.directory = mount, directory

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KvfsL2AdapterConfig:
        """Takes `adapter_params`."""
        unknown = sorted(set(d) - {"mount", "directory"})
        if unknown:
            raise ValueError(f"kvfs.lmcache knows no adapter_params {unknown}: mount, directory")
        mount, directory = d.get("mount"), d.get("directory", "lmcache")
        if not isinstance(mount, str) or not mount:
            raise ValueError('kvfs.lmcache needs adapter_params {"mount": "/where/kvfs/is/mounted"}')
        if not isinstance(directory, str) or directory.startswith("/") or ".." in directory.split("/"):
            raise ValueError(f"directory is {directory!r}: a path below files/ of the mount is needed")
        return cls(mount, directory)

    @classmethod
    def help(cls) -> str:
        """What LMCache prints."""
        return f"kvfs.lmcache: {cls.__doc__}"


class _Results:
    """What came of the tasks of one kind, and the event that tells that there is something."""

    def __init__(self, name: str) -> None:
        self.event = create_event_notifier()
        # One after the other: each call reads or writes many files at a time by itself. Each kind has a thread of its
        # own, so a lookup does not wait until gigabytes are stored.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"kvfs_{name}")
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}

    def submit(self, task: int, work: Callable[[], Any]) -> None:
        self._executor.submit(self._run, task, work)

    def _run(self, task: int, work: Callable[[], Any]) -> None:
        outcome = work()
        with self._lock:
            self._done[task] = outcome
        self.event.notify()

    def pop(self, task: int) -> Any:
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        # What runs has buffers of the engine's in its hands: it is waited for.
        self._executor.shutdown(wait=True, cancel_futures=True)
        self.event.close()


class KvfsL2Adapter(L2AdapterInterface):
    """Chunks of LMCache as files of a mount.

    A mount that is gone, or a file that cannot be read, is a miss and a line in the log, never an exception in LMCache's
    controllers. Room is the mount's matter (`kvfs quota`), so LMCache's global eviction is not offered.
    """

    def __init__(self, config: KvfsL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        super().__init__()
        # Refused where nothing is mounted: chunks would fill the disk below the mountpoint, and nobody would find them.
        self._files = Files(Mount.at(config.mount).files(config.directory))
        self._stores, self._lookups, self._loads = (_Results(name) for name in ("store", "lookup", "load"))
        self._lock = threading.Lock()
        self._tasks = 0
        self._is_healthy = True

    def get_store_event_fd(self) -> int:
        """Tells that a store has ended."""
        return self._stores.event.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Tells that a lookup has ended."""
        return self._lookups.event.fileno()

    def get_load_event_fd(self) -> int:
        """Tells that a load has ended."""
        return self._loads.event.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Writes what the mount has not."""
        task = self._next_task()
        self._stores.submit(task, lambda: self._store(keys, objects))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """How the stores ended."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, Any]) -> int:
        """Asks which chunks are there."""
        task = self._next_task()
        self._lookups.submit(task, lambda: self._lookup(keys))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """What a lookup found."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked: a file that goes before it is loaded is a miss."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Reads chunks into the engine's memory."""
        task = self._next_task()
        self._loads.submit(task, lambda: self._load(keys, objects))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """What a load has read."""
        return self._loads.pop(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Removes chunks."""
        gone, sizes = [], []
        for key in keys:
            name = file_name(key)
            try:
                size = os.stat(os.path.join(self._files, name)).st_size
                if self._files.remove([name])[0]:
                    gone.append(key)
                    sizes.append(size)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._failed("delete", error)
        if gone:
            self._notify_keys_deleted(gone, sizes)

    def close(self) -> None:
        """Waits for what runs."""
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    def report_status(self) -> dict[str, Any]:
        """For LMCache's own status."""
        return {"is_healthy": self._is_healthy, "type": "kvfs", "directory": os.fspath(self._files)}

    def _next_task(self) -> int:
        with self._lock:
            self._tasks += 1
            return self._tasks

    def _store(self, keys: list[ObjectKey], objects: list[Any]) -> L2StoreResult:
        try:
            names = [file_name(key) for key in keys]
            new = [index for index, is_there in enumerate(self._files.has(names)) if not is_there]
            values = [_memory(objects[index]) for index in new]
            outcomes = self._files.write([names[index] for index in new], values)
        except Exception as error:
            self._failed("store", error)
            return L2StoreResult(False, 0)
        done = [(keys[index], value.nbytes) for index, value, error in zip(new, values, outcomes) if error is None]
        self._tell("store", outcomes)
        if done:
            self._notify_keys_stored(*(list(column) for column in zip(*done)))
        return L2StoreResult(len(done) == len(new), sum(size for _, size in done))

    def _lookup(self, keys: list[ObjectKey]) -> Bitmap:
        found = Bitmap(len(keys))
        try:
            for index, is_there in enumerate(self._files.has([file_name(key) for key in keys])):
                if is_there:
                    found.set(index)
        except Exception as error:
            self._failed("lookup", error)
        return found

    def _load(self, keys: list[ObjectKey], objects: list[Any]) -> Bitmap:
        loaded = Bitmap(len(keys))
        try:
            outcomes = self._files.read([file_name(key) for key in keys], [_memory(object) for object in objects])
        except Exception as error:
            self._failed("load", error)
            return loaded
        for index, error in enumerate(outcomes):
            if error is None:
                loaded.set(index)
        self._tell("load", outcomes)
        self._notify_keys_accessed([key for key, error in zip(keys, outcomes) if error is None])
        return loaded

    def _tell(self, what: str, outcomes: list[Error | None]) -> None:
        # A chunk that went is no failure, but what a cache does.
        failed = [error for error in outcomes if error is not None and not isinstance(error, Missing)]
        if failed:
            self._failed(f"{what} of {len(failed)} chunks", failed[0])
        else:
            self._is_healthy = True

    def _failed(self, what: str, error: BaseException) -> None:
        # The first time as a warning: a mount that is gone is met by every request until it is back.
        logger.log(logging.WARNING if self._is_healthy else logging.DEBUG, "kvfs: %s: %s", what, error)
        self._is_healthy = False


def file_name(key: ObjectKey) -> str:
    """As LMCache's adapter `fs` calls it. `@` is in no part, and a slash only in the name of a model."""
    parts = [
        key.model_name.replace("/", "-SEP-"),
        f"{key.kv_rank:#010x}",
        f"{key.object_group_id:x}",
        key.chunk_hash.hex(),
        *([key.cache_salt] if key.cache_salt else []),
    ]
    return "@".join(parts) + ".data"


def _memory(object: Any) -> numpy.ndarray:
    """The bytes of a chunk that count, where they lie."""
    return numpy.frombuffer(object.byte_array, numpy.uint8)

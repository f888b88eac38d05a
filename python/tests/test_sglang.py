"""SGLang's storage layer with real tensors; it is skipped where SGLang is not installed."""

import os

import pytest

import kvfs

torch = pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")
pytest.importorskip("sglang", reason="no SGLang here: mount-scripts/test-engines.sh")
try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheFile,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
except ImportError as error:
    pytest.skip(f"SGLang cannot be imported without its GPU packages here: {error}", allow_module_level=True)

TOKENS, ROW, PAGES = 4, 48, 8


class Pool:
    """A host pool as the storage sees it: rows of tokens, `page_size` of them a page."""

    def __init__(self, fill=None):
        generator = torch.Generator().manual_seed(fill or 0)
        rows = (PAGES * TOKENS, ROW)
        self.rows = torch.randn(rows, generator=generator) if fill else torch.zeros(rows)
        self.page_size = TOKENS

    def get_data_page(self, index, flat=True):
        return self.rows[index : index + TOKENS].flatten()

    def get_dummy_flat_data_page(self):
        return torch.zeros(TOKENS * ROW)

    def set_from_flat_data_page(self, index, page):
        self.rows[index : index + TOKENS] = page.view(TOKENS, ROW)


def config(mount, **fields):
    extra = {
        "backend_name": "kvfs",
        "module_path": "kvfs.sglang",
        "class_name": "KvfsHiCacheStorage",
        "interface_v1": 1,
        "mount": mount and mount.mountpoint,
    }
    of_one = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    plain = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "org/m"}
    return HiCacheStorageConfig(**{**of_one, **plain, "extra_config": extra, **fields})


def storage_of(mount, pool=None, **fields):
    """As SGLang's own factory makes it."""
    storage = StorageBackendFactory.create_backend("dynamic", config(mount, **fields), pool)
    storage.register_mem_pool_host(pool or Pool())
    return storage


KEYS = [f"{number:064x}" for number in range(PAGES)]
INDICES = torch.arange(PAGES * TOKENS)


def test_pages_come_back_in_another_order(mount):
    written, read = Pool(fill=1), Pool()
    storage = storage_of(mount, written)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS[:5], INDICES[: 5 * TOKENS]) == [True] * 5
    assert storage.batch_exists(KEYS) == 5
    assert storage.batch_exists(KEYS[5:] + KEYS) == 0
    again = storage_of(mount, read)
    wanted = [KEYS[4], KEYS[7], KEYS[0]]
    assert again.batch_get_v1(wanted, INDICES[: 3 * TOKENS]) == [True, False, True]
    assert torch.equal(read.rows[:TOKENS], written.rows[4 * TOKENS : 5 * TOKENS])
    assert not read.rows[TOKENS : 2 * TOKENS].any()
    assert torch.equal(read.rows[2 * TOKENS : 3 * TOKENS], written.rows[:TOKENS])
    assert storage.batch_get_v1(KEYS, INDICES[:-1]) == [False] * PAGES


def test_pools_of_all_pages_and_of_the_last_ones(mount):
    storage = storage_of(mount, Pool(fill=1))
    dense, state = Pool(fill=2), Pool(fill=3)
    storage.register_mem_host_pool_v2(dense, PoolName.INDEXER)
    storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
    storage.batch_set_v1(KEYS, INDICES)
    rows = INDICES.view(PAGES, TOKENS)

    def transfer(name, pages, **more):
        return PoolTransfer(name, host_indices=rows[pages].flatten(), keys=[KEYS[page] for page in pages], **more)

    written = storage.batch_set_v2([transfer(PoolName.INDEXER, [*range(6)]), transfer(PoolName.MAMBA, [2, 3, 6])])
    assert written == {PoolName.INDEXER: [True] * 6, PoolName.MAMBA: [True] * 3}
    all_pages = transfer(PoolName.INDEXER, [*range(PAGES)], hit_policy=PoolHitPolicy.ALL_PAGES)
    for window, restorable in (([0], [3, 4]), ([0, 1], [4])):
        trailing = transfer(PoolName.MAMBA, window, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = storage.batch_exists_v2(KEYS, [all_pages, trailing])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, restorable)
        assert found.extra_pool_hit_pages[PoolName.INDEXER] == 6
    other = Pool()
    storage.register_mem_host_pool_v2(other, PoolName.MAMBA)
    assert storage.batch_get_v2([transfer(PoolName.MAMBA, [3, 4])]) == {PoolName.MAMBA: [True, False]}
    assert torch.equal(other.rows[3 * TOKENS : 4 * TOKENS], state.rows[3 * TOKENS : 4 * TOKENS])
    groups = transfer(PoolName.INDEXER, [0], hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    with pytest.raises(ValueError, match="block_groups|BLOCK_GROUPS"):
        storage.batch_exists_v2(KEYS, [groups])


def test_the_same_answers_as_the_engines_own_files(mount, place):
    """Random sets of pages, asked of both."""
    own = HiCacheFile(config(None, extra_config={}), str(place / "own"))
    ours = storage_of(mount)
    page = torch.arange(64, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for key in KEYS[:-1]:
        for name in (PoolName.KV, PoolName.INDEXER, PoolName.MAMBA):
            if torch.rand(1, generator=generator) < (0.95 if name == PoolName.KV else 0.7):
                own.set(own._log_key(name, key), page)
                ours._write([ours._name(name, key)], [page])
    for window in (1, 2, 3):
        transfers = [
            PoolTransfer(PoolName.INDEXER, keys=KEYS, hit_policy=PoolHitPolicy.ALL_PAGES),
            PoolTransfer(PoolName.MAMBA, keys=KEYS[:window], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        for asked in (None, transfers[:1], transfers[1:], transfers):
            assert ours.batch_exists_v2(KEYS, asked) == own.batch_exists_v2(KEYS, asked)


def test_ranks_and_models_are_kept_apart(mount):
    first = storage_of(mount, Pool(fill=1), tp_size=2)
    first.batch_set_v1(KEYS, INDICES)
    for fields in ({"tp_rank": 1, "tp_size": 2}, {"model_name": "org/other", "tp_size": 2}, {"pp_size": 2, "tp_size": 2}):
        other = storage_of(mount, **fields)
        assert other.batch_exists(KEYS) == 0
        other.clear()
    assert first.batch_exists(KEYS) == PAGES
    first.clear()
    assert first.batch_exists(KEYS) == 0


def test_a_mount_that_is_gone_is_misses(mount, place):
    storage = storage_of(mount, Pool(fill=1))
    page = torch.arange(64, dtype=torch.float32)
    assert storage.set("key", page) and storage.exists("key")
    assert torch.equal(storage.get("key", torch.zeros(64)), page)
    os.kill(mount.status()["pid"], 9)
    # Names that were asked lately are the kernel's to answer.
    assert storage.batch_exists(KEYS) == 0
    assert storage.get("key", torch.zeros(64)) is None
    assert storage.set("other", page) is False
    assert storage.batch_set_v1(KEYS, INDICES) == [False] * PAGES


def test_what_does_not_fit_is_refused(mount, place):
    with pytest.raises(ValueError, match='"mount"'):
        storage_of(None)
    nothing = place / "nothing"
    nothing.mkdir()
    extra = {**config(mount).extra_config, "mount": str(nothing)}
    with pytest.raises(kvfs.Error, match="no kvfs is mounted"):
        storage_of(mount, extra_config=extra)

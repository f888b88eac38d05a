"""The parts of the connector for vLLM that need no vLLM: what is refused, what is planned, and rows to pages and back."""

import os
import shutil
from types import SimpleNamespace

import numpy
import pytest

import kvfs

torch = pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")

from kvfs.vllm.plan import Part, Plan  # noqa: E402
from kvfs.vllm.rows import rows_of  # noqa: E402
from kvfs.vllm.settings import Settings, check_engine, layers_of, open_model  # noqa: E402
from kvfs.vllm.transfer import Loads, Saves  # noqa: E402

BLOCK, PAGE, LAYERS, HEADS, DIM = 4, 8, 3, 2, 16
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


class FullAttentionSpec(SimpleNamespace):
    """Called as vLLM's."""


class SlidingWindowSpec(FullAttentionSpec):
    """Called as vLLM's."""


def spec(kind=FullAttentionSpec, **fields):
    plain = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "head_size_v": DIM, "dtype": torch.float32}
    return kind(**{**plain, "kv_quant_mode": 0, "tokens_per_state": 1, **fields})


def cache_config(*specs):
    groups = [SimpleNamespace(layer_names=NAMES, kv_cache_spec=each) for each in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups)


def engine(**fields):
    """A configuration of vLLM; `part__name=value` is another value of a part."""
    parts = {
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "nnodes": 1},
        "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
        "scheduler_config": {"async_scheduling": False},
        "model_config": {"model": "org/tiny", "revision": None, "dtype": torch.float32, "quantization": None},
    }
    parts["model_config"]["hf_text_config"] = SimpleNamespace(rope_parameters={"rope_theta": 1e4})
    for name, value in fields.items():
        part, _, field = name.partition("__")
        parts[part][field] = value
    return SimpleNamespace(speculative_config=None, **{name: SimpleNamespace(**each) for name, each in parts.items()})


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, "where kvfs is mounted"),
        ({"mount": ""}, "a text is needed"),
        ({"mount": "/", "modle": "x"}, "no such kv_connector_extra_config .*modle"),
        ({"mount": "/", "page_tokens": -1}, "number above 0"),
        ({"mount": "/", "ttl_seconds": True}, "number above 0"),
        ({"mount": "/", "model": "../other"}, "name of a directory"),
        ({"mount": "/"}, "no kvfs is mounted here"),
    ],
)
def test_settings_that_do_not_fit_are_refused(extra, why):
    with pytest.raises(kvfs.Error, match=why):
        Settings.of(extra, "org/tiny")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"scheduler_config__async_scheduling": True}, "--no-async-scheduling"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__nnodes": 2}, "one machine"),
    ],
)
def test_engines_that_do_not_fit_are_refused(fields, why):
    check_engine(engine())
    with pytest.raises(kvfs.InvalidArgument, match=why):
        check_engine(engine(**fields))


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([spec(), spec(SlidingWindowSpec, sliding_window=8)], "2 groups of layers .*SlidingWindowSpec"),
        ([spec(SlidingWindowSpec, sliding_window=8)], "looks at 8 tokens only"),
        ([spec(sliding_window=8)], "layers.0.* looks at 8 tokens only"),
        ([spec(type("MambaSpec", (FullAttentionSpec,), {}))], "keeps a MambaSpec"),
        ([spec(kv_quant_mode=1)], "--kv-cache-dtype auto"),
        ([spec(head_size_v=8)], "K and V of .* differ"),
        ([spec(num_head_slots=2)], "num_head_slots"),
    ],
)
def test_layers_that_keep_something_else_are_refused(specs, why):
    assert list(layers_of(cache_config())) == NAMES
    with pytest.raises(kvfs.InvalidArgument, match=why):
        layers_of(cache_config(*specs))


def test_layers_are_in_the_order_of_their_numbers():
    names = [f"model.layers.{number}.attn" for number in (10, 2, 0)]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec())
    assert list(layers_of(SimpleNamespace(kv_cache_groups=[group]))) == names[::-1]


@pytest.mark.parametrize(
    ("backend", "cache", "why"),
    [
        ("MYSTERY_ATTN", torch.zeros(6, HEADS, BLOCK, 2 * DIM), "uses MYSTERY_ATTN, .*known are CPU_ATTN"),
        ("CPU_ATTN", torch.zeros(6, BLOCK, HEADS, 2 * DIM).transpose(1, 2), "strides"),
        ("FLASH_ATTN", torch.zeros(2, 6, BLOCK, HEADS, DIM), "is \\(2, 6, 4, 2, 16\\)"),
        ("FLASH_ATTN", torch.zeros(6, HEADS, 3, 2 * DIM), "no whole number"),
        ("FLASH_ATTN", [torch.zeros(1)], "is list"),
    ],
)
def test_layouts_that_are_not_known_are_refused(backend, cache, why):
    with pytest.raises(kvfs.InvalidArgument, match=why):
        rows_of("layers.0", backend, cache, BLOCK, HEADS, DIM)


def store(mount, extra=None, **fields):
    """The model of rank 0."""
    settings = Settings.of({"mount": mount.mountpoint, "page_tokens": PAGE, **(extra or {})}, "org/tiny")
    return open_model(settings, engine(**fields), layers_of(cache_config()), 0)


def test_a_model_that_keeps_something_else_is_refused(mount):
    made = store(mount)
    assert (made.path.name, made.num_layers, made.page_tokens, made.layout) == ("tiny", LAYERS, PAGE, "hnd")
    assert store(mount).manifest == made.manifest
    for extra, fields in (
        ({"page_tokens": 2 * PAGE}, {}),
        ({"salt": "other"}, {}),
        ({}, {"model_config__revision": "abc"}),
        ({}, {"model_config__quantization": "fp8"}),
    ):
        with pytest.raises(kvfs.Refused, match=f'something else.*name another "model".*remove {made.path}'):
            store(mount, extra, **fields)
    with pytest.raises(kvfs.InvalidArgument, match="multiple of vLLM's block size 4"):
        store(mount, {"model": "odd", "page_tokens": 6})
    # About 4 MiB where nothing is said.
    settings = Settings.of({"mount": mount.mountpoint, "model": "large"}, "org/tiny")
    assert open_model(settings, engine(), layers_of(cache_config()), 0).page_tokens == 16384


def test_each_rank_has_a_model_of_its_own(mount):
    settings = Settings.of({"mount": mount.mountpoint, "page_tokens": PAGE}, "org/tiny")
    config = engine(parallel_config__tensor_parallel_size=2)
    models = [open_model(settings, config, layers_of(cache_config()), rank) for rank in (0, 1)]
    assert [model.path.name for model in models] == ["tiny-tp0of2", "tiny-tp1of2"]
    assert models[1].manifest["shard"] == {"rank": 1, "size": 2}
    for model, tokens in zip(models, (16, 8)):
        fill(model, 16)
        model.sequence("vllm").remove(tokens)
    assert Plan([model.path for model in models], BLOCK).find(request("a", range(20)), 0) == 8
    assert Plan([settings.directory(rank, 2) for rank in (0, 1)], BLOCK).find(request("a", range(20)), 0) == 8


def fill(model, tokens, name="vllm"):
    rows = numpy.random.default_rng(1).standard_normal((2, LAYERS, HEADS, tokens, DIM), numpy.float32)
    sequence = model.create_sequence(name)
    sequence.append(list(range(tokens)), *rows)
    return sequence


def request(name, tokens, **fields):
    ids = list(tokens)
    return SimpleNamespace(request_id=name, prompt_token_ids=ids, num_tokens=len(ids), mm_features=[], **fields)


def output(new=(), cached=(), resumed=(), scheduled=None):
    """What the scheduler decided: requests as (name, blocks, computed tokens)."""
    fresh = [SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=at) for name, blocks, at in new]
    going = SimpleNamespace(
        req_ids=[name for name, _, _ in cached],
        new_block_ids=[(blocks,) if blocks else None for _, blocks, _ in cached],
        num_computed_tokens=[at for _, _, at in cached],
        resumed_req_ids=set(resumed),
    )
    return SimpleNamespace(scheduled_new_reqs=fresh, scheduled_cached_reqs=going, num_scheduled_tokens=scheduled)


def shown(parts):
    return [(part.request, len(part.tokens), part.blocks, part.end, part.load) for part in parts]


def test_a_prompt_is_planned_in_chunks_and_after_a_preemption(mount):
    model = store(mount)
    fill(model, 10)
    plan = Plan([model.path], BLOCK)
    asked = request("a", range(22))
    assert plan.find(asked, 0) == 8
    assert plan.find(asked, 4) == 4
    plan.allocate(asked, 4)
    assert shown(plan.step(output(new=[("a", [5, 6, 7], 8)], scheduled={"a": 3}))) == [("a", 20, [5, 6], 8, (4, 8))]
    # The second chunk, then a preemption, after which it has other blocks, and then tokens of the answer.
    parts = plan.step(output(cached=[("a", [8], 11)], scheduled={"a": 6}))
    assert shown(parts) == [("a", 20, [5, 6, 7, 8], 16, None)]
    assert plan.find(asked, 0) == 8
    plan.allocate(asked, 8)
    parts = plan.step(output(cached=[("a", [1, 2, 3, 4, 9, 10], 8)], resumed=["a"], scheduled={"a": 14}))
    assert shown(parts) == [("a", 20, [1, 2, 3, 4, 9], 20, (0, 8))]
    assert plan.step(output(cached=[("a", None, 22)], scheduled={"a": 1})) == []


def test_the_last_token_is_always_computed(mount):
    model = store(mount)
    fill(model, 16)
    for tokens, found in ((3, 0), (4, 0), (16, 12), (17, 16)):
        assert Plan([model.path], BLOCK).find(request("a", range(tokens)), 0) == found


@pytest.mark.parametrize("fields", [{"cache_salt": "x"}, {"lora_request": object()}, {"prompt_embeds": object()}])
def test_requests_whose_ids_do_not_tell_their_rows_are_left_alone(mount, fields):
    model = store(mount)
    fill(model, 16)
    plan = Plan([model.path], BLOCK)
    asked = request("a", range(20), **fields)
    assert plan.find(asked, 0) == 0
    plan.allocate(asked, 0)
    assert plan.step(output(new=[("a", [0, 1, 2, 3, 4], 0)], scheduled={"a": 20})) == []


def test_a_prompt_waits_for_blocks_that_another_one_loads(mount):
    model = store(mount)
    fill(model, 16)
    plan = Plan([model.path], BLOCK)
    plan.allocate(request("a", range(20)), plan.find(request("a", range(20)), 0))
    assert plan.find(request("b", range(24)), 16) is None
    assert plan.find(request("c", range(50, 74)), 4) == 0
    plan.step(output(new=[("a", [0, 1, 2, 3, 4], 16)], scheduled={"a": 4}))
    assert plan.find(request("b", range(24)), 16) == 0


class Worker:
    """An engine's blocks, and what a worker does in a step."""

    def __init__(self, model, backend="CPU_ATTN", seed=None):
        generator = torch.Generator().manual_seed(seed or 0)
        shape = (LAYERS, 16, HEADS, BLOCK, 2 * DIM)
        self.cache = torch.randn(shape, generator=generator) if seed else torch.zeros(shape)
        self.rows = [rows_of(name, backend, self.cache[at], BLOCK, HEADS, DIM) for at, name in enumerate(NAMES)]
        self.model = self.found_in = model
        self.loads, self.saves = Loads(BLOCK), Saves(BLOCK, None)

    def step(self, *parts):
        self.saves.start(self.model, list(parts))
        self.loads.start(self.found_in, list(parts), LAYERS)
        for layer, rows in enumerate(self.rows):
            self.loads.wait_for(layer, rows)
            self.saves.save(layer, rows)
        self.loads.end()
        self.saves.wait(self.loads.failed)
        failed, self.loads.failed = self.loads.failed, set()
        return failed

    def kept(self, blocks):
        return [rows.take(blocks) for rows in self.rows]


def part(tokens, blocks, end=None, load=None, name="a"):
    return Part(name, numpy.arange(tokens, dtype=numpy.uint32), blocks, tokens if end is None else end, load)


def same(one, other):
    return all(torch.equal(x, y) for a, b in zip(one, other) for x, y in zip(a, b))


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN"])
def test_rows_come_back_in_other_blocks(mount, backend):
    first, blocks = Worker(store(mount), backend, seed=1), [3, 9, 0, 5, 12]
    assert first.step(part(20, blocks[:3], end=12)) == set()
    # A chunk whose pages are not full yet writes the full ones only.
    assert first.model.match(list(range(20))).tokens == 8
    assert first.step(part(20, blocks)) == set()
    assert first.model.match(list(range(20))).tokens == 20
    sequence = first.model.match(list(range(20))).sequence
    assert torch.equal(torch.from_dlpack(sequence.page(1, 16).k), first.kept(blocks)[1][0][:, 16:20])
    for begin, end in ((0, 20), (4, 20), (12, 16)):
        second = Worker(store(mount), backend)
        there = [7, 1, 2, 11, 15][: end // BLOCK]
        assert second.step(part(20, there, end=end, load=(begin, end))) == set()
        assert same(second.kept(there[begin // BLOCK :]), first.kept(blocks[begin // BLOCK : end // BLOCK]))
    assert len(first.model.sequences()) == 1


def test_blocks_that_the_kernel_splits(mount):
    cache = torch.randn(8, HEADS, BLOCK // 2, 2 * DIM)
    rows = rows_of("layers.0", "FLASH_ATTN", cache, BLOCK, HEADS, DIM)
    k, v = rows.take([1, 3])
    assert torch.equal(k[:, 2], cache[3, :, 0, :DIM]) and torch.equal(v[:, 4], cache[6, :, 0, DIM:])
    cache.zero_()
    rows.put([0, 2], k[None], v[None], 0)
    assert torch.equal(rows.take([0, 2])[0], k) and torch.equal(rows.take([0, 2])[1], v)


def test_a_longer_prompt_shares_pages_and_what_is_there_is_not_written_again(mount):
    worker, blocks = Worker(store(mount), seed=2), list(range(10))
    worker.step(part(12, blocks[:3], name="short"))
    worker.step(part(12, blocks[:3], name="again"))
    assert len(worker.model.sequences()) == 1
    worker.step(part(40, blocks, name="long"))
    found = worker.model.match(list(range(40)))
    assert found.tokens == 40 and len(worker.model.sequences()) == 2
    other = Worker(worker.model)
    assert other.step(part(40, blocks, load=(0, 40))) == set()
    assert same(other.kept(blocks), worker.kept(blocks))


def test_pages_that_go_before_they_are_shared(mount, caplog):
    worker, blocks = Worker(store(mount), seed=2), list(range(10))
    worker.step(part(16, blocks[:4], name="short"))
    longer = part(40, blocks, name="long")
    worker.saves.start(Removing(worker.model, worker.model.match(list(range(16))).sequence.path), [longer])
    worker.saves.save(0, worker.rows[0])
    worker.saves.wait(set())
    assert worker.model.sequences() == [] and "a prompt is not kept" in caplog.text
    worker.saves = Saves(BLOCK, ttl_seconds=3600)
    worker.step(part(40, blocks, name="again"))
    found = worker.model.match(list(range(40)))
    assert (found.tokens, found.sequence.ttl) == (40, 3600)


def test_rows_that_another_program_appended_are_loaded(mount):
    """Its last rows are in a tail."""
    worker = Worker(store(mount))
    sequence = fill(worker.model, 15)
    sequence.close()
    assert worker.step(part(12, [2, 4, 6], load=(0, 12))) == set()
    rows = numpy.random.default_rng(1).standard_normal((2, LAYERS, HEADS, 15, DIM), numpy.float32)
    for layer, (k, v) in enumerate(worker.kept([2, 4, 6])):
        assert numpy.array_equal(k, rows[0, layer, :, :12]) and numpy.array_equal(v, rows[1, layer, :, :12])


def test_two_engines_that_save_the_same_prompt_at_once(mount):
    one, other = (Worker(store(mount), seed=3) for _ in range(2))
    whole = part(20, list(range(5)))
    for worker in (one, other):
        worker.saves.start(worker.model, [whole])
    for layer in range(LAYERS):
        for worker in (one, other):
            worker.saves.save(layer, worker.rows[layer])
    for worker in (one, other):
        worker.saves.wait(set())
    assert [len(one.model.sequence(name)) for name in one.model.sequences()] == [20, 20]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_page_that_goes_while_it_is_loaded_is_reported(mount, layer):
    first = Worker(store(mount), seed=4)
    first.step(part(24, list(range(6))))
    sequence = first.model.match(list(range(24))).sequence
    second = Worker(store(mount))
    whole = part(28, list(range(7)), load=(4, 24))
    page = sequence.page(layer, 8).path
    second.found_in = Removing(second.model, page)
    assert second.step(whole) == {1, 2, 3, 4, 5}
    # Nothing that was computed from such blocks is kept.
    assert len(first.model.sequences()) == 1


class Removing:
    """A model whose page, or sequence, goes right after it was found."""

    def __init__(self, model, page):
        self.path, self.page_tokens, self._model, self._page = model.path, model.page_tokens, model, page

    def match(self, tokens):
        found = self._model.match(tokens)
        if os.path.isdir(self._page):
            shutil.rmtree(self._page)
        elif os.path.exists(self._page):
            os.unlink(self._page)
        return found


def test_a_mount_that_is_gone_costs_one_line(mount, caplog):
    worker = Worker(store(mount), seed=5)
    worker.step(part(8, [0, 1], name="before"))
    plan = Plan([worker.model.path], BLOCK)
    assert plan.find(request("x", range(20)), 0) == 8
    mount.sync()
    os.kill(mount.status()["pid"], 9)
    for name in ("y", "z"):
        assert plan.find(request(name, range(20)), 0) == 0
    assert worker.step(part(16, [0, 1, 2, 3], load=(0, 8))) == {0, 1}
    assert worker.step(part(16, [4, 5, 6, 7], name="b")) == set()
    assert [record.levelname for record in caplog.records if record.levelname != "DEBUG"] == ["WARNING"]
    assert "the mount is gone" in caplog.text
    store_place = os.path.join(os.path.dirname(mount.mountpoint), "store")
    again = kvfs.Mount(store_place, mount.mountpoint)
    assert plan.find(request("w", range(20)), 0) == 8
    assert worker.step(part(16, [4, 5, 6, 7], name="c")) == set()
    assert worker.model.match(list(range(16))).tokens == 16
    assert again.status()["pid"]

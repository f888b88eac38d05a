"""vLLM itself on the CPU with a small random model, and pages of a mount; it is skipped where vLLM is not installed."""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import pytest

import kvfs

torch = pytest.importorskip("torch", reason="no torch here: mount-scripts/test-engines.sh")
hf = pytest.importorskip("transformers", minversion="5", reason="no transformers 5 here: mount-scripts/test-engines.sh")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM here: KVFS_ENGINES_PYTHON of mount-scripts/test-engines.sh", allow_module_level=True)

BLOCK, PAGE = 32, 128
# An engine in a process of its own: what it is made of, then one line for each thing to do.
ENGINE = """
import json, logging, subprocess, sys
from vllm import LLM, SamplingParams
logging.getLogger("kvfs.vllm").addHandler(logging.StreamHandler())
made = LLM(**json.loads(sys.argv[1]))
for line in sys.stdin:
    todo = json.loads(line)
    if "run" in todo:
        subprocess.run(todo["run"], check=True)
        continue
    if "metric" in todo:
        counted = sum(metric.value for metric in made.get_metrics() if metric.name == todo["metric"])
        print("ANSWER", json.dumps(counted), flush=True)
        continue
    ask = SamplingParams(max_tokens=todo["tokens"], temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in todo["prompts"]]
    done = made.generate(prompts, ask, use_tqdm=False)
    print("ANSWER", json.dumps([[list(one.outputs[0].token_ids), one.num_cached_tokens] for one in done]), flush=True)
    made.reset_prefix_cache()
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Large enough weights, or all answers would be the same few tokens."""
    place = tmp_path_factory.mktemp("weights")

    @functools.cache
    def make(kind="Llama", **fields):
        torch.manual_seed(5)
        sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
        config = getattr(hf, f"{kind}Config")(**{**sizes, **heads, "initializer_range": 0.3, **fields})
        path = str(place / f"{kind}-{len(fields)}")
        getattr(hf, f"{kind}ForCausalLM")(config).save_pretrained(path)
        return path

    return make


def prompt(tokens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 512, (tokens,), generator=generator).tolist()


class Engine:
    """A running engine; `mount` is the mountpoint, or none."""

    def __init__(self, weights, mount=None, extra=None, **options):
        plain = {"model": weights, "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32"}
        sizes = {"max_model_len": 2048, "max_num_seqs": 4, "block_size": BLOCK, "max_num_batched_tokens": 256}
        transfer = {
            "kv_connector": "KvfsConnector",
            "kv_connector_module_path": "kvfs.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"mount": mount, "model": "tiny", "page_tokens": PAGE, **(extra or {})},
        }
        made = {**plain, **sizes, **({"kv_transfer_config": transfer} if mount else {}), **options}
        self.lines = []
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(made)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, *prompts, tokens=12):
        self.lines.append({"prompts": prompts, "tokens": tokens})
        return self

    def count(self, metric):
        self.lines.append({"metric": metric})
        return self

    def run(self, *command):
        self.lines.append({"run": command})
        return self

    def end(self):
        """The answers to everything that was asked: of each prompt its tokens and how many were not computed."""
        todo = "".join(json.dumps(line) + "\n" for line in self.lines)
        out, self.log = self._process.communicate(todo, timeout=300)
        assert self._process.returncode == 0, self.log[-4000:]
        return [json.loads(line[7:]) for line in out.splitlines() if line.startswith("ANSWER ")]

    def refuse(self):
        """Why it does not start."""
        _, log = self._process.communicate(timeout=300)
        assert self._process.returncode != 0
        return log


def but_last_block(ids):
    return (len(ids) - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def expected(weights):
    """Answers of vLLM alone, of one prompt after the other."""
    engine = Engine(weights())
    for ids in (LONG, LONGER, OTHER):
        engine.ask(ids)
    return [answer[0][0] for answer in engine.end()]


LONG, OTHER = prompt(700), prompt(512, seed=2)
LONGER = LONG[:650] + prompt(300, seed=3)


def test_another_process_takes_it_from_a_mount_that_was_killed(place, mount, weights, expected):
    # Two engines that compute and save the same prompts at the same time, in chunks.
    both = [Engine(weights(), mount.mountpoint).ask(LONG).ask(OTHER) for _ in range(2)]
    for engine in both:
        assert [answer[0][0] for answer in engine.end()] == [expected[0], expected[2]]
        assert "kvfs:" not in engine.log
    mount.sync()
    os.kill(mount.status()["pid"], signal.SIGKILL)
    again = kvfs.Mount(place / "store", mount.mountpoint)
    engine = Engine(weights(), again.mountpoint).ask(LONG).ask(LONGER).ask(OTHER)
    answers = engine.end()
    assert [answer[0][0] for answer in answers] == expected
    # Of the longer prompt only what the two have in common, in whole blocks.
    assert [answer[0][1] for answer in answers] == [but_last_block(LONG), 640, but_last_block(OTHER)]
    model = kvfs.Model(again.model("tiny"))
    assert model.match(LONGER).tokens == len(LONGER) // BLOCK * BLOCK
    # Rows in an order that everybody can read: attention in Python finds the same ones.
    page = model.match(LONG).sequence.page(0, PAGE)
    assert torch.from_dlpack(page.k).shape == (2, PAGE, 32)


def test_damaged_and_lost_pages_never_change_an_answer(place, mount, weights, expected):
    Engine(weights(), mount.mountpoint).ask(LONG).ask(OTHER).end()
    model = kvfs.Model(mount.model("tiny"))
    model.match(OTHER).sequence.page(1, PAGE).path.unlink()
    damaged = model.match(LONG).sequence.page(1, 2 * PAGE)
    size = damaged.path.stat().st_size
    bits = torch.from_dlpack(damaged.k).clone()
    del damaged
    mount.umount(lazy=True)
    assert damage(place / "store", bits.numpy().tobytes()[:4096], size) == 1
    again = kvfs.Mount(place / "store", mount.mountpoint)
    # The damaged prompt twice in one step, with another one that shares its beginning.
    engine = Engine(weights(), again.mountpoint).ask(OTHER).ask(LONG, LONG, LONGER).ask(LONG)
    other, three, alone = engine.end()
    assert other == [[expected[2], PAGE]]
    assert [tokens for tokens, _ in three] == [expected[0], expected[0], expected[1]]
    assert alone[0][0] == expected[0]
    assert "tokens are computed again" in engine.log
    # What was lost is there again.
    assert model.match(OTHER).tokens == len(OTHER) // BLOCK * BLOCK


def damage(store, content, size):
    """Changes a byte of the objects that have this content; returns how many."""
    done = 0
    for path in store.glob("objects/**/*"):
        if path.is_file() and path.stat().st_size == size:
            whole = path.read_bytes()
            if content in whole:
                at = whole.index(content) + 100
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([whole[at] ^ 0x40]))
                done += 1
    return done


def test_an_engine_goes_on_without_its_mount(place, mount, weights, expected):
    program = [sys.executable, "-c", "import kvfs, sys; kvfs.Mount(*sys.argv[1:])", str(place / "store"), mount.mountpoint]
    engine = Engine(weights(), mount.mountpoint).ask(LONG).run("sync", "-f", mount.mountpoint)
    engine.run("kill", "-9", str(mount.status()["pid"])).ask(LONG).ask(OTHER).run(*program).ask(OTHER).ask(OTHER)
    answers = [answer[0] for answer in engine.end()]
    assert [tokens for tokens, _ in answers] == [expected[at] for at in (0, 0, 2, 2, 2)]
    assert [found for _, found in answers] == [0, 0, 0, 0, but_last_block(OTHER)]
    assert engine.log.count("the mount is gone") == 1


def test_preempted_requests(mount, weights):
    prompts = [prompt(330, seed) for seed in range(10, 14)]
    alone = Engine(weights())
    for ids in prompts:
        alone.ask(ids, tokens=150)
    expected = [answer[0][0] for answer in alone.end()]
    # Room for two of them until they end, and a batch of four.
    engine = Engine(weights(), mount.mountpoint, num_gpu_blocks_override=34, max_model_len=512, disable_log_stats=False)
    engine.ask(*prompts, tokens=150).ask(*prompts, tokens=150).count("vllm:num_preemptions")
    *answers, preempted = engine.end()
    assert preempted > 0
    for answer in answers:
        assert [tokens for tokens, _ in answer] == expected
    model = kvfs.Model(mount.model("tiny"))
    assert [model.match(ids).tokens for ids in prompts] == [320] * 4


@pytest.mark.parametrize(
    ("kind", "fields", "extra", "why"),
    [
        ("Llama", {"num_key_value_heads": 4}, {}, 'something else.*name another "model" in kv_connector_extra_config'),
        ("Mistral", {"sliding_window": 64}, {}, "looks at 64 tokens only"),
        ("Llama", {}, {"mount": "/proc"}, "no kvfs is mounted here"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(mount, weights, kind, fields, extra, why):
    kvfs.Model.create(mount.model("tiny"), num_layers=3, num_kv_heads=2, head_dim=32, dtype="f32", page_tokens=PAGE)
    log = Engine(weights(kind, **fields), mount.mountpoint, extra).refuse()
    assert re.search(why, log), log[-4000:]

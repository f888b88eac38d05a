"""Time to the first token of a prompt that another process has computed: `python vllm_first_token.py DIRECTORY [TOKENS]`.

DIRECTORY on a disk; the wheel and vLLM for the CPU installed. Three engines with the same small Llama of random weights take
turns: one that computes, one that loads from the mount, one with vLLM's own ExampleConnector and a plain directory beside it.
What the two load was written by processes that have ended. Each prompt is asked once of each engine, all of it in one step.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from first_token import llama, show
from scratch import mounted

ROUNDS, BLOCK = 7, 32
# An engine in a process of its own, which is timed from the ids to the first token.
ENGINE = """
import json, sys, time
from vllm import LLM, SamplingParams
made = LLM(**json.loads(sys.argv[1]))
ask = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
for line in sys.stdin:
    begin = time.perf_counter()
    done = made.generate([{"prompt_token_ids": json.loads(line)}], ask, use_tqdm=False)[0]
    seconds = time.perf_counter() - begin
    made.reset_prefix_cache()
    print("ANSWER", json.dumps([seconds, done.outputs[0].token_ids[0], done.num_cached_tokens]), flush=True)
"""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    def __init__(self, weights, tokens, transfer=None):
        options = {"model": weights, "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32"}
        options |= {"max_model_len": tokens + 64, "max_num_batched_tokens": tokens + 64, "max_num_seqs": 2}
        options |= {"block_size": BLOCK, **({"kv_transfer_config": transfer} if transfer else {})}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        line = [sys.executable, "-c", ENGINE, json.dumps(options)]
        self._process = subprocess.Popen(line, env={**os.environ, **ENVIRONMENT}, **pipes)

    def ask(self, ids):
        self._process.stdin.write(json.dumps(ids) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        raise RuntimeError(f"the engine ended: {self._process.wait()}")

    def end(self):
        self._process.stdin.close()
        self._process.wait()


def kvfs_connector(mount):
    return {
        "kv_connector": "KvfsConnector",
        "kv_connector_module_path": "kvfs.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"mount": mount.mountpoint},
    }


def example_connector(plain):
    extra = {"shared_storage_path": str(plain)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def measure(weights, mount, plain, tokens):
    generator = torch.Generator().manual_seed(1)
    first, *prompts = torch.randint(1, 4096, (ROUNDS + 1, tokens), generator=generator).tolist()
    transfers = {"computed": None, "from the mount": kvfs_connector(mount), "ExampleConnector": example_connector(plain)}
    expected, seconds = [], {name: [] for name in transfers}
    for name in list(transfers)[1:]:
        writer = Engine(weights, tokens, transfers[name])
        writer.ask(first)
        written = [writer.ask(ids) for ids in prompts]
        writer.end()
        show(f"{name}: computed and written", [each[0] for each in written])
        expected = expected or [each[1] for each in written]
        assert expected == [each[1] for each in written]
    mount.sync()
    engines = {name: Engine(weights, tokens, transfer) for name, transfer in transfers.items()}
    for engine in engines.values():
        engine.ask(first)
    for ids, token in zip(prompts, expected):
        for name, engine in engines.items():
            taken, answer, found = engine.ask(ids)
            assert answer == token
            assert found == (0 if name == "computed" else (tokens - 1) // BLOCK * BLOCK), (name, found)
            seconds[name].append(taken)
    for engine in engines.values():
        engine.end()
    print(f"{tokens} tokens, {ROUNDS} prompts")
    medians = {name: show(name, each) for name, each in seconds.items()}
    print("times as fast as computing:", {name: round(medians["computed"] / each, 1) for name, each in medians.items()})


def main():
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    with tempfile.TemporaryDirectory() as place, mounted(sys.argv[1]) as (mount, plain):
        weights = str(Path(place, "llama"))
        llama().save_pretrained(weights)
        measure(weights, mount, plain, tokens)


if __name__ == "__main__":
    main()

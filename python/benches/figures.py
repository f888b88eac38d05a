"""The figures of python/README.md: `python figures.py DIRECTORY` with the wheel installed, DIRECTORY on a disk.

Each line is the median of `ROUNDS` rounds, and the range from the first to the last decile.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy

from scratch import mounted

import kvfs

ROUNDS = 200
LAYERS, HEADS, DIM = 32, 8, 128


def show(name, seconds, unit=1e6, suffix="us"):
    deciles = statistics.quantiles(seconds, n=10)
    middle, low, high = (value * unit for value in (statistics.median(seconds), deciles[0], deciles[-1]))
    print(f"{name}: {middle:.1f} {suffix} ({low:.1f} to {high:.1f})", flush=True)


def timed(work, rounds=ROUNDS):
    seconds = []
    for index in range(rounds):
        begin = time.perf_counter()
        work(index)
        seconds.append(time.perf_counter() - begin)
    return seconds


def importing():
    def run(code):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begin

    both = [(run("import kvfs"), run("pass")) for _ in range(20)]
    show("import kvfs", [with_it - without for with_it, without in both], 1e3, "ms")


def anonymous_kib():
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon"))


def pages(mount):
    """What `Page.k` costs beyond opening the file, and what it copies."""
    for page_tokens in (256, 1024):
        model = create(mount, f"pages-{page_tokens}", 1, page_tokens)
        sequence = model.create_sequence("chat")
        count = ROUNDS
        k = numpy.ones((1, HEADS, page_tokens, DIM), numpy.float16)
        for start in range(0, count * page_tokens, page_tokens):
            sequence.append(numpy.arange(start, start + page_tokens), k, k)
        mount.sync()
        listed = sequence.pages(0)
        for page in listed:
            page.path.read_bytes()
        size = listed[0].path.stat().st_size / 2**20
        before = anonymous_kib()
        keep, opened, first = [], [], []
        for page in listed:
            # In turns, for both depend on what else the machine does.
            begin = time.perf_counter()
            os.close(os.open(page.path, os.O_RDONLY | os.O_CLOEXEC))
            middle = time.perf_counter()
            keep.append(page.k)
            end = time.perf_counter()
            opened.append(middle - begin)
            first.append(end - middle)
        show(f"open and close a page of {size:.0f} MiB", opened)
        show("Page.k, the first time: with open", first)
        show("  beyond open", [both - alone for both, alone in zip(first, opened)])
        print(f"  memory that {count} pages took: {anonymous_kib() - before} KiB")
        again = timed(lambda index: listed[index].k, count)
        show("Page.k, again", again)


def create(mount, name, layers, page_tokens):
    return kvfs.Model.create(
        mount.model(name),
        num_layers=layers,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype="f16",
        page_tokens=page_tokens,
    )


def matching(mount):
    tokens = 100_000
    model = kvfs.Model.create(
        mount.model("prompt"), num_layers=1, num_kv_heads=1, head_dim=64, dtype="f16", page_tokens=256
    )
    ids = numpy.random.default_rng(1).integers(0, 150_000, tokens, dtype=numpy.int64)
    rows = numpy.zeros((1, 1, tokens, 64), numpy.float16)
    model.create_sequence("chat").append(ids, rows, rows)
    listed = ids.tolist()
    assert model.match(ids).tokens == tokens
    show("Model.match of 100,000 tokens, an array", timed(lambda _: model.match(ids)), 1e3, "ms")
    show("Model.match of 100,000 tokens, a list", timed(lambda _: model.match(listed)), 1e3, "ms")


def appending(mount):
    model = create(mount, "decode", LAYERS, 1024)
    sequence = model.create_sequence("chat")
    k = numpy.ones((LAYERS, HEADS, 1, DIM), numpy.float16)
    sequence.append([0], k, k)
    show("append one token of 32 layers", timed(lambda index: sequence.append([index], k, k)))


def main():
    importing()
    with mounted(sys.argv[1]) as (mount, _):
        print("data path:", {k: v for k, v in mount.status().items() if "pass" in k or "uring" in k or "transport" in k})
        pages(mount)
        matching(mount)
        appending(mount)


if __name__ == "__main__":
    main()

"""LMCache's own verified `bench l2` over a mount and over plain files: `python level2.py DIRECTORY [ROUNDS] [KIB]`.

DIRECTORY on a disk; the wheel, torch and LMCache installed. In turns: LMCache's `fs_native` on plain files, the same in the
mount, and `kvfs.lmcache`. 64 chunks of KIB (1024) each, buffered, as LMCache has it by itself; half of the names that are
looked up are not there. Ratios are of the medians over all rounds to those of `fs_native` on plain files.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from scratch import mounted

KEYS = 64


def bench(adapter, kib):
    """Milliseconds of one run by operation: the median of its rounds."""
    line = [Path(sys.executable).with_name("lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter)]
    line += ["--num-keys", str(KEYS), "--data-size-kb", str(kib), "--rounds", "5", "--warmup-rounds", "1"]
    line += ["--no-skip-verify", "--lookup-max-hit-rate", "0.5"]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    if done.returncode or "MISMATCH" in done.stdout:
        sys.exit(done.stdout)
    if f"All {KEYS} keys data verified OK" not in done.stdout:
        sys.exit(f"nothing was verified:\n{done.stdout}")
    found = {}
    for name in ("Store", "Lookup", "Load"):
        part = re.search(rf"Operation: +{name}\n(.*?)Duration p99", done.stdout, re.DOTALL)[1]
        found[name] = float(re.search(r"Duration p50 \(ms\): +([\d.]+)", part)[1])
    return found


def main():
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    kib = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
    with mounted(sys.argv[1]) as (mount, plain):
        print({name: value for name, value in mount.status().items() if name in ("passthrough", "io_uring")})
        there = Path(mount.files("fs_native"))
        plugin = {"type": "plugin", "module_path": "kvfs.lmcache", "class_name": "KvfsL2Adapter"}
        cases = {
            "fs_native, plain files": (plain, {"type": "fs_native", "base_path": str(plain)}),
            "fs_native, in the mount": (there, {"type": "fs_native", "base_path": str(there)}),
            "kvfs.lmcache": (
                Path(mount.files("lmcache")),
                {**plugin, "adapter_params": {"mount": mount.mountpoint}},
            ),
        }
        found = {name: [] for name in cases}
        for _ in range(rounds):
            for name, (place, adapter) in cases.items():
                place.mkdir(exist_ok=True)
                found[name].append(bench(adapter, kib))
                shutil.rmtree(place)
        print(f"{KEYS} chunks of {kib} KiB, {rounds} runs of 5 rounds each; ms, median (range), ratio of speeds")
        for operation in ("Store", "Lookup", "Load"):
            plainly = None
            for name, runs in found.items():
                times = [run[operation] for run in runs]
                middle = statistics.median(times)
                plainly = plainly or middle
                print(f"{operation}, {name}: {middle:.2f} ({min(times):.2f} to {max(times):.2f}), {plainly / middle:.2f}")


if __name__ == "__main__":
    main()

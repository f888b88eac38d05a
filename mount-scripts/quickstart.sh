#!/usr/bin/env bash
# From a fresh checkout to a running demonstration: installs what is missing, builds, shows.
#
#   mount-scripts/quickstart.sh
set -euo pipefail

if [ $# -ne 0 ]; then
    echo "usage: mount-scripts/quickstart.sh" >&2
    exit 2
fi
here=$(cd -- "$(dirname -- "$0")/.." && pwd)
cd -- "$here"

mount-scripts/setup.sh
# Together: what the example needs beside the program would have most of it built once more.
cargo build --release --locked --package kvfs --bin kvfs --example demo
release=${CARGO_TARGET_DIR:-$here/target}/release
"$release/examples/demo"

kvfs=$release/kvfs
cache=${HOME:-/root}/kvfs
cat <<TEXT

A cache of your own:

  mkdir -p $cache/mnt
  $kvfs mount $cache/store $cache/mnt
  $kvfs create $cache/mnt/models/llama3-8b --layers 32 --kv-heads 8 --head-dim 128
  $kvfs inspect $cache/mnt/models/llama3-8b
  $kvfs status $cache/mnt
  $kvfs umount $cache/mnt

To have kvfs in PATH and in /etc/fstab (mount -t kvfs): sudo mount-scripts/install.sh
TEXT

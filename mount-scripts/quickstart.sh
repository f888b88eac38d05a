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
cargo build --release --locked --package kvfs --bin kvfs
exec "${CARGO_TARGET_DIR:-$here/target}/release/kvfs" demo

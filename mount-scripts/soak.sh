#!/usr/bin/env bash
# Loads a mount with writers, readers, moves, collections of garbage and kills, and checks everything
# they read and leave behind (tests/soak).
#
#   mount-scripts/soak.sh [SECONDS]
#
# An hour, if nothing else is said, in parts of ten minutes that each begin with nothing: the remote keeps
# garbage for a day, and that of an hour fills a small disk. KVFS_SEED=N does other things.
set -euo pipefail
cd "$(dirname "$0")/.."

left=${1:-3600}
seed=${KVFS_SEED:-1}
while [ "$left" -gt 0 ]; do
    part=$((left < 600 ? left : 600))
    KVFS_SEED=$seed KVFS_SOAK_SECONDS=$part KVFS_REQUIRE=fuse,root \
        cargo test --locked --test soak -- --nocapture
    left=$((left - part))
    seed=$((seed + 1))
done

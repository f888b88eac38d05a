#!/usr/bin/env bash
# Loads a mount with writers, readers, moves, collections of garbage and kills, and checks everything
# they read and leave behind (tests/soak).
#
#   mount-scripts/soak.sh [SECONDS]
#
# An hour, if nothing else is said. KVFS_SEED=N does other things.
set -euo pipefail
cd "$(dirname "$0")/.."

KVFS_SOAK_SECONDS=${1:-3600} KVFS_REQUIRE=fuse,root \
    exec cargo test --locked --test soak -- --nocapture

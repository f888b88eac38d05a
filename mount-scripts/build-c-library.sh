#!/usr/bin/env bash
# Builds libkvfs.so and libkvfs.a, the libraries behind include/kvfs.h.
#
#   mount-scripts/build-c-library.sh [ARGUMENTS OF cargo rustc]
#
# With --release they lie in target/release.
set -euo pipefail
cd "$(dirname "$0")/.."

# Dependencies have symbols of their own for C; a program shall see those of kvfs alone.
exec cargo rustc --locked --package kvfs --lib --crate-type cdylib,staticlib "$@" -- \
    -C link-arg=-Wl,-soname,libkvfs.so -C link-arg=-Wl,--exclude-libs,ALL

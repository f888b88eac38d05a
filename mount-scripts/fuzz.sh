#!/usr/bin/env bash
# Runs the fuzz targets (tests/fuzz) with the code of kvfs instrumented, so that inputs that reach new
# code are found and kept. Stable Rust will do.
#
#   mount-scripts/fuzz.sh [SECONDS] [TEST]
#
# Each target runs for SECONDS (600). KVFS_FUZZ_KEEP=1 replaces the corpus by the inputs that show
# everything that was found; KVFS_SEED=N tries others.
set -euo pipefail
cd "$(dirname "$0")/.."

# Only kvfs and its tests are compiled for it: cargo keeps what a wrapper made apart from the rest.
wrapper=target/fuzz-rustc
mkdir -p target
cat >"$wrapper" <<'END'
#!/bin/sh
# The tests take the counters; the program that is linked beside them has nobody who does.
case " $* " in
*" --crate-type bin "*) set -- "$@" -Clink-arg=-Wl,--defsym=__sanitizer_cov_8bit_counters_init=_init ;;
esac
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
END
chmod +x "$wrapper"

KVFS_FUZZ_SECONDS=${1:-600} RUSTC_WORKSPACE_WRAPPER=$PWD/$wrapper \
    exec cargo test --locked --test fuzz "${2:-}" -- --nocapture --test-threads=1

#!/usr/bin/env bash
# Installs what the tests call and runs all of them.
#
#   mount-scripts/test.sh [ARGUMENTS OF cargo nextest run, or of cargo test where there is no nextest]
#
# With cargo-nextest several tests run at a time (.config/nextest.toml); without it one by one, for
# a program that one test starts would otherwise inherit descriptors of another.
#
# A test that lacks something (root, /dev/fuse, a program) prints why and passes; what KVFS_REQUIRE
# promises, a comma list of the words in tests/common/skips.rs, must be there. How many tests were skipped,
# and for want of what, is what the test `skips` prints last; it fails if KVFS_SKIPS_ALLOWED (a comma list
# of such words) is set and something else was missing.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON_PACKAGES=(safetensors==0.8.0 numpy==2.4.6 xxhash==4.1.0 gguf==0.19.0 xllamacpp==2026.10.11549)
WHEEL_PACKAGES=(numpy==2.4.6 pytest==9.2.0)

mount-scripts/setup.sh --tests

# Everything else goes below target/, so that `cargo clean` takes it away.
tools=$PWD/target/test-tools
mkdir -p "$tools"
export PATH=$tools/bin:$PATH
export KVFS_TEST_PYTHON=$tools/python/bin/python
export KVFS_TEST_LLAMA=$tools/llama.cpp-0.5.0

# What is only fetched; it comes while the compiler works.
fetch() {
    if ! "$KVFS_TEST_PYTHON" -c 'import safetensors, numpy, xxhash, gguf, xllamacpp' 2>/dev/null; then
        python3 -m venv "$tools/python" &&
            "$KVFS_TEST_PYTHON" -m pip install --quiet --disable-pip-version-check "${PYTHON_PACKAGES[@]}" || return
    fi
    # An unmodified llama.cpp, for the ggml backend.
    mount-scripts/fetch-llama.sh "$KVFS_TEST_LLAMA" ||
        echo "test.sh: tests with llama.cpp are skipped" >&2
    mount-scripts/fetch-llama.sh --releases ||
        echo "test.sh: tests with releases of llama.cpp are skipped" >&2
    # A server and a kernel for the remote on NFS.
    mount-scripts/fetch-nfs.sh "$tools/nfs" || echo "test.sh: tests with NFS are skipped" >&2
    # What makes the PTX of kernels/ and looks at what an assembler makes of it.
    kernels/install-tools.sh
}
fetch >"$tools/fetched.log" 2>&1 &
fetched=$!
# Nothing of this goes on when this has ended.
trap 'kill "$fetched" 2>/dev/null || true' EXIT

mount-scripts/install-program.sh pjdfstest 0.2.2
mount-scripts/install-program.sh fsx 0.3.2
# An S3 server on loopback, for the remote tier.
mount-scripts/install-program.sh s3s-fs 0.14.1 --features binary

# The program as the tests build it: with what they add to its libraries, cargo would build all of those twice.
if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --locked --no-run "$@"
else
    cargo test --locked --no-run "$@"
fi
program=${CARGO_TARGET_DIR:-$PWD/target}/debug/kvfs

# The Python package of this tree, in an environment that has nothing else of it.
install_wheel() {
    local wheel
    wheel=$(mount-scripts/build-wheel.sh --dev "$program") || return
    if ! "$KVFS_TEST_WHEEL" -c 'import numpy, pytest' 2>/dev/null; then
        python3 -m venv "$tools/wheel" &&
            "$KVFS_TEST_WHEEL" -m pip install --quiet --disable-pip-version-check "${WHEEL_PACKAGES[@]}" || return
    fi
    "$KVFS_TEST_WHEEL" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"
}
export KVFS_TEST_WHEEL=$tools/wheel/bin/python
if ! install_wheel; then
    # Not the one of another tree.
    rm -rf "$tools/wheel"
    echo "test.sh: tests of the Python package are skipped" >&2
fi

outcome=0
wait "$fetched" || outcome=$?
trap - EXIT
cat "$tools/fetched.log" >&2
[ "$outcome" -eq 0 ] || { echo "test.sh: what tests call could not be fetched, see above" >&2; exit "$outcome"; }

export KVFS_SKIPS=$PWD/target/test-skips
rm -f "$KVFS_SKIPS"

if cargo nextest --version >/dev/null 2>&1; then
    cargo test --locked --doc
    exec cargo nextest run --locked "$@"
fi
cargo test --locked --no-fail-fast "$@" -- --test-threads=1
exec cargo test --locked --test skips -- --nocapture

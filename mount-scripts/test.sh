#!/usr/bin/env bash
# Installs what the tests call and runs all of them.
#
#   mount-scripts/test.sh [ARGUMENTS OF cargo test]
#
# A test that lacks something (root, /dev/fuse, a program) prints why and passes;
# KVFS_REQUIRE=fuse,root,loop,rsync,python,safetensors,pjdfstest,fsx,s3,zstd,cc,c++,nm,llama turns that
# into a failure, word by word.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON_PACKAGES=(safetensors==0.8.0 numpy==2.4.6 xxhash==4.1.0)

mount-scripts/setup.sh --tests

# Everything else goes below target/, so that `cargo clean` takes it away.
tools=$PWD/target/test-tools
[ -x "$tools/bin/pjdfstest" ] ||
    cargo install --quiet --locked --root "$tools" pjdfstest --version 0.2.2
[ -x "$tools/bin/fsx" ] || cargo install --quiet --locked --root "$tools" fsx --version 0.3.2
# An S3 server on loopback, for the remote tier.
[ -x "$tools/bin/s3s-fs" ] ||
    cargo install --quiet --locked --root "$tools" s3s-fs --version 0.14.1 --features binary
export PATH=$tools/bin:$PATH

export KVFS_TEST_PYTHON=$tools/python/bin/python
if ! "$KVFS_TEST_PYTHON" -c 'import safetensors, numpy, xxhash' 2>/dev/null; then
    python3 -m venv "$tools/python"
    "$KVFS_TEST_PYTHON" -m pip install --quiet --disable-pip-version-check "${PYTHON_PACKAGES[@]}"
fi

# llama.cpp as others build it, with backends as libraries: the libraries come from one package, the
# headers of the same release from the sources in the other.
export KVFS_TEST_LLAMA=$tools/llama.cpp-0.5.0
if [ ! -e "$KVFS_TEST_LLAMA/include/llama.h" ] && command -v npm >/dev/null; then
    staging=$(mktemp -d "$tools/llama.XXXXXX")
    for package in @node-llama-cpp/linux-x64 node-llama-cpp; do
        (cd "$staging" && npm pack --silent "$package@3.22.1" >/dev/null)
    done
    tar -xzf "$staging/node-llama-cpp-linux-x64-3.22.1.tgz" -C "$staging"
    tar -xzf "$staging/node-llama-cpp-3.22.1.tgz" -C "$staging" package/llama/gitRelease.bundle
    git -c init.defaultBranch=main -c advice.detachedHead=false clone --quiet "$staging/package/llama/gitRelease.bundle" "$staging/source"
    mkdir -p "$KVFS_TEST_LLAMA/include"
    mv "$staging/package/bins/linux-x64" "$KVFS_TEST_LLAMA/lib"
    cp "$staging"/source/ggml/include/*.h "$staging"/source/include/*.h "$KVFS_TEST_LLAMA/include"
    rm -rf "$staging"
fi

exec cargo test --locked "$@"

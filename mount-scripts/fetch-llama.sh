#!/usr/bin/env bash
# Fetches the llama.cpp that the ggml backend is tested with: built by others, with its backends as
# libraries, and unmodified. What is there is left alone.
#
#   mount-scripts/fetch-llama.sh DIRECTORY
#
# The libraries (DIRECTORY/lib) come from one npm package, the headers of the same release
# (DIRECTORY/include) from the sources in another. From there also comes the RPC backend, which the
# package lacks: it is built (DIRECTORY/rpc), so that a server can stand in for another device.
set -euo pipefail

VERSION=3.22.1

fail() {
    echo "fetch-llama.sh: no llama.cpp: $*" >&2
    exit 1
}

[ $# -eq 1 ] || { echo "usage: mount-scripts/fetch-llama.sh DIRECTORY" >&2; exit 2; }
[ -e "$1/rpc/libggml-rpc.so" ] && exit 0

[ ! -e "$1" ] || [ -e "$1/include/llama.h" ] || fail "$1 is there, but without headers: remove it"

[ "$(uname -sm)" = "Linux x86_64" ] || fail "it is fetched for Linux on x86-64 alone"
for program in npm git c++; do
    command -v $program >/dev/null || fail "$program is missing"
done

mkdir -p "$(dirname "$1")"
staging=$(mktemp -d "$1.XXXXXX")
trap 'rm -rf "$staging"' EXIT
for package in @node-llama-cpp/linux-x64 node-llama-cpp; do
    (cd "$staging" && npm pack --silent "$package@$VERSION" >/dev/null) ||
        fail "npm pack $package@$VERSION failed"
done
tar -xzf "$staging/node-llama-cpp-linux-x64-$VERSION.tgz" -C "$staging" package/bins/linux-x64
tar -xzf "$staging/node-llama-cpp-$VERSION.tgz" -C "$staging" package/llama/gitRelease.bundle
git -c init.defaultBranch=main -c advice.detachedHead=false \
    clone --quiet "$staging/package/llama/gitRelease.bundle" "$staging/source"

mkdir -p "$staging/engine/include"
mv "$staging/package/bins/linux-x64" "$staging/engine/lib"
cp "$staging"/source/ggml/include/*.h "$staging"/source/include/*.h "$staging/engine/include"
mkdir "$staging/engine/rpc"
rpc=$staging/source/ggml/src/ggml-rpc
c++ -std=c++17 -O2 -shared -fPIC -DGGML_BACKEND_DL -DGGML_BACKEND_BUILD -DGGML_BACKEND_SHARED \
    -DGGML_SHARED -I "$staging/source/ggml/include" -I "$staging/source/ggml/src" \
    "$rpc/ggml-rpc.cpp" "$rpc/transport.cpp" -o "$staging/engine/rpc/libggml-rpc.so" \
    -L "$staging/engine/lib" -l:libggml-base.so ||
    fail "the RPC backend does not build"
# All at once: an engine without its headers is none.
rm -rf "$1"
mv "$staging/engine" "$1"

#!/usr/bin/env bash
# Fetches the llama.cpp that the ggml backend is tested with: built by others, with its backends as
# libraries, and unmodified. What is there is left alone.
#
#   mount-scripts/fetch-llama.sh DIRECTORY     the one that most tests use
#   mount-scripts/fetch-llama.sh --releases    also others since ggml 0.9.7, and that one again
#   mount-scripts/fetch-llama.sh --newest      also the newest that there is
#
# The libraries (DIRECTORY/lib) come from one npm package, the headers of the same release
# (DIRECTORY/include) from the sources in another. From there also comes the RPC backend, which the
# package lacks: it is built (DIRECTORY/rpc), so that a server can stand in for another device.
# Releases lie in target/test-tools/llama.cpp-releases, each by its number, without RPC.
set -euo pipefail

VERSION=3.22.1
# From ggml 0.9.7 to 0.25.1, from the oldest to the newest.
RELEASES=(3.16.0 3.16.2 3.17.1 3.18.0 3.18.1 3.19.0 3.19.1 3.20.0 3.21.1 3.22.0 3.22.1)

fail() {
    echo "fetch-llama.sh: no llama.cpp: $*" >&2
    exit 1
}

# fetch VERSION DIRECTORY MARK: what is complete has the file MARK.
fetch() {
    local version=$1 directory=$2 mark=$3
    [ ! -e "$directory/$mark" ] || return 0
    [ ! -e "$directory" ] || [ -e "$directory/include/llama.h" ] ||
        fail "$directory is there, but without headers: remove it"
    mkdir -p "$(dirname "$directory")"
    staging=$(mktemp -d "$directory.XXXXXX")
    trap 'rm -rf "$staging"' EXIT
    for package in @node-llama-cpp/linux-x64 node-llama-cpp; do
        (cd "$staging" && npm pack --silent "$package@$version" >/dev/null) ||
            fail "npm pack $package@$version failed"
    done
    tar -xzf "$staging/node-llama-cpp-linux-x64-$version.tgz" -C "$staging" package/bins/linux-x64
    tar -xzf "$staging/node-llama-cpp-$version.tgz" -C "$staging" package/llama/gitRelease.bundle
    git -c init.defaultBranch=main -c advice.detachedHead=false \
        clone --quiet "$staging/package/llama/gitRelease.bundle" "$staging/source"
    mkdir -p "$staging/engine/include"
    mv "$staging/package/bins/linux-x64" "$staging/engine/lib"
    cp "$staging"/source/ggml/include/*.h "$staging"/source/include/*.h "$staging/engine/include"
    case $mark in rpc/*) build_rpc ;; esac
    # All at once: an engine without its headers is none.
    rm -rf "$directory"
    mv "$staging/engine" "$directory"
    rm -rf "$staging"
}

build_rpc() {
    mkdir "$staging/engine/rpc"
    local rpc=$staging/source/ggml/src/ggml-rpc
    c++ -std=c++17 -O2 -shared -fPIC -DGGML_BACKEND_DL -DGGML_BACKEND_BUILD -DGGML_BACKEND_SHARED \
        -DGGML_SHARED -I "$staging/source/ggml/include" -I "$staging/source/ggml/src" \
        "$rpc/ggml-rpc.cpp" "$rpc/transport.cpp" -o "$staging/engine/rpc/libggml-rpc.so" \
        -L "$staging/engine/lib" -l:libggml-base.so ||
        fail "the RPC backend does not build"
}

[ $# -eq 1 ] || { echo "usage: mount-scripts/fetch-llama.sh DIRECTORY|--releases|--newest" >&2; exit 2; }
case $1 in -*) ;; *) [ ! -e "$1/rpc/libggml-rpc.so" ] || exit 0 ;; esac
[ "$(uname -sm)" = "Linux x86_64" ] || fail "it is fetched for Linux on x86-64 alone"
for program in npm git c++; do
    command -v $program >/dev/null || fail "$program is missing"
done
releases=$(dirname "$0")/../target/test-tools/llama.cpp-releases
case $1 in
--releases)
    for release in "${RELEASES[@]}"; do
        fetch "$release" "$releases/$release" include/llama.h
    done
    ;;
--newest)
    newest=$(npm view @node-llama-cpp/linux-x64 version) || fail "npm view failed"
    echo "$newest"
    fetch "$newest" "$releases/$newest" include/llama.h
    ;;
*) fetch "$VERSION" "$1" rpc/libggml-rpc.so ;;
esac

#!/usr/bin/env bash
# Installs a program that tests call, from the registry, unless it is there.
#
#   mount-scripts/install-program.sh NAME VERSION [ARGUMENTS OF cargo install]
#
# Below target/, so that `cargo clean` takes it away. Programs of tests run for minutes: they are compiled with few
# optimisations, in three quarters of the time.
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: mount-scripts/install-program.sh NAME VERSION [ARGUMENTS OF cargo install]" >&2; exit 2; }
name=$1 version=$2
shift 2
tools=$(cd "$(dirname "$0")/.." && pwd)/target/test-tools
[ -x "$tools/bin/$name" ] && exit
export CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=256
exec cargo install --quiet --locked --root "$tools" "$name" --version "$version" "$@"

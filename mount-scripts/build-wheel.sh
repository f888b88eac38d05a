#!/usr/bin/env bash
# Builds the Python package, with the program in it, and prints where the wheel is.
#
#   mount-scripts/build-wheel.sh [--dev [PROGRAM]]
#
# With --dev the profile is that of the tests, and PROGRAM a build of it that is there already. Needs Python 3.10 or later
# with venv, and fetches maturin into target/test-tools.
set -euo pipefail
cd "$(dirname "$0")/.."

MATURIN=1.16.0

profile=release directory=release program=
case ${1-}:$# in
    :0) ;;
    --dev:1 | --dev:2) profile=dev directory=debug program=${2-} ;;
    *) echo "usage: mount-scripts/build-wheel.sh [--dev [PROGRAM]]" >&2; exit 2 ;;
esac

fail() {
    echo "build-wheel.sh: $*" >&2
    exit 1
}

built=${CARGO_TARGET_DIR:-$PWD/target}
tools=$PWD/target/test-tools/maturin
if ! "$tools/bin/maturin" --version 2>/dev/null | grep -qxF "maturin $MATURIN"; then
    python3 -m venv "$tools" || fail "no Python with venv: mount-scripts/setup.sh --tests installs it"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check "maturin==$MATURIN"
fi

if [ -z "$program" ]; then
    cargo build --locked --profile "$profile" --bin kvfs >&2
    program=$built/$directory/kvfs
fi
# pip puts what lies there where programs are.
scripts=python/kvfs.data/scripts
mkdir -p "$scripts"
strip -o "$scripts/kvfs" "$program"

# The oldest C library that the program runs with. maturin compares the library in the wheel with it, and says so
# if that needs a newer one.
needed=$(readelf --dyn-syms --wide "$scripts/kvfs" | grep -o 'GLIBC_2\.[0-9]*' | cut -d. -f2 | sort -n | tail -1)
[ "$needed" -ge 17 ] || needed=17

wheels=$built/$directory/wheels
rm -f "$wheels"/kvfs-*.whl
"$tools/bin/maturin" build --locked --manifest-path python/Cargo.toml --profile "$profile" \
    --out "$wheels" --compatibility "manylinux_2_$needed" >&2
ls "$wheels"/kvfs-*.whl

#!/usr/bin/env bash
# Builds libkvfs.so and libkvfs.a, the libraries behind include/kvfs.h, and prints where they are.
#
#   mount-scripts/build-c-library.sh [ARGUMENTS OF cargo rustc]
#
# With --release they lie in target/release.
set -euo pipefail
cd "$(dirname "$0")/.."

# Dependencies have symbols of their own for C; a program must see those of kvfs alone.
built=$(cargo rustc --locked --package kvfs-c --lib --crate-type cdylib,staticlib "$@" --message-format=json-render-diagnostics -- \
    -C link-arg=-Wl,-soname,libkvfs.so -C link-arg=-Wl,--exclude-libs,ALL |
    sed -n 's/.*"filenames":\["\([^"]*libkvfs_c\.[a-z]*\)","\([^"]*libkvfs_c\.[a-z]*\)"\].*/\1\n\2/p')
[ -n "$built" ] || { echo "build-c-library.sh: cargo does not tell what it built" >&2; exit 1; }
while IFS= read -r file; do
    # Cargo names files after the crate, programs look for the library's name.
    name=${file%/*}/libkvfs.${file##*.}
    ln -f "$file" "$name"
    echo "$name"
done <<<"$built"

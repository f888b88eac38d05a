#!/usr/bin/env bash
# Installs what building and mounting kvfs need, on Debian and Ubuntu; what is there is left alone.
#
#   mount-scripts/setup.sh [--tests]
#
# --tests also installs what the tests call. Rust is not installed, only looked for: rustup
# belongs to the user.
set -euo pipefail

usage="usage: mount-scripts/setup.sh [--tests]"
tests=no
case $# in
    0) ;;
    1) case $1 in
           --tests) tests=yes ;;
           -h | --help) echo "$usage"; exit 0 ;;
           *) echo "$usage" >&2; exit 2 ;;
       esac ;;
    *) echo "$usage" >&2; exit 2 ;;
esac

fail() {
    echo "setup.sh: $*" >&2
    exit 1
}

missing=()

# need PROGRAM PACKAGE: remembers the package if the program is not there. Services and users
# may lack the sbin directories in PATH.
need() {
    PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}

# need_package PACKAGE: the same for what is no program.
need_package() {
    dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'install ok installed' || missing+=("$1")
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    else
        sudo -- "$@"
    fi
}

need cc gcc
need mount mount
need fusermount3 fuse3
# examples/demo backs a cache up with it.
need rsync rsync
# The C library's headers and start files; cc alone cannot link without them.
if command -v dpkg-query >/dev/null 2>&1; then
    need_package libc6-dev
fi
if [ "$tests" = yes ]; then
    need setfattr attr
    need mkfs.ext4 e2fsprogs
    need mkfs.xfs xfsprogs
    need strace strace
    need unshare util-linux
    need python3 python3
    need zstd zstd
    need c++ g++
    need nm binutils
    need dpkg-deb dpkg
    need pkg-config pkg-config
    need npm npm
    need git git
    need setpriv util-linux
    need stress-ng stress-ng
    need systemd-analyze systemd
    # For the page of a mount.
    need chromium chromium
    need fio fio
    need faketime faketime
    # For a kernel with an NFS client, in a virtual machine.
    need qemu-system-x86_64 qemu-system-x86
    if command -v dpkg-query >/dev/null 2>&1; then
        need_package python3-venv
    fi
fi

if [ ${#missing[@]} -gt 0 ]; then
    list="${missing[*]}"
    command -v apt-get >/dev/null 2>&1 ||
        fail "this system has no apt-get: install the equivalents of: $list"
    if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null 2>&1; then
        fail "these packages are missing and there is no sudo: as root, apt-get install $list"
    fi
    echo "setup.sh: installing $list"
    as_root apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${missing[@]}"
fi

# Not something to install, but worth saying before the first mount fails.
if [ ! -e /dev/fuse ]; then
    echo "setup.sh: /dev/fuse is missing: modprobe fuse, or give the container the device" >&2
fi
command -v cargo >/dev/null 2>&1 ||
    fail "cargo is missing: install Rust 1.90 or later (https://rustup.rs)"

if [ "$tests" = yes ]; then
    "$(dirname "$0")/install-program.sh" cargo-mutants 27.1.0
fi
echo "setup.sh: everything is there"

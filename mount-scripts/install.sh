#!/usr/bin/env bash
# Installs the program, the names by which mount(8) and umount(8) find it, what it says of itself (man pages,
# completions), the units for systemd, header and library for C, dashboards and alerts. This is the one place that knows
# where files go; package.sh calls it too.
#
#   mount-scripts/install.sh [--uninstall]
#
#   PREFIX    where bin/kvfs, include/, lib/ and share/ go (/usr/local)
#   LIBDIR    where libkvfs.so and its description for pkg-config go (PREFIX/lib)
#   SBINDIR   where mount(8) looks for helpers (/sbin)
#   MODPROBE  where modprobe(8) looks for options of modules (/etc/modprobe.d)
#   DESTDIR   a directory in front of them, for packages
#   BINARY    the program (target/release/kvfs)
#   LIBRARY   the library (libkvfs.so beside the program, where build-c-library.sh has put it; none is installed if there
#             is none)
set -euo pipefail

usage="usage: mount-scripts/install.sh [--uninstall]   (PREFIX, LIBDIR, SBINDIR, MODPROBE, DESTDIR, BINARY and LIBRARY are honoured)"
prefix=${PREFIX:-/usr/local}
libdir=${LIBDIR:-$prefix/lib}
sbin=${SBINDIR:-/sbin}
modprobe=${MODPROBE:-/etc/modprobe.d}
root=${DESTDIR:-}
helpers="mount.kvfs mount.fuse.kvfs umount.kvfs umount.fuse.kvfs"
here=$(cd -- "$(dirname -- "$0")/.." && pwd)
share=$root$prefix/share
man=$share/man/man1
bash=$share/bash-completion/completions/kvfs
zsh=$share/zsh/site-functions/_kvfs
fish=$share/fish/vendor_completions.d/kvfs.fish
unit_directory=$root$prefix/lib/systemd/system
units="kvfs@.service kvfs-slots@.service"
header=$root$prefix/include/kvfs.h
description=$root$libdir/pkgconfig/kvfs.pc
binary=${BINARY:-${CARGO_TARGET_DIR:-$here/target}/release/kvfs}
library=${LIBRARY:-$(dirname -- "$binary")/libkvfs.so}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

# A helper that is not ours is left alone: a distribution's package may own it.
is_ours() {
    [ -L "$1" ] && [ "$(readlink "$1")" = "$prefix/bin/kvfs" ]
}

uninstall() {
    for helper in $helpers; do
        if is_ours "$root$sbin/$helper"; then
            rm -f -- "$root$sbin/$helper"
        fi
    done
    rm -f -- "$root$prefix/bin/kvfs" "$root$modprobe/kvfs.conf" "$bash" "$zsh" "$fish" \
        "$man"/kvfs.1 "$man"/kvfs-*.1 "$header" "$root$libdir/libkvfs.so" "$description"
    for unit in $units; do
        rm -f -- "$unit_directory/$unit"
    done
    rm -rf -- "$share/kvfs"
    echo "kvfs is removed; stores and logs are where they were"
}

# What the program says of itself.
install_documents() {
    mkdir -p -- "$(dirname -- "$bash")" "$(dirname -- "$zsh")" "$(dirname -- "$fish")"
    "$binary" completions bash >"$bash"
    "$binary" completions zsh >"$zsh"
    "$binary" completions fish >"$fish"
    mkdir -p -- "$man"
    "$binary" man "$man"
}

# put FILE WHERE: a file that is read, and the directory for it.
put() {
    install -D -m 0644 -- "$1" "$2"
}

# What other programs use: systemd, compilers, Grafana and Prometheus.
install_for_others() {
    mkdir -p -- "$unit_directory"
    for unit in $units; do
        sed -e "s|/usr/local/bin/kvfs|$prefix/bin/kvfs|" -e '/^# *mount-scripts/d' \
            "$here/mount-scripts/$unit" >"$unit_directory/$unit"
    done
    for file in kvfs.json alerts.yml; do
        put "$here/dashboards/$file" "$share/kvfs/dashboards/$file"
    done
    if [ -e "$library" ]; then
        put "$here/include/kvfs.h" "$header"
        put "$library" "$root$libdir/libkvfs.so"
        mkdir -p -- "$(dirname -- "$description")"
        printf '%s\n' "prefix=$prefix" "includedir=\${prefix}/include" "libdir=$libdir" "" \
            "Name: kvfs" "Description: Attention over the pages of a KV cache in a mount" \
            "Version: $("$binary" version | cut -d' ' -f2)" \
            "Libs: -L\${libdir} -lkvfs" "Cflags: -I\${includedir}" >"$description"
    fi
}

# Mounts of root's turn rings on themselves; those of others find them on. A kernel that has FUSE built in reads
# fuse.enable_uring=1 on its command line instead.
keep_rings_on() {
    if ! mkdir -p -- "$root$modprobe" || ! printf '%s\n' \
        '# Requests to FUSE servers may come through io_uring (Linux 6.14).' \
        'options fuse enable_uring=1' >"$root$modprobe/kvfs.conf"; then
        echo "install.sh: mounts of users have io_uring only once root has mounted, see kvfs status" >&2
    fi
}

install_all() {
    [ -x "$binary" ] || fail "$binary is missing: run cargo build --release --locked first, or name another one with BINARY"
    for helper in $helpers; do
        if [ -e "$root$sbin/$helper" ] && ! is_ours "$root$sbin/$helper"; then
            fail "$root$sbin/$helper belongs to something else: remove it first"
        fi
    done
    mkdir -p -- "$root$prefix/bin" "$root$sbin"
    # install(1) replaces the file, so a running daemon keeps the one it started from.
    install -m 0755 -- "$binary" "$root$prefix/bin/kvfs"
    for helper in $helpers; do
        ln -sfn -- "$prefix/bin/kvfs" "$root$sbin/$helper"
    done
    install_documents
    install_for_others
    keep_rings_on
    echo "installed $root$prefix/bin/kvfs, and in $root$sbin: $helpers"
    [ -e "$library" ] || echo "without libkvfs.so: mount-scripts/build-c-library.sh --release makes it"
}

case $# in
    0) action=install_all ;;
    1) case $1 in
           --uninstall) action=uninstall ;;
           -h | --help) echo "$usage"; exit 0 ;;
           *) echo "$usage" >&2; exit 2 ;;
       esac ;;
    *) echo "$usage" >&2; exit 2 ;;
esac

# The first directory that exists decides whether this may work at all.
target=$root$prefix
while [ ! -e "$target" ] && [ "$target" != / ] && [ -n "$target" ]; do
    target=$(dirname -- "$target")
done
[ -w "$target" ] || fail "$target is not writable: run as root, or set PREFIX and SBINDIR"
"$action"

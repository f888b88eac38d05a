#!/usr/bin/env bash
# Installs the release binary, the names by which mount(8) and umount(8) find it, man pages and completions.
#
#   mount-scripts/install.sh [--uninstall]
#
#   PREFIX    where bin/kvfs and share/ go (/usr/local)
#   SBINDIR   where mount(8) looks for helpers (/sbin)
#   MODPROBE  where modprobe(8) looks for options of modules (/etc/modprobe.d)
#   DESTDIR   a directory in front of them, for packages
set -euo pipefail

usage="usage: mount-scripts/install.sh [--uninstall]   (PREFIX, SBINDIR, MODPROBE and DESTDIR are honoured)"
prefix=${PREFIX:-/usr/local}
sbin=${SBINDIR:-/sbin}
modprobe=${MODPROBE:-/etc/modprobe.d}
root=${DESTDIR:-}
helpers="mount.kvfs mount.fuse.kvfs umount.kvfs umount.fuse.kvfs"
here=$(cd -- "$(dirname -- "$0")/.." && pwd)
man=$root$prefix/share/man/man1
bash=$root$prefix/share/bash-completion/completions/kvfs
zsh=$root$prefix/share/zsh/site-functions/_kvfs
fish=$root$prefix/share/fish/vendor_completions.d/kvfs.fish
binary=${CARGO_TARGET_DIR:-$here/target}/release/kvfs

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
        "$man"/kvfs.1 "$man"/kvfs-*.1
    echo "kvfs is removed; stores and logs are where they were"
}

# What the program says of itself.
install_documents() {
    mkdir -p -- "$(dirname -- "$bash")" "$(dirname -- "$zsh")" "$(dirname -- "$fish")"
    "$binary" completions bash >"$bash"
    "$binary" completions zsh >"$zsh"
    "$binary" completions fish >"$fish"
    "$binary" man "$man"
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
    [ -x "$binary" ] || fail "$binary is missing: run cargo build --release --locked first"
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
    keep_rings_on
    echo "installed $root$prefix/bin/kvfs, and in $root$sbin: $helpers"
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

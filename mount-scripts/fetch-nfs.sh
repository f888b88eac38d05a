#!/usr/bin/env bash
# Fetches what the tests with a real NFS client need: a server in user space (nfs-ganesha), and for a
# virtual machine a kernel that has the client, and busybox. The packages are unpacked and not
# installed, so that no service starts. What is there is left alone.
#
#   mount-scripts/fetch-nfs.sh DIRECTORY
set -euo pipefail

fail() {
    echo "fetch-nfs.sh: no NFS: $*" >&2
    exit 1
}

[ $# -eq 1 ] || { echo "usage: mount-scripts/fetch-nfs.sh DIRECTORY" >&2; exit 2; }
[ -d "$1/root" ] && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || fail "it is fetched for Linux on x86-64 alone"
for program in apt-get dpkg-deb; do
    command -v $program >/dev/null || fail "$program is missing"
done

mkdir -p "$(dirname "$1")"
staging=$(mktemp -d "$1.XXXXXX")
trap 'rm -rf "$staging"' EXIT
chmod 755 "$staging"
mkdir -p "$staging/packages/partial" "$staging/tools/root"
kernel=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null |
    sed -n 's/.*Depends: \(linux-image-[^ ]*\)/\1/p' | head -n 1)
[ -n "$kernel" ] || fail "there is no package linux-image-cloud-amd64: apt-get update?"
# The server with what it needs and this system lacks.
apt-get install -qq -y --no-install-recommends --download-only -o Debug::NoLocking=1 \
    -o Dir::Cache::archives="$staging/packages" nfs-ganesha nfs-ganesha-vfs >/dev/null ||
    fail "apt-get cannot download nfs-ganesha"
(cd "$staging/packages" && apt-get download -qq "$kernel" busybox-static 2>/dev/null) ||
    fail "apt-get cannot download $kernel"
for package in "$staging"/packages/*.deb; do
    dpkg-deb -x "$package" "$staging/tools/root"
done
# All at once.
rm -rf "$1"
mv "$staging/tools" "$1"

#!/usr/bin/env bash
# Builds a package for Debian and Ubuntu: what install.sh installs, without debug information, which comes beside it.
# The same sources, compiler and SOURCE_DATE_EPOCH give the same package, bit for bit.
#
#   mount-scripts/package.sh [DIRECTORY]      (target/packages)
#
#   BINARY             a program that is built already; else program and library are built in the release profile
#   LIBRARY            the library that belongs to it (libkvfs.so beside it, if there is one)
#   SOURCE_DATE_EPOCH  the time of everything in the package (that of the last commit)
#   DEBFULLNAME, DEBEMAIL  who makes it
set -euo pipefail

usage="usage: mount-scripts/package.sh [DIRECTORY]   (BINARY, LIBRARY, SOURCE_DATE_EPOCH, DEBFULLNAME and DEBEMAIL are honoured)"
here=$(cd -- "$(dirname -- "$0")/.." && pwd)
built=${CARGO_TARGET_DIR:-$here/target}

fail() {
    echo "package.sh: $*" >&2
    exit 1
}

case $# in
    0) to=$built/packages ;;
    1) case $1 in
           -h | --help) echo "$usage"; exit 0 ;;
           -*) echo "$usage" >&2; exit 2 ;;
           *) to=$1 ;;
       esac ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
for program in dpkg-deb objcopy strip readelf; do
    command -v "$program" >/dev/null || fail "$program is missing: apt-get install dpkg binutils"
done
mkdir -p -- "$to"
to=$(cd -- "$to" && pwd)
if [ -z "${BINARY:-}" ]; then
    # A newcomer's build has no line tables; whoever looks into a crash of an installed program wants them. Nor does it wait
    # for the minutes that make the program smaller.
    export CARGO_PROFILE_RELEASE_DEBUG=line-tables-only CARGO_PROFILE_RELEASE_LTO=fat CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1
    (cd -- "$here" && cargo build --release --locked --package kvfs --bin kvfs &&
        mount-scripts/build-c-library.sh --release) >&2
    BINARY=$built/release/kvfs
fi
[ -x "$BINARY" ] || fail "$BINARY is no program: BINARY names one, or nothing and it is built"
library=${LIBRARY:-$(dirname -- "$BINARY")/libkvfs.so}
version=$(sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$here/Cargo.toml")
is_version=$("$BINARY" version)
[ "$is_version" = "kvfs $version" ] || fail "$BINARY is $is_version, and the sources are $version: build it anew"
architecture=$(dpkg --print-architecture)
: "${SOURCE_DATE_EPOCH:=$(git -C "$here" log -1 --format=%ct 2>/dev/null)}"
[ -n "$SOURCE_DATE_EPOCH" ] || fail "there is no commit to take the time from: set SOURCE_DATE_EPOCH"
export SOURCE_DATE_EPOCH LC_ALL=C
umask 022
maintainer="${DEBFULLNAME:-kvfs} <${DEBEMAIL:-kvfs@example.org}>"

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
root=$work/root
document=$root/usr/share/doc/kvfs

# split FILE: puts it into $work without debug information, which goes to DIRECTORY and is found by its name.
split() {
    local name
    name=$(basename -- "$1")
    objcopy --only-keep-debug --compress-debug-sections -- "$1" "$to/$name.debug"
    strip --strip-unneeded -o "$work/$name" -- "$1"
    objcopy --add-gnu-debuglink="$to/$name.debug" -- "$work/$name"
    echo "$name: $(stat -c %s -- "$1") bytes, installed $(stat -c %s -- "$work/$name")"
}

install_files() {
    local here_library=$work/none
    split "$BINARY"
    if [ -e "$library" ]; then
        split "$library"
        here_library=$work/$(basename -- "$library")
    fi
    # From here on the one that is installed, which is so known to run.
    DESTDIR=$root PREFIX=/usr LIBDIR=/usr/lib/$(gcc_triplet) SBINDIR=/usr/sbin MODPROBE=/usr/lib/modprobe.d \
        BINARY=$work/$(basename -- "$BINARY") LIBRARY=$here_library "$here/mount-scripts/install.sh" >/dev/null
    mkdir -p -- "$document"
    gzip -9nc -- "$here/CHANGELOG.md" >"$document/CHANGELOG.md.gz"
    changelog | gzip -9nc >"$document/changelog.gz"
    copyright >"$document/copyright"
    find "$root/usr/share/man" -type f -exec gzip -9n {} +
    find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
}

# Where libraries of this architecture are.
gcc_triplet() {
    case $architecture in
        amd64) echo x86_64-linux-gnu ;;
        arm64) echo aarch64-linux-gnu ;;
        *) fail "where libraries of $architecture go is not known here" ;;
    esac
}

# In the form that Debian's tools read.
changelog() {
    printf '%s\n' "kvfs ($version) unstable; urgency=medium" "" "  * See CHANGELOG.md.gz." "" \
        " -- $maintainer  $(date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")"
}

copyright() {
    printf '%s\n' "kvfs $version is licensed under the MIT licence or the Apache licence 2.0, at your choice." "" \
        "The Apache licence 2.0 is in /usr/share/common-licenses/Apache-2.0. The MIT licence:" ""
    cat -- "$here/LICENSE-MIT"
    printf '%s\n' "" "The program and the library have these crates in them, each under its own licence:" ""
    (cd -- "$here" && cargo tree --locked --offline --edges normal --prefix none --format '{p} {l}' \
        --package kvfs --package kvfs-c) | sed -e 's| ([^)]*)||' -e '/^kvfs/d' | grep . | sort -u
}

# The packages that the programs below a directory need, with the oldest C library.
needs() {
    local files=() libraries glibc needed list=fuse3
    mapfile -t files < <(find "$root/usr" -type f \( -path '*/bin/*' -o -name '*.so' \))
    libraries=$(readelf --dynamic --wide "${files[@]}" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u)
    glibc=$(readelf --dyn-syms --wide "${files[@]}" | grep -o 'GLIBC_2\.[0-9.]*' | cut -d_ -f2 | sort -Vu | tail -1)
    for needed in $libraries; do
        case $needed in
            ld-linux* | libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1) ;;
            libgcc_s.so.1) list+=", libgcc-s1" ;;
            *) fail "the programs need $needed, and which package has it is not known here" ;;
        esac
    done
    echo "$list, libc6 (>= $glibc)"
}

control() {
    cat <<TEXT
Package: kvfs
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $(du --summarize --apparent-size --block-size=1024 -- "$root/usr" | cut -f1)
Depends: $(needs)
Suggests: rsync
Section: admin
Priority: optional
Description: filesystem whose files are the KV cache of language models
 kvfs mounts a directory in which inference engines keep the key-value cache
 of language models as files: pages that are verified, shared between prompts
 that begin alike, moved to memory, disk or a remote, and there after a restart.
TEXT
}

install_files
(cd -- "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$work/md5sums"
control >"$work/control"
mkdir -- "$root/DEBIAN"
mv -- "$work/md5sums" "$work/control" "$root/DEBIAN"
if [ -e "$library" ]; then
    # The loader looks for libraries anew.
    echo "activate-noawait ldconfig" >"$root/DEBIAN/triggers"
fi
package=$to/kvfs_${version}_$architecture.deb
dpkg-deb --root-owner-group --build -Zxz -- "$root" "$package" >/dev/null
echo "$package: $(stat -c %s -- "$package") bytes"

#!/bin/sh
# Everything that only a GPU can show, in one command, for a machine that is borrowed: no network, no
# compiler, no mount.
#
#   tests/gpu.sh pack [DIRECTORY]                   here: builds kvfs and puts it, without debug
#                                                   information, and this script into DIRECTORY (gpu)
#   tests/gpu.sh run [KVFS [OUTPUT [ARGUMENT...]]]  there: measures; results go to OUTPUT (gpu-results)
#
# `run` writes gpu.json and gpu.md (for docs/gpu.md), and what compute-sanitizer says where it is
# installed. Without a GPU it says why and succeeds. It fails if a kernel is not exact or the sanitizer
# finds something; a figure that misses its target is marked, but is no failure. Pages are files of a
# mount where one with passthrough is to be had (as root, with /dev/fuse), else of a plain directory;
# the result says which. They take 7 GB: in memory (/dev/shm) where it has room, else in TMPDIR or
# /var/tmp. ARGUMENTs go to `kvfs bench attention --cuda`, for instance --quick.
set -eu

# What can be carried to such a machine.
BYTES_MAX=67108864

# A million tokens, and what the figures need besides.
PAGES_KIB=7340032

# Of each tool, so that all of it takes less than eight minutes.
SANITIZER_SECONDS=150

pack() {
    cd "$(dirname "$0")/.."
    to=${1:-gpu}
    cargo build --release --bin kvfs
    mkdir -p "$to"
    strip -o "$to/kvfs" target/release/kvfs
    cp tests/gpu.sh "$to/gpu.sh"
    bytes=$(wc -c <"$to/kvfs")
    echo "gpu.sh: $to/kvfs has $bytes bytes"
    [ "$bytes" -lt "$BYTES_MAX" ]
}

# Under a tool of compute-sanitizer: small figures, all kernels.
sanitize() {
    echo "gpu.sh: $1"
    code=0
    timeout "$SANITIZER_SECONDS" \
        compute-sanitizer --tool "$1" --error-exitcode 9 --log-file "$output/$1.txt" \
        "$kvfs" bench attention --cuda --quick --plain --json >/dev/null || code=$?
    case $code in
    0) echo "gpu.sh: $1 found nothing" ;;
    124) echo "gpu.sh: $1 was stopped after $SANITIZER_SECONDS s: it is not known what it would find" ;;
    *)
        echo "gpu.sh: $1 found something, or failed ($code): see $output/$1.txt" >&2
        exit 1
        ;;
    esac
}

# Room for the pages, in memory if there is some.
choose_directory() {
    for place in /dev/shm "${TMPDIR:-}" /var/tmp; do
        [ -w "$place" ] || continue
        free=$(df -Pk "$place" | awk 'NR == 2 { print $4 }')
        if [ "${free:-0}" -gt "$PAGES_KIB" ]; then
            echo "$place"
            return
        fi
    done
    echo "${TMPDIR:-/var/tmp}"
}

# The number of a figure in gpu.json: the line of its value comes before the next name.
value() {
    awk -v name="\"$1\"," '
        $1 == "\"name\":" { found = $2 == name }
        $1 == "\"value\":" { last = $2 }
        $1 == "}," || $1 == "}" { if (found) { sub(",", "", last); print last; exit } }
    ' "$output/gpu.json"
}

run() {
    here=$(dirname "$0")
    kvfs=${1:-$here/kvfs}
    [ $# -gt 0 ] || [ -x "$kvfs" ] || kvfs=$here/../target/release/kvfs
    output=${2:-gpu-results}
    if [ $# -gt 2 ]; then shift 2; else shift $#; fi
    mkdir -p "$output"
    TMPDIR=$(choose_directory)
    # The driver remembers what it compiled, which takes a minute for all kernels, also where the home
    # directory cannot be written to.
    if [ -z "${CUDA_CACHE_PATH:-}" ]; then
        CUDA_CACHE_PATH=$TMPDIR/kvfs-compiled-$$
        trap 'rm -rf "$CUDA_CACHE_PATH"' EXIT
    fi
    export TMPDIR CUDA_CACHE_PATH
    "$kvfs" bench attention --cuda --json --markdown "$output/gpu.md" "$@" >"$output/gpu.json"
    if grep -q '"gpu": "none' "$output/gpu.json"; then
        echo "gpu.sh: skipped: no GPU: $(sed -n 's/.*"gpu": "none (\(.*\))",*/\1/p' "$output/gpu.json")"
        return
    fi
    cat "$output/gpu.md"
    for what in f16 bf16 f32 f8_e4m3 q8_0 q4_0 options scans; do
        error=$(value "cuda_relative_l2_$what")
        awk -v error="$error" 'BEGIN { exit !(error != "" && error + 0 <= 1e-4) }' || {
            echo "gpu.sh: relative L2 of $what is $error, more than 1e-4" >&2
            exit 1
        }
    done
    if command -v compute-sanitizer >/dev/null; then
        sanitize memcheck
        sanitize racecheck
    else
        echo "gpu.sh: no compute-sanitizer on this machine"
    fi
}

command=${1:-run}
[ $# -eq 0 ] || shift
case $command in
pack | run) "$command" "$@" ;;
*)
    sed -n '2,15s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

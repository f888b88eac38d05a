#!/usr/bin/env bash
# Changes one operator, condition or result of the store, the file system or the tiers at a time
# (cargo-mutants) and runs tests that must notice. What lives is in mutants.out/missed.txt.
#
#   tests/mutants.sh                                   all mutants, in many hours
#   tests/mutants.sh --file 'src/fs/publish.rs'        those of one file
#   tests/mutants.sh --sample N --seed S [--seconds T] N of them, the same for the same seed, until the
#                                                      time is over; says how many were tried
#
# Works on a copy below target/ whose build is kept. docs/reliability.md has what is known to live.
set -euo pipefail
cd "$(dirname "$0")/.."

sample='' seed=1 seconds=86400 files=()
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || { echo "mutants.sh: $1 needs a value" >&2; exit 2; }
    case $1 in
        --sample) sample=$2 ;;
        --seed) seed=$2 ;;
        --seconds) seconds=$2 ;;
        --file) files+=(--file "$2") ;;
        *) echo "mutants.sh: unknown: $1" >&2; exit 2 ;;
    esac
    shift 2
done

if [ ${#files[@]} -eq 0 ]; then
    files=(--file 'src/fs/**/*.rs' --file 'src/store/**/*.rs' --file 'src/tier/**/*.rs' \
        --file 'crates/encoding/src/**/*.rs')
fi

tools=$PWD/target/test-tools
export PATH=$tools/bin:$PATH
cargo mutants --version >/dev/null 2>&1 ||
    cargo install --quiet --locked --root "$tools" cargo-mutants

copy=$PWD/target/mutants
mkdir -p "$copy/tree"
# What is here now, and nothing that is gone; times stay, so that only what changed is built again.
list=$(mktemp)
trap 'rm -f "$list"' EXIT
git ls-files -z --cached --others --exclude-standard >"$list"
find "$copy/tree" -mindepth 1 -delete
rsync -a --from0 --files-from="$list" ./ "$copy/tree/"
export CARGO_TARGET_DIR=$copy/build
cd "$copy/tree"

chosen=()
if [ -n "$sample" ]; then
    # One share of all, evenly spread.
    total=$(cargo mutants --list "${files[@]}" | wc -l)
    shares=$((total / sample > 0 ? total / sample : 1))
    chosen=(--sharding round-robin --shard "$((seed * 7919 % shares))/$shares")
    cargo mutants --list "${files[@]}" "${chosen[@]}"
fi

outcome=0
timeout --signal=INT "$seconds" cargo mutants --in-place --baseline skip --timeout 120 \
    "${files[@]}" "${chosen[@]}" || outcome=$?
# 2: some live; 3: a test took too long; 124: the time was over, which is no fault of a test.
case $outcome in
    0 | 2 | 3 | 124) ;;
    *) exit "$outcome" ;;
esac
tried=$(cat mutants.out/{caught,missed,timeout,unviable}.txt | wc -l)
echo "mutants.sh: $tried tried"
if [ -s mutants.out/missed.txt ]; then
    echo "mutants.sh: these live:" >&2
    cat mutants.out/missed.txt >&2
    exit 1
fi

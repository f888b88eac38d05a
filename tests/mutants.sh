#!/usr/bin/env bash
# Changes one operator, condition or result of the store, the tiers, the remote or the file system at a time
# (cargo-mutants) and runs tests that must notice: first those of the same crate, then, for what they did not
# notice, those of the program that need no mount, and then suites with one. What lives after all three is
# printed, and is the failure.
#
#   tests/mutants.sh                                   all mutants, in days
#   tests/mutants.sh --file 'crates/fs/src/publish.rs'        those of one file
#   tests/mutants.sh --sample N --seed S [--seconds T] N of them, the same for the same seed, until the
#                                                      time is over; says how many were tried
#
# Works on a copy below target/, with the dependencies that are built already. docs/reliability.md has what is
# known to live.
set -euo pipefail
cd "$(dirname "$0")/.."

# Tests of the program that need no mount, and suites with one.
WITHOUT_MOUNT=(--test files_model --test crash)
WITH_MOUNT=(--test pages --test prefixes --test retention --test tiers --test users --test fsck)

sample='' seed=1 seconds=864000 files=()
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
    files=(--file 'crates/fs/src/**/*.rs' --file 'crates/storage/src/**/*.rs' --file 'crates/remote/src/**/*.rs' \
        --file 'crates/encoding/src/**/*.rs')
fi

tools=$PWD/target/test-tools
export PATH=$tools/bin:$PATH
cargo mutants --version >/dev/null 2>&1 ||
    cargo install --quiet --locked --root "$tools" cargo-mutants

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
# No mutant is noticed because the machine is busy.
export KVFS_REQUEST_LIMIT_MS=5000
tree=$PWD/target/mutants
mkdir -p "$tree"
# What is here now, and nothing that is gone; times stay, so that only what changed is built again.
list=$(mktemp)
trap 'rm -f "$list"' EXIT
git ls-files -z --cached --others --exclude-standard >"$list"
find "$tree" -mindepth 1 -delete
rsync -a --from0 --files-from="$list" ./ "$tree/"
cd "$tree"

# Of a sample the names: what a later round leaves out must not change what the sample is.
chosen=()
if [ -n "$sample" ]; then
    names=$(cargo mutants --workspace --list "${files[@]}")
    total=$(wc -l <<<"$names")
    apart=$((total / sample > 0 ? total / sample : 1))
    while IFS= read -r name; do
        # shellcheck disable=SC2016 # These are characters of an expression, not variables.
        chosen+=(--re "^$(sed 's/[][\.*^$()+?{}|/]/\\&/g' <<<"$name")\$")
    done < <(awk -v apart="$apart" -v first="$((seed * 7919 % apart))" 'NR % apart == first' <<<"$names")
fi

end=$((SECONDS + seconds))
# Runs tests on the mutants that none has noticed yet: try SECONDS PACKAGE|own ARGUMENTS OF cargo test. A mutant
# whose tests take longer never ends, which is noticed as well.
try() {
    local left=$((end - SECONDS)) outcome=0 arguments=()
    [ "$left" -gt 0 ] || return 0
    [ ! -e mutants.out ] || [ -s mutants.out/missed.txt ] || return 0
    arguments+=(--timeout "$1")
    shift
    # Without a name cargo-mutants runs the tests of the package that the mutant is in.
    [ "$1" = own ] || arguments+=(--test-package "$1")
    shift
    for argument in "$@"; do arguments+=(--cargo-test-arg "$argument"); done
    timeout --signal=INT "$left" cargo mutants --workspace --in-place --iterate --baseline skip \
        "${files[@]}" "${chosen[@]}" "${arguments[@]}" || outcome=$?
    # 2: some live; 3: a test took too long; 124: the time was over, which is no fault of a test.
    case $outcome in
        0 | 2 | 3 | 124) ;;
        *) exit "$outcome" ;;
    esac
}
try 60 own --lib
echo "mutants.sh: $(cat mutants.out/{caught,missed,timeout,unviable}.txt | wc -l) tried"
try 300 kvfs "${WITHOUT_MOUNT[@]}"
try 300 kvfs "${WITH_MOUNT[@]}"
if [ -s mutants.out/missed.txt ]; then
    echo "mutants.sh: these live:" >&2
    cat mutants.out/missed.txt >&2
    exit 1
fi

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

chosen=()
if [ -n "$sample" ]; then
    # One share of all, evenly spread.
    total=$(cargo mutants --workspace --list "${files[@]}" | wc -l)
    shares=$((total / sample > 0 ? total / sample : 1))
    chosen=(--sharding round-robin --shard "$((seed * 7919 % shares))/$shares")
fi

# First the tests of the crate that the mutant is in. A mutant whose tests take a minute never ends, which is noticed
# as well.
end=$((SECONDS + seconds)) outcome=0
timeout --signal=INT "$seconds" cargo mutants --workspace --in-place --baseline skip --timeout 60 \
    "${files[@]}" "${chosen[@]}" --cargo-test-arg --lib || outcome=$?
# 2: some live; 3: a test took too long; 124: the time was over, which is no fault of a test.
case $outcome in
    0 | 2 | 3 | 124) ;;
    *) exit "$outcome" ;;
esac

# The change of each mutant that lives so far, a file and its name in a line.
living() {
    python3 - <<'PYTHON'
import json
for outcome in json.load(open("mutants.out/outcomes.json"))["outcomes"]:
    if outcome["summary"] == "MissedMutant":
        print(outcome["diff_path"], outcome["scenario"]["Mutant"]["name"], sep="\t")
PYTHON
}

# Whether a test of the program fails, of those that these arguments of cargo test choose.
fails() {
    local run=(cargo test --quiet --locked --package kvfs)
    # Several at a time, and none any more after the first that fails.
    cargo nextest --version >/dev/null 2>&1 && run=(cargo nextest run --locked --package kvfs)
    ! timeout 1800 "${run[@]}" "$@" </dev/null >mutants.out/suites.log 2>&1
}

# The same with a change: notices FILE CHANGE ARGUMENTS
notices() {
    local file=$1 change=mutants.out/$2 outcome=0
    shift 2
    patch --quiet "$file" "$change"
    fails "$@" || outcome=$?
    patch --quiet --reverse "$file" "$change"
    return "$outcome"
}

if [ -n "$(living)" ] && { fails "${WITHOUT_MOUNT[@]}" || fails "${WITH_MOUNT[@]}"; }; then
    echo "mutants.sh: tests fail without any change: $tree/mutants.out/suites.log" >&2
    exit 1
fi
tried=$(cat mutants.out/{caught,missed,timeout,unviable}.txt | wc -l) unknown=0 survivors=()
while IFS=$'\t' read -r change name; do
    if [ "$SECONDS" -ge "$end" ]; then
        unknown=$((unknown + 1))
        continue
    fi
    file=${name%%:*}
    if ! notices "$file" "$change" "${WITHOUT_MOUNT[@]}" &&
        ! notices "$file" "$change" "${WITH_MOUNT[@]}"; then
        survivors+=("$name")
        echo "lives: $name"
    fi
done < <(living)
echo "mutants.sh: $tried tried, ${#survivors[@]} live, $unknown not looked at to the end"
[ ${#survivors[@]} -eq 0 ]

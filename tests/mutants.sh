#!/usr/bin/env bash
# Changes one operator, condition or result of the store, the tiers, the remote or the file system at a time
# (cargo-mutants) and runs tests that must notice. A mutant that lives, and is not named with its reason in
# tests/mutants.known, is printed and is the failure.
#
#   tests/mutants.sh                      all mutants, in days: first the tests of the same crate, then, for what those
#                                         did not notice, tests of the program without a mount, then suites with one
#   tests/mutants.sh --file 'crates/fs/src/publish.rs'    those of one file
#   tests/mutants.sh --own                only tests of the same crate, and only files in which those are meant to
#                                         notice everything, in hours
#   tests/mutants.sh --known              runs nothing: whether each line of tests/mutants.known names a mutant
#
# With `--sample N --seed S` some N of them, the same for the same seed, in the same order (`--own`: of one group of
# files). With `--seconds T` until the time is over, with the build; that is no failure, and what was tried is told.
#
# Works on a copy below target/, with the dependencies that are built already. docs/reliability.md has what came out.
set -euo pipefail
cd "$(dirname "$0")/.."

# Files in which the crate's own tests are meant to notice every change: the crate, which of its tests (with commas
# between), and files. A sample takes one group, whatever its size: they have some three hundred mutants each.
OWN=(
    "kvfs-storage store:: $(printf 'crates/storage/src/store/%s.rs ' commit packs/{compaction,index,record,writer})"
    "kvfs-storage store::packs $(printf 'crates/storage/src/store/packs/%s.rs ' disk file holes mod pack)"
    "kvfs-storage store::events,store::metadata,store::quarantine,store::recovery,store::record $(
        printf 'crates/storage/src/store/%s.rs ' metadata metadata/{attributes,clock,discarded,encoded,events,remote,scan,watches} \
            quarantine record records recovery standing)"
    "kvfs-storage tier::copies,tier::counters,tier::encoded,tier::ram,tier::rate,tier::scan,tier::ssd $(
        printf 'crates/storage/src/tier/%s.rs ' copies counters encoded ram/{copies,mod,resize} rate scan ssd)"
    "kvfs-storage store::fsck $(
        printf 'crates/storage/src/store/%s.rs ' fsck fsck/{encoded,image,links,names,objects,places})"
    "kvfs-storage store::fsck $(printf 'crates/storage/src/store/fsck/%s.rs ' rebuild rest salvage tree)"
    "kvfs-storage store::arrivals,store::buffer,store::packs $(
        printf 'crates/storage/src/store/%s.rs ' arrivals buffer/{file,mod})"
    "kvfs-storage store::metadata,store::reserve $(
        printf 'crates/storage/src/store/%s.rs ' last_mount metadata/{opening,prefixes,reopening} reserve)"
    "kvfs-storage store::keys,store::layer,store::metadata,store::overlay,store::records $(
        printf 'crates/storage/src/store/%s.rs ' keys layer overlay)"
    "kvfs-storage store::buffer,store::disk,store::local_disk,store::read_only_disk $(
        printf 'crates/storage/src/store/%s.rs ' disk read_only_disk)"
    "kvfs-storage ingest::,tier::encoded,tier::exchange $(
        printf 'crates/storage/src/%s.rs ' ingest/{model,seal} tier/encoded/files tier/exchange tier/exchange/bytes)"
    "kvfs-fs retention:: $(printf 'crates/fs/src/retention/%s.rs ' cut mod pass)"
    "kvfs-fs core::idle,retention:: crates/fs/src/core/idle.rs $(
        printf 'crates/fs/src/retention/%s.rs ' clock expired policy remove rights steps tree uses)"
    "kvfs-fs core::,backlog::,discarded::,error::,pacing::,postponed::,takeover:: $(printf 'crates/fs/src/%s.rs ' backlog discarded error \
        pacing postponed core/{latest,node,refuse,releases,rights,spare,stale,turns,unsettled,waits})"
    "kvfs-fs on_corrupt::,placement::,prefixes::,retention::cut,verify:: $(
        printf 'crates/fs/src/%s.rs ' on_corrupt placement prefixes/{access,edited,key,shares} verify)"
)
# Tests of the program that need no mount, and suites with one.
WITHOUT_MOUNT=(--test files_model --test crash)
WITH_MOUNT=(--test pages --test prefixes --test retention --test tiers --test users --test fsck)

fail() {
    echo "mutants.sh: $*" >&2
    exit 1
}

mode=all sample='' seed=1 seconds=864000 files=()
while [ $# -gt 0 ]; do
    case $1 in
        --own | --known)
            mode=${1#--}
            shift
            continue
            ;;
    esac
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
end=$((SECONDS + seconds))

if [ ${#files[@]} -eq 0 ]; then
    files=(--file 'crates/fs/src/**/*.rs' --file 'crates/storage/src/**/*.rs' --file 'crates/remote/src/**/*.rs' \
        --file 'crates/encoding/src/**/*.rs')
fi

export PATH=$PWD/target/test-tools/bin:$PATH
cargo mutants --version >/dev/null 2>&1 || fail "cargo-mutants is missing: mount-scripts/setup.sh --tests installs it"

# Names of mutants without lines and columns, which change with everything above them.
names() {
    sed -E 's/^([^:]+):[0-9]+:[0-9]+: /\1: /' "$@" | sort -u
}

# The mutants that are known to live.
known() {
    grep -v -e '^#' -e '^$' tests/mutants.known | sort -u
}

# Each line of the list is about a mutant that there is, and stands in a group that begins with its reason.
check_known() {
    local gone reasonless
    reasonless=$(awk '/^$/ { reason = 0 } /^#/ { reason = 1; next } NF && !reason' tests/mutants.known)
    [ -z "$reasonless" ] || fail "tests/mutants.known gives no reason for: $reasonless"
    gone=$(comm -13 <(cargo mutants --workspace --list | names) <(known))
    [ -z "$gone" ] || fail "tests/mutants.known names what is no mutant any more; take it out: $gone"
    echo "mutants.sh: $(known | wc -l) mutants are known to live, all of them with a reason"
}

if [ "$mode" = known ]; then
    check_known
    exit
fi

mkdir -p target
exec 9>target/mutants.lock
flock --nonblock 9 || fail "another run is in target/mutants: wait for its end"

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
# With a profile of its own, so that nothing takes a program with a mutant in it for its own: for cargo the same files
# in another place are the same.
export CARGO_PROFILE_DEV_DEBUG=0
# As many as an incremental build has in any case, and another build does not.
export CARGO_PROFILE_DEV_CODEGEN_UNITS=256
# After a change of one line a third of the time.
export CARGO_INCREMENTAL=1
# Trying again finds what fails now and then, and no mutant does.
export NEXTEST_RETRIES=0
# No mutant is noticed because the machine is busy.
export KVFS_REQUEST_LIMIT_MS=5000
# Tests of stores sync all the time, and a disk that does takes most of theirs.
temporary=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)/kvfs-mutants.XXXXXX")
trap 'rm -rf "$temporary"' EXIT
export TMPDIR=$temporary

tree=$PWD/target/mutants
mkdir -p "$tree"
# What is here now, and nothing that is gone; times stay, so that only what changed is built again.
git ls-files -z --cached --others --exclude-standard >"$temporary/files"
find "$tree" -mindepth 1 -delete
rsync -a --from0 --files-from="$temporary/files" ./ "$tree/"
cd "$tree"
# What was built there last may have a mutant in it, and is newer than any of these files.
touch crates/*/src/lib.rs

# Tries mutants until this second with these tests of the same crate, with commas between: try UNTIL TESTS ARGUMENTS
try() {
    local until=$1 tests outcome=0 chosen=() tool=() total shares
    IFS=, read -r -a tests <<<"$2"
    shift 2
    # The first test that fails has noticed.
    cargo nextest --version >/dev/null 2>&1 && tool=(--test-tool nextest --cargo-test-arg=--fail-fast)
    if [ -n "$sample" ]; then
        # One share of all, evenly spread.
        total=$(cargo mutants --workspace --list "$@" | wc -l)
        shares=$((total / sample > 0 ? total / sample : 1))
        chosen=(--sharding round-robin --shard "$((seed * 7919 % shares))/$shares")
    fi
    # A mutant whose tests take a minute never ends, which is noticed as well.
    timeout --signal=INT "$((until - SECONDS))" cargo mutants --workspace --in-place --baseline skip --timeout 60 \
        --cargo-arg=--lib "${tool[@]}" "$@" "${chosen[@]}" -- -- "${tests[@]}" || outcome=$?
    # 2: some live; 3: a test took too long; 124: the time was over, which is no fault of a test.
    case $outcome in
        0 | 2 | 3 | 124) ;;
        *) exit "$outcome" ;;
    esac
}

# How many mutants had one of these outcomes.
count() {
    (cd mutants.out && cat "${@/%/.txt}" | wc -l)
}

# Tries the mutants of a line of OWN; whether all that live are known to.
try_own() {
    local package tests paths unknown until
    read -r package tests paths <<<"$1"
    # shellcheck disable=SC2086 # Each is a word.
    timeout 900 cargo test --quiet --locked --package "$package" --lib -- ${tests//,/ } >"$temporary/log" 2>&1 ||
        { cat "$temporary/log" >&2; fail "tests of $package fail without any change"; }
    # However long that took, some are tried.
    until=$((end > SECONDS + 30 ? end : SECONDS + 30))
    read -r -a paths <<<"--file ${paths// / --file }"
    try "$until" "$tests" "${paths[@]}"
    unknown=$(comm -23 <(names mutants.out/missed.txt) <(known))
    echo "mutants.sh: $package: $(count caught missed timeout) tried, $(count caught timeout) caught," \
        "$(count missed) live, $(grep -c . <<<"$unknown") of them unknown; $(count unviable) do not compile"
    [ -z "$unknown" ] && return
    echo "$unknown" >&2
    return 1
}

if [ "$mode" = own ]; then
    check_known
    groups=("${OWN[@]}")
    if [ -n "$sample" ]; then
        groups=("${OWN[seed % ${#OWN[@]}]}")
        seed=$((seed / ${#OWN[@]}))
    fi
    outcome=0
    for group in "${groups[@]}"; do
        try_own "$group" || outcome=1
    done
    [ "$outcome" -eq 0 ] ||
        fail "no test notices these changes: write one that does, or name them with the reason in tests/mutants.known"
    exit
fi

try "$end" :: "${files[@]}"

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
    fail "tests fail without any change: $tree/mutants.out/suites.log"
fi
tried=$(count caught missed timeout unviable) unfinished=0 survivors=()
while IFS=$'\t' read -r change name; do
    if [ "$SECONDS" -ge "$end" ]; then
        unfinished=$((unfinished + 1))
        continue
    fi
    file=${name%%:*}
    if ! notices "$file" "$change" "${WITHOUT_MOUNT[@]}" &&
        ! notices "$file" "$change" "${WITH_MOUNT[@]}"; then
        survivors+=("$name")
        echo "lives: $name"
    fi
done < <(living)
unknown=$(comm -23 <(printf '%s\n' "${survivors[@]}" | names) <(known) | grep . || true)
echo "mutants.sh: $tried tried, ${#survivors[@]} live, $unfinished not looked at to the end"
[ -z "$unknown" ] || fail "not in tests/mutants.known: $unknown"

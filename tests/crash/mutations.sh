#!/usr/bin/env bash
# Takes one fsync, rename, verification or probe out of the source at a time and runs the tests that must
# notice. Works on a copy that is built once: a variable says at run time what is left out. The tests
# must pass when nothing is. Prints a line per mutation; fails if one lives.
#
#   tests/crash/mutations.sh [NAME...]
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 cp --parents -t "$copy"
export CARGO_TARGET_DIR=${KVFS_MUTATIONS_TARGET:-$PWD/target/mutations}

failed=0
wanted=("$@")
names=()
declare -A tests

# mutate NAME FILE TEXT REPLACEMENT TESTS...: the text must be there exactly once. MUTATED stands for
# whether this mutation was chosen.
mutate() {
    if [[ ${#wanted[@]} -gt 0 && ! " ${wanted[*]} " == *" $1 "* ]]; then return; fi
    python3 - "$1" "$copy/$2" "$3" "$4" <<'PYTHON' || { echo "$1: the source changed"; failed=1; return; }
import sys
name, path, text, replacement = sys.argv[1:]
chosen = f'(std::env::var_os("KVFS_MUTATION").is_some_and(|chosen| chosen == "{name}"))'
source = open(path).read()
sys.exit(f"{path}: {source.count(text)} times: {text}") if source.count(text) != 1 else None
open(path, "w").write(source.replace(text, replacement.replace("MUTATED", chosen)))
PYTHON
    names+=("$1")
    tests[$1]="${*:5}"
}

# Runs the tests of a mutation, or of none.
run() {
    # The arguments of cargo are words.
    # shellcheck disable=SC2086
    (cd "$copy" && KVFS_MUTATION=$1 cargo test -q --locked $2 >"$copy/test.log" 2>&1)
}

crash=(--test crash)
# Fewer states than a run of the tests has: the tests pass with them, and what is missing shows at many.
export KVFS_SIM_STATES=${KVFS_SIM_STATES:-3000} KVFS_SIM_DAMAGES=${KVFS_SIM_DAMAGES:-1000}

mutate fsync-of-objects crates/storage/src/store/commit.rs \
    'file.and_then(|file| file.sync())' \
    'file.and_then(|file| if MUTATED { Ok(()) } else { file.sync() })' \
    "${crash[@]}"
mutate sync-of-all-files crates/storage/src/store/commit.rs \
    'if store.disk.sync_all_files(objects.len())? {' \
    'if MUTATED && objects.len() > 1 || store.disk.sync_all_files(objects.len())? {' "${crash[@]}"
mutate fsync-of-copies-from-memory crates/storage/src/store/flush.rs \
    '    target.sync()?;' '    if !MUTATED { target.sync()?; }' "${crash[@]}"
mutate fsync-of-shards crates/storage/src/store/commit.rs \
    'store.disk.sync_directory(directory)?;' \
    'if !MUTATED { store.disk.sync_directory(directory)?; }' "${crash[@]}"
mutate rename-of-the-database crates/storage/src/store/mod.rs \
    'if !self.has_metadata()? {' 'if !MUTATED && !self.has_metadata()? {' "${crash[@]}"
mutate fsync-of-the-store crates/storage/src/store/mod.rs \
    'self.disk.sync_directory(DiskDirectory::Store)?;' \
    'if !MUTATED { self.disk.sync_directory(DiskDirectory::Store)?; }' "${crash[@]}"
mutate fsync-of-removals crates/fs/src/commit.rs \
    'self.core.store.sync_removals()?;' 'if !MUTATED { self.core.store.sync_removals()?; }' "${crash[@]}"
mutate fsync-of-encoded-names crates/fs/src/encoded.rs \
    'self.core.store.disk.sync_directory(directory)?;' \
    'if !MUTATED { self.core.store.disk.sync_directory(directory)?; }' "${crash[@]}"
mutate fsync-before-changes-in-place crates/fs/src/keep_resident.rs \
    '                    file.sync()?;' 'if !MUTATED { file.sync()?; }' "${crash[@]}"
mutate commit-before-changes-in-place crates/fs/src/open.rs \
    'if wait && let Err(error) = self.commit() {' \
    'if !MUTATED && wait && let Err(error) = self.commit() {' "${crash[@]}"
mutate commit-before-leaving crates/fs/src/leave.rs \
    'if let Err(error) = self.commit() {' \
    'if !MUTATED && let Err(error) = self.commit() {' "${crash[@]}"
mutate removals-after-the-commit crates/fs/src/commit.rs \
    'self.core.describe(&layer);' \
    'self.core.describe(&layer); if MUTATED { for object in &layer.removals { let _ = self.core.store.remove_object(*object); } }' \
    "${crash[@]}"
mutate read-only-after-a-failed-fsync crates/fs/src/commit.rs \
    'state.refusal = Some(Refusal::DiskFailed);' \
    'if !MUTATED { state.refusal = Some(Refusal::DiskFailed); }' "${crash[@]}"
mutate verification-at-open crates/fs/src/open.rs \
    'if actual == expected ||' 'if MUTATED || actual == expected ||' "${crash[@]}"
mutate length-at-open crates/fs/src/open.rs \
    'if length != file.size {' 'if !MUTATED && length != file.size {' --test reliability verification
mutate panics-of-the-database crates/storage/src/store/database.rs \
    'catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(panicked)' \
    'if MUTATED { act() } else { catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(panicked) }' "${crash[@]}"
mutate staging-is-emptied crates/storage/src/store/recovery.rs \
    'store.disk.remove(&path)?;' 'if !MUTATED { store.disk.remove(&path)?; }' "${crash[@]}"
mutate the-probe-for-writers crates/fs/src/core/settle.rs \
    '|| !seal::is_at_rest(&self.store, object)?' \
    '|| (!MUTATED && !seal::is_at_rest(&self.store, object)?)' --test files_semantics mappings
mutate objects-without-records crates/storage/src/store/mod.rs \
    'if self.has_objects()? {' 'if !MUTATED && self.has_objects()? {' --test fsck rebuild
mutate the-last-descriptors crates/fs/src/descriptors.rs \
    'if taken < ' 'if MUTATED || taken < ' --test files_semantics floods
mutate waiters-are-told crates/fs/src/flights.rs \
    'self.flight.landed.notify_all();' 'if !MUTATED { self.flight.landed.notify_all(); }' \
    --test models sharing
mutate flights-end-before-they-are-told crates/fs/src/flights.rs \
    'self.flights.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);' \
    'if !MUTATED { self.flights.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key); }' \
    --test models sharing
mutate versions-of-copies crates/storage/src/tier/ram/mod.rs \
    'filter(|copy| copy.version == version)' 'filter(|copy| MUTATED || copy.version == version)' \
    --test models leaving
mutate bytes-that-came-to-rest crates/storage/src/tier/ram/mod.rs \
    $'        if let Some(copy) = copy {\n            copy.version += 1;' \
    $'        if let Some(copy) = copy.filter(|_| !MUTATED) {\n            copy.version += 1;' \
    --test models leaving

mapfile -t sets < <(for name in "${names[@]}"; do echo "${tests[$name]}"; done | sort -u)
for set in "${sets[@]}"; do
    if ! run "" "$set"; then
        tail -n 20 "$copy/test.log"
        echo "cargo test $set fails without a mutation"
        exit 1
    fi
done
for name in "${names[@]}"; do
    if run "$name" "${tests[$name]}"; then
        echo "$name: NOT NOTICED"
        failed=1
    else
        signs='missing|instead of|no version|wrong bytes|cannot|record|Acknowledge|panicked'
        why=$(grep -v KVFS_MUTATION "$copy/test.log" | grep -m1 -E "$signs")
        echo "$name: noticed: ${why:0:150}"
    fi
done
exit $failed

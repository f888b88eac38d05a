#!/usr/bin/env bash
# Takes one fsync, rename, verification or probe out of the source at a time and runs the tests that must
# notice. Works on a copy; takes a minute or two for each. Prints a line per mutation; fails if one lives.
#
#   tests/crash/mutations.sh [NAME...]
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 cp --parents -t "$copy"
export CARGO_TARGET_DIR=${KVFS_MUTATIONS_TARGET:-$PWD/target/mutations}

lives=0
# mutate NAME FILE TEXT REPLACEMENT TESTS...: the text must be there exactly once.
mutate() {
    local name=$1 file=$2
    if [[ ${#wanted[@]} -gt 0 && ! " ${wanted[*]} " == *" $name "* ]]; then return; fi
    python3 - "$copy/$file" "$3" "$4" <<'PYTHON' || { echo "$name: the source changed"; lives=1; return; }
import sys
path, text, replacement = sys.argv[1:]
source = open(path).read()
sys.exit(f"{path}: {source.count(text)} times: {text}") if source.count(text) != 1 else None
open(path, "w").write(source.replace(text, replacement))
PYTHON
    if ! (cd "$copy" && cargo test -q --locked --no-run "${@:5:2}" 2>"$copy/build.log"); then
        tail -n 5 "$copy/build.log"
        echo "$name: does not compile"
        lives=1
    elif (cd "$copy" && cargo test -q --locked "${@:5}" >"$copy/test.log" 2>&1); then
        echo "$name: NOT NOTICED"
        lives=1
    else
        local why
        why=$(grep -m1 -E 'missing|instead of|no version|wrong bytes|cannot|record|panicked' "$copy/test.log")
        echo "$name: noticed: ${why:0:150}"
    fi
    cp "$file" "$copy/$file"
}

wanted=("$@")
crash=(--test crash)

mutate fsync-of-objects src/store/commit.rs \
    'store.open_object(object, Access::Read)?.sync()' \
    'store.open_object(object, Access::Read).map(drop)' "${crash[@]}"
mutate fsync-of-copies-from-memory src/store/flush.rs '    target.sync()?;' '' "${crash[@]}"
mutate fsync-of-shards src/store/commit.rs \
    'store.disk.sync_directory(directory)?;' 'let _ = directory;' "${crash[@]}"
mutate rename-of-the-database src/store/mod.rs \
    'if !self.has_metadata()? {' 'if false {' "${crash[@]}"
mutate fsync-of-the-store src/store/mod.rs \
    'self.disk.sync_directory(DiskDirectory::Store)?;' '' "${crash[@]}"
mutate fsync-of-removals src/fs/sync.rs 'self.store.sync_removals()?;' '' "${crash[@]}"
mutate fsync-of-encoded-names src/fs/encoded.rs \
    'self.store.disk.sync_directory(directory)?;' 'let _ = directory;' "${crash[@]}"
mutate fsync-before-changes-in-place src/fs/keep_resident.rs '                    file.sync()?;' '' "${crash[@]}"
mutate commit-before-changes-in-place src/fs/open.rs \
    'if wait && let Err(error) = self.commit() {' \
    'if false && let Err(error) = self.commit() {' "${crash[@]}"
mutate commit-before-leaving src/fs/leave.rs \
    'if let Err(error) = self.commit() {' \
    'if false && let Err(error) = self.commit() {' "${crash[@]}"
mutate removals-after-the-commit src/fs/sync.rs \
    'self.amend(&checksums).map_or(Ok(()), |layer| writer.write(&layer))' \
    'self.amend(&checksums).map_or(Ok(()), |layer| { for object in &layer.removals { let _ = self.store.remove_object(*object); } writer.write(&layer) })' \
    "${crash[@]}"
mutate read-only-after-a-failed-fsync src/fs/sync.rs 'state.failed = true;' '' "${crash[@]}"
mutate verification-at-open src/fs/open.rs \
    'if actual == expected ||' 'if actual != [0; 16] ||' "${crash[@]}"
mutate length-at-open src/fs/open.rs 'if length != file.size {' 'if false {' "${crash[@]}"
mutate panics-of-the-database src/store/database.rs \
    'catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(panicked)' \
    'if false { panicked(()) } else { act() }' "${crash[@]}"
mutate staging-is-emptied src/store/recovery.rs \
    'store.disk.remove(&path)?;' '' "${crash[@]}"
mutate the-probe-for-writers src/fs/settle.rs \
    '|| !seal::is_at_rest(&self.store, object)?' '' --test files_semantics mappings
exit $lives

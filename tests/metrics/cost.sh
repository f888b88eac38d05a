#!/usr/bin/env bash
# What looking costs the daemon of a mount with 100,000 pages, as a share of one core: the page in a browser, `kvfs top`, and
# Prometheus, which asks each 15 s. And what a map of all pages takes. Usage: tests/metrics/cost.sh KVFS [SECONDS]. Without chromium a loop asks as the page does.
set -euo pipefail
kvfs=$(realpath "$1")
seconds=${2:-60}
place=$(mktemp -d "${KVFS_TEST_DIR:-/var/tmp}/kvfs-page.XXXXXX")
mount=$place/mnt
browser=
finish() {
    [ -z "$browser" ] || kill "$browser" 2>/dev/null || true
    "$kvfs" umount "$mount" || umount -l "$mount" || true
    rm -rf "$place"
}
trap finish EXIT
mkdir "$mount"
"$kvfs" mount --log "$place/log" --metrics-addr 127.0.0.1:0 --ram 1G "$place/store" "$mount"
"$kvfs" create "$mount/models/toy" --layers 10 --kv-heads 1 --head-dim 8 --page-tokens 16 >"$place/created"
python3 - "$mount/models/toy/sequences/chat" <<'PYTHON'
import os, sys
for layer in range(10):
    directory = f"{sys.argv[1]}/{layer:03}"
    os.makedirs(directory)
    for page in range(10_000):
        with open(f"{directory}/{page * 16:07}.tail", "ab", buffering=0) as tail:
            tail.write(bytes([page % 251]) * (16 * 16 * 2))
PYTHON
"$kvfs" sync "$mount"
grep '^pages:' "$mount/.kvfs/status"
address=$(cat "$mount/.kvfs/page")
token=${address##*#}
address=${address%%#*}
daemon=$(sed -n 's/^pid: //p' "$mount/.kvfs/status")
ticks() { sed 's/.*) //' "/proc/$1/stat" | awk '{print $12 + $13}'; }
ask() { curl -sS -o "$place/answer" -H "Authorization: Bearer $token" "$address$1"; }
share() {
    local before after
    before=$(ticks "$daemon")
    sleep "$seconds"
    after=$(ticks "$daemon")
    awk -v ticks=$((after - before)) -v hertz="$(getconf CLK_TCK)" -v seconds="$seconds" -v what="$1" \
        'BEGIN { printf "%s: %.2f %% of a core\n", what, ticks * 100 / hertz / seconds }'
}
sleep 5
share "nobody looks"

while sleep 15; do ask metrics; done &
browser=$!
share "metrics are read each 15 s"
before=$(ticks "$daemon")
for _ in $(seq 200); do ask metrics; done
echo "one answer with all metrics: $((($(ticks "$daemon") - before) * 10000 / 200)) us of a core, $(wc -c <"$place/answer") bytes"
kill "$browser" || true
wait "$browser" || true

# A terminal at which nobody presses a key.
mkfifo "$place/keys"
exec 3<>"$place/keys"
script -qec "$kvfs top $mount" "$place/typescript" >"$place/top" 2>&1 <&3 &
browser=$!
share "kvfs top is open"
watcher=$(pgrep -f "^$kvfs top $mount" | head -1)
before=$(ticks "$watcher")
sleep 10
awk -v ticks=$(($(ticks "$watcher") - before)) -v hertz="$(getconf CLK_TCK)" \
    'BEGIN { printf "its own: %.2f %% of a core\n", ticks * 100 / hertz / 10 }'
kill "$browser" || true
wait "$browser" || true

if command -v chromium >"$place/answer"; then
    chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-port=0 \
        --user-data-dir="$place/profile" "$address#$token" >"$place/browser" 2>&1 &
else
    while sleep 2; do ask page.json; done &
fi
browser=$!
sleep 10
share "a page is open"
before=$(ticks "$daemon")
begun=$(date +%s%N)
ask "map.json?path=models/toy/sequences/chat"
echo "a map of all pages: $((($(date +%s%N) - begun) / 1000000)) ms, $((($(ticks "$daemon") - before) * 10)) ms of a core," \
    "$(wc -c <"$place/answer") bytes"
head -c 200 "$place/answer"
echo

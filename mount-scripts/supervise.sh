#!/usr/bin/env bash
# Keeps a store mounted: when its daemon dies, the store is mounted again.
#
#   mount-scripts/supervise.sh [OPTIONS OF kvfs mount] STORE MOUNTPOINT
#
# Stays in the foreground. Ends with 0 when somebody unmounts, or after it has unmounted itself because
# of SIGTERM or SIGINT; with an error when the first mount fails, or when mounts fail again and again.
# Where there is systemd, kvfs@.service does the same. KVFS names the program.
set -uo pipefail

kvfs=${KVFS:-kvfs}
# Mounts in a row that end before they were up for so long.
attempts_max=5
settled_seconds=10

if [ $# -lt 2 ]; then
    echo "usage: mount-scripts/supervise.sh [OPTIONS OF kvfs mount] STORE MOUNTPOINT" >&2
    exit 2
fi

daemon=
is_over=no
stop() {
    is_over=yes
    # The daemon unmounts and makes everything durable.
    [ -z "$daemon" ] || kill -TERM "$daemon" 2>/dev/null
}
trap stop TERM INT

has_ended() {
    [ ! -e "/proc/$daemon" ] || grep -q '^State:.Z' "/proc/$daemon/status" 2>/dev/null
}

# A killed daemon cannot end while one of its threads waits in the kernel for somebody who waits for
# it: the next mount cuts that off. One that has ended is gone as soon as this shell looks again.
was_killed() {
    sleep 0.2
    [ -e "/proc/$daemon" ]
}

attempts=0
while [ "$is_over" = no ]; do
    started=$SECONDS
    # A dead mount is cleared by the next one.
    "$kvfs" mount --foreground "$@" &
    daemon=$!
    until has_ended; do
        sleep 0.2
    done
    if was_killed; then
        status=137
    else
        wait "$daemon"
        status=$?
    fi
    if [ "$status" -eq 0 ]; then
        exit 0
    fi
    [ "$is_over" = no ] || exit "$status"
    # Ended by a signal: that was a daemon. Anything else may be for good.
    if [ $((SECONDS - started)) -ge "$settled_seconds" ]; then
        attempts=0
    fi
    attempts=$((attempts + 1))
    if [ "$status" -le 128 ] && [ "$attempts" -ge "$attempts_max" ]; then
        echo "supervise.sh: the mount failed $attempts times" >&2
        exit "$status"
    fi
    echo "supervise.sh: the daemon ended ($status): mounting again" >&2
    [ "$attempts" -le 1 ] || sleep 0.5
done

"""Hostile processes of one unprivileged user, each at another limit.

    attack.py MOUNT USER PROCESSES SECONDS SEED

Each process repeats one kind of attack until the time is over or its directory has had its number of
operations; refusals are what it is after. Prints how often each kind was granted and refused. All processes
are at SCHED_IDLE: what is measured is how the daemon shares itself out, not how the kernel shares processors.
"""
import collections
import errno
import fcntl
import json
import os
import random
import resource
import struct
import sys
import time

mount, user, processes, seconds, seed = sys.argv[1], *map(int, sys.argv[2:])
FILES_MAX = 400  # names of one process at a time
DEPTH_MAX = 150  # directories in directories
OPEN_MAX = 900  # descriptors of one process
SPARSE_BYTES = 1 << 40  # on paper
RENAMED_BYTES = 1 << 30  # of a file without bytes, renamed to be a page
POSITIONS_BYTES = 80 << 20  # the longest positions.json that is read
TOKENS_BYTES = 64 << 20  # the longest file of tokens that is published
PATH_BYTES = 4096  # with the zero at its end
VALUE_BYTES = 64 << 10  # of an attribute
MODEL = f"{mount}/models/small"


def own(number):
    path = f"{mount}/files/hostile/{number}"
    os.makedirs(path, exist_ok=True)
    return path


def open_files(place, chance):
    held = []
    for number in range(OPEN_MAX):
        held.append(os.open(f"{place}/f{number % FILES_MAX}", os.O_RDWR | os.O_CREAT))
        yield
    for file in held:
        os.close(file)


def questions(place, chance):
    held = []
    try:
        for _ in range(80):
            file = os.open(f"{MODEL}/prefixes/match", os.O_RDWR)
            held.append(file)
            os.write(file, bytes(4096))
            yield
    finally:
        for file in held:
            os.close(file)


def drafts(place, chance):
    held = []
    try:
        for number in range(40):
            name = f"{chance.getrandbits(256):064x}.000"
            file = os.open(f"{MODEL}/blocks/{name}", os.O_WRONLY | os.O_CREAT)
            held.append(file)
            os.write(file, b"{" * 100_000)
            yield
    finally:
        for file in held:
            os.close(file)


def deep(place, chance):
    path = place
    made = []
    for _ in range(DEPTH_MAX):
        path += "/d"
        os.mkdir(path)
        made.append(path)
        yield
    for path in reversed(made):
        os.rmdir(path)
        yield


def long_names(place, chance):
    for number in range(FILES_MAX):
        name = f"{place}/{number:04}" + "n" * 251
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT))
        os.unlink(name)
        yield


def long_paths(place, chance):
    """Down to where the next name does not fit, and one name further."""
    path, made = place, []
    try:
        while True:
            path += "/" + "p" * 251
            os.mkdir(path)
            made.append(path)
            yield
    finally:
        for path in reversed(made):
            os.rmdir(path)


def symlinks(place, chance):
    path = f"{place}/symlink"
    for length in [PATH_BYTES - 1] * 20 + [PATH_BYTES]:
        os.symlink("t" * length, path)
        try:
            assert len(os.readlink(path)) == length
        finally:
            os.unlink(path)
        yield


def attributes(place, chance):
    """As long as they may be, then with names as long as they may be, then one byte too long."""
    path = f"{place}/attributes"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        if chance.random() < 0.1:
            os.setxattr(path, "user.long", bytes(VALUE_BYTES + 1))
        for number in range(40):
            os.setxattr(path, f"user.x{number}", bytes(VALUE_BYTES))
            yield
    except OSError:
        for number in range(100):
            os.setxattr(path, f"user.{number:03}" + "n" * 247, b"x")
            yield
        raise
    finally:
        os.unlink(path)


def sparse(place, chance):
    path = f"{place}/sparse"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(50):
            os.pwrite(file, b"x", chance.randrange(SPARSE_BYTES))
            os.ftruncate(file, chance.randrange(SPARSE_BYTES))
            yield
    finally:
        os.close(file)
        os.unlink(path)


def renames(place, chance):
    """A file that is far too long for a page, renamed to be one."""
    layer = f"{MODEL}/sequences/hostile/000"
    os.makedirs(layer, exist_ok=True)
    temporary = f"{layer}/.{os.getpid()}.tmp"
    for number in range(20):
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(file, RENAMED_BYTES)
        os.close(file)
        try:
            os.rename(temporary, f"{layer}/{number * 32:07}.safetensors")
        finally:
            yield


def own_sequence(place):
    path = f"{MODEL}/sequences/hostile-{os.path.basename(place)}"
    os.makedirs(path, exist_ok=True)
    return path


def ask():
    file = os.open(f"{MODEL}/prefixes/match", os.O_RDWR)
    try:
        os.write(file, bytes(4096))
        return os.read(file, 1000)
    finally:
        os.close(file)


def positions(place, chance):
    """As long as it may be, one byte longer, and a question after each, for which it is read."""
    sequence = own_sequence(place)
    with open(f"{sequence}/tokens", "ab") as tokens:
        tokens.write(bytes(4096))
    for number in range(20):
        file = os.open(f"{sequence}/positions.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(file, b'{"schema_version":1,"edited_at":0,"next":[0,0],"runs":[')
        os.ftruncate(file, POSITIONS_BYTES + number % 2)
        os.close(file)
        os.rename(f"{sequence}/positions.tmp", f"{sequence}/positions.json")
        yield
        ask()
        yield


def tokens(place, chance):
    path = f"{own_sequence(place)}/tokens"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for _ in range(TOKENS_BYTES // (1 << 20) + 1):
            os.write(file, bytes(1 << 20))
            yield
        os.pwrite(file, bytes(4), 0)
        os.ftruncate(file, 4)
    finally:
        os.close(file)
        os.unlink(path)


def endless_slots(place, chance):
    """Saves that begin, go on for a while and never end."""
    held = []
    begin = struct.pack("<III", 0x67677371, 3, 4 << 20)
    try:
        for number in range(20):
            name = f"hostile-{os.path.basename(place)}-{number}"
            held.append(os.open(f"{MODEL}/slots/{name}.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            os.write(held[-1], begin)
            for _ in range(4):
                os.write(held[-1], bytes(1 << 20))
                yield
    finally:
        for file in held:
            try:
                os.close(file)
            except OSError:
                pass  # What was written so far is none.


def locks(place, chance):
    file = os.open(f"{mount}/files/hostile/lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        for _ in range(200):
            start = chance.randrange(1000)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1 + chance.randrange(9), start)
            yield
    finally:
        os.close(file)


def syncs(place, chance):
    for number in range(FILES_MAX):
        file = os.open(f"{place}/s{number}", os.O_WRONLY | os.O_CREAT)
        os.write(file, bytes(100))
        os.fsync(file)
        os.close(file)
        os.unlink(f"{place}/s{number}")
        yield


KINDS = [
    open_files, questions, drafts, deep, long_names, attributes, sparse, renames, locks, syncs,
    long_paths, symlinks, positions, tokens, endless_slots,
]


def attack(number, until):
    kind = KINDS[number % len(KINDS)]
    chance = random.Random(seed * 1000 + number)
    place = own(number)
    counts = collections.Counter()
    while time.monotonic() < until:
        steps = kind(place, chance)
        try:
            for _ in steps:
                counts["granted"] += 1
                if time.monotonic() > until:
                    break
        except OSError as error:
            counts[errno.errorcode.get(error.errno, str(error.errno))] += 1
            # Who is refused asks again at once, but not for nothing.
            time.sleep(0.001)
    return kind.__name__, counts


def main():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_MAX + 100, OPEN_MAX + 100))
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    until = time.monotonic() + seconds
    children = []
    for number in range(processes):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.write(writing, json.dumps(attack(number, until)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        children.append((child, reading))
    total = collections.defaultdict(collections.Counter)
    for child, reading in children:
        with os.fdopen(reading, "rb") as pipe:
            kind, counts = json.loads(pipe.read() or b'["died", {"processes": 1}]')
        total[kind].update(counts)
        os.waitpid(child, 0)
    print(json.dumps(total))


main()

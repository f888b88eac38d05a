"""Threads that move blocks between an engine's memory and a mount, so that the engine never waits for the mount."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy


@dataclass
class Job:
    """Blocks `keys` at the places `chunks` of the engine's memory. Whoever touches that memory holds the lock, and leaves it
    alone once the job is over: the engine gives the places to others then."""

    number: int
    keys: list[bytes]
    chunks: list[int]
    done: list[bytes] = field(default_factory=list)
    pieces: int = 0
    running: int = 0
    is_over: bool = False
    is_late: bool = False
    # When something last happened to it, and how long pieces of it have run.
    since: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Lane:
    """Jobs of one kind, in pieces that `work` does: it gets a job, its indices, and a buffer of the thread's own.

    A mount that hangs keeps a thread for as long as it hangs, but no job: one to which nothing has happened for
    `wait_seconds` is over with what is done of it. What its thread has then is in the buffer, where it hurts nobody.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        wait_seconds: float,
        piece: tuple[int, int],
        work: Callable[[Job, range, numpy.ndarray], None],
    ) -> None:
        self._wait_seconds, self._piece, self._work = wait_seconds, piece, work
        self._changed = threading.Condition()
        self._queue: deque[tuple[Job, range]] = deque()
        self._jobs: dict[int, Job] = {}
        self._finished: list[Job] = []
        self._moved = time.monotonic()
        self._began: dict[int, float] = {}
        self._is_closed = False
        # They end with the process, also where the mount never answers.
        self._threads = [
            threading.Thread(target=self._run, args=(at,), name=f"kvfs_{name}_{at}", daemon=True) for at in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, room_chunks: int | None = None) -> bool:
        """Takes a job. One that finds no room beside others, or no thread that answers, is over at once; whether it was taken."""
        with self._changed:
            waiting = sum(len(each.chunks) for each in self._jobs.values())
            is_full = room_chunks is not None and waiting > 0 and waiting + len(job.chunks) > room_chunks
            job.is_late = self._is_stuck()
            if is_full or job.is_late or self._is_closed:
                job.is_over = True
                self._finished.append(job)
                return False
            size = self._piece[0]
            pieces = [range(at, min(at + size, len(job.chunks))) for at in range(0, len(job.chunks), size)]
            job.pieces = len(pieces)
            self._jobs[job.number] = job
            self._queue.extend((job, piece) for piece in pieces)
            if not pieces:
                self._end(job)
            self._changed.notify_all()
            return True

    def take_finished(self) -> list[Job]:
        """The jobs that are over since the last time, those among them that have waited too long."""
        with self._changed:
            self._give_up_late()
            finished, self._finished = self._finished, []
        return finished

    def drain(self) -> None:
        """Waits until no job is under way."""
        with self._changed:
            while self._jobs:
                self._give_up_late()
                self._changed.wait(min(self._wait_seconds, 0.05))

    def close(self) -> None:
        """Begins nothing any more, and waits for what runs, but not for a mount that hangs."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            for job in [job for job in self._jobs.values() if not job.running]:
                self._end(job)
            self._changed.notify_all()
        self.drain()
        for at, thread in enumerate(self._threads):
            if at not in self._late_threads():
                thread.join(self._wait_seconds)

    def _is_stuck(self) -> bool:
        return len(self._late_threads()) == len(self._threads)

    def _late_threads(self) -> list[int]:
        now = time.monotonic()
        return [at for at, began in list(self._began.items()) if now - began > self._wait_seconds]

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for job in list(self._jobs.values()):
            # One that has not begun waits for others, and these may take their time as long as they go on.
            since = job.since if job.running else max(job.since, self._moved)
            if now - since > self._wait_seconds:
                self._queue = deque(each for each in self._queue if each[0] is not job)
                job.is_late = True
                self._end(job)

    def _end(self, job: Job) -> None:
        with job.lock:
            job.is_over = True
        del self._jobs[job.number]
        self._finished.append(job)
        self._changed.notify_all()

    def _run(self, at: int) -> None:
        buffer = numpy.empty(self._piece, numpy.uint8)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                job, piece = self._queue.popleft()
                job.running += 1
                job.since = self._began[at] = time.monotonic()
            try:
                self._work(job, piece, buffer[: len(piece)])
            finally:
                with self._changed:
                    job.since = self._moved = time.monotonic()
                    job.seconds += job.since - self._began.pop(at)
                    job.running -= 1
                    job.pieces -= 1
                    if not job.is_over and (job.pieces == 0 or (self._is_closed and not job.running)):
                        self._end(job)

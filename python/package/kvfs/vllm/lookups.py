"""Which blocks a mount has, asked in a thread: many at once, in one question."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class _Asked:
    since: float
    requests: set[str] = field(default_factory=set)
    is_there: bool | None = None


class Lookups:
    """Answers for as long as a request that wants to know is there. `ask` is called in a thread, and knows a list of
    names; what gets no answer within `wait_seconds` is not there, for a request that waits is one that nobody computes.
    `tell_late` hears of that."""

    def __init__(
        self, wait_seconds: float, ask: Callable[[list[bytes]], list[bool]], tell_late: Callable[[], None]
    ) -> None:
        self._wait_seconds, self._ask, self._tell_late = wait_seconds, ask, tell_late
        # Of the engine's thread alone.
        self._asked: dict[bytes, _Asked] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []
        # What both threads have. Nothing is twice in it, so it is no longer than what requests want to know.
        self._changed = threading.Condition()
        self._waiting: dict[bytes, None] = {}
        self._answers: dict[bytes, bool] = {}
        self._began: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvfs_lookup", daemon=True)
        self._thread.start()

    def lookup(self, key: bytes, request: str) -> bool | None:
        """Whether a block is there; `None` if nobody knows yet."""
        self._take_answers()
        asked = self._asked.get(key)
        now = time.monotonic()
        if asked is None:
            asked = self._asked[key] = _Asked(now)
            self._new.append(key)
        asked.requests.add(request)
        self._of_request.setdefault(request, set()).add(key)
        if asked.is_there is None and (now - asked.since > self._wait_seconds or self._is_stuck(now)):
            asked.is_there = False
            self._tell_late()
        return asked.is_there

    def flush(self) -> None:
        """A step has ended: what it wanted to know is asked."""
        new, self._new = self._new, []
        wanted = [key for key in new if key in self._asked and self._asked[key].is_there is None]
        if wanted:
            with self._changed:
                self._waiting.update(dict.fromkeys(wanted))
                self._changed.notify()

    def are_missing(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded: they are not asked for again by the same requests."""
        for key in keys:
            if key in self._asked:
                self._asked[key].is_there = False

    def forget(self, request: str) -> None:
        """The request is over."""
        for key in self._of_request.pop(request, ()):
            asked = self._asked[key]
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[key]
                with self._changed:
                    self._waiting.pop(key, None)

    def close(self) -> None:
        """Ends the thread, if its mount lets it."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify()
        if not self._is_stuck(time.monotonic()):
            self._thread.join(self._wait_seconds)

    def _is_stuck(self, now: float) -> bool:
        began = self._began
        return began is not None and now - began > self._wait_seconds

    def _take_answers(self) -> None:
        if not self._answers:
            return
        with self._changed:
            answers, self._answers = self._answers, {}
        for key, is_there in answers.items():
            asked = self._asked.get(key)
            if asked is not None and asked.is_there is None:
                asked.is_there = is_there

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                keys, self._waiting = list(self._waiting), {}
                self._began = time.monotonic()
            there = self._ask(keys)
            with self._changed:
                self._began = None
                self._answers.update(zip(keys, there))

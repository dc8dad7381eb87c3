"""Whose turn it is: one answer at a time on a pair, and one round at a time, whatever threads ask."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from localspec.errors import BackendError, OptionError

PATIENCE_S = 10.0  # after so long without a round an open answer gives way to another thread's
GRACE_S = 1.0  # to one in the thread of its last round, where that is one of a pool and others may go on with it
POLL_S = 0.05  # a stream that is dropped tells nobody

CLOSED = "this pair is closed; load it again."
FORKED = "this pair was loaded before this process was forked; load it here, or start processes with 'spawn'."
NESTED = "this pair is in the middle of a round; use it outside of the functions given as path and progress."
OVER = "another answer has begun on this pair; finish or close one before the next."


class Turns:
    """Gives a pair to one answer after the other, first come, first served.

    An answer keeps its turn between rounds until it ends, is closed or dropped. A new one in another thread waits for
    that; in the thread of the last round it takes over, for nobody could go on with the other while it waits. In a
    child process that was forked nothing may be used: the threads of llama.cpp are not there, it would wait for them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._process = os.getpid()
        self._closed = False
        self._waiting: deque[object] = deque()
        self._owner: Callable[[], object | None] = _nobody  # the answer whose turn it is
        self._work: object | None = None  # what is going on now, a round or the like
        self._thread = 0  # that did the owner's last work
        self._idle_since = 0.0
        self._n_reading = 0

    @property
    def is_closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """Raise BackendError where nobody may use the pair: it is closed, or this is a forked process."""
        if os.getpid() != self._process:
            raise BackendError(FORKED)
        if self._closed:
            raise BackendError(CLOSED)

    def begin(self, work: object, answer: object = None, *, first: bool = True) -> None:
        """Have the pair for `work`: the `first` piece of an answer, a further one, or (answer None) one of nobody's.

        `leave` must follow, even where this raises: an interrupt may come between the two. Raises OptionError where
        the answer has lost its turn, or inside another piece of work in the same thread.
        """
        self.check()
        with self._lock:
            self._refuse_nested()
            if first:
                self._waiting.append(work)
                self._wait_until(lambda: self._may_begin(work, answer))
                self._owner = _nobody if answer is None else weakref.ref(answer)
            if self._work is not None:  # the answer's own, in another thread
                self._wait_until(lambda: self._work is None or not self._owns(answer))
            self.check()
            if not (self._owns(answer) or answer is None):
                raise OptionError(OVER)
            self._work, self._thread = work, threading.get_ident()

    def leave(self, work: object) -> None:
        """The work is done, or has come to nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._waiting and work in self._waiting:
                self._waiting.remove(work)
            if self._work is work:
                self._work, self._idle_since = None, monotonic()
            self._changed.notify_all()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Have the pair for a piece of work that is no answer's."""
        work = object()
        try:
            self.begin(work)
            yield
        finally:
            self.leave(work)

    def end(self, answer: object) -> None:
        """The answer is over, once a round of it in another thread is done."""
        if os.getpid() != self._process:
            return
        with self._lock:
            while self._owns(answer) and self._works_elsewhere():
                self._changed.wait()
            if self._owns(answer):
                self._owner = _nobody
                self._changed.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the pair open meanwhile, without a turn."""
        self.check()
        with self._lock:
            self.check()
            self._n_reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_reading -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody begin any more, and wait for what goes on. False if there is nothing to free (any more) here."""
        if os.getpid() != self._process:
            return False
        with self._lock:
            if self._closed:
                return False
            self._refuse_nested()
            self._closed = True
            self._changed.notify_all()
            while self._work is not None or self._n_reading:
                self._changed.wait()
        return True

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.wait(POLL_S)
            self.check()
        self.check()

    def _may_begin(self, work: object, answer: object) -> bool:
        if self._owns(answer):
            return True
        if self._work is None and monotonic() - self._idle_since >= self._patience_s():
            self._owner = _nobody
        return self._waiting[0] is work and self._work is None and self._owner() is None

    def _patience_s(self) -> float:
        if self._thread != threading.get_ident():
            return PATIENCE_S
        return 0.0 if threading.current_thread() is threading.main_thread() or _runs_a_loop() else GRACE_S

    def _owns(self, answer: object) -> bool:
        return answer is not None and self._owner() is answer

    def _works_elsewhere(self) -> bool:
        return self._work is not None and self._thread != threading.get_ident()

    def _refuse_nested(self) -> None:
        if self._work is not None and not self._works_elsewhere():
            raise OptionError(NESTED)


def _nobody() -> None:
    return None


def _runs_a_loop() -> bool:
    """Whether asyncio runs its tasks in this thread: while one waits, none goes on."""
    if asyncio := sys.modules.get("asyncio"):
        try:
            return asyncio.get_running_loop() is not None
        except RuntimeError:
            return False
    return False

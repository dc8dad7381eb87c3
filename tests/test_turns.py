"""One answer at a time: who waits for whom, and what ends a turn."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from localspec import turns
from localspec.answer import Result, Stream
from localspec.errors import BackendError, OptionError
from localspec.turns import Turns

SOON = 20.0  # seconds after which a test gives up: a fault, not a slow machine


def numbers(n: int) -> list[Any]:
    return list(range(1, n + 1))


def stream(some: Turns, n: int = 3) -> Stream:
    return Stream(iter(numbers(n)), Result(), some)


class Elsewhere:
    """A call in another thread; `result()` is what it returned, or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._out, self._error = call, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._out = self._call()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(SOON)
        assert self.is_done, "it hangs"
        if self._error:
            raise self._error
        return self._out


def has_waited(some: Turns, n: int = 1) -> None:
    """Return once `n` threads wait for their turn."""
    end = time.monotonic() + SOON
    while len(some._waiting) < n:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("ending", ["the end", "close", "drop", "error"])
def test_another_thread_waits_until_an_answer_is_over(ending: str) -> None:
    some = Turns()
    first = Stream(iter([1, 2]), Result(), some) if ending != "error" else Stream(fails(), Result(), some)
    assert next(first) == 1
    other = Elsewhere(lambda: list(stream(some)))
    has_waited(some)
    time.sleep(3 * turns.POLL_S)
    assert not other.is_done
    match ending:
        case "the end":
            assert list(first) == [2]
        case "close":
            first.close()
            assert list(first) == []
        case "drop":
            del first
        case "error":
            with pytest.raises(ZeroDivisionError):
                next(first)
    assert other.result() == numbers(3)


def fails() -> Any:
    yield 1
    raise ZeroDivisionError


def test_first_come_first_served() -> None:
    """A thread that asks again and again does not keep the others out."""
    some, order = Turns(), list[int]()

    def one(name: int) -> None:
        for _ in stream(some):
            order.append(name)

    with some.work():
        threads = []
        for name in range(6):
            threads.append(Elsewhere(lambda name=name: one(name)))
            has_waited(some, name + 2)  # and the one at work
    for _ in range(50):
        list(stream(some, 1))
    for thread in threads:
        thread.result()
    assert order == [name for name in range(6) for _ in range(3)]


def test_in_the_same_thread_a_new_answer_takes_over() -> None:
    some = Turns()
    old, new = stream(some), stream(some)
    assert (next(old), next(new)) == (1, 1)
    with pytest.raises(OptionError, match="another answer has begun"):
        next(old)
    assert list(new) == [2, 3]
    with pytest.raises(OptionError, match="another answer has begun"):
        next(old)
    old.close()
    assert list(old) == []


def test_tasks_of_one_event_loop_take_over_too() -> None:
    """Were one to wait, the other could not go on."""
    some = Turns()

    async def task(log: list[str], name: str, after: float) -> None:
        await asyncio.sleep(after)
        try:
            for _ in stream(some, 3):
                log.append(name)
                await asyncio.sleep(0.05)
        except OptionError as error:
            log.append(str(error)[:14])

    async def main() -> list[str]:
        log = list[str]()
        await asyncio.gather(task(log, "a", 0), task(log, "b", 0.02))
        return log

    began = time.monotonic()
    assert Elsewhere(lambda: asyncio.run(main())).result() == ["a", "b", "another answer", "b", "b"]
    assert time.monotonic() - began < turns.PATIENCE_S


def test_a_stream_that_a_pool_reads_is_not_taken_for_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last round may have been in the very thread that now begins another answer."""
    monkeypatch.setattr(turns, "GRACE_S", 5.0)
    some = Turns()
    first = stream(some, 3)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        assert one.submit(next, first).result() == 1
        second = one.submit(lambda: list(stream(some)))
        has_waited(some)
        for number in (2, 3):
            assert two.submit(next, first).result() == number
        assert not second.done()
        assert two.submit(next, first, None).result() is None
        assert second.result(SOON) == numbers(3)


def test_in_a_thread_of_a_pool_a_stream_left_open_gives_way_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 1e9)
    monkeypatch.setattr(turns, "GRACE_S", 0.1)
    some = Turns()
    left = stream(some)
    with ThreadPoolExecutor(1) as one:
        one.submit(next, left).result()
        behind = Elsewhere(lambda: list(stream(some)))
        has_waited(some)
        assert one.submit(lambda: list(stream(some))).result(SOON) == numbers(3)
    assert behind.result() == numbers(3)


def test_an_answer_left_alone_gives_way_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.2)
    some = Turns()
    left = stream(some)
    next(left)
    assert Elsewhere(lambda: list(stream(some))).result() == numbers(3)
    with pytest.raises(OptionError, match="another answer has begun"):
        next(left)


def test_a_long_round_is_not_being_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.3)
    some, order = Turns(), list[str]()

    def slow() -> Any:
        for i in range(2):
            time.sleep(0.6)
            order.append("slow")
            yield i

    first = Elsewhere(lambda: list(Stream(slow(), Result(), some)))
    while some._work is None:
        time.sleep(0.001)
    second = Elsewhere(lambda: [order.append("quick") for _ in stream(some, 1)])
    assert first.result() == [0, 1]
    second.result()
    assert order == ["slow"] * 2 + ["quick"]


def test_threads_may_share_a_stream() -> None:
    some = Turns()
    shared = stream(some, 500)
    threads = [Elsewhere(lambda: list(shared)) for _ in range(4)]
    assert sorted(one for thread in threads for one in thread.result()) == numbers(500)


def test_a_round_is_no_place_to_use_the_pair() -> None:
    some = Turns()

    def nested() -> Any:
        for use in (lambda: list(stream(some)), some.close, lambda: some.work().__enter__()):
            with pytest.raises(OptionError, match="in the middle of a round"):
                use()
        yield 1
        yield 2

    outer = Stream(nested(), Result(), some)
    assert list(outer) == [1, 2]


def test_a_stream_may_be_closed_from_inside_its_round() -> None:
    some = Turns()

    def chunks() -> Any:
        outer.close()
        yield 1
        yield 2

    outer = Stream(chunks(), Result(), some)
    assert list(outer) == [1]
    assert Elsewhere(lambda: list(stream(some))).result() == numbers(3)


def test_closing_a_stream_waits_for_its_round_in_another_thread() -> None:
    some, reached, result = Turns(), threading.Event(), Result()

    def chunks() -> Any:
        reached.set()
        time.sleep(0.2)
        result.text = "said"
        yield 1
        result.text = "too much"
        yield 2

    outer = Stream(chunks(), result, some)
    thread = Elsewhere(lambda: list(outer))
    assert reached.wait(SOON)
    outer.close()
    assert outer.result.text == "said"
    assert thread.result() == [1]


def test_who_is_interrupted_while_waiting_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Turns()
    first = stream(some)
    next(first)

    def interrupted() -> None:
        some.check = raises  # type: ignore[method-assign]
        list(stream(some))

    def raises() -> None:
        if some._waiting:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Elsewhere(interrupted).result()
    del some.check
    assert list(first) == [2, 3]
    assert Elsewhere(lambda: list(stream(some))).result() == numbers(3)


def test_closing_waits_for_what_goes_on_and_turns_away_what_waits() -> None:
    some, may_end, order = Turns(), threading.Event(), list[str]()

    def chunks() -> Any:
        may_end.wait(SOON)
        order.append("round")
        yield 1

    working = Elsewhere(lambda: next(Stream(chunks(), Result(), some)))
    while some._work is None:
        time.sleep(0.001)
    waiting = Elsewhere(lambda: list(stream(some)))
    has_waited(some, 2)
    closing = Elsewhere(lambda: (some.close(), order.append("closed"))[0])
    with pytest.raises(BackendError, match="closed"):
        waiting.result()
    assert not closing.is_done
    may_end.set()
    assert (working.result(), closing.result(), order) == (1, True, ["round", "closed"])
    assert not some.close(), "there is nothing more to free"
    for use in (some.check, lambda: next(stream(some)), lambda: some.reading().__enter__()):
        with pytest.raises(BackendError, match="this pair is closed; load it again"):
            use()


def test_closing_waits_for_readers() -> None:
    some = Turns()
    with some.reading():
        closing = Elsewhere(some.close)
        time.sleep(0.1)
        assert not closing.is_done
    assert closing.result()


def test_in_another_process_nothing_may_be_used_or_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Turns()
    begun = stream(some)
    next(begun)
    some._changed.acquire()  # as another thread may have done in the moment of the fork
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    uses = (some.check, lambda: next(begun), lambda: next(stream(some)), lambda: some.reading().__enter__())
    for use in uses:
        with pytest.raises(BackendError, match="before this process was forked"):
            Elsewhere(use).result()
    assert Elsewhere(some.close).result() is False
    Elsewhere(begun.close).result()

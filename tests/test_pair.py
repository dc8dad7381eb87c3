"""A pair as users hold it: threads, forks, closing, what help and repr say; on fakes, and on real tiny models."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import pickle
import pydoc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
from fakes import FakeTarget, pair_of_fakes
from test_turns import SOON, Elsewhere, has_waited

from localspec import turns
from localspec.chat import Chat
from localspec.engine.sampling import SamplingParams
from localspec.errors import BackendError, OptionError
from localspec.loading.open import open_pair
from localspec.options import MEANINGS, Options
from localspec.pair import Pair

PROMPTS = ("the user is in the sea", "and the sand is in his hand", "a hat", "the sea, the sea, the sea")


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.write_target(folder / "t.gguf", request.param)
    with open_pair(target, tiny.write_drafter(folder / "d.gguf", target), n_ctx=512, n_threads=1) as loaded:
        loaded.path = "greedy"
        yield loaded


def pair_in(folder: Path, **options: Any) -> Pair:
    target = tiny.write_target(folder / "t.gguf")
    return open_pair(target, tiny.write_drafter(folder / "d.gguf", target), n_ctx=512, n_threads=1, **options)


# --- threads


def test_two_threads_at_once_get_the_right_answers(real: Pair) -> None:
    """Without a lock llama.cpp ends the process."""
    alone = [real.generate(prompt, max_tokens=80).tokens for prompt in PROMPTS[:2]]
    barrier = threading.Barrier(2)

    def answers(prompt: str) -> list[list[int]]:
        barrier.wait(SOON)
        return [real.generate(prompt, max_tokens=80).tokens for _ in range(3)]

    threads = [Elsewhere(lambda prompt=prompt: answers(prompt)) for prompt in PROMPTS[:2]]
    assert [thread.result() for thread in threads] == [[tokens] * 3 for tokens in alone]


def test_twenty_threads(real: Pair) -> None:
    """Answers, turns of conversations and tokenising, all at the same time."""
    options: list[dict[str, Any]] = [{}, {"spec": False}, {"temperature": 0.8, "seed": 3}, {"path": "expected"}]
    alone = {
        (prompt, i): real.generate(prompt, max_tokens=20, **options[i]).tokens
        for prompt in PROMPTS
        for i in range(len(options))
    }
    ids = real.encode(PROMPTS[0])

    def answer(prompt: str, i: int) -> list[int]:
        assert real.encode(PROMPTS[0]) == ids
        return real.generate(prompt, max_tokens=20, **options[i]).tokens

    def turn() -> str:
        return real.chat().send(PROMPTS[0], max_tokens=10).text

    said = turn()
    talking = [Elsewhere(turn) for _ in range(4)]
    threads = {key: Elsewhere(lambda key=key: answer(*key)) for key in alone}
    assert {key: thread.result() for key, thread in threads.items()} == alone
    assert {thread.result() for thread in talking} == {said}


def test_streams_of_threads_follow_each_other(real: Pair) -> None:
    whole = {prompt: real.generate(prompt, max_tokens=20).tokens for prompt in PROMPTS}

    def read(prompt: str) -> list[int]:
        with real.stream(prompt, max_tokens=20) as stream:
            return [token for chunk in stream for token in chunk.tokens]

    threads = {prompt: Elsewhere(lambda prompt=prompt: read(prompt)) for prompt in PROMPTS}
    assert {prompt: thread.result() for prompt, thread in threads.items()} == whole


def test_a_stream_that_a_thread_leaves_open_does_not_hang_the_others(
    real: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.2)
    plain = real.generate(PROMPTS[1], max_tokens=20, spec=False).tokens
    left = real.stream(PROMPTS[0], max_tokens=20)
    Elsewhere(lambda: next(left)).result()
    assert Elsewhere(lambda: real.generate(PROMPTS[1], max_tokens=20)).result().tokens == plain
    with pytest.raises(OptionError, match="another answer has begun"):
        next(left)


def test_with_asyncio(real: Pair) -> None:
    whole = [real.generate(prompt, max_tokens=20).tokens for prompt in PROMPTS]

    async def main() -> list[list[int]]:
        answers = [asyncio.to_thread(real.generate, prompt, max_tokens=20) for prompt in PROMPTS]
        return [result.tokens for result in await asyncio.gather(*answers)]

    async def step_by_step() -> list[int]:
        stream, said = real.stream(PROMPTS[0], max_tokens=20), list[int]()
        while (chunk := await asyncio.to_thread(next, stream, None)) is not None:
            said += chunk.tokens
        return said

    assert asyncio.run(main()) == whole
    assert asyncio.run(step_by_step()) == whole[0]


def test_measuring_waits_for_its_turn_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    with pair_in(tmp_path) as pair:
        plain = pair.generate(PROMPTS[0], max_tokens=60, spec=False).tokens
        stream = pair.stream(PROMPTS[0], max_tokens=60, path="greedy")
        said = list(next(stream).tokens)
        tuning = Elsewhere(pair.tune)
        has_waited(pair._turns)
        said += [token for chunk in stream for token in chunk.tokens]
        assert said == plain
        assert tuning.result() is pair.profile


def test_who_knows_the_profile_disturbs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    with pair_in(tmp_path) as pair:
        stream = pair.stream(PROMPTS[0], max_tokens=20)
        next(stream)
        assert pair.profile is not None
        assert len(list(stream)) > 0


# --- inside a round


@pytest.mark.parametrize("use", ["generate", "logits", "forget", "close"])
def test_the_functions_a_user_gives_may_not_use_the_pair(real: Pair, use: str) -> None:
    ids = real.encode(PROMPTS[0])
    plain = real.generate(ids, max_tokens=20, spec=False).tokens
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: real.generate(ids),
        "logits": lambda: real.logits(ids),
        "forget": real.forget,
        "close": real.close,
    }
    for options in ({"progress": lambda *_: calls[use]()}, {"path": lambda _: calls[use]()}):
        real.forget()
        with pytest.raises(OptionError, match="in the middle of a round; use it outside"):
            real.generate(ids, max_tokens=20, **options)
    assert real.generate(ids, max_tokens=20).tokens == plain


def test_the_logits_are_those_the_target_decides_by(real: Pair) -> None:
    ids = real.encode(PROMPTS[0])
    stream = real.stream(ids, max_tokens=20)
    first = next(stream).tokens[0]
    row = real.logits(ids)
    assert row.shape == (real.vocab.n_tokens,)
    assert row.argmax() == first
    with pytest.raises(OptionError, match="another answer has begun"):
        next(stream)
    with pytest.raises(OptionError, match="empty"):
        real.logits([])


# --- forks

FORK = """
import os, signal, sys, threading
from pathlib import Path
import localspec
from localspec.loading.open import open_pair

pair = open_pair(Path(sys.argv[1]), Path(sys.argv[2]), n_ctx=512, n_threads=2)
pair.path = "greedy"
chat = pair.chat()
expected = pair.generate("the sea", max_tokens=20).tokens
stream = pair.stream("the sea", max_tokens=200)
next(stream)
busy = threading.Thread(target=lambda: [chat.send("the sand", max_tokens=30) for _ in range(3)])
busy.start()
uses = {
    "generate": lambda: pair.generate("the sea"),
    "stream": lambda: next(stream),
    "chat": lambda: chat.send("the sea"),
    "encode": lambda: pair.encode("the sea"),
    "tune": lambda: pair.tune(),
}
if (child := os.fork()) == 0:
    signal.alarm(60)  # one that hangs is left behind by nobody
    for name, use in uses.items():
        try:
            use()
        except localspec.BackendError as error:
            print(name, error, flush=True)
    stream.close()
    with pair:
        pass
    os._exit(7)
stream.close()
busy.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(pair.generate("the sea", max_tokens=20).tokens == expected, len(chat.messages))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_process_gets_a_sentence(tmp_path: Path) -> None:
    """In the middle of another thread's answer; left to itself the child waits for ever for threads it has not."""
    target = tiny.write_target(tmp_path / "t.gguf", chat_template=tiny.CHATML)
    command = [sys.executable, "-c", FORK, str(target), str(tiny.write_drafter(tmp_path / "d.gguf", target))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stdout.splitlines() if "this pair was loaded before this process was forked" in line]
    assert [line.split()[0] for line in said] == ["generate", "stream", "chat", "encode", "tune"], done.stderr
    assert done.stdout.splitlines()[-2:] == ["7", "True 6"]


# --- closing


def test_closing_while_another_thread_decodes(tmp_path: Path) -> None:
    for _ in range(5):
        pair = pair_in(tmp_path)
        pair.path = "greedy"
        stream = pair.stream(PROMPTS[0], temperature=0.8, seed=1)
        begun = threading.Event()

        def read(stream: Any = stream, begun: threading.Event = begun) -> None:
            for _ in stream:
                begun.set()

        reading = Elsewhere(read)
        waiting = Elsewhere(lambda pair=pair: pair.generate(PROMPTS[1]))
        assert begun.wait(SOON)
        pair.close()
        for thread in (reading, waiting):
            with pytest.raises(BackendError, match="this pair is closed; load it again"):
                thread.result()


def test_a_closed_pair_says_so_whatever_it_is_asked(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    pair.path = "greedy"
    ids = pair.encode("the sea")
    stream = pair.stream(ids, max_tokens=20)
    next(stream)
    pair.close()
    uses: list[Callable[[], object]] = [
        lambda: pair.generate("the sea"),
        lambda: pair.generate(ids),
        lambda: pair.stream(ids),
        lambda: next(stream),
        lambda: pair.encode("the sea"),
        lambda: pair.logits(ids),
        lambda: pair.profile,
        pair.tune,
        pair.forget,
        pair.ensure_open,
    ]
    for use in uses:
        with pytest.raises(BackendError, match="this pair is closed; load it again"):
            use()
    assert repr(pair) == "<Pair t.gguf, drafter d.gguf, 512 tokens of context, closed>"


# --- made of parts


def test_a_pair_of_fakes() -> None:
    pair = pair_of_fakes()
    plain = pair.generate("abc", max_tokens=30, spec=False)
    drafted = pair.generate("abc", max_tokens=30)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.acceptance_length > 4
    assert (pair.n_ctx, pair.block_size, pair.has_drafter) == (200, 8, True)
    assert pair.n_tokens == len(pair.encode("abc")) + 30


def test_closing_keeps_and_frees_once() -> None:
    pair = pair_of_fakes()
    with pair:
        pair.generate("abc", max_tokens=3)
        assert pair.freed == []
    pair.close()
    assert (len(pair.freed), pair.keeper.calls["keep"]) == (1, 1)


def test_a_fork_frees_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of_fakes()
    monkeypatch.setattr("os.getpid", lambda: -1)
    pair.close()
    assert (pair.freed, pair.keeper.calls["keep"]) == ([], 0)


def test_only_auto_and_ngram_ask_for_the_profile() -> None:
    pair = pair_of_fakes()
    for path in ("greedy", "expected", "tree", "sampled"):
        pair.generate("abc", max_tokens=3, path=path)
    pair.generate("abc", max_tokens=3, spec=False, path="auto")
    assert pair.keeper.calls["get"] == 0
    for path in ("auto", "ngram"):
        pair.generate("abc", max_tokens=3, path=path)
        assert pair.keeper.calls.pop("get") > 0


# --- a stream


def test_a_stream_is_an_iterator_and_a_context_manager() -> None:
    pair = pair_of_fakes()
    whole = pair.generate("abc", max_tokens=30)
    first = next(pair.stream("abc", max_tokens=30))
    assert whole.text.startswith(first.text)
    with pair.stream("abc", max_tokens=30) as stream:
        assert iter(stream) is stream
        taken = list(itertools.islice(stream, 2))
        assert next(stream, None) is not None
    assert list(stream) == []
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.result.text.startswith("".join(chunk.text for chunk in taken))
    assert stream.result.finish_reason == "cancelled"


def test_an_interrupted_stream_is_over() -> None:
    pair = pair_of_fakes(FakeTarget())
    stream = pair.stream("abc", max_tokens=30)
    next(stream)
    pair.engine.target.faults.at("verify", after=True)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert list(stream) == []
    assert len(Elsewhere(lambda: pair.generate("abc", max_tokens=30)).result().tokens) == 30


# --- what it says of itself


def test_repr_names_files_context_and_drafter() -> None:
    assert repr(pair_of_fakes()) == "<Pair target.gguf, drafter drafter.gguf, 200 tokens of context>"
    assert repr(pair_of_fakes(drafted=False)) == "<Pair target.gguf, no drafter, 200 tokens of context>"


def test_repr_of_an_answer_is_short() -> None:
    pair = pair_of_fakes()
    stream = pair.stream("abc", max_tokens=100)
    assert repr(stream) == "<Stream open: <Result '', 0 tokens, cancelled, 0.0 tokens/s>>"
    list(stream)
    shown = repr(stream.result)
    assert shown.startswith(f"<Result {stream.result.text[:59]!r}"[:-1])
    assert "…', 100 tokens, length, " in shown
    assert shown.endswith(" tokens/s>")
    assert repr(stream) == f"<Stream ended: {shown}>"


@pytest.mark.parametrize("method", [Pair.generate, Pair.stream, Chat.send, Chat.stream])
def test_help_names_every_option_and_its_default(method: Any) -> None:
    signature, defaults = inspect.signature(method), {one.name: one.default for one in fields(SamplingParams)}
    shown = pydoc.plain(pydoc.render_doc(method))
    for name, hint in Options.__annotations__.items():
        parameter = signature.parameters[name]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation == hint.__forward_arg__
        assert f"{name}: " in shown
        if name in defaults:
            assert parameter.default == defaults[name]
            assert f"{name} ({'None' if defaults[name] is None else f'{defaults[name]:g}'})" in MEANINGS
        else:
            assert not parameter.default
            assert f"{name} (" in MEANINGS
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    assert textwrap.dedent(MEANINGS).strip() in inspect.cleandoc(method.__doc__)
    with pytest.raises(OptionError, match="unknown option 'nonsense'"):
        pair_of_fakes().generate("abc", nonsense=1)


def test_what_help_says_may_be_passed_as_it_stands() -> None:
    """The defaults that are shown are those that are used."""
    pair = pair_of_fakes()
    shown = {
        n: p.default for n, p in inspect.signature(pair.generate).parameters.items() if n in Options.__annotations__
    }
    assert pair.generate("abc", **(shown | {"max_tokens": 20})).tokens == pair.generate("abc", max_tokens=20).tokens


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pair_goes_nowhere_else(carry: Callable[[Pair], object]) -> None:
    with pytest.raises(BackendError, match="neither pickled nor copied; load it in the process that uses it"):
        carry(pair_of_fakes())

"""Conversations: what they remember when streams are left open, closed late, dropped, and when turns are taken back."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from fakes import FakeTarget, pair_of_fakes
from test_turns import Elsewhere

from localspec.chat import Chat
from localspec.errors import BackendError, OptionError
from localspec.loading.open import open_pair
from localspec.pair import Pair

TURNS = ("abc", "def", "ghi")


@pytest.fixture
def pair() -> Pair:
    return pair_of_fakes(FakeTarget(n_ctx=2000))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.write_target(folder / "t.gguf", chat_template=tiny.CHATML)
    with open_pair(target, tiny.write_drafter(folder / "d.gguf", target), n_ctx=2048, n_threads=1) as loaded:
        loaded.path = "greedy"
        yield loaded


def asked(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.messages if message["role"] == "user"]


def roles(chat: Chat) -> str:
    return "".join(message["role"][0] for message in chat.messages)


def begin(chat: Chat, text: str, n_chunks: int = 1, **options: Any) -> Any:
    """A stream of which `n_chunks` have been read, left open."""
    stream = chat.stream(text, max_tokens=30, **options)
    assert len(list(itertools.islice(stream, n_chunks))) == n_chunks
    return stream


# --- streams that are left open


def test_a_turn_whose_stream_is_left_open_is_kept(real: Pair) -> None:
    """Ada's: her turn was gone, and `undo` ended in an IndexError."""
    chat = real.chat()
    stream = chat.stream("My name is Ada.", max_tokens=30)
    for _ in stream:
        break
    said = stream.result.text
    chat.send("What is my name?", max_tokens=5)
    chat.send("And yours?", max_tokens=5)
    assert asked(chat) == ["My name is Ada.", "What is my name?", "And yours?"]
    assert roles(chat) == "uauaua"
    assert chat.messages[1]["content"] == said == stream.result.text
    assert list(stream) == [], "a new turn has closed it"
    assert [chat.undo() for _ in range(3)] == ["And yours?", "What is my name?", "My name is Ada."]
    with pytest.raises(OptionError, match="no turn to take back"):
        chat.undo()


def test_the_answer_grows_in_the_conversation(pair: Pair) -> None:
    chat = pair.chat(system="s")
    stream = chat.stream("abc", max_tokens=30, draft_max=0)
    assert chat.messages == [{"role": "system", "content": "s"}], "nothing has been said"
    for _ in itertools.islice(stream, 5):
        assert chat.messages[1:] == [
            {"role": "user", "content": "abc"},
            {"role": "assistant", "content": stream.result.text},
        ]
    assert len(stream.result.tokens) == 5


@pytest.mark.parametrize("ending", ["close", "drop", "read on"])
@pytest.mark.parametrize("n_chunks", [0, 1, 3])
def test_an_older_stream_changes_nothing_any_more(pair: Pair, ending: str, n_chunks: int) -> None:
    chat = pair.chat()
    old = begin(chat, "abc", n_chunks)
    kept = old.result.text
    chat.send("def", max_tokens=5)
    messages = list(chat.messages)
    match ending:
        case "close":
            old.close()
        case "drop":
            del old
            gc.collect()
        case "read on":
            assert list(old) == []
    assert chat.messages == messages
    assert asked(chat) == (["abc", "def"] if n_chunks else ["def"])
    if n_chunks:
        assert messages[1]["content"] == kept
    assert chat.undo() == "def"
    assert asked(chat) == (["abc"] if n_chunks else [])


@pytest.mark.parametrize("ending", ["close", "drop", "read on"])
def test_after_clear_an_open_stream_brings_nothing_back(pair: Pair, ending: str) -> None:
    chat = pair.chat(system="s")
    old = begin(chat, "abc")
    chat.clear()
    match ending:
        case "close":
            old.close()
        case "drop":
            del old
            gc.collect()
        case "read on":
            assert list(old) == []
    assert chat.messages == [{"role": "system", "content": "s"}]
    fresh = pair.chat(system="s")
    assert chat.send("def", max_tokens=9).tokens == fresh.send("def", max_tokens=9).tokens


def test_undo_takes_back_the_turn_whose_stream_is_open(pair: Pair) -> None:
    chat = pair.chat()
    chat.send("abc", max_tokens=5)
    old = begin(chat, "def")
    assert chat.undo() == "def"
    assert list(old) == []
    assert asked(chat) == ["abc"]


def test_a_stream_that_is_dropped_lets_others_begin_at_once(pair: Pair) -> None:
    """Not only after the time an open one may be left alone: the conversation itself holds no stream."""
    chat = pair.chat()
    begin(chat, "abc")
    assert len(Elsewhere(lambda: pair.generate("u", max_tokens=5)).result().tokens) == 5
    assert roles(chat) == "ua"


def test_an_error_in_the_middle_keeps_what_was_said(pair: Pair) -> None:
    chat = pair.chat()
    stream = begin(chat, "abc", 2)
    pair.engine.target.faults.at("verify")
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert chat.messages[-1]["content"] == stream.result.text != ""
    assert len(chat.send("def", max_tokens=5).tokens) == 5
    assert asked(chat) == ["abc", "def"]


def test_a_turn_that_is_refused_leaves_the_conversation_as_it_was(pair: Pair) -> None:
    chat = pair.chat()
    old = begin(chat, "abc")
    before = list(chat.messages)
    for options in ({"max_tokens": 0}, {"nonsense": 1}):
        with pytest.raises(OptionError):
            chat.send("def", **options)
        assert chat.messages == before
    old.close()
    assert chat.undo() == "abc"


# --- messages


def test_messages_may_be_assigned(pair: Pair) -> None:
    chat = pair.chat()
    chat.send("abc", max_tokens=5)
    old = begin(chat, "def")
    chat.messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    old.close()
    assert roles(chat) == "ua"
    answer = chat.send("ghi", max_tokens=9)
    history = [*chat.messages[:2], {"role": "user", "content": "ghi"}]
    assert answer.tokens == pair.generate(history, max_tokens=9).tokens
    assert [chat.undo(), chat.undo()] == ["ghi", "b"]
    assert chat.messages == []
    with pytest.raises(OptionError, match="no turn"):
        chat.undo()


@pytest.mark.parametrize(
    "messages", [[], [{"role": "system", "content": "s"}], [{"role": "assistant", "content": "a"}]]
)
def test_undo_of_a_history_without_users_is_refused(pair: Pair, messages: Any) -> None:
    chat = pair.chat()
    chat.send("abc", max_tokens=5)
    chat.messages = messages
    with pytest.raises(OptionError, match="no turn"):
        chat.undo()
    assert chat.messages == messages


@pytest.mark.parametrize("bad", ["text", {"role": "user"}, 3])
def test_what_is_no_message_is_not_assigned(pair: Pair, bad: Any) -> None:
    chat = pair.chat()
    chat.send("abc", max_tokens=5)
    with pytest.raises(OptionError, match="needs a 'role' and a 'content'"):
        chat.messages = [bad]
    assert asked(chat) == ["abc"]


def test_a_list_that_is_changed_in_place_is_the_conversation(pair: Pair) -> None:
    chat = pair.chat()
    chat.send("abc", max_tokens=5)
    begin(chat, "def")
    chat.messages.append({"role": "user", "content": "ghi"})
    assert asked(chat) == ["abc", "def", "ghi"]
    assert chat.undo() == "ghi"
    old = begin(chat, "d", 2)
    chat.messages.clear()
    old.close()
    assert chat.messages == []
    with pytest.raises(OptionError, match="no turn"):
        chat.undo()


def test_a_state_brings_back_turn_and_tokens(pair: Pair) -> None:
    chat = pair.chat()
    chat.send("abc", max_tokens=5)
    before, messages = chat.state(), list(chat.messages)
    assert chat.undo() == "abc"
    old = begin(chat, "def")
    chat.restore(before)
    old.close()
    assert chat.messages == messages
    assert chat.undo() == "abc"


# --- anything in any order


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_turns_gives_a_history_that_is_true(pair: Pair, seed: int) -> None:
    """Beside a plain list of (question, answer): only what was said counts, and answers are those of that history."""
    rng, chat, model = random.Random(seed), pair.chat(), list[tuple[str, Any]]()
    streams: list[Any] = []
    open_turn: list[tuple[str, Any]] = []

    def settle() -> None:
        model.extend(turn for turn in open_turn if turn[1].tokens)
        open_turn.clear()

    def ask(n_chunks: int) -> None:
        settle()
        text = rng.choice(TURNS)
        history = [m for said, answer in model for m in message_pair(said, answer.text)]
        expected = pair.generate([*history, {"role": "user", "content": text}], max_tokens=12)
        stream = chat.stream(text, max_tokens=12)
        streams.append(stream)
        open_turn.append((text, stream.result))
        for _ in itertools.islice(stream, n_chunks):
            pass
        assert expected.tokens[: len(stream.result.tokens)] == stream.result.tokens

    def undo() -> None:
        settle()
        if model:
            assert chat.undo() == model.pop()[0]
        else:
            with pytest.raises(OptionError):
                chat.undo()

    def clear() -> None:
        open_turn.clear()
        model.clear()
        chat.clear()

    def end_some() -> None:
        if streams:
            stream = streams.pop(rng.randrange(len(streams)))
            if rng.random() < 0.5:
                stream.close()

    actions: list[Callable[[], None]] = [lambda: ask(99), lambda: ask(rng.randrange(4)), undo, clear, end_some]
    for _ in range(25):
        rng.choices(actions, [3, 4, 2, 1, 4])[0]()
        said = [*model, *(turn for turn in open_turn if turn[1].tokens)]
        assert chat.messages == [m for text, answer in said for m in message_pair(text, answer.text)], f"seed {seed}"


def message_pair(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


# --- threads, closed pairs, how it looks


def test_turns_of_two_threads_follow_each_other(real: Pair) -> None:
    chat = real.chat()
    answers = [Elsewhere(lambda text=text: chat.send(text, max_tokens=20)) for text in ("the sea", "the sand", "a hat")]
    said = {answer.result().text for answer in answers}
    assert roles(chat) == "uauaua"
    assert {message["content"] for message in chat.messages[1::2]} == said
    fresh = real.chat()
    for text in asked(chat):
        fresh.send(text, max_tokens=20, spec=False)
    assert fresh.messages == chat.messages


def test_another_thread_may_stop_an_answer(pair: Pair) -> None:
    chat = pair.chat()
    answer = Elsewhere(lambda: chat.send("abc"))  # to the end of the context
    while not chat.messages:
        pass
    assert chat.undo() == "abc"
    assert answer.result().finish_reason == "cancelled"
    assert chat.messages == []


def test_a_conversation_outlives_its_pair(pair: Pair) -> None:
    chat = pair.chat()
    chat.send("abc", max_tokens=5)
    old = begin(chat, "def")
    pair.close()
    with pytest.raises(BackendError, match="this pair is closed"):
        chat.send("ghi")
    with pytest.raises(BackendError, match="this pair is closed"):
        next(old)
    assert asked(chat) == ["abc", "def"]
    assert chat.undo() == "def"
    chat.clear()


def test_it_says_what_it_is(pair: Pair) -> None:
    chat = pair.chat(system="s")
    assert repr(chat) == "<Chat of 0 turns with target.gguf>"
    begin(chat, "abc")
    assert repr(chat) == "<Chat of 1 turn with target.gguf>"


def test_stream_and_send_are_closed_and_wrapped_by_nothing(pair: Pair) -> None:
    chat = pair.chat()
    with chat.stream("abc", max_tokens=30) as stream:
        next(stream)
    assert list(stream) == []
    assert roles(chat) == "ua"


def test_options_reach_the_answer(pair: Pair, tmp_path: Path) -> None:
    chat = pair.chat()
    read: list[tuple[int, int]] = []
    answer = chat.send("abc", max_tokens=3, progress=lambda done, n: read.append((done, n)))
    assert len(answer.tokens) == 3
    assert read == [(4, 4)]


@pytest.mark.parametrize("wrong", [None, 5, "hello", [5], [{"role": "user"}]])
def test_messages_of_another_kind_are_one_sentence(wrong: Any) -> None:
    chat = pair_of_fakes().chat()
    with pytest.raises(OptionError, match=r"^(messages must be a list|a message needs) .*\.$"):
        chat.messages = wrong
    assert chat.messages == []

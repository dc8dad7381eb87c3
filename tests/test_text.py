"""Plain text to tokens, and tokens back to text as they come."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny
from fakes import EOG, FakeVocab

from localspec.errors import OptionError
from localspec.llama import Model
from localspec.text import Limits, TextStream, encode_plain


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tiny.write_target(tmp_path_factory.mktemp("text") / "target.gguf")
    with Model(path) as loaded:
        yield loaded


def test_plain_text_takes_the_bos_its_model_wants(tmp_path: Path, model: Model) -> None:
    assert encode_plain(model.vocab, "the sea") == model.vocab.tokenize("the sea")
    path = tiny.write_target(tmp_path / "bos.gguf", overrides={"tokenizer.ggml.add_bos_token": True})
    with Model(path) as other:
        assert encode_plain(other.vocab, "the sea") == [other.vocab.bos, *other.vocab.tokenize("the sea")]
        assert encode_plain(other.vocab, "<|im_end|>")[1:] == other.vocab.tokenize("<|im_end|>")


@pytest.mark.parametrize("text", ["", "\ud800", "a\0b", "🙂" * 50, "\n" * 300])
def test_any_text_can_be_tokenised(model: Model, text: str) -> None:
    ids = encode_plain(model.vocab, text)
    assert b"".join(map(model.vocab.piece, ids)) == text.encode("utf-8", "replace")


# --- the stream


def chop(text: str, cuts: list[int]) -> FakeVocab:
    """The bytes of `text` as tokens 1, 2, …, cut at `cuts`."""
    data = text.encode()
    edges = [0, *cuts, len(data)]
    return FakeVocab([b"", *(data[a:b] for a, b in itertools.pairwise(edges))])


def streamed(vocab: FakeVocab, tokens: list[int], **limits: Any) -> tuple[list[str], TextStream]:
    """The text after each token, and the flushed end."""
    stream, pieces = TextStream(vocab, Limits(**limits)), []
    for token in tokens:
        stream.clip([token])
        pieces.append(stream.text())
        if stream.finish_reason:
            break
    return [*pieces, stream.flush()], stream


TEXT = "né 🙂 семь 👩‍👩‍👧 日本"


def test_a_character_is_never_split() -> None:
    vocab = chop(TEXT, list(range(1, len(TEXT.encode()))))
    pieces, _ = streamed(vocab, list(range(1, vocab.n_tokens)))
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    for n in range(len(pieces)):  # what has been shown is always the beginning of the text, character by character
        assert TEXT.startswith("".join(pieces[:n]))


@pytest.mark.parametrize("cuts", list(itertools.combinations(range(1, 4), 2)))
def test_an_emoji_over_three_tokens_comes_whole_with_the_last(cuts: tuple[int, int]) -> None:
    pieces, _ = streamed(chop("🙂", list(cuts)), [1, 2, 3])
    assert pieces == ["", "", "🙂", ""]


def test_half_a_character_at_the_end_is_dropped() -> None:
    pieces, _ = streamed(chop("a🙂", [1, 3]), [1, 2])
    assert pieces == ["a", "", ""]


def test_broken_bytes_become_the_replacement_character_and_no_more() -> None:
    pieces, _ = streamed(FakeVocab([b"", b"a\xff", b"b"]), [1, 2])
    assert "".join(pieces) == "a\ufffdb"


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_stop_string_is_found_across_any_token_border(cut: int) -> None:
    vocab = chop("one STOP two", [cut])
    pieces, stream = streamed(vocab, [1, 2], stop=("STOP",))
    assert "".join(pieces) == "one "
    assert stream.finish_reason == "stop"


def test_a_stop_string_over_many_tokens() -> None:
    vocab = chop("xSTOPy", [1, 2, 3, 4, 5])
    pieces, stream = streamed(vocab, [1, 2, 3, 4, 5, 6], stop=("STOP",))
    assert pieces == ["x", "", "", "", "", ""]
    assert stream.n_tokens == 5


def test_text_that_may_become_a_stop_string_is_held_back_and_released() -> None:
    pieces, stream = streamed(chop("aSTOxb", [1, 2, 3, 4, 5]), [1, 2, 3, 4, 5, 6], stop=("STOP",))
    assert pieces == ["a", "", "", "", "STOx", "b", ""]
    assert stream.finish_reason is None


def test_a_stop_string_can_begin_inside_a_failed_one() -> None:
    pieces, _ = streamed(chop("aab", [1, 2]), [1, 2, 3], stop=("ab",))
    assert "".join(pieces) == "a"


def test_the_stop_string_that_begins_first_counts() -> None:
    pieces, _ = streamed(FakeVocab([b"", b"one two three"]), [1], stop=("three", "two"))
    assert "".join(pieces) == "one "


def test_a_stop_string_may_be_wider_than_a_character() -> None:
    vocab = chop("a🙂b", [2, 3, 4])
    pieces, stream = streamed(vocab, [1, 2, 3, 4], stop=("🙂",))
    assert "".join(pieces) == "a"
    assert stream.finish_reason == "stop"


def test_what_was_held_back_comes_at_the_end() -> None:
    pieces, stream = streamed(FakeVocab([b"", b"a ST"]), [1, EOG], stop=("STOP",))
    assert pieces == ["a ", "", "ST"]
    assert stream.finish_reason == "stop"


def test_an_end_of_generation_token_ends_and_says_nothing() -> None:
    stream = TextStream(FakeVocab([b"", b"a"]), Limits())
    assert stream.clip([1, EOG, 1]) == (2, True)
    assert (stream.text() + stream.flush(), stream.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_max_tokens_clips_inside_a_round(limit: int) -> None:
    stream = TextStream(FakeVocab([b"", b"a"]), Limits(max_tokens=limit))
    assert stream.clip([1, 1]) == (min(limit, 2), limit <= 2)
    if limit > 2:
        assert stream.clip([1, 1]) == (limit - 2, True)
    assert stream.finish_reason == "length"
    assert stream.text() == "a" * limit


def test_an_end_that_is_also_the_limit_is_a_stop() -> None:
    stream = TextStream(FakeVocab([b"", b"a"]), Limits(max_tokens=2))
    assert stream.clip([1, EOG]) == (2, True)
    assert stream.finish_reason == "stop"


def test_at_the_limit_held_back_text_is_not_lost() -> None:
    pieces, stream = streamed(FakeVocab([b"", b"ST"]), [1], stop=("STOP",), max_tokens=1)
    assert pieces == ["", "ST"]
    assert stream.finish_reason == "length"


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"max_tokens": 2.5},
        {"max_tokens": "many"},
        {"stop": ("",)},
        {"stop": ("a", "")},
        {"stop": (3,)},
    ],
    ids=repr,
)
def test_impossible_limits_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Limits(**limits)

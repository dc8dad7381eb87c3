"""What people do at a terminal: Ctrl-C, commands, odd settings."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from localspec.cli import answers
from localspec.cli.conversation import Conversation
from localspec.engine.lattice import Lattice
from localspec.engine.paths import Chain, greedy
from localspec.engine.stats import Stats
from localspec.llama.binding import uninterrupted
from localspec.loading.open import open_pair
from localspec.pair import Pair

PROMPT = "abc abc"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.write_target(folder / "t.gguf", chat_template=tiny.CHATML)
    with open_pair(target, tiny.write_drafter(folder / "d.gguf", target), n_ctx=2048, n_threads=1) as loaded:
        loaded.path = "greedy"
        yield loaded


def ctrl_c(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_the_prompt_is_read_ends_it_at_once(pair: Pair) -> None:
    result = answers.show(pair.stream(list(range(40, 200)) * 8, max_tokens=20, progress=ctrl_c), quiet=True)
    assert (result.text, result.finish_reason) == ("", "cancelled")
    plain = pair.generate(PROMPT, max_tokens=20, spec=False)
    assert pair.generate(PROMPT, max_tokens=20).tokens == plain.tokens


def test_ctrl_c_in_an_answer_keeps_what_was_said(pair: Pair) -> None:
    n_rounds = 0

    def third(pool: Lattice) -> Chain:
        nonlocal n_rounds
        n_rounds += 1
        if n_rounds == 3:
            ctrl_c()
        return greedy(pool)

    whole = pair.generate(PROMPT, max_tokens=200, spec=False)
    result = answers.show(pair.stream(PROMPT, max_tokens=200, path=third), quiet=True)
    assert result.finish_reason == "cancelled"
    assert 3 <= len(result.tokens) < 200
    assert result.tokens == whole.tokens[: len(result.tokens)]


def test_a_second_ctrl_c_interrupts(pair: Pair) -> None:
    def impatient(pool: Lattice) -> Chain:
        if terminal_has_begun:
            ctrl_c()
            ctrl_c()
        terminal_has_begun.append(True)
        return greedy(pool)

    terminal_has_begun: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        answers.show(pair.stream(PROMPT, max_tokens=200, path=impatient), quiet=True)
    assert len(pair.generate(PROMPT, max_tokens=9).tokens) == 9


def test_ctrl_c_in_a_call_into_c_is_raised_behind_it() -> None:
    done = []

    def call() -> None:
        with uninterrupted():
            ctrl_c()
            done.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done


def test_the_figures_name_the_gain_or_that_drafting_rests() -> None:
    gained = Stats(predicted_n=186, predicted_s=1.0, n_rounds=100, n_parked=60, draft_n=98, draft_n_accepted=86)
    assert "1.86 a round" in answers.figures(gained)
    assert "rests" not in answers.figures(gained)
    rested = Stats(predicted_n=102, predicted_s=1.0, n_rounds=100, n_parked=90, draft_n=30, draft_n_accepted=2)
    assert answers.figures(rested) == "102 tokens · 102.0 tokens/s · drafting rests: plain decoding is faster here"


def test_the_machine_is_measured_behind_the_first_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(pair, "settle", lambda: order.append("measured"))
    monkeypatch.setattr("localspec.cli.conversation.figures", lambda _: order.append("answered") or "")
    assert conversation(pair).turn("abc")
    assert order == ["answered", "measured"]


def conversation(pair: Pair, **settings: Any) -> Any:
    return Conversation(pair, pair.chat(), {"max_tokens": 8} | settings)


def test_switching_the_drafter_off_forgets_the_bounds_of_its_drafts(pair: Pair, capsys: Any) -> None:
    talk = conversation(pair, draft_max=4, draft_min=1, path=None)
    pair.path = "auto"
    try:
        for line in ("abc", "/spec off", "abc", "/spec on", "abc"):
            assert talk.turn(line)
    finally:
        pair.path = "greedy"
    assert "Error" not in capsys.readouterr().err
    assert [stats.draft_n > 0 for stats in talk.answers] == [True, False, True]


def test_there_is_no_drafter_to_switch_on(tmp_path: Path, capsys: Any) -> None:
    target = tiny.write_target(tmp_path / "t.gguf", chat_template=tiny.CHATML)
    with open_pair(target, n_ctx=256, n_threads=1) as alone:
        talk = conversation(alone)
        assert talk.turn("/spec on")
        assert talk.turn("abc")
    assert "no drafter" in capsys.readouterr().err
    assert len(talk.answers) == 1

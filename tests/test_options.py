"""The options of an answer: what is asked for, what is refused, and in which words."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from localspec.engine.plan import Drafting
from localspec.errors import OptionError
from localspec.options import MEANINGS, PATHS, Options, Settings, check_whole
from localspec.pair import Pair

DRAFTING = Drafting(n_slots=7, calibration=np.ones(7), max_leaves=8, draft_max=32, n_vocab=100)


def settings(drafting: Drafting | None = DRAFTING, **options: Any) -> Settings:
    return Settings.of(options, drafting)  # type: ignore[arg-type]


def test_nothing_asked_for_is_greedy_and_drafts_where_it_can() -> None:
    assert settings().drafts
    assert settings().path == "auto"
    assert settings().sampling.temperature == 0
    assert not settings(None).drafts


def test_every_option_has_a_meaning_and_a_place_in_the_signature() -> None:
    signature = inspect.signature(Pair.generate)
    for name in Options.__annotations__:
        assert f"{name} (" in MEANINGS, name
        assert name in signature.parameters


@pytest.mark.parametrize("path", PATHS)
def test_each_way_to_draft_may_be_named(path: str) -> None:
    assert settings(path=path).path == path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tempreature": 1}, "unknown option 'tempreature'; choose from max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop": 5}, "stop must be a text or a list of texts, not 5"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"path": "best"}, "path"),
        ({"spec": "yes"}, "spec must be True, False or None, not 'yes'"),
        ({"spec": False, "draft_max": 4}, "draft_max is 4, but nothing is drafted with spec off"),
        ({"draft_max": 33}, "draft_max must be at least"),
        ({"path": "greedy", "draft_max": 8}, "draft_max must be at least"),
        ({"draft_min": 5, "draft_max": 4}, "draft_min"),
        ({"draft_p_min": 2}, "draft_p_min"),
        ({"progress": 3}, "progress must be a function of two numbers, not 3"),
    ],
)
def test_what_cannot_be_honoured_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        settings(**options)
    assert words in str(refused.value)
    assert str(refused.value).endswith(".")


def test_without_a_drafter_drafting_cannot_be_insisted_on() -> None:
    with pytest.raises(OptionError, match=r"spec is on, but there is no drafter; load one with draft \(-md\)"):
        settings(None, spec=True)
    assert not settings(None, spec=False).drafts


def test_numbers_say_their_borders() -> None:
    check_whole("n_ctx (-c)", None, 1, 10)
    check_whole("n_ctx (-c)", 10, 1, 10)
    for wrong, words in ((11, "at most 10, not 11"), (0, "at least 1"), (True, "whole number"), (1.5, "not 1.5")):
        with pytest.raises(OptionError, match=words):
            check_whole("n_ctx (-c)", wrong, 1, 10)

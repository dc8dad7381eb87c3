"""Threads that share: OpenMP is told to wait briefly while llama.cpp is loaded, unless the user has said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from localspec.llama import openmp

NAMES = (*openmp.SETTINGS, "OMP_WAIT_POLICY")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_only_meanwhile(bare: pytest.MonkeyPatch) -> None:
    with openmp.waiting_briefly():
        assert settings() == openmp.SETTINGS
    assert settings() == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_users_own_setting_wins(bare: pytest.MonkeyPatch, name: str) -> None:
    bare.setenv(name, "7")
    with openmp.waiting_briefly():
        assert settings() == {name: "7"}
    assert settings() == {name: "7"}


def test_the_library_has_heard_it() -> None:
    """GNU's OpenMP, which Linux has, says what it goes by as it is loaded."""
    code = f"import localspec.llama, os; print([name for name in {NAMES} if name in os.environ])"
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
    said = [line.strip() for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert said == ["GOMP_SPINCOUNT = '300'"] * (sys.platform == "linux")

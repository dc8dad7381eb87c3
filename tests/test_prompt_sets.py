"""Prompt sets come from a pinned place, are checked, and are fetched once."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import prompt_sets

from localspec.evaluation import prompts

LINES = ({"turns": ["first", "second"]}, {"prompt": "def f():"}, {"prompt": "x" * 1501})
QUESTIONS = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's folder that has one set, as the scripts are told it is published."""
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prompt_sets, "RAW", f"file://{tmp_path}")
    data = gzip.compress(QUESTIONS)
    source = replace(prompt_sets.SETS["humaneval"], file="set.jsonl.gz", sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(prompt_sets.SETS, "tiny", source)
    file = tmp_path / source.repository / source.commit / source.file
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    return file


def test_fetched_once_and_read_as_prompts(published: Path) -> None:
    path = prompt_sets.path_of("tiny")
    assert prompts.read(path) == ["first", "def f():"]
    published.unlink()
    assert prompt_sets.path_of("tiny") == path


def test_other_bytes_are_refused(published: Path) -> None:
    published.write_bytes(gzip.compress(QUESTIONS + b"\n"))
    with pytest.raises(SystemExit, match=r"has SHA-256 .*…, not .*…; give a folder of prompt sets with --data"):
        prompt_sets.path_of("tiny")


def test_what_cannot_be_fetched_names_the_folder_option(published: Path) -> None:
    published.unlink()
    with pytest.raises(SystemExit, match=r"cannot fetch .*set\.jsonl\.gz .*--data"):
        prompt_sets.path_of("tiny")


def test_a_folder_goes_first(published: Path, tmp_path: Path) -> None:
    assert prompt_sets.path_of("tiny", tmp_path) == tmp_path / "tiny.jsonl"

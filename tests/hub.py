"""A small Hugging Face Hub on this machine: the endpoints that huggingface_hub calls, and trouble on demand.

`hub.repos[repo][file] = bytes` is what it serves. Files are "in LFS": the resolve URL redirects to another host
(`localhost` instead of `127.0.0.1`), as the real one does to its CDN. Each request to "api", "head" or "get" (of bytes)
takes the next of `hub.faults[kind]`, a string of the words below, and once they are used up all goes well:

    drop    half of the bytes come, then the connection closes      reset   the connection is reset at once
    short   half of the bytes come and the headers say so           hang    nothing comes for `hub.hang_s` seconds
    stall   half of the bytes come, and then nothing for as long    garble  the last byte is wrong
    no-range   the whole file comes, whatever was asked
    401 403 404 429 500 503 …   an error status; 429 carries Retry-After
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

COMMIT = "c0ffee" + "0" * 34


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the game."""


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: dict[str, str] = {}  # repository -> the token that has access
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        self.requests: list[tuple[str, str, str | None]] = []  # kind, path, range
        self.tokens: list[tuple[str, str | None]] = []  # host, Authorization
        self.hang_s = 1.5
        self.closing = Event()
        self.retry_after = "1"
        self.server = Server(("127.0.0.1", 0), _handler(self))
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def ranges(self) -> list[str | None]:
        """The Range headers of all requests for bytes."""
        return [asked for kind, _, asked in self.requests if kind == "get"]

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/"):
                self.answer("api", path)
            elif path.startswith("/cdn/"):
                self.answer("get", path)
            else:
                self.answer("resolve", path)

        def do_HEAD(self) -> None:
            self.answer("head", self.path)

        def answer(self, kind: str, path: str) -> None:
            hub.requests.append((kind, path, self.headers["Range"]))
            hub.tokens.append((self.headers["Host"].partition(":")[0], self.headers["Authorization"]))
            fault = hub.faults[kind].pop(0) if hub.faults[kind] else ""
            if fault.isdigit():
                self.start(int(fault), 0, {"Retry-After": hub.retry_after} if fault == "429" else {})
            elif fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
            elif fault == "hang":
                hub.closing.wait(hub.hang_s)
                self.close_connection = True
            elif kind == "api":
                self.send_info(*path.removeprefix("/api/models/").split("/revision/"))
            elif kind == "get":
                self.send_bytes(path.rpartition("/")[2], fault)
            else:
                repo, _, rest = path[1:].partition("/resolve/")
                self.redirect(repo, rest.partition("/")[2])

        def send_info(self, repo: str, revision: str) -> None:
            if repo not in hub.repos:
                self.start(401, 0, {"X-Error-Code": "RepoNotFound"})
                return
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "blobId": hashlib.sha1(data).hexdigest(),
                    "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 130},
                }
                for name, data in hub.repos[repo].items()
            ]
            body = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}).encode()
            self.start(200, len(body), {"Content-Type": "application/json"})
            self.wfile.write(body)

        def redirect(self, repo: str, name: str) -> None:
            token = self.headers["Authorization"]
            if repo in hub.gated and token != f"Bearer {hub.gated[repo]}":
                self.start(403 if token else 401, 0, {"X-Error-Code": "GatedRepo"})
            elif name not in hub.repos.get(repo, {}):
                self.start(404, 0, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                data = hub.repos[repo][name]
                linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256(data)}"'}
                place = f"http://localhost:{hub.port}/cdn/{sha256(data)}"
                self.start(302, 0, {"Location": place, "X-Repo-Commit": COMMIT} | linked)

        def send_bytes(self, digest: str, fault: str) -> None:
            data = next(data for files in hub.repos.values() for data in files.values() if sha256(data) == digest)
            asked = None if fault == "no-range" else self.headers["Range"]
            first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1 if last else None]
            if fault == "garble":
                data = data[:-1] + bytes([data[-1] ^ 1])
            half = data[: len(data) // 2]
            data = half if fault == "short" else data
            self.start(206 if asked else 200, len(data), {})
            self.wfile.write(half if fault in ("drop", "stall") else data)
            self.close_connection = fault in ("drop", "stall")
            if fault == "stall":
                self.wfile.flush()
                hub.closing.wait(hub.hang_s)

        def start(self, code: int, length: int, headers: dict[str, str]) -> None:
            self.send_response(code)
            for key, value in {"Content-Length": str(length), **headers}.items():
                self.send_header(key, value)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    return Handler

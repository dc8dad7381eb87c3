"""Chats and the target's features on disk: append-only, whole again after a kill -9.

A folder holds

    meta.json     whose work it is: target, target_sha256, n_embd, layers, n_vocab, tokenizer_sha256 (where known)
    tokens.bin    int32, all chats one after the other
    features.bin  float16 [n_tokens, n_layers * n_embd]: row i is what the target's `layers` were
                  given when token i was decoded, layer after layer
    candidates.bin  CANDIDATES [n_tokens]: what the target would say behind token i, best first,
                  where it was asked
    chats.jsonl   a line a chat: `start` (row), `n` (rows), `questions` and `answers` (spans
                  [from, to) inside the chat) and figures; written last, so a line marks its rows as complete

A folder without `layers` holds text alone: tokens and chats, for `collect` to fill in the rest elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from localspec.errors import MissingError, ModelError, OptionError
from localspec.storage import write_whole

Ids = NDArray[np.int32]
Halves = NDArray[np.float16]
Span = tuple[int, int]
N_CANDIDATES = 8
CANDIDATES = np.dtype([("id", "<i4", N_CANDIDATES), ("logit", "<f2", N_CANDIDATES)])  # id -1: none
NONE = np.array((-1, 0), CANDIDATES)


def row_bytes(width: int) -> int:
    """Bytes on disk a token takes: id, features [width] and candidates."""
    return 4 + 2 * width + CANDIDATES.itemsize


@dataclass(frozen=True)
class Meta:
    """Whose work a folder holds; `layers` are counted as GGUF counts them."""

    target: str
    target_sha256: str
    n_embd: int
    layers: tuple[int, ...]
    n_vocab: int
    tokenizer_sha256: str = ""  # of the token texts; empty in folders of earlier versions

    @property
    def width(self) -> int:
        """Floats in one row of features."""
        return len(self.layers) * self.n_embd

    @property
    def row_bytes(self) -> int:
        """Bytes on disk a token takes: id, features and candidates."""
        return sum(self.files.values())

    @property
    def files(self) -> dict[str, int]:
        """The files with a row per token, and the bytes of one."""
        text = {"tokens.bin": 4}
        rest = {"features.bin": 2 * self.width, "candidates.bin": CANDIDATES.itemsize}
        return text | rest if self.layers else text


@dataclass(frozen=True)
class ChatRecord:
    """Where a finished chat lies and what it is made of; spans count from the chat's first token."""

    start: int
    n: int
    questions: tuple[Span, ...]
    answers: tuple[Span, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)  # id, source, temperatures, …

    @classmethod
    def from_json(cls, line: str) -> ChatRecord:
        raw = json.loads(line)
        spans = {key: tuple((a, b) for a, b in raw.pop(key)) for key in ("questions", "answers")}
        return cls(raw.pop("start"), raw.pop("n"), **spans, figures=raw)

    def to_json(self) -> str:
        spans = {"questions": self.questions, "answers": self.answers}
        return json.dumps({"start": self.start, "n": self.n, **spans, **self.figures})


@dataclass(frozen=True)
class Text:
    """The chats of a folder; `tokens` [n_tokens] is a memory map."""

    meta: Meta
    chats: list[ChatRecord]
    tokens: Ids


@dataclass(frozen=True)
class Data(Text):
    """A folder opened for reading; the arrays are memory maps."""

    features: Halves  # [n_tokens, n_layers * n_embd]
    candidates: NDArray[np.void]  # CANDIDATES [n_tokens]

    def rows(self, where: slice | NDArray[np.int64], layers: Sequence[int]) -> Halves:
        """Features of some tokens at some of the collected layers, [n, len(layers) * n_embd]."""
        found = self.features[where]
        if tuple(layers) == self.meta.layers:
            return found
        planes = found.reshape(len(found), len(self.meta.layers), -1)
        picked: Halves = planes[:, [self.meta.layers.index(layer) for layer in layers]].reshape(len(found), -1)
        return picked


def read_text(folder: Path) -> Text:
    """Open the chats finished so far, also while a writer is at work. Raises MissingError if there are none."""
    chats = _read_chats(folder)
    if not chats:
        raise MissingError(f"{folder} holds no finished chats yet; run the synthesis first.")
    n = chats[-1].start + chats[-1].n
    return Text(_read_meta(folder), chats, np.memmap(folder / "tokens.bin", np.int32, "r", shape=(n,)))


def read(folder: Path) -> Data:
    """Open chats with features and candidates, else as `read_text`. Raises MissingError if it holds text alone."""
    text = read_text(folder)
    n, width = len(text.tokens), text.meta.width
    for name, a_row in (("features.bin", 2 * width), ("candidates.bin", CANDIDATES.itemsize)):
        path = folder / name
        if not path.exists() or not width or path.stat().st_size < n * a_row:
            raise MissingError(f"{folder} holds text without {name}; collect what is missing with --chats {folder}.")
    return Data(
        **vars(text),
        features=np.memmap(folder / "features.bin", np.float16, "r", shape=(n, width)),
        candidates=np.memmap(folder / "candidates.bin", CANDIDATES, "r", shape=(n,)),
    )


class Store:
    """A folder opened for appending, by one process at a time; a context manager.

    Raises OptionError if the folder holds another target's work or another process writes to it.
    """

    def __init__(self, folder: Path, meta: Meta) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.meta = folder, meta
        self._lock = FileLock(folder / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise OptionError(f"another process is writing to {folder}; wait for it.") from None
        try:
            self._claim()
            self.chats = _read_chats(folder)
            self._open()
        except BaseException:
            self._lock.release()
            raise

    @property
    def n_tokens(self) -> int:
        """Tokens of finished chats."""
        return self.chats[-1].start + self.chats[-1].n if self.chats else 0

    def questions(self) -> Iterable[bytes]:
        """The first question of each chat so far, as the bytes of its token ids."""
        tokens = np.fromfile(self.folder / "tokens.bin", np.int32)
        for chat in self.chats:
            first, last = chat.questions[0]
            yield tokens[chat.start + first : chat.start + last].tobytes()

    def append(
        self,
        tokens: Ids,
        features: Halves,
        candidates: NDArray[np.void],
        questions: Iterable[Span],
        answers: Iterable[Span],
        **figures: Any,
    ) -> ChatRecord:
        """Add a chat: tokens [n], features [n, width], candidates [n], spans inside it and figures worth keeping."""
        assert features.shape == (len(tokens), self.meta.width)
        assert candidates.shape == tokens.shape
        chat = ChatRecord(self.n_tokens, len(tokens), tuple(questions), tuple(answers), figures)
        rows: dict[str, NDArray[Any]] = {"tokens.bin": tokens, "features.bin": features, "candidates.bin": candidates}
        for name, file in self._rows.items():
            file.write(np.ascontiguousarray(rows[name]).view(np.uint8).data)
            file.flush()
        self._lines.write(chat.to_json() + "\n")
        self._lines.flush()
        self.chats.append(chat)
        return chat

    def _claim(self) -> None:
        """Write meta.json into a fresh folder, compare it in a used one."""
        path = self.folder / "meta.json"
        if not path.exists():
            write_whole(path, json.dumps(asdict(self.meta), indent=1))
            return
        theirs, ours = asdict(_read_meta(self.folder)), asdict(self.meta)
        differs = [key for key in ours if key != "target" and theirs[key] != "" and theirs[key] != ours[key]]
        if differs:
            raise _other_work(self.folder, differs[0], theirs, ours)

    def _open(self) -> None:
        """Cut off what a killed writer left behind the last finished chat, then append."""
        self._rows: dict[str, IO[bytes]] = {}
        for name, row_bytes in self.meta.files.items():
            file = self._rows[name] = (self.folder / name).open("ab")
            if file.tell() < row_bytes * self.n_tokens:
                raise OptionError(
                    f"{self.folder / name} holds less than the chats beside it; collect it anew elsewhere with --chats "
                    f"{self.folder}."
                )
            file.truncate(row_bytes * self.n_tokens)
        path = self.folder / "chats.jsonl"
        if path.exists():  # a line cut short by the kill
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._lines = path.open("a", encoding="utf-8")

    def close(self) -> None:
        for file in self._rows.values():
            file.close()
        self._lines.close()
        self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_owner(folder: Path, target: Path) -> None:
    """Raises OptionError if `folder` holds work for another file than `target`."""
    if (folder / "meta.json").exists():
        key, theirs = "target_sha256", asdict(_read_meta(folder))
        if theirs[key] != (ours := file_sha256(target)):
            raise _other_work(folder, key, theirs, {"target": target.name, key: ours})


def file_sha256(path: Path) -> str:
    """Hash of a file. Raises ModelError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}.") from error


def _other_work(folder: Path, key: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> OptionError:
    return OptionError(
        f"{folder} holds work for {theirs['target']} ({key} {theirs[key]}), this is {ours['target']} ({key} "
        f"{ours[key]}); choose another output folder."
    )


def _read_meta(folder: Path) -> Meta:
    path = folder / "meta.json"
    try:
        raw = json.loads(path.read_text())
        return Meta(**{**raw, "layers": tuple(raw["layers"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is not a data folder's description ({error}).") from error


def _read_chats(folder: Path) -> list[ChatRecord]:
    path = folder / "chats.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # behind the last \n: unfinished
    return [ChatRecord.from_json(line) for line in lines]

"""A toy language model that stands in for target and drafter, and watches over the invariants of a round.

`FakeTarget` and `FakeDrafter` have the methods that `Engine` calls on the real ones. Each keeps its memory as a plain
list, so a test can ask what is in it; misuse (a decode while a rollback is due, a gap in the positions, features of
another decode) fails at once. `faults` makes a method raise before or after it has changed the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from localspec.engine.generate import Engine
from localspec.engine.lattice import Lattice
from localspec.engine.plan import Drafting
from localspec.pair import Pair, Parts
from localspec.planning.exactness import Exactness
from localspec.planning.plans import Plans

N_VOCAB = 24
EOG = 0
K = 4
Draft = Callable[[list[int], int], list[int]]  # tokens so far, number of slots -> the tokens to put first


def logits(history: Sequence[int], seed: int = 0, eog_bias: float = -9.0) -> np.ndarray:
    """The toy model: the last three tokens decide, and `EOG` is rare."""
    return _row(seed, eog_bias, *history[-3:])


@cache
def _row(seed: int, eog_bias: float, *recent: int) -> np.ndarray:
    row = np.random.default_rng([seed, *recent]).standard_normal(N_VOCAB).astype(np.float32)
    row[EOG] += eog_bias
    row.flags.writeable = False
    return row


class Faults:
    """`at("verify", after=True)`: the next such call raises KeyboardInterrupt once its work is done (or before)."""

    def __init__(self) -> None:
        self._due: dict[tuple[str, bool], int] = {}

    def at(self, method: str, *, after: bool = False, call: int = 1) -> None:
        self._due[method, after] = call

    def check(self, method: str, after: bool) -> None:
        due = self._due.get((method, after))
        if due is None:
            return
        self._due[method, after] = due - 1
        if due == 1:
            del self._due[method, after]
            raise KeyboardInterrupt


class FakeTarget:
    """`recurrent`: it cannot go back farther than the last decode. `seed` and `eog_bias`: which toy model it is."""

    def __init__(self, *, n_ctx: int = 200, seed: int = 0, eog_bias: float = -9.0, recurrent: bool = False) -> None:
        self.n_ctx, self.recurrent, self.layers = n_ctx, recurrent, [1]
        self.seed, self.eog_bias = seed, eog_bias
        self.memory: list[int] = []
        self.calls: Counter[str] = Counter()
        self.n_read = 0
        self.faults = Faults()
        self._exposing = False
        self._verified = 0  # tokens of a verify that no rollback has followed yet
        self._batch: list[tuple[int, int]] | None = None  # (position, token) of the last decode, if features exist

    @property
    def n_past(self) -> int:
        return len(self.memory)

    def logits(self, history: Sequence[int]) -> np.ndarray:
        return logits(history, self.seed, self.eog_bias)

    def expose_features(self, wanted: bool) -> None:
        self._exposing = wanted

    def _decode(self, tokens: Sequence[int]) -> None:
        assert not self._verified, "a decode before the last verify was rolled back"
        assert len(tokens) > 0
        assert len(self.memory) + len(tokens) <= self.n_ctx, "the memory is full"
        start = len(self.memory)
        self.memory += tokens
        self.n_read += len(tokens)
        self._batch = list(enumerate(tokens, start)) if self._exposing else None

    def prefill(self, tokens: Sequence[int]) -> None:
        self.calls["prefill"] += 1
        self.faults.check("prefill", False)
        self._decode(tokens)
        self.faults.check("prefill", True)

    def verify(self, anchor: int, draft: Any) -> np.ndarray:
        self.calls["verify"] += 1
        self.faults.check("verify", False)
        start = len(self.memory)
        self._decode([anchor, *draft.tokens])
        self._verified, self._ways = len(draft.tokens) + 1, [[anchor]]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            self._ways.append([*self._ways[parent + 1], token])
        if self._batch:
            self._batch = [(start + len(way) - 1, way[-1]) for way in self._ways]
        self.faults.check("verify", True)
        return np.stack([self.logits(self.memory[:start] + way) for way in self._ways])

    def features(self, rows: Any) -> np.ndarray:
        assert self._batch is not None, "features that nobody asked for"
        if isinstance(rows, slice):
            assert rows.stop <= len(self._batch)
            return np.array(self._batch[rows], np.float32)
        return np.array([self._batch[row] for row in rows], np.float32).reshape(len(rows), 2)

    def commit(self, rows: Sequence[int]) -> None:
        self.calls["commit"] += 1
        assert self._verified, "a second rollback after one verify"
        assert rows[0] == 0, "a whole decode rolled back"
        self.faults.check("commit", False)
        way = self._ways[rows[-1]]
        assert [self._ways[row] for row in rows] == [way[: k + 1] for k in range(len(way))], (
            "no way down from the anchor"
        )
        self.memory[len(self.memory) - self._verified :] = way
        self._verified = 0
        self.faults.check("commit", True)

    def rewind(self, n: int) -> int:
        if n < len(self.memory):
            n = self.reachable(n)
            del self.memory[n:]
        self.faults.check("rewind", True)
        return n

    def reachable(self, n: int) -> int:
        return 0 if self.recurrent and n < len(self.memory) else n

    def checkpoint(self) -> None:
        self.calls["checkpoint"] += 1

    def forget(self) -> None:
        self.memory.clear()
        self._verified = 0


class FakeDrafter:
    """Puts what `draft_of(tokens, n)` says on the greedy path of an otherwise arbitrary pool."""

    def __init__(self, target: FakeTarget, draft_of: Draft, *, block_size: int = 8) -> None:
        self.target, self.block_size, self._draft_of = target, block_size, draft_of
        self.memory: list[int] = []
        self.calls: Counter[str] = Counter()
        self.n_injected = 0
        self.faults = Faults()
        self._rng = np.random.default_rng(0)

    @property
    def n_past(self) -> int:
        return len(self.memory)

    def inject(self, features: np.ndarray) -> None:
        self.calls["inject"] += 1
        self.faults.check("inject", False)
        for position, token in features.astype(int).tolist():
            assert position == len(self.memory), "a position injected twice or left out"
            self.memory.append(token)
        self.n_injected += len(features)
        self.faults.check("inject", True)

    def draft(self, anchor: int, n_slots: int) -> Lattice:
        self.calls["draft"] += 1
        self.faults.check("draft", False)
        assert 0 < n_slots < self.block_size
        assert self.memory == self.target.memory, "a draft from a memory that is not in step"
        path = self._draft_of([*self.memory, anchor], n_slots)
        ids = self._rng.integers(N_VOCAB, size=(n_slots, K)).astype(np.int32)
        best = self._rng.integers(K, size=n_slots)
        scores = self._rng.random((n_slots, K, K)).astype(np.float32)
        for slot, token in enumerate(path):
            ids[slot, best[slot]] = token
            scores[slot, :, best[slot]] = 2.0
        self.faults.check("draft", True)
        return Lattice(ids, scores)

    def rewind(self, n: int) -> None:
        del self.memory[n:]
        self.faults.check("drafter rewind", True)

    def forget(self) -> None:
        self.memory.clear()


def perfect(target: FakeTarget) -> Draft:
    """Says what greedy decoding will say."""

    def draft(tokens: list[int], n: int) -> list[int]:
        path: list[int] = []
        for _ in range(n):
            path.append(int(target.logits(tokens + path).argmax()))
        return path

    return draft


def useless(target: FakeTarget) -> Draft:
    """Always names a token that greedy decoding will not say."""
    return lambda tokens, n: [(token + 1) % N_VOCAB for token in perfect(target)(tokens, n)]


def adversarial(target: FakeTarget, seed: int = 0) -> Draft:
    """Right up to a random slot, wrong there (an end-of-generation token, too), right again behind it."""
    rng = np.random.default_rng(seed)

    def draft(tokens: list[int], n: int) -> list[int]:
        path = perfect(target)(tokens, n)
        for slot in rng.integers(n, size=rng.integers(3)):
            path[slot] = int(rng.choice([EOG, int(rng.integers(N_VOCAB)), tokens[-1]]))
        return path

    return draft


class FakeVocab:
    """Tokens as bytes: `pieces[token]`; empty pieces are control tokens, `EOG` ends an answer."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.n_tokens = list(pieces), len(pieces)
        self.bos = self.eos = EOG

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def tokenize(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        return [self.pieces.index(letter.encode()) for letter in text]

    def is_eog(self, token: int) -> bool:
        return token == EOG


def letters() -> FakeVocab:
    """Token 0 ends, token k is the k-th letter."""
    return FakeVocab([b"", *(bytes([ord("a") + k]) for k in range(N_VOCAB - 1))])


class FakeTemplate:
    """A letter for each role before what it says."""

    ROLES: ClassVar = {"system": "s", "user": "u", "assistant": "v"}

    def __init__(self, vocab: FakeVocab) -> None:
        self._vocab = vocab

    def tokenize(self, rendered: str, *, continues: bool = False) -> list[int]:
        return self._vocab.tokenize(rendered)

    def parser(self, prompt: Sequence[int]) -> None:
        """Nothing is set apart from the answer."""

    def n_before_answer(self, prompt: Sequence[int]) -> int:
        return len(prompt) - 1  # the letter of the assistant

    def said(self, tokens: Sequence[int], answer: str) -> tuple[str, list[int]]:
        words = [token for token in tokens if token != EOG]
        spoken = b"".join(map(self._vocab.piece, words)).decode()
        return answer, words if spoken == answer else self._vocab.tokenize(answer)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(self.ROLES[one["role"]] + one["content"] for one in messages) + self.ROLES["assistant"]


class FakeKeeper:
    """Knows nothing of a pair, and counts what it is asked."""

    known = None

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def get(self) -> None:
        self.calls["get"] += 1

    def prepare(self) -> None:
        """Nothing is worth measuring."""

    def admit(self, lag: int) -> bool:
        self.get()
        return True

    def settle(self) -> None:
        self.calls["settle"] += 1

    def measure(self) -> None:
        self.calls["measure"] += 1

    def keep(self) -> None:
        self.calls["keep"] += 1


class FakeExactness:
    """All passes are exact."""

    strict = False

    def get(self) -> Exactness:
        return Exactness(width=100, reading=True, block=1)


def pair_of_fakes(target: FakeTarget | None = None, *, drafted: bool = True) -> Pair:
    """A pair whose parts are all fakes; `pair.freed` counts how often it freed its models."""
    target = target or FakeTarget()
    vocab, keeper = letters(), FakeKeeper()
    drafter = FakeDrafter(target, perfect(target)) if drafted else None
    drafting = Drafting(7, np.ones(7), max_leaves=1, draft_max=7, n_vocab=N_VOCAB) if drafted else None
    freed: list[int] = []
    parts = Parts(
        engine=Engine(target, drafter),
        plans=Plans(drafting, keeper, FakeExactness()),
        vocab=vocab,
        template=FakeTemplate(vocab),
        target_path=Path("target.gguf"),
        drafter_path=Path("drafter.gguf") if drafted else None,
        free=lambda: freed.append(1),
    )
    pair = Pair(parts)
    pair.path, pair.freed, pair.keeper = "greedy", freed, keeper
    return pair

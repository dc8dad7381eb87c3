"""Whatever was done with a pair before, it goes on like a fresh one: random histories, every place of every answer.

The seven ways a state changes (extend, truncate, abandon, abort, undo, retry, interleave) come in random order, with
and without drafter, drafting chains and trees, on targets of each kind of memory. What is compared are the logits that
decided each token: a wrong state moves them by whole numbers, another width of a batch by less than `NOISE`.

A failure prints its seed and all steps; `LOCALSPEC_STATES_SEED=n` begins with that seed, `LOCALSPEC_STATES_RUNS=k`
tries k of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from test_engine import distance

from localspec.engine import generate as rounds
from localspec.engine import target as targets
from localspec.engine.generate import Engine, generate
from localspec.engine.plan import Fixed, Plan, selector
from localspec.engine.sampling import Sampler, SamplingParams
from localspec.errors import BackendError, OptionError
from localspec.loading.open import open_pair
from localspec.pair import Pair
from localspec.planning import exactness

KINDS = {"attention": "llama", "hybrid": "qwen35", "window": "muse-glimmer", "recurrent": "mamba"}
CASES = [(kind, drafts) for kind in KINDS for drafts in (False, True) if not (kind == "recurrent" and drafts)]
FIRST = int(os.environ.get("LOCALSPEC_STATES_SEED", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("LOCALSPEC_STATES_RUNS", "3")))
N_STEPS = 60
N_CTX = 640
N_BATCH = 48  # small: a prompt has several chunks, and a window of 16 tokens has forgotten the rest after 256
NOISE = 0.05  # keys and values are stored in 16 bits; as in test_engine

Rows = list[np.ndarray]


class Recorder(Sampler):
    """Greedy; keeps the logits that decided each token."""

    def __init__(self) -> None:
        super().__init__(SamplingParams())
        self.rows: Rows = []

    def choose(self, row: np.ndarray, history: Any, index: int) -> int:
        self.rows.append(row.copy())
        return super().choose(row, history, index)


class Answer:
    """An answer as it comes: its tokens and, for each, the logits that decided it."""

    def __init__(self, engine: Engine, prompt: list[int], plan: Plan, n: int, **options: Any) -> None:
        self.prompt, self.tokens, self.rows = prompt, list[int](), list[np.ndarray]()
        self.prefill = engine.start(prompt, **options)
        self._engine, self._plan, self._n = engine, plan, n

    def __iter__(self) -> Iterator[None]:
        sampler = Recorder()

        def clip(emitted: list[int]) -> tuple[int, bool]:
            room = self._n - len(self.tokens)
            return min(room, len(emitted)), len(emitted) >= room

        for one in generate(self._engine, plan=self._plan, sampler=sampler, clip=clip):
            self.tokens += one.tokens
            self.rows += sampler.rows[: len(one.tokens)]
            sampler.rows.clear()
            yield

    @property
    def is_open(self) -> bool:
        return len(self.tokens) < self._n

    def all(self) -> Answer:
        for _ in self:
            pass
        return self


class Interrupt:
    """One call of a method of the engine's parts fails, before or after it has done its work."""

    PLACES: tuple[tuple[str, str], ...] = (
        *(("target", name) for name in ("verify", "commit", "features", "prefill", "rewind", "checkpoint")),
        *(("target.context", name) for name in ("decode", "remove", "save_state", "load_state")),
        *(("drafter", name) for name in ("draft", "inject", "rewind")),
        *(("drafter.context", name) for name in ("decode", "decode_rows", "remove")),
    )

    def __init__(self, engine: Engine, rng: np.random.Generator) -> None:
        places = [place for place in self.PLACES if engine.drafter or place[0].startswith("target")]
        self.where, self.name = places[int(rng.integers(len(places)))]
        self.after, self.call = bool(rng.integers(2)), int(rng.integers(1, 5))
        self.error: type[BaseException] = [KeyboardInterrupt, BackendError][int(rng.integers(2))]
        self._engine = engine

    def __str__(self) -> str:
        order = "after" if self.after else "before"
        return f"{self.error.__name__} {order} call {self.call} of {self.where}.{self.name}"

    def __enter__(self) -> None:
        owner: Any = self._engine
        for part in self.where.split("."):
            owner = getattr(owner, part)
        real, calls = getattr(owner, self.name), itertools.count(1)

        def failing(*args: Any, **options: Any) -> Any:
            due = next(calls) == self.call
            if due and not self.after:
                raise self.error("interrupted")
            out = real(*args, **options)
            if due:
                raise self.error("interrupted")
            return out

        self._owner = owner
        setattr(owner, self.name, failing)

    def __exit__(self, *_: Any) -> None:
        delattr(self._owner, self.name)


class History:
    """Two conversations on one pair, and a fresh pair that says what each answer has to be."""

    def __init__(self, pair: Pair, fresh: Pair, seed: int) -> None:
        self.pair, self.engine, self.fresh = pair, pair.engine, fresh.engine
        self.rng = np.random.default_rng(seed)
        self.texts: list[list[int]] = [[], []]  # what each conversation has come to
        self.prompts: list[list[list[int]]] = [[], []]  # what it was asked
        self.at = 0  # the conversation that goes on
        self.open: list[Iterator[None]] = []  # abandoned answers that nobody has closed
        self.letters = tiny.letter_ids()
        self.worst = 0.0

    def words(self, low: int, high: int) -> list[int]:
        return [self.letters[i] for i in self.rng.integers(len(self.letters), size=int(self.rng.integers(low, high)))]

    def prompt(self, start: list[int], *, at_least: int = 0) -> list[int]:
        """`start` and some new words, many now and then; begun anew before the context is full."""
        new = self.words(at_least, 150 if self.rng.random() < 0.15 else 9)
        ids = [*start, *new]
        return ids if 0 < len(ids) < N_CTX - 60 else self.words(1, 30)

    def plan(self) -> tuple[Plan, str]:
        drafting = self.pair.drafting
        if drafting is None or self.rng.random() < 0.2:
            return Fixed(), "plainly"
        kinds = ["greedy", "expected", *["tree"] * (drafting.max_leaves > 1)]
        kind, n = str(self.rng.choice(kinds)), int(self.rng.integers(1, drafting.n_slots + 1))
        return Fixed(drafting.n_slots, selector(kind, n, drafting, Sampler(SamplingParams()))), f"{kind} {n}"

    def begin(self, prompt: list[int], step: str) -> Answer:
        plan, how = self.plan()
        spec = self.engine.drafter is not None and self.rng.random() < 0.8
        plan, how = (plan, how) if spec else (Fixed(), "plainly")
        keep_at = int(self.rng.integers(1, len(prompt) + 1)) if self.rng.random() < 0.5 else None
        n = int(self.rng.integers(1, 24))
        print(f"{step}: {len(prompt)} tokens of conversation {self.at}, {n} more {how}, spec={spec}, keep_at={keep_at}")
        self.prompts[self.at].append(prompt)
        self.texts[self.at] = prompt
        return Answer(self.engine, prompt, plan, n, spec=spec, keep_at=keep_at)

    def finish(self, answer: Answer) -> None:
        """Hold what was said against the fresh pair, and both caches against the tokens."""
        self.texts[self.at] = answer.prompt + answer.tokens
        self.check(answer)
        n = len(self.engine.tokens) - 1
        assert self.engine.target.n_past == n
        assert self.engine.tokens == self.texts[self.at]
        if self.engine.drafter:
            assert self.engine.drafter.n_past <= n
            if self.rng.random() < 0.3:
                self.check_drafter()

    def check(self, answer: Answer) -> None:
        self.fresh.forget()
        expected = Answer(self.fresh, answer.prompt, Fixed(), max(1, len(answer.tokens)), spec=False).all()
        for i, (token, row) in enumerate(zip(answer.tokens, answer.rows, strict=True)):
            self.worst = max(self.worst, float(abs(row - expected.rows[i]).max()))
            np.testing.assert_allclose(row, expected.rows[i], atol=NOISE, err_msg=f"token {i} of the answer")
            if token != expected.tokens[i]:
                return  # a near-tie, since the logits agree: from here on another text

    def check_drafter(self) -> None:
        """The drafter's pool is that of one which has read all tokens at once, if it keeps up."""
        self.engine._inject_pending()
        if self.engine.drafter.n_past < self.engine.target.n_past or self.engine.room < 0:
            return
        self.fresh.forget()
        self.fresh.start(self.engine.tokens, spec=True)
        n_slots = self.pair.drafting.n_slots
        found, expected = (one.drafter.draft(one.tokens[-1], n_slots) for one in (self.engine, self.fresh))
        assert distance(found, expected) < 0.1

    # --- the seven ways

    def extend(self) -> None:
        self.finish(self.begin(self.prompt(self.texts[self.at]), "extend").all())

    def truncate(self) -> None:
        text = self.texts[self.at]
        cut = text[: int(self.rng.integers(len(text) + 1))]
        self.finish(self.begin(self.prompt(cut), "truncate").all())

    def abandon(self) -> None:
        answer = self.begin(self.prompt(self.texts[self.at]), "abandon")
        chunks = iter(answer)
        for _ in itertools.islice(chunks, int(self.rng.integers(1, 5))):
            pass
        self.finish(answer)
        if answer.is_open and self.rng.random() < 0.5:
            self.open.append(chunks)

    def abort(self) -> None:
        interrupt = Interrupt(self.engine, self.rng)
        prompt = self.prompt(self.texts[self.at][: int(self.rng.integers(300))])
        try:
            with interrupt:
                self.finish(self.begin(prompt, f"abort ({interrupt})").all())
        except interrupt.error as error:
            if str(error) != "interrupted":
                raise
            self.texts[self.at] = list(self.engine.tokens) or prompt

    def undo(self) -> None:
        asked = self.prompts[self.at]
        del asked[max(1, len(asked) - int(self.rng.integers(1, 4))) :]
        before = asked.pop() if asked else []
        self.finish(self.begin(self.prompt(before[: max(1, len(before) - 5)], at_least=1), "undo").all())

    def retry(self) -> None:
        asked = self.prompts[self.at]
        self.finish(self.begin(asked.pop() if asked else self.words(1, 9), "retry").all())

    def interleave(self) -> None:
        self.at = 1 - self.at
        self.finish(self.begin(self.prompt(self.texts[self.at]), "interleave").all())
        for chunks in self.open:
            with pytest.raises(OptionError, match="another answer"):
                next(chunks)
        self.open.clear()

    def steps(self) -> list[Callable[[], None]]:
        return [self.extend, self.truncate, self.abandon, self.abort, self.undo, self.retry, self.interleave]


THINKING = (  # as Qwen3.5's: the prompt opens a thought, and behind the next turn the answer stands without it
    tiny.CHATML.replace("message['content']", "message['content'].split('</think>')[-1]").rpartition("{% if")[0]
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def opened(folder: Path, kind: str, *, drafts: bool, **options: Any) -> Pair:
    n_layer = 2 if kind == "recurrent" else 4  # its scan is slow
    target = tiny.write_target(folder / f"{kind}-{drafts}.gguf", KINDS[kind], n_layer=n_layer, **options)
    drafter = tiny.write_drafter(folder / f"{kind}-drafter.gguf", target) if drafts else None
    return open_pair(target, drafter, n_ctx=N_CTX, n_threads=1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "drafts"), CASES, ids=[f"{kind}{'+drafter' * drafts}" for kind, drafts in CASES])
def test_any_history_goes_on_like_a_fresh_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, drafts: bool, seed: int
) -> None:
    monkeypatch.setattr(targets, "N_BATCH", N_BATCH)
    monkeypatch.setattr(rounds, "N_BATCH", N_BATCH)
    monkeypatch.setattr(exactness, "measure", lambda _: exactness.Exactness(1, True))  # go back to any place
    print(f"LOCALSPEC_STATES_SEED={seed} LOCALSPEC_STATES_RUNS=1")
    with ExitStack() as stack:
        pair, fresh = (stack.enter_context(opened(tmp_path, kind, drafts=drafts)) for _ in range(2))
        history = History(pair, fresh, seed)
        for _ in range(N_STEPS):
            steps = history.steps()
            steps[int(history.rng.integers(len(steps)))]()
        print("largest difference of a logit:", history.worst)


# --- cases that were once wrong, or slow


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[Pair]:
    with opened(tmp_path, "hybrid", drafts=True, chat_template=None) as pair:
        yield pair


def test_a_hybrid_goes_back_only_to_what_the_last_batch_left(hybrid: Pair) -> None:
    """llama.cpp went back to a snapshot of an earlier batch, and the words were others."""
    expected = hybrid.generate("tea is hot", max_tokens=12, spec=False).tokens
    hybrid.engine.forget()
    hybrid.generate("to a", max_tokens=3, spec=False)
    assert hybrid.generate("tea is hot", max_tokens=12, spec=False).tokens == expected


def test_where_a_recurrent_state_can_be_taken_back_to(hybrid: Pair) -> None:
    """To any token of the last batch but the place before it, once; else to a checkpoint."""
    target, n_rollback = hybrid.engine.target, hybrid.engine.target.draft_max
    target.prefill([65] * 20)
    target.checkpoint()
    target.prefill([66] * 30)
    assert [target.reachable(n) for n in (50, 50 - n_rollback, 49 - n_rollback, 20, 19)] == [50, 43, 20, 20, 0]
    target.prefill([67] * 3)
    assert [target.reachable(n) for n in (52, 51, 50, 49)] == [52, 51, 20, 20]
    assert target.rewind(51) == 51
    assert [target.reachable(n) for n in (51, 50)] == [51, 20]
    assert target.rewind(50) == 20
    assert target.n_past == 20
    assert target.rewind(19) == 0


@pytest.mark.parametrize("kind", ["hybrid", "window", "recurrent"])
def test_a_chat_whose_template_takes_thoughts_back_reads_no_old_turn_again(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path, kind, drafts=kind != "recurrent", chat_template=THINKING) as pair:
        pair.path = "greedy"
        chat, before = pair.chat(system="be the sea"), 0
        for text in ("the sea", "and the sand", "what is in his hand"):
            cached = chat.send(text, max_tokens=20).stats.cached_n
            assert cached >= before - before % pair.engine.reading.block
            before = pair.template.n_before_answer(pair.encode([*chat.messages[:-1]]))
            assert before is not None
            assert before > cached
        chat.undo()
        again = chat.send("what is in his hand", max_tokens=20)
        assert again.stats.cached_n >= before


def test_prompts_that_part_at_the_same_place_are_read_from_there(hybrid: Pair) -> None:
    """A long beginning in common is read twice, not for each of them."""
    start, ends = hybrid.encode("the user is in the sea and the sand " * 4), map(hybrid.encode, ("a", "on", "is", "to"))
    cached = [hybrid.generate([*start, *end, *end], max_tokens=5).stats.cached_n for end in ends]
    assert cached == [0, 0, len(start), len(start)]


def test_a_prompt_said_again_is_not_read_again(hybrid: Pair) -> None:
    ids = hybrid.encode("the user is in the sea and the sand")
    first = hybrid.generate(ids, max_tokens=20, path="greedy")
    again = hybrid.generate(ids, max_tokens=20, path="greedy")
    assert again.stats.prompt_n == 1
    assert again.tokens == first.tokens

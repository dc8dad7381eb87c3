"""The round and the loop with fakes: whatever the drafter does, the words are the target's and the memories agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fakes
import pytest
from fakes import EOG, Draft, FakeDrafter, FakeTarget, adversarial, letters, perfect, useless

from localspec.engine import paths
from localspec.engine.generate import Engine, Prefill, generate
from localspec.engine.lattice import Lattice
from localspec.engine.plan import Fixed, FixedProposal
from localspec.engine.sampling import Sampler, SamplingParams
from localspec.engine.stats import Round
from localspec.engine.target import N_BATCH
from localspec.errors import OptionError
from localspec.text import Limits, TextStream

PROMPT = [5, 9, 2, 14, 3, 3, 8]


def engine(draft: str | None = "adversarial", *, block_size: int = 8, **target: Any) -> Engine:
    speaker = FakeTarget(**target)
    if draft is None:
        return Engine(speaker, None)
    named: dict[str, Draft] = {
        "perfect": perfect(speaker),
        "useless": useless(speaker),
        "adversarial": adversarial(speaker),
    }
    return Engine(speaker, FakeDrafter(speaker, named[draft], block_size=block_size))


def check_memories(pair: Engine, *, spec: bool) -> None:
    assert pair.target.memory == pair.tokens[:-1]
    if spec:
        pair._inject_pending()  # what a full context leaves for later
        assert pair.drafter.memory == pair.tokens[:-1]


class Answer:
    """A generation run to its end, the invariants checked after every round."""

    def __init__(
        self,
        pair: Engine,
        prompt: list[int] = PROMPT,
        *,
        n_draft: int = 7,
        max_tokens: int | None = 60,
        stop: tuple[str, ...] = (),
        select: Any = paths.greedy,
        **sampling: Any,
    ) -> None:
        self.pair, self.rounds, self.spec = pair, [], n_draft > 0 and pair.drafter is not None
        self.text = TextStream(letters(), Limits(max_tokens, stop))
        pair.target.calls.clear()
        self.prefill: Prefill = pair.start(prompt, spec=self.spec)
        check_memories(pair, spec=self.spec)
        self.tokens: list[int] = []
        sampler = Sampler(SamplingParams(**sampling))
        for one in generate(
            pair, plan=Fixed(n_draft, lambda pool, _: select(pool)), sampler=sampler, clip=self.text.clip
        ):
            self.take(one)
        assert pair.tokens == prompt + self.tokens
        assert pair.target.calls["verify"] == pair.target.calls["commit"]

    def take(self, one: Round) -> None:
        self.rounds.append(one)
        self.tokens += one.tokens
        assert 0 <= one.n_accepted <= one.n_drafted
        assert one.n_accepted <= len(one.tokens) <= one.n_accepted + 1
        assert min(one.draft_s, one.verify_s, one.inject_s, one.host_s) >= 0
        check_memories(self.pair, spec=self.spec)

    @property
    def n_accepted(self) -> int:
        return sum(one.n_accepted for one in self.rounds)


def plain(prompt: list[int] = PROMPT, **options: Any) -> Answer:
    target = {k: options.pop(k) for k in ("n_ctx", "seed_of_model", "eog_bias") if k in options}
    if "seed_of_model" in target:
        target["seed"] = target.pop("seed_of_model")
    return Answer(engine(None, **target), prompt, n_draft=0, **options)


DRAFTERS = ["perfect", "useless", "adversarial"]


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("n_draft", range(8))
def test_greedy_words_are_the_targets(draft: str, n_draft: int) -> None:
    answer = Answer(engine(draft), n_draft=n_draft)
    assert answer.tokens == plain().tokens
    assert all(one.n_drafted <= n_draft for one in answer.rounds)


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 4},
        {"temperature": 1.5, "seed": 1, "top_k": 0, "min_p": 0.0},
        {"temperature": 1.0, "seed": 2, "repeat_penalty": 1.3, "frequency_penalty": 0.4, "penalty_last_n": 5},
        {"repeat_penalty": 2.0, "penalty_last_n": 9},
    ],
    ids=repr,
)
def test_a_seed_gives_the_same_words_with_and_without_drafter(draft: str, sampling: dict[str, Any]) -> None:
    assert Answer(engine(draft), **sampling).tokens == plain(**sampling).tokens


def test_a_perfect_drafter_fills_every_round() -> None:
    answer = Answer(engine("perfect"), max_tokens=64)
    assert [len(one.tokens) for one in answer.rounds] == [8] * 8
    assert [one.n_accepted for one in answer.rounds] == [7] * 8


def test_a_useless_drafter_costs_rounds_not_words() -> None:
    answer = Answer(engine("useless"), max_tokens=20)
    assert [(len(one.tokens), one.n_accepted, one.n_drafted) for one in answer.rounds] == [(1, 0, 7)] * 20


def test_an_adversary_is_accepted_in_part() -> None:
    answer = Answer(engine("adversarial"), max_tokens=120)
    assert len({one.n_accepted for one in answer.rounds}) >= 5


def test_without_drafter_nothing_is_drafted() -> None:
    answer = plain()
    assert all(one.n_drafted == 0 and len(one.tokens) == 1 for one in answer.rounds)


def test_a_path_may_be_shorter_than_the_pool_or_empty() -> None:
    """What select leaves out is not verified; the drafter's memory keeps up all the same."""
    for keep in (0, 1, 3):
        answer = Answer(engine("perfect"), select=lambda pool, keep=keep: paths.greedy(pool).head(keep))
        assert answer.tokens == plain().tokens
        assert {one.n_drafted for one in answer.rounds} == {keep}


def test_a_path_may_leave_the_pool() -> None:
    def select(pool: Lattice) -> paths.Chain:
        return paths.Chain([23] * len(pool), [1.0] * len(pool))

    assert Answer(engine("perfect"), select=select).tokens == plain().tokens


# --- how an answer ends


def test_max_tokens_cuts_a_round_short_and_both_memories_with_it() -> None:
    for limit in range(1, 18):
        answer = Answer(engine("perfect"), max_tokens=limit)
        assert len(answer.tokens) == limit
        assert answer.text.finish_reason == "length"
        assert answer.tokens == plain(max_tokens=limit).tokens


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("seed", range(8))
def test_an_end_of_generation_token_ends_even_in_the_middle_of_a_draft(draft: str, seed: int) -> None:
    model = {"seed": seed, "eog_bias": 0.5}
    answer = Answer(engine(draft, **model), max_tokens=None)
    assert answer.tokens == plain(max_tokens=None, seed_of_model=seed, eog_bias=0.5).tokens
    assert answer.tokens.index(EOG) == len(answer.tokens) - 1
    assert answer.text.finish_reason == "stop"


def test_an_answer_can_end_before_the_end_of_an_accepted_draft() -> None:
    """The case that needs clipping before the rollback: more was matched than may be kept."""
    clipped = 0
    for seed in range(8):
        answer = Answer(engine("perfect", seed=seed, eog_bias=0.5), max_tokens=None)
        clipped += answer.rounds[-1].n_accepted == len(answer.rounds[-1].tokens)
    assert clipped


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("start", range(0, 24, 3))
def test_a_stop_string_ends_there_with_and_without_drafter(draft: str, width: int, start: int) -> None:
    words = "".join(letters().piece(token).decode() for token in plain().tokens)
    stop = words[start : start + width]
    answer, bare = Answer(engine(draft), stop=(stop,)), plain(stop=(stop,))
    assert answer.tokens == bare.tokens
    assert answer.text.text() == bare.text.text() == words[: words.index(stop)]
    assert answer.text.finish_reason == "stop"


@pytest.mark.parametrize("draft", [*DRAFTERS, None])
@pytest.mark.parametrize("n_ctx", range(7, 31))
def test_a_full_context_ends_the_answer_at_its_last_token(draft: str | None, n_ctx: int) -> None:
    answer = Answer(engine(draft, n_ctx=n_ctx), max_tokens=None)
    assert answer.tokens == plain(max_tokens=100).tokens[: len(answer.tokens)]
    assert len(answer.pair.target.memory) == n_ctx
    assert len(answer.pair.tokens) == n_ctx + 1
    assert answer.text.finish_reason is None


# --- the prompt, and what is still in memory


def test_a_long_prompt_is_read_in_chunks_and_injected_whole() -> None:
    prompt = [1 + i % 20 for i in range(2 * N_BATCH + 37)]
    pair, seen = engine("perfect", n_ctx=2000), []
    prefill = pair.start(prompt, spec=True, progress=lambda done, of: seen.append((done, of)))
    check_memories(pair, spec=True)
    n = len(prompt) - 1
    assert seen == [(N_BATCH, n), (2 * N_BATCH, n), (n, n)]
    assert (prefill.n_cached, prefill.n) == (0, n)
    assert pair.target.calls["prefill"] == 3


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    answer = Answer(engine("adversarial"), [4])
    assert answer.pair.target.calls["prefill"] == 0
    assert answer.tokens == plain([4]).tokens


@pytest.mark.parametrize("draft", [*DRAFTERS, None])
def test_the_next_turn_reads_only_what_is_new(draft: str | None) -> None:
    pair = engine(draft)
    first = Answer(pair)
    new = [7, 7, 1]
    n_read, n_injected = pair.target.n_read, pair.drafter.n_injected if pair.drafter else 0
    second = PROMPT + first.tokens + new
    prefill = pair.start(second, spec=draft is not None)
    assert (prefill.n_cached, prefill.n) == (len(PROMPT + first.tokens) - 1, len(new))
    assert pair.target.n_read == n_read + len(new)
    if pair.drafter:
        assert pair.drafter.n_injected == n_injected + len(new)
    assert Answer(pair, second).tokens == plain(second).tokens


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(
    "prompt",
    [PROMPT, PROMPT[:3], [*PROMPT[:4], 1, 1, 1], [1], [*PROMPT, 9, 9], PROMPT[:1]],
    ids=["same", "shorter", "branching", "other", "longer", "one"],
)
def test_any_next_prompt_gives_the_words_of_a_fresh_start(draft: str, recurrent: bool, prompt: list[int]) -> None:
    pair = engine(draft, recurrent=recurrent)
    Answer(pair)
    again = Answer(pair, prompt)
    assert again.tokens == plain(prompt).tokens
    if recurrent:
        assert again.prefill.n_cached == 0


def test_a_repeated_prompt_is_not_read_again() -> None:
    pair = engine("perfect")
    Answer(pair)
    prefill = pair.start(PROMPT, spec=True)
    assert (prefill.n_cached, prefill.n) == (len(PROMPT) - 1, 0)


def test_plain_and_drafted_answers_take_turns() -> None:
    """A plain answer leaves the drafter behind; the next drafted one reads again what it missed."""
    pair, prompt = engine("perfect"), PROMPT
    for n_draft in (0, 7, 0, 0, 7, 3):
        answer = Answer(pair, prompt, n_draft=n_draft, max_tokens=9)
        assert answer.tokens == plain(prompt, max_tokens=9).tokens
        assert (pair.drafter.n_past == pair.target.n_past) == (n_draft > 0)
        prompt = [*prompt, *answer.tokens, 6]


# --- interrupts

POINTS = [
    ("target", "prefill", False),
    ("target", "prefill", True),
    ("target", "verify", False),
    ("target", "verify", True),
    ("target", "commit", False),
    ("target", "commit", True),
    ("drafter", "draft", False),
    ("drafter", "draft", True),
    ("drafter", "inject", False),
    ("drafter", "inject", True),
]


@pytest.mark.parametrize(("who", "method", "after"), POINTS)
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupt_anywhere_costs_the_memory_at_most(
    who: str, method: str, after: bool, recurrent: bool, call: int
) -> None:
    pair = engine("adversarial", recurrent=recurrent)
    getattr(pair, who).faults.at(method, after=after, call=1 if method == "prefill" else call)
    with pytest.raises(KeyboardInterrupt):
        Answer(pair)
    assert Answer(pair).tokens == plain().tokens
    longer = [*PROMPT, 1, 2]
    assert Answer(pair, longer).tokens == plain(longer).tokens


@pytest.mark.parametrize("where", ["rewind", "drafter rewind"])
def test_an_interrupt_while_going_back(where: str) -> None:
    pair = engine("perfect")
    Answer(pair)
    (pair.target if where == "rewind" else pair.drafter).faults.at(where, after=True)
    with pytest.raises(KeyboardInterrupt):
        pair.start(PROMPT, spec=True)
    assert Answer(pair).tokens == plain().tokens


@pytest.mark.parametrize("where", ["select", "clip", "choose", "progress"])
def test_an_interrupt_in_pythons_part_of_a_step(where: str) -> None:
    pair = engine("perfect")
    Answer(pair, max_tokens=10)

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    sampler, text = Sampler(SamplingParams()), TextStream(letters(), Limits(20))
    if where == "choose":
        sampler.choose = interrupt  # type: ignore[method-assign]
    select = interrupt if where == "select" else paths.greedy
    clip = interrupt if where == "clip" else text.clip

    def step() -> None:
        pair.start([*PROMPT, 1, 2], spec=True, progress=interrupt if where == "progress" else None)
        pair.round(Fixed(7, lambda pool, _: select(pool)), sampler, clip)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert Answer(pair).tokens == plain().tokens


def test_an_answer_left_between_rounds_keeps_the_memory() -> None:
    pair = engine("perfect")
    text = TextStream(letters(), Limits(60))
    pair.start(PROMPT, spec=True)
    rounds = generate(
        pair, plan=Fixed(7, lambda pool, _: paths.greedy(pool)), sampler=Sampler(SamplingParams()), clip=text.clip
    )
    said = [*next(rounds).tokens, *next(rounds).tokens]
    rounds.close()
    check_memories(pair, spec=True)
    longer = [*PROMPT, *said, 4]
    assert pair.start(longer, spec=True).n_cached == len(longer) - 2


def test_a_new_answer_ends_the_old_one() -> None:
    """Both would write into the same memory; the older one must not go on with the other's tokens."""
    pair = engine("perfect")

    def answer() -> Iterator[Round]:
        text = TextStream(letters(), Limits(60))
        return generate(
            pair, plan=Fixed(7, lambda pool, _: paths.greedy(pool)), sampler=Sampler(SamplingParams()), clip=text.clip
        )

    pair.start(PROMPT, spec=True)
    old = answer()
    next(old)
    pair.start([4, 4, 4], spec=True)
    new = answer()
    next(new)
    with pytest.raises(OptionError, match="another answer"):
        next(old)
    next(new)
    check_memories(pair, spec=True)


def test_the_toy_model_is_no_constant() -> None:
    assert len(set(plain().tokens)) > 10
    assert fakes.logits([1, 2, 3]).tolist() == fakes.logits([9, 1, 2, 3]).tolist()


class Resting(Fixed):
    """Drafts in one round of `every`, as a planner that parks and probes."""

    def __init__(self, every: int) -> None:
        super().__init__(7, lambda pool, _: paths.greedy(pool))
        self.every, self.n = every, 0

    def propose(self, tokens: Any, room: int) -> FixedProposal:
        return super().propose(tokens, room if self.n % self.every == 0 else 0)

    def learn(self, choice: Any, round: Any) -> None:
        self.n += 1


@pytest.mark.parametrize("every", [2, 5, 100])
def test_features_of_rounds_without_a_draft_are_injected_before_the_next(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.engine.generate.N_WAIT", 64)
    pair = engine("perfect")
    text = TextStream(letters(), Limits(max_tokens=150))
    pair.start(PROMPT, spec=True)
    plan, rounds = Resting(every), []
    for one in generate(pair, plan=plan, sampler=Sampler(SamplingParams()), clip=text.clip):
        rounds.append(one)
        assert pair.target.n_past - pair.drafter.n_past <= min(every, 64)
    assert [token for one in rounds for token in one.tokens] == plain(max_tokens=150).tokens
    assert sum(one.n_accepted == 7 for one in rounds) > 1  # what was injected late was right
    again = pair.start([*pair.tokens, 3], spec=True)
    assert again.n <= 1
    assert pair.drafter.n_past == pair.target.n_past


def test_features_that_wait_for_another_text_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = engine("perfect")
    text = TextStream(letters(), Limits(max_tokens=30))
    pair.start(PROMPT, spec=True)
    list(generate(pair, plan=Fixed(), sampler=Sampler(SamplingParams()), clip=text.clip))
    behind = pair.target.n_past - pair.drafter.n_past
    assert behind >= 29
    injected, inject = [], pair.drafter.inject
    monkeypatch.setattr(pair.drafter, "inject", lambda rows: (injected.append(len(rows)), inject(rows)))
    pair.start([*PROMPT, *pair.tokens[len(PROMPT) : len(PROMPT) + 5], 3, 3], spec=True)
    assert sum(injected) < 10, "the five tokens both texts have in common, and the rest of the prompt"
    check_memories(pair, spec=True)

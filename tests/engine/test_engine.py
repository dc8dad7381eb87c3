"""Pairs on real llama.cpp: the words are the target's own, whatever is drafted, and both memories stay true.

Good tiny drafters are accepted about every second time; where more is wanted of rollback and injection, `select` hands
over the plain answer with random errors in it (an oracle), so that every number of accepted tokens occurs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from localspec.answer import Result
from localspec.engine import paths
from localspec.engine.generate import generate
from localspec.engine.lattice import Lattice
from localspec.engine.plan import Fixed
from localspec.engine.sampling import Sampler, SamplingParams, distribution
from localspec.errors import OptionError
from localspec.llama.binding import C
from localspec.loading.open import open_pair
from localspec.pair import Pair
from localspec.text import Limits, TextStream

PROMPT = "the user is in the sea and the sand is in his hand"
N_TOKENS = 60
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, DFlash 1": ("llama", {"version": 1}),
    "llama, reduced vocabulary": ("llama", {"n_kept_vocab": 40}),
    "llama, DFlash 1, reduced vocabulary": ("llama", {"version": 1, "n_kept_vocab": 40}),
    "llama, own embeddings": ("llama", {"own_embeddings": True}),
    "llama, M-RoPE": ("llama", {"mrope": True}),
    "llama, sliding window": ("llama", {"sliding_window": 16}),
    "llama, causal": ("llama", {"causal": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, DFlash 1": ("qwen3", {"version": 1}),
    "qwen35": ("qwen35", {}),
    "qwen35, DFlash 1": ("qwen35", {"version": 1}),
    "qwen35, M-RoPE": ("qwen35", {"mrope": True}),
}
RANDOM = {name: (arch, options | {"good": False}) for name, (arch, options) in GOOD.items()} | {
    "llama, block of 5, 2 layers": ("llama", {"good": False, "block_size": 5, "n_layer": 2, "target_layers": [0, 2, 3]})
}


def opened(folder: Path, arch: str, drafter: dict[str, Any] | None, *, n_ctx: int = 512, **target: Any) -> Pair:
    speaker = tiny.write_target(folder / "target.gguf", arch, **target)
    helper = None if drafter is None else tiny.write_drafter(folder / "drafter.gguf", speaker, **drafter)
    pair = open_pair(speaker, helper, n_ctx=n_ctx, n_threads=1)
    pair.path = "greedy"  # all of it: a planner would often rest here
    return pair


@pytest.fixture(scope="module", params=GOOD.values(), ids=list(GOOD))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    arch, drafter = request.param
    with opened(tmp_path_factory.mktemp("pair"), arch, drafter) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=RANDOM.values(), ids=list(RANDOM))
def random_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    arch, drafter = request.param
    with opened(tmp_path_factory.mktemp("pair"), arch, drafter) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def chatty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """An attention and a hybrid pair whose answers end by themselves now and then."""
    with opened(tmp_path_factory.mktemp("pair"), request.param, {}, eog_bias=3.0) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def steady(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """An attention and a hybrid pair whose answers never end by themselves."""
    with opened(tmp_path_factory.mktemp("pair"), request.param, {}) as loaded:
        yield loaded


# --- the same words


def plain_row(pair: Pair, ids: list[int]) -> np.ndarray:
    """The plain decoder's logits after `ids`."""
    pair.engine.target.forget()
    pair.engine.tokens = []
    pair.engine.start(ids, spec=False)
    row = pair.engine.target.verify(ids[-1], paths.NOTHING)[0].copy()
    pair.engine.target.forget()
    pair.engine.tokens = []
    return row


def assert_same(pair: Pair, prompt: list[int], plain: list[int], spec: list[int], **sampling: Any) -> None:
    """Token for token, or parted at a near-tie: two logits within 1e-2, a drawn number within 1e-3 of a border."""
    if plain == spec:
        return
    at = next(i for i, (a, b) in enumerate(itertools.zip_longest(plain, spec)) if a != b)
    row = plain_row(pair, prompt + plain[:at])
    if sampling:
        params = SamplingParams(**sampling)
        drawn = np.random.default_rng(params.seed).random(at + 1)[-1]
        upto = distribution(row, params)[1].cumsum()
        assert abs(upto - drawn).min() < 1e-3, f"token {at} differs: {plain[at:][:3]} and {spec[at:][:3]}"
        return
    second, first = np.argsort(row)[-2:].tolist()
    print(f"token {at}: plain {plain[at]}, drafted {spec[at]}; two best {first}: {row[first]}, {second}: {row[second]}")
    assert {plain[at], spec[at]} == {first, second}
    assert row[first] - row[second] <= 1e-2 * max(abs(row[first]), abs(row[second]))


@pytest.mark.parametrize("draft_max", range(8))
def test_greedy_words_are_those_of_plain_decoding(pair: Pair, draft_max: int) -> None:
    ids = pair.encode(PROMPT)
    plain = pair.generate(ids, max_tokens=N_TOKENS, spec=False)
    spec = pair.generate(ids, max_tokens=N_TOKENS, draft_max=draft_max)
    assert_same(pair, ids, plain.tokens, spec.tokens)
    assert plain.stats.draft_n == 0
    assert plain.stats.n_rounds == N_TOKENS
    assert len(spec.stats.drafted_per_slot) == draft_max
    if draft_max >= 3:
        assert spec.stats.acceptance_length > 1.3


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_gives_the_words_of_plain_decoding(pair: Pair, seed: int) -> None:
    ids, sampling = pair.encode(PROMPT), {"temperature": 0.8, "seed": seed}
    plain, spec = (pair.generate(ids, max_tokens=N_TOKENS, spec=spec, **sampling) for spec in (False, True))
    assert_same(pair, ids, plain.tokens, spec.tokens, **sampling)
    assert spec.stats.draft_n_accepted > 0
    assert plain.tokens != pair.generate(ids, max_tokens=N_TOKENS, spec=False).tokens


def test_penalties_see_the_same_history(pair: Pair) -> None:
    ids, options = pair.encode(PROMPT), {"repeat_penalty": 1.3, "frequency_penalty": 0.3, "penalty_last_n": 12}
    plain, spec = (pair.generate(ids, max_tokens=N_TOKENS, spec=spec, **options) for spec in (False, True))
    assert plain.tokens == spec.tokens
    assert plain.tokens != pair.generate(ids, max_tokens=N_TOKENS, spec=False).tokens


def test_a_hopeless_drafter_changes_nothing(random_pair: Pair) -> None:
    ids = random_pair.encode(PROMPT)
    plain = random_pair.generate(ids, max_tokens=N_TOKENS, spec=False)
    spec = random_pair.generate(ids, max_tokens=N_TOKENS)
    assert_same(random_pair, ids, plain.tokens, spec.tokens)
    assert spec.stats.accepted_share < 0.2


# --- true memories


class Oracle:
    """A `select` that knows the plain answer and errs at random slots."""

    def __init__(self, pair: Pair, prompt: list[int], plain: list[int], error: float) -> None:
        self.engine, self.n_prompt, self.plain, self.error = pair.engine, len(prompt), plain, error
        self._rng = np.random.default_rng(3)

    def __call__(self, pool: Lattice) -> paths.Chain:
        start = len(self.engine.tokens) - self.n_prompt
        path = self.plain[start : start + len(pool)]
        wrong = self._rng.random(len(path)) < self.error
        tokens = [(t + 1) % 256 if bad else t for t, bad in zip(path, wrong, strict=True)]
        return paths.Chain(tokens, [1.0] * len(tokens))


def last_position(context: Any) -> int:
    return int(C.llama_memory_seq_pos_max(context._memory, 0))


def rounds_of(pair: Pair, prompt: list[int], select: Any, n: int) -> Iterator[Any]:
    pair.engine.start(prompt, spec=True)
    clip = TextStream(pair.vocab, Limits(n)).clip
    n_draft = pair.block_size - 1
    for one in generate(
        pair.engine, plan=Fixed(n_draft, lambda pool, _: select(pool)), sampler=Sampler(SamplingParams()), clip=clip
    ):
        engine = pair.engine
        engine._inject_pending()  # what a full context leaves for later
        assert engine.drafter is not None
        assert engine.target.n_past == engine.drafter.n_past == len(engine.tokens) - 1
        assert last_position(engine.target.context) == last_position(engine.drafter.context) == len(engine.tokens) - 2
        yield one


def state(pair: Pair) -> tuple[np.ndarray, Lattice]:
    """What target and drafter make of their memories: the next logits and the next pool."""
    engine = pair.engine
    assert engine.drafter is not None
    pool = engine.drafter.draft(engine.tokens[-1], pair.block_size - 1)
    return engine.target.verify(engine.tokens[-1], paths.NOTHING)[0].copy(), pool


def distance(one: Lattice, two: Lattice) -> float:
    """How far two pools are apart: the largest difference of a score that both have, in spreads of the scores.

    1 or more where a slot has fewer than 12 of 16 candidates in common.
    """
    found, before = 0.0, (np.arange(one.ids.shape[1]),) * 2  # indices of the common predecessors in both
    for slot in range(len(one)):
        _, *common = np.intersect1d(one.ids[slot], two.ids[slot], return_indices=True)
        if len(common[0]) < 12:
            return 1.0
        a, b = (
            pool.scores[slot][np.ix_(pred, cand)] for pool, pred, cand in zip((one, two), before, common, strict=True)
        )
        found, before = max(found, float(abs(a - b).max() / one.scores.std())), tuple(common)
    return found


def fresh_state(pair: Pair, tokens: list[int]) -> tuple[np.ndarray, Lattice]:
    """The same after reading all tokens anew."""
    engine = pair.engine
    assert engine.drafter is not None
    engine.target.forget()
    engine.drafter.forget()
    engine.tokens = []
    engine.start(tokens, spec=True)
    return state(pair)


def assert_same_state(pair: Pair) -> None:
    """The memories grown round by round equal memories that read the whole text at once."""
    tokens = list(pair.engine.tokens)
    row, pool = state(pair)
    expected_row, expected = fresh_state(pair, tokens)
    pair.engine.target.forget()
    pair.engine.tokens = []
    print("state", abs(row - expected_row).max(), distance(pool, expected))
    np.testing.assert_allclose(row, expected_row, atol=0.05)  # keys and values are stored in 16 bits
    assert distance(pool, expected) < 0.1


def test_rollback_and_injection_after_any_number_of_accepted_tokens(random_pair: Pair) -> None:
    pair, prompt = random_pair, random_pair.encode(PROMPT)
    plain = pair.generate(prompt, max_tokens=200, spec=False).tokens
    rounds = list(rounds_of(pair, prompt, Oracle(pair, prompt, plain, error=0.15), 200))
    said = [token for one in rounds for token in one.tokens]
    assert_same(pair, prompt, plain, said)
    assert {one.n_accepted for one in rounds} == set(range(pair.block_size))
    list(rounds_of(pair, prompt, Oracle(pair, prompt, plain, error=0.15), 137))
    assert_same_state(pair)


def test_a_perfect_oracle_fills_every_round(random_pair: Pair) -> None:
    pair, prompt = random_pair, random_pair.encode(PROMPT)
    n = 6 * pair.block_size
    plain = pair.generate(prompt, max_tokens=n + 8, spec=False).tokens
    rounds = list(rounds_of(pair, prompt, Oracle(pair, prompt, plain, error=0.0), n))
    assert [len(one.tokens) for one in rounds] == [pair.block_size] * 6
    assert_same_state(pair)


def test_the_pool_depends_on_what_was_injected(random_pair: Pair) -> None:
    """Else the comparisons of states would prove nothing."""
    one, two = (random_pair.encode(text) for text in ("the user is in the sea", "a cat sat on his old hat, so"))
    n = min(len(one), len(two))
    first, second = (fresh_state(random_pair, ids[: n - 1] + one[-1:])[1] for ids in (one, two))
    assert distance(first, second) > 0.3


def test_a_sliding_window_forgets_nothing_that_a_draft_still_needs(tmp_path: Path) -> None:
    """More tokens than llama.cpp's window cache has cells, so that it would write over the oldest."""
    with opened(tmp_path, "llama", {"good": False, "sliding_window": 16}) as pair:
        prompt = pair.encode(PROMPT)
        plain = pair.generate(prompt, max_tokens=430, spec=False).tokens
        for n in range(395, 425, 6):
            list(rounds_of(pair, prompt, Oracle(pair, prompt, plain, error=0.15), n))
            tokens = list(pair.engine.tokens)
            assert_same_state(pair)
            pair.engine.start(tokens, spec=True)
            known = n // 2 - 1
            n_cached = pair.engine.start(tokens[: n // 2], spec=True).n_cached
            assert n_cached == known - known % pair.engine.reading.block
            assert_same_state(pair)


def pool_after(pair: Pair, n_slots: int) -> Lattice:
    pair.engine.start(pair.encode(PROMPT), spec=True)
    assert pair.engine.drafter is not None
    return pair.engine.drafter.draft(pair.engine.tokens[-1], n_slots)


@pytest.mark.parametrize("causal", [None, False, True])
def test_a_block_looks_ahead_unless_its_file_says_causal(tmp_path: Path, causal: bool | None) -> None:
    with opened(tmp_path, "llama", {"good": False, "causal": causal}) as pair:
        short, whole = pool_after(pair, 1), pool_after(pair, 7)
        first = Lattice(whole.ids[:1], whole.scores[:1])
        assert (distance(short, first) < 0.01) == bool(causal)


def test_m_rope_at_equal_positions_is_plain_rope(tmp_path: Path) -> None:
    """All sections in use, which published drafters do not have, show that every row of positions is right."""
    sections = {"dflash.rope.dimension_sections": [6, 5, 5, 0]}
    options: list[dict[str, Any]] = [{}, {"mrope": True}, {"mrope": True, "overrides": sections}]
    pools = []
    for i, option in enumerate(options):
        folder = tmp_path / str(i)
        folder.mkdir()
        with opened(folder, "llama", {"good": False} | option) as pair:
            assert pair.engine.drafter is not None
            assert pair.engine.drafter.model.n_pos == (4 if option else 1)
            pools.append(pool_after(pair, 7))
    assert distance(pools[0], pools[1]) < 0.01
    assert distance(pools[0], pools[2]) < 0.01


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_prompt_of_many_chunks(tmp_path: Path, arch: str) -> None:
    """1,300 tokens: three target batches, eleven injections; read in two pieces they give the same memories."""
    with opened(tmp_path, arch, {"good": False}, n_ctx=1500) as pair:
        letters = tiny.letter_ids()
        ids = [letters[i * i % 13] for i in range(1300)]
        pair.engine.start(ids[:337], spec=True)
        assert pair.engine.start(ids, spec=True).n_cached == 336
        assert_same_state(pair)


def test_a_full_context_ends_every_answer_at_the_same_token(pair: Pair) -> None:
    ids = [*pair.encode(PROMPT) * 20][: 512 - 21]
    plain, spec = (pair.generate(ids, spec=spec) for spec in (False, True))
    assert plain.finish_reason == spec.finish_reason == "context"
    assert len(plain.tokens) == 22
    assert_same(pair, ids, plain.tokens, spec.tokens)
    assert pair.generate(ids[:50], max_tokens=5).finish_reason == "length"


# --- conversations


def read_again(pair: Pair, result: Result) -> tuple[int, int]:
    """Tokens of the prompt that were read, and those that were still in memory."""
    return result.stats.prompt_n, result.stats.cached_n


def test_a_second_turn_reads_only_its_new_tokens_in_both_memories(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = pair.chat(system="be the sea")
    first = chat.send("the sea", max_tokens=30)
    in_memory = len(pair.engine.tokens) - 1
    injected: list[int] = []
    inject = pair.engine.drafter.inject
    monkeypatch.setattr(pair.engine.drafter, "inject", lambda rows: (injected.append(len(rows)), inject(rows))[1])
    second = chat.send("and the sand", max_tokens=30)
    new = pair.vocab.tokenize(
        "<|im_end|>\n<|im_start|>user\nand the sand<|im_end|>\n<|im_start|>assistant\n", parse_special=True
    )
    assert first.finish_reason == "length"
    assert read_again(pair, second) == (1 + len(new), in_memory)  # the last word had not been read yet
    assert sum(injected) == len(new) + 30
    monkeypatch.undo()
    again = pair.chat(system="be the sea")
    for text, result in (("the sea", first), ("and the sand", second)):
        assert_same(pair, pair.encode(PROMPT), result.tokens, again.send(text, max_tokens=30, spec=False).tokens)


def test_an_answer_that_ends_by_itself_is_not_read_again_either(chatty: Pair) -> None:
    chat = chatty.chat()
    first = next(r for text in map(str, range(30)) if (r := chat.send(text, max_tokens=40)).finish_reason == "stop")
    assert chatty.vocab.is_eog(first.tokens[-1])
    in_memory = len(chatty.engine.tokens) - 1
    second = chat.send("the sand", max_tokens=10)
    assert second.stats.cached_n == in_memory


def test_undo_and_retry_give_the_same_answer(chatty: Pair) -> None:
    chat = chatty.chat(system="be the sea")
    chat.send("the sea", max_tokens=20)
    kept = list(chat.messages)
    first = chat.send("and the sand", max_tokens=20)
    for _ in range(2):
        assert chat.undo() == "and the sand"
        assert chat.messages == kept
        again = chat.send("and the sand", max_tokens=20)
        assert again.tokens == first.tokens
    if not chatty.engine.target.model.is_recurrent:
        assert read_again(chatty, again)[0] == 1  # only the anchor
    chat.undo()
    other = chat.send("and the land", max_tokens=20)
    fresh = chatty.chat(system="be the sea")
    fresh.send("the sea", max_tokens=20, spec=False)
    assert fresh.send("and the land", max_tokens=20, spec=False).tokens == other.tokens


def test_clear_begins_again(chatty: Pair) -> None:
    chat = chatty.chat(system="be the sea")
    first = chat.send("the sea", max_tokens=20)
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "be the sea"}]
    assert chat.send("the sea", max_tokens=20).tokens == first.tokens


def test_undo_without_a_turn_is_refused(chatty: Pair) -> None:
    with pytest.raises(Exception, match="no turn"):
        chatty.chat().undo()


def test_a_stop_string_leaves_the_conversation_without_it(steady: Pair) -> None:
    """What the user does not see, the model does not read in the next turn."""
    whole = steady.chat().send("the sea", max_tokens=30).text
    stop = whole[7:11]
    chat = steady.chat()
    cut = chat.send("the sea", max_tokens=30, stop=stop)
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    after = chat.send("and", max_tokens=10)
    assert chat.messages[1]["content"] == cut.text
    read = steady.engine.tokens[: -len(after.tokens)]
    assert (
        b"".join(map(steady.vocab.piece, read)).decode()
        == f"user\nthe sea\nassistant\n{cut.text}\nuser\nand\nassistant\n"
    )
    assert after.stats.cached_n > 0 or steady.engine.target.model.is_recurrent or steady.engine.reading.block > 1


# --- streams and interrupts


def test_a_stream_adds_up_to_the_answer(pair: Pair) -> None:
    whole = pair.generate(PROMPT, max_tokens=N_TOKENS)
    stream = pair.stream(PROMPT, max_tokens=N_TOKENS)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text == whole.text
    assert [token for chunk in chunks for token in chunk.tokens] == stream.result.tokens == whole.tokens
    assert sum(sum(chunk.drafted) for chunk in chunks) == stream.result.stats.draft_n_accepted
    assert all(len(chunk.drafted) == len(chunk.tokens) for chunk in chunks)
    assert len(chunks) == stream.result.stats.n_rounds < N_TOKENS


def test_a_stream_closed_early_keeps_what_was_said(pair: Pair) -> None:
    whole = pair.generate(PROMPT, max_tokens=N_TOKENS)
    stream = pair.stream(PROMPT, max_tokens=N_TOKENS)
    chunks = list(itertools.islice(stream, 5))
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.tokens == [token for chunk in chunks for token in chunk.tokens]
    assert whole.text.startswith(stream.result.text)
    assert pair.generate(PROMPT, max_tokens=N_TOKENS).tokens == whole.tokens


@pytest.mark.parametrize("where", ["verify", "commit", "features", "draft", "inject", "prefill"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_in_the_middle_of_a_step(
    steady: Pair, where: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = steady.encode(PROMPT)
    plain = steady.generate(ids, max_tokens=20, spec=False).tokens
    owner = steady.engine.drafter if where in ("draft", "inject") else steady.engine.target
    real, calls = getattr(owner, where), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        due = next(calls) == (1 if where == "prefill" else 3)
        if due and not after:
            raise KeyboardInterrupt
        out = real(*args)
        if due:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(owner, where, interrupted)
    longer = [*ids, *plain[:3], 65, 66]
    with pytest.raises(KeyboardInterrupt):
        steady.generate(longer, max_tokens=20)
    monkeypatch.undo()
    assert steady.generate(ids, max_tokens=20).tokens == plain
    assert_same_state_of(steady, ids, plain)


def test_an_interrupt_inside_the_first_injection(steady: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp has read the rows, the drafter does not know yet: only forgetting all is safe."""
    engine = steady.engine
    assert engine.drafter is not None
    ids = steady.encode(PROMPT)
    plain = steady.generate(ids, max_tokens=20, spec=False).tokens
    engine.start([1], spec=True)
    context, real = engine.drafter.context, engine.drafter.context.decode_rows

    def interrupted(rows: np.ndarray, pos: int) -> None:
        real(rows, pos)
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "decode_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        steady.generate(ids)
    monkeypatch.undo()
    assert steady.generate(ids, max_tokens=20).tokens == plain
    assert_same_state_of(steady, ids, plain)


def assert_same_state_of(pair: Pair, ids: list[int], plain: list[int]) -> None:
    assert pair.engine.tokens == ids + plain
    assert_same_state(pair)


def test_ctrl_c_in_a_chat_keeps_the_answer_so_far(chatty: Pair) -> None:
    chat = chatty.chat()
    stream = chat.stream("the sea", max_tokens=40)
    chunks = list(itertools.islice(stream, 4))
    stream.close()
    said = "".join(chunk.text for chunk in chunks)
    assert chat.messages == [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": said}]
    again = chat.send("and", max_tokens=5)
    assert again.stats.cached_n >= stream.result.stats.predicted_n


def test_a_second_stream_ends_the_first(pair: Pair) -> None:
    old, new = pair.stream(PROMPT, max_tokens=30), pair.stream("the sand", max_tokens=30)
    next(iter(old))
    next(iter(new))
    with pytest.raises(Exception, match="another answer"):
        next(iter(old))
    assert len(list(new)) > 1


# --- options and endings


@pytest.mark.parametrize(
    "options",
    [
        {"temperatur": 0.5},
        {"temperature": -1},
        {"top_k": 1.5},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": [3]},
        {"draft_max": 8},
        {"draft_max": -1},
        {"grammar": "x"},
        {"seed": -5},
    ],
    ids=repr,
)
def test_an_option_that_cannot_be_honoured_is_an_error(chatty: Pair, options: dict[str, Any]) -> None:
    from localspec.errors import OptionError

    with pytest.raises(OptionError):
        chatty.generate(PROMPT, **options)


@pytest.mark.parametrize(
    "prompt", [[], [-1], [320], [0] * 600, [{"role": "user"}], [1, {"role": "user", "content": "x"}]]
)
def test_a_prompt_that_cannot_be_read_is_an_error(chatty: Pair, prompt: Any) -> None:
    from localspec.errors import OptionError

    with pytest.raises(OptionError):
        chatty.generate(prompt)


def test_a_target_alone_decodes_plainly(tmp_path: Path) -> None:
    for arch in ("llama", "qwen2", "qwen35"):
        with opened(tmp_path, arch, None) as pair:
            result = pair.generate(PROMPT, max_tokens=10)
            assert (result.stats.draft_n, len(result.tokens), result.finish_reason) == (0, 10, "length")
            assert pair.generate(PROMPT, max_tokens=10, spec=False).tokens == result.tokens


def test_a_closed_pair_says_so(tmp_path: Path) -> None:
    from localspec.errors import BackendError

    pair = opened(tmp_path, "llama", {})
    ids = pair.encode(PROMPT)
    stream = pair.stream(ids, max_tokens=20)
    next(iter(stream))
    pair.close()
    pair.close()
    for use in (lambda: pair.encode("x"), lambda: pair.generate(ids), lambda: list(stream), lambda: pair.generate("x")):
        with pytest.raises(BackendError, match="closed"):
            use()


def test_greedy_paths_are_what_a_pair_selects(pair: Pair) -> None:
    pair.engine.start(pair.encode(PROMPT), spec=True)
    pool = pair.engine.drafter.draft(pair.engine.tokens[-1], 7)
    one, _ = pair.engine.round(
        Fixed(7, lambda *_: paths.greedy(pool)), Sampler(SamplingParams()), lambda e: (len(e), False)
    )
    assert one.n_drafted == 7


# --- trees


TREES = {name: GOOD[name] for name in ("llama", "llama, M-RoPE", "qwen3, DFlash 1")}


@pytest.fixture(scope="module", params=TREES.values(), ids=list(TREES))
def branching(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    arch, drafter = request.param
    with opened(tmp_path_factory.mktemp("pair"), arch, drafter) as loaded:
        assert loaded.engine.target.can_branch
        yield loaded


@pytest.mark.parametrize("n", [1, 2, 7, 16, 32])
def test_words_from_trees_are_those_of_plain_decoding(branching: Pair, n: int) -> None:
    ids = branching.encode(PROMPT)
    plain = branching.generate(ids, max_tokens=N_TOKENS, spec=False).tokens
    spec = branching.generate(ids, max_tokens=N_TOKENS, path="tree", draft_max=n)
    assert spec.tokens == plain
    assert spec.stats.draft_n >= (n - 1) * spec.stats.n_rounds / 2
    drawn = {"temperature": 1.1, "seed": 5}
    assert_same(
        branching,
        ids,
        branching.generate(ids, max_tokens=N_TOKENS, spec=False, **drawn).tokens,
        branching.generate(ids, max_tokens=N_TOKENS, path="tree", draft_max=n, **drawn).tokens,
        **drawn,
    )


def bushes(pair: Pair, prompt: list[int], plain: list[int], seed: int) -> Any:
    """Trees that hold the plain answer on a random branch, cut at a random depth, among wrong siblings."""
    rng = np.random.default_rng(seed)

    def select(pool: Lattice) -> paths.Tree:
        start = len(pair.engine.tokens) - len(prompt)
        tokens, parents, at = [], [], -1
        for token in plain[start : start + int(rng.integers(0, 6))]:
            for _ in range(int(rng.integers(0, 3))):
                tokens.append((token + 1 + int(rng.integers(100))) % 256)
                parents.append(at)
            tokens.append(token)
            parents.append(at)
            at = len(tokens) - 1
        if rng.random() < 0.5 and at >= 0:  # a younger sister of the first, with a child of her own
            tokens += [(tokens[0] + 101) % 256, 7]
            parents += [-1, len(parents)]
        return paths.Tree(tokens, parents, [0.5] * len(tokens))

    return select


@pytest.mark.parametrize("seed", range(4))
def test_memories_after_trees_are_those_after_chains(branching: Pair, seed: int) -> None:
    """Whatever branch wins, the next logits and the next pool are those of plain decoding.

    Not to the last bit: ggml's products of float32 weights depend on the batch (tests/test_default_pair.py has bits).
    """
    pair, ids = branching, branching.encode(PROMPT)
    plain = pair.generate(ids, max_tokens=60, spec=False).tokens
    n_buried = 0
    for _ in rounds_of(pair, ids, bushes(pair, ids, plain, seed), 60):
        n_buried = max(n_buried, pair.engine.target._n_buried)
    assert pair.engine.tokens[len(ids) :] == plain
    assert n_buried > 0, "no case in which rejected tokens lay before kept ones"
    logits, pool = state(pair)
    pair.engine.target.commit([0])
    expected_logits, expected_pool = after_plain(pair, ids, plain)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-3)
    assert distance(pool, expected_pool) < 0.02


def after_plain(pair: Pair, ids: list[int], plain: list[int]) -> tuple[np.ndarray, Lattice]:
    pair.engine.forget()
    for one in rounds_of(pair, ids, lambda _: paths.NOTHING, len(plain)):
        assert one.n_drafted == 0
    found = state(pair)
    pair.engine.target.commit([0])
    return found


def test_buried_cells_are_given_up_before_the_memory_overflows(tmp_path: Path) -> None:
    with opened(tmp_path, "llama", {}, n_ctx=128) as pair:
        ids = pair.encode(PROMPT)
        plain = pair.generate(ids, spec=False).tokens
        for _ in rounds_of(pair, ids, bushes(pair, ids, plain, 3), 500):
            target = pair.engine.target
            assert target.n_past + target._n_buried <= target.n_ctx
        assert len(pair.engine.tokens) == 129
        said = pair.engine.tokens[len(ids) :]
        assert_same(pair, ids, plain[: len(said)], said)


def test_a_hybrid_gets_chains(tmp_path: Path) -> None:
    with opened(tmp_path, "qwen35", {}) as pair:
        assert not pair.engine.target.can_branch
        ids = pair.encode(PROMPT)
        spec = pair.generate(ids, max_tokens=40, path="tree", draft_max=7)
        assert spec.tokens == pair.generate(ids, max_tokens=40, spec=False).tokens
        with pytest.raises(OptionError, match="at most 7"):
            pair.generate(ids, path="tree", draft_max=8)


def test_a_path_of_ones_own(branching: Pair) -> None:
    ids = branching.encode(PROMPT)
    spec = branching.generate(ids, max_tokens=30, path=lambda pool: paths.tree(pool, 9, max_leaves=4))
    assert spec.tokens == branching.generate(ids, max_tokens=30, spec=False).tokens
    for wrong, words in {
        "no list": (lambda pool: [1, 2], "must return a localspec.Chain or a localspec.Tree"),
        "no token": (lambda pool: paths.Chain([99999], [1.0]), "token 99999"),
        "no preorder": (lambda pool: paths.Tree([1, 2, 3, 4], [-1, 0, -1, 1], [1.0] * 4), "not in preorder"),
        "too long": (lambda pool: paths.Chain([1] * 40, [1.0] * 40), "32 at most"),
        "too wide": (lambda pool: paths.Tree(list(range(20)), [-1] * 20, [1.0] * 20), "20 leaves"),
        "no numbers": (lambda pool: paths.Chain(["a"], [1.0]), "no whole numbers"),
        "halves": (lambda pool: paths.Chain([1.5], [1.0]), "no whole numbers"),
        "nothing": (lambda pool: paths.Chain(None, [1.0]), "no whole numbers"),
        "fewer parents": (lambda pool: paths.Tree([5, 6, 7], [-1], [1.0] * 3), "1 parents"),
        "fewer chances": (lambda pool: paths.Tree([5, 6], [-1, -1], []), "0 probabilities"),
        "no q": (lambda pool: paths.Chain([5, 6], [1.0, 1.0], [1, 2]), "no list of candidates"),
        "crooked q": (lambda pool: paths.Chain([5], [1.0], [([1, 2], [0.5])]), "q for 1"),
        "fewer q": (lambda pool: paths.Chain([5, 6], [1.0, 1.0], []), "q for 0"),
    }.values():
        with pytest.raises(OptionError, match=words):
            branching.generate(ids, max_tokens=30, path=wrong)
    assert branching.generate(ids, max_tokens=30).tokens == spec.tokens
    numbers = branching.generate(
        ids, max_tokens=30, path=lambda pool: paths.Tree(*map(np.array, ([7, 8], [-1, 0], [0.5, 0.4])))
    )
    assert numbers.tokens == spec.tokens
    two = branching.generate(ids, max_tokens=30, path=paths.greedy, draft_max=2)
    assert two.tokens == spec.tokens
    assert len(two.stats.drafted_per_slot) == 2


def test_a_drawn_chain_is_matched_at_temperature_zero(branching: Pair) -> None:
    ids, rng = branching.encode(PROMPT), np.random.default_rng(0)

    def drawn(pool: Lattice) -> paths.Chain:
        return paths.sampled(pool, 4, lambda row: np.exp(row) / np.exp(row).sum(), rng)

    assert branching.generate(ids, max_tokens=30, path=drawn).tokens == (
        branching.generate(ids, max_tokens=30, spec=False).tokens
    )

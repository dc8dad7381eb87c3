"""Training a drafter: batches, objective, figures, and runs that go on where they stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from filelock import FileLock

from localspec.distill.export import export, provenance
from localspec.distill.meter import Meter
from localspec.distill.metrics import Picks, best_temperature, by_text, figures, join, judge
from localspec.distill.model import Drafter
from localspec.distill.objective import Head, aims, drawn, losses, position_weights
from localspec.distill.options import Options
from localspec.distill.start import Shape, TargetFile, fresh_drafter, inherit, kept_tokens, mask_token, tapped
from localspec.distill.store import NONE, ChatRecord, Data, Meta, Store, read
from localspec.distill.train import Trained, Trainer, schedule, train
from localspec.distill.windows import NO_LABEL, Batch, Sampler, anchors_of, split
from localspec.errors import MissingError, OptionError

N_VOCAB, N_EMBD, LAYERS = 320, 288, (1, 3)
SHAPE = Shape(n_layers=1, n_rows=40, block_size=5, selector_rank=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFile:
    return TargetFile(tiny.write_target(tmp_path_factory.mktemp("target") / "target.gguf"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Chats in which letters follow each other in a fixed order, and features that say which."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    letters = np.array(tiny.letter_ids())
    codes = rng.standard_normal((tiny.N_CODES, len(LAYERS) * N_EMBD))
    with Store(folder, Meta("tiny", "0" * 64, N_EMBD, LAYERS, N_VOCAB)) as store:
        for _ in range(60):
            n, code = int(rng.integers(20, 60)), int(rng.integers(tiny.N_CODES))
            steps = [code := tiny.next_code(code) for _ in range(n)]
            noise = 0.1 * rng.standard_normal((n, len(LAYERS) * N_EMBD))
            features = (codes[steps] + noise).astype(np.float16)
            store.append(letters[steps].astype(np.int32), features, np.full(n, NONE), [(0, 8)], [(8, n)])
    return read(folder)


def options(**changes: object) -> Options:
    defaults = Options(steps=4, n_windows=2, n_anchors=8, eval_batches=2, log_every=1, compile=False)
    return dataclasses.replace(defaults, **changes)


def drafter_for(target: TargetFile, data: Data, seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    return fresh_drafter(target, data, SHAPE)


# --- batches


def test_batches_are_a_function_of_seed_and_index(data: Data) -> None:
    training, _ = split(data)
    one, same = (
        Sampler(data, training, layers=LAYERS, block_size=5, n_windows=2, n_anchors=4, seed=3) for _ in range(2)
    )
    assert torch.equal(one.batch(7).labels, same.batch(7).labels)
    assert not torch.equal(one.batch(7).features, one.batch(8).features)


def test_labels_are_what_was_said_after_the_anchor(data: Data) -> None:
    training, _ = split(data)
    batch = Sampler(data, training, layers=LAYERS, block_size=5, n_windows=3, n_anchors=16).batch(0)
    letters = tiny.letter_ids()
    assert (batch.labels[..., 0] != NO_LABEL).all()
    for token, label in zip(batch.anchor_tokens.flatten(), batch.labels[..., 1].flatten(), strict=True):
        expected = letters[tiny.next_code(letters.index(int(token)), 2)]
        assert int(label) in (expected, NO_LABEL)


def test_labels_end_with_the_answer() -> None:
    sampler, said = _made_up(n=20, answers=((4, 9), (12, 20)))
    batch = sampler.batch(0)
    for position, labels in zip(batch.anchors[0].tolist(), batch.labels[0].tolist(), strict=True):
        end = 9 if position < 9 else 20
        assert labels == [said[p] if p < end else NO_LABEL for p in range(position + 1, position + 5)]
    assert set(batch.anchors[0].tolist()) <= {4, 5, 6, 7, *range(12, 19)}


def test_windows_of_long_chats_hold_their_anchors() -> None:
    sampler, said = _made_up(n=1000, answers=((100, 1000),), n_context=128)
    for index in range(20):
        batch = sampler.batch(index)
        assert batch.features.shape[1] == 128
        begin = int(batch.features[0, 0, 0])
        assert (said[batch.anchors[0] + begin] == batch.anchor_tokens[0].numpy()).all()
        assert begin == 0 or int(batch.anchors.min()) >= 32  # some context comes before an anchor


def test_repeating_text_is_told_from_fresh() -> None:
    said = np.array([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 9, 9, 9, 9, 9])
    sampler, _ = _made_up(n=16, answers=((0, 16),), said=said, n_anchors=15)
    batch = sampler.batch(0)
    repeating = batch.anchors[0][batch.repeating[0]].tolist()
    assert repeating == [10]  # "1 2 3 4" came before; "9 9 9 9" at 14 is the first of its kind


def test_repeating_text_is_drawn_as_often_as_asked() -> None:
    said = np.concatenate((np.arange(40), np.arange(200) % 5))
    for weight, share in ((1.0, 0.8), (0.25, 0.5), (0.0, 0.0)):
        sampler, _ = _made_up(n=240, answers=((0, 240),), said=said, n_anchors=400, repeat_weight=weight)
        drawn = sampler.batch(0).repeating.float().mean()
        assert drawn == pytest.approx(share, abs=0.07)


def test_a_subset_of_the_layers_can_be_read(data: Data) -> None:
    training, _ = split(data)
    both, last = (
        Sampler(data, training, layers=layers, block_size=5, n_windows=2, n_anchors=4).batch(0)
        for layers in (LAYERS, LAYERS[1:])
    )
    assert torch.equal(both.features[..., N_EMBD:], last.features)
    assert tapped((2, 11, 19, 28), 1) == (28,)
    assert tapped((2, 11, 19, 28), 2) == (2, 28)
    assert tapped((2, 11, 19, 28), None) == (2, 11, 19, 28)
    with pytest.raises(OptionError, match="3 of the 2 layers"):
        tapped(LAYERS, 3)


def test_slots_know_what_the_target_would_have_said() -> None:
    sampler, _ = _made_up(n=20, answers=((4, 20),))
    pools = np.full(20, NONE)
    pools["id"][:, 0], pools["logit"][:, 0] = np.arange(20) + 100, np.arange(20)
    sampler.data = dataclasses.replace(sampler.data, candidates=pools)
    batch = sampler.batch(0)
    for position, pool in zip(batch.anchors[0].tolist(), batch.pool[0, ..., 0].tolist(), strict=True):
        assert pool == [100 + min(position + k, 19) for k in range(4)], "slot k + 1 is said behind token k"
    assert torch.equal(batch.pool_logits[..., 0].long(), batch.pool[..., 0] - 100)


def _made_up(
    n: int,
    answers: tuple[tuple[int, int], ...],
    said: np.ndarray | None = None,
    n_context: int = 512,
    n_anchors: int = 8,
    repeat_weight: float = 1.0,
) -> tuple[Sampler, np.ndarray]:
    """A sampler over one chat whose features are the offsets of its tokens."""
    tokens = np.arange(n) * 7 % 300 if said is None else said
    features = np.repeat(np.arange(n, dtype=np.float16)[:, None], 4, 1)
    chat = ChatRecord(0, n, (), answers)
    made_up = Data(Meta("", "", 2, (1, 2), 320), [chat], tokens.astype(np.int32), features, np.full(len(tokens), NONE))
    sampler = Sampler(
        made_up,
        [chat],
        layers=(1, 2),
        block_size=5,
        n_windows=1,
        n_anchors=n_anchors,
        n_context=n_context,
        repeat_weight=repeat_weight,
    )
    return sampler, tokens


def test_every_fiftieth_chat_is_held_out(data: Data) -> None:
    training, held_out = split(data)
    assert held_out == [data.chats[0], data.chats[50]]
    assert len(training) == 58
    assert not set(map(id, training)) & set(map(id, held_out))


def test_one_chat_is_too_few(data: Data) -> None:
    with pytest.raises(OptionError, match="too few"):
        split(dataclasses.replace(data, chats=data.chats[:1]))


def test_the_last_token_of_an_answer_is_no_anchor() -> None:
    assert anchors_of(ChatRecord(0, 9, (), ((2, 5), (8, 9)))).tolist() == [2, 3]


# --- vocabulary and first weights


def test_the_mask_token_is_the_rarest_special_one(target: TargetFile) -> None:
    counts = np.zeros(N_VOCAB, np.int64)
    first = mask_token(target, counts)
    assert target.tokens[first] == "<|mask|>"
    counts[first] = 1
    assert target.tokens[mask_token(target, counts)].startswith("<|unused")
    counts[:] = 2
    counts[first] = 1
    assert mask_token(target, counts) == first


def test_kept_tokens_are_the_frequent_ones_and_the_ends(target: TargetFile) -> None:
    counts = np.arange(N_VOCAB)[::-1].copy()
    kept = kept_tokens(target, counts, 10, mask=3)
    ends = target.end_tokens()
    assert target.tokens.index("<|im_end|>") in ends
    assert ends <= set(kept.tolist())
    assert 3 not in kept
    assert kept.tolist() == sorted(kept.tolist())
    assert len(kept) == 10
    with pytest.raises(OptionError, match="500"):
        kept_tokens(target, counts, 500, mask=3)


def test_a_fresh_drafter_starts_from_the_target(target: TargetFile, data: Data) -> None:
    drafter = drafter_for(target, data)
    assert drafter.config.target_layers == LAYERS
    assert drafter.config.mask_token not in drafter.kept
    head = target.tensor("output.weight")
    assert head is not None
    assert torch.equal(drafter.head.weight, head[drafter.kept])
    assert torch.equal(drafter.layers[0].down.weight, target.tensor("blk.3.ffn_down.weight"))
    scaled = data.features[:].astype(np.float32) * drafter.feature_scale.numpy()
    assert np.sqrt(np.square(scaled).mean(0)) == pytest.approx(1.0, abs=0.05)


def test_a_drafter_that_inherits_guesses_as_the_one_before_among_its_tokens(target: TargetFile, data: Data) -> None:
    old = drafter_for(target, data)
    for parameter in old.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    wider = fresh_drafter(target, data, dataclasses.replace(SHAPE, n_rows=60))
    new = inherit(wider, dataclasses.replace(old.config, mask_token=7), old.state_dict())
    assert new.config == dataclasses.replace(old.config, n_rows=60, mask_token=7)
    assert torch.equal(new.layers[0].down.weight, old.layers[0].down.weight)
    assert torch.equal(new.feature_scale, old.feature_scale)
    hidden, common = torch.randn(3, N_EMBD), old.kept[:4]
    for before in range(N_VOCAB):
        scores = [
            d.selector(hidden, d.row_of[torch.full((3, 1), before)], d.row_of[common].expand(3, -1)) for d in (old, new)
        ]
        torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(new.head(hidden)[:, new.row_of[common]], old.head(hidden)[:, old.row_of[common]])
    added = next(t for t in new.kept.tolist() if t not in old.kept)
    assert torch.equal(new.head.weight[new.row_of[added]], wider.head.weight[wider.row_of[added]])
    deeper = fresh_drafter(target, data, dataclasses.replace(SHAPE, n_layers=2))
    with pytest.raises(OptionError, match="n_layers = 1, this one is to have 2; choose as many or fewer"):
        inherit(deeper, old.config, old.state_dict())
    shallower = inherit(old, deeper.config, deeper.state_dict())
    assert shallower.config == old.config
    assert torch.equal(shallower.layers[0].down.weight, deeper.layers[0].down.weight)
    assert torch.equal(shallower.head.weight, deeper.head.weight)
    assert not any(name.startswith("layers.1") for name in shallower.state_dict())


# --- the objective


def test_the_head_equals_plain_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (9, 30))
    rows = torch.tensor([0, 5, -1, 29, 3, 3, 7, 8, -1])
    mix = torch.randn(9, 4, generator=generator)

    shares = (rows >= 0).float()[:, None]
    cross_entropy, values, best = Head.apply(hidden, weight, rows.clamp(min=0)[:, None], shares, 4)
    (cross_entropy.sum() + (values * mix).sum()).backward()
    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    logits = hidden @ weight.T
    expected = torch.nn.functional.cross_entropy(logits, rows, ignore_index=-1, reduction="none")
    expected_values, expected_best = logits.topk(4)
    (expected.sum() + (expected_values * mix).sum()).backward()
    assert torch.equal(best, expected_best)
    torch.testing.assert_close(cross_entropy, expected)
    torch.testing.assert_close(ours, (hidden.grad, weight.grad))


def test_the_head_learns_a_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (5, 12))
    rows = torch.tensor([[0, 3, 7], [0, 0, 5], [11, 2, 4], [1, 0, 0], [0, 0, 0]])
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.2, 0.2, 0.6], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    loss, _, _ = Head.apply(hidden, weight, rows, shares, 4)
    loss.sum().backward()
    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    said = torch.zeros(5, 12).scatter_add(1, rows, shares)
    expected = torch.nn.functional.kl_div((hidden @ weight.T).log_softmax(-1), said, reduction="none").sum(-1)
    expected[:4].sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, (hidden.grad, weight.grad))


@pytest.mark.parametrize(
    ("soft", "expected"),
    [
        (0.0, [{2: 1.0}, {2: 1.0}, {}, {2: 1.0}, {}]),
        (1.0, [{2: 0.75, 3: 0.25}, {3: 1.0}, {3: 1.0}, {2: 1.0}, {}]),
        (0.5, [{2: 0.875, 3: 0.125}, {2: 0.5, 3: 0.5}, {3: 1.0}, {2: 1.0}, {}]),
    ],
)
def test_aims_are_what_was_said_and_what_could_have_been(soft: float, expected: list[dict[int, float]]) -> None:
    """Five slots: truth in the pool, outside of it, without row, without pool, outside the answer."""
    row_of = torch.tensor([9, 9, 2, 3, 9])  # tokens 2 and 3 have a row, 9 stands for none
    labels = torch.tensor([[[2, 2, 4, 2, NO_LABEL]]])
    pool = torch.tensor([[[[2, 3, 4], [3, 4, -1], [3, 4, -1], [4, -1, -1], [2, 3, -1]]]])
    logits = torch.tensor([0.0, -np.log(3), 5.0]).expand(1, 1, 5, 3)
    nothing = torch.zeros(1, 1)
    rows, shares = aims(Batch(nothing, nothing, nothing, labels, nothing, pool, logits), row_of, 9, soft)
    for slot, aim in enumerate(expected):
        found = {int(r): float(s) for r, s in zip(rows[0, 0, slot], shares[0, 0, slot], strict=True) if s > 0}
        assert found == pytest.approx(aim)


def test_d_pace_weighs_the_prefixes_through_a_slot() -> None:
    used = torch.tensor([[True, True, False], [True, False, False]])
    weights = position_weights(torch.tensor([1.0, 4.0, 2.0]).log(), used, options(position_weights="d-pace", alpha=0.5))
    s = [[1.0, 0.625, 1.0], [0.75, 1.0, 1.0]]
    expected = [[1 + 2 * 0.625, 2 * 0.625, 0.625], [3 * 0.75, 2 * 0.75, 0.75]]
    assert s[0][0] * s[0][1] == 0.625
    torch.testing.assert_close(weights, torch.tensor(expected))
    weights = position_weights(torch.zeros(3), used, options(gamma=2.0))
    torch.testing.assert_close(weights[0], torch.exp(-torch.arange(3) / 2))


def test_drawn_slots_count_as_often_as_others_weigh() -> None:
    slots = drawn(64, 7, gamma=4.0)
    torch.testing.assert_close(slots.float().mean(0), torch.exp(-torch.arange(7) / 4), atol=0.02, rtol=0)
    assert slots[:, 0].all()
    assert bool((slots[:, 1:] <= slots[:, :-1]).all()), "a block counts up to some slot"
    assert drawn(3, 7, gamma=1e9).all()


def test_drawing_slots_is_weighing_them_on_average(target: TargetFile, data: Data) -> None:
    """The loss of a batch in training comes from fewer slots, in evaluation from all."""
    batch = Sampler(data, split(data)[0], layers=LAYERS, block_size=5, n_windows=8, n_anchors=64).batch(0)
    drafter = drafter_for(target, data)
    hidden = torch.randn(*batch.labels.shape, N_EMBD, generator=torch.Generator().manual_seed(0))
    weighed, thinned = (
        [losses(drafter, hidden, batch, options(position_weights=name), judged=judged).base for judged in (False, True)]
        for name in ("exponential", "drawn")
    )
    assert thinned[1] == weighed[1] == weighed[0]
    assert thinned[0] != weighed[0]
    torch.testing.assert_close(thinned[0], weighed[0], rtol=0.03, atol=0)


def test_what_is_switched_off_stays_as_it_was(target: TargetFile, data: Data, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, conv=False, copy_layers=False, n_tapped=1, own_head=False)
    drafter = fresh_drafter(target, data, shape)
    assert drafter.config.target_layers == LAYERS[1:]
    assert drafter.fc.weight.shape == (N_EMBD, N_EMBD)
    assert not torch.equal(drafter.layers[0].down.weight, target.tensor("blk.3.ffn_down.weight"))
    Trainer(drafter, data, tmp_path, options(selector_weight=0.0, objective="mix", position_weights="d-pace")).train()
    assert torch.equal(drafter.head.weight, target.tensor("output.weight")[drafter.kept])
    conv = drafter.layers[0].ffn_conv
    assert not conv.proj.weight.any()
    assert bool((conv.base[:, 0] == 1).all())
    assert not conv.base[:, 1].any()
    assert not drafter.selector.successor.any(), "scores are the logits"


def test_unproposable_tokens_and_masked_slots_do_not_weigh(target: TargetFile, data: Data) -> None:
    drafter = drafter_for(target, data)
    sampler = Sampler(data, data.chats, layers=LAYERS, block_size=5, n_windows=2, n_anchors=4)
    batch = sampler.batch(0)
    hidden = torch.randn(2, 4, 4, N_EMBD)
    absent = next(t for t in range(N_VOCAB) if drafter.row_of[t] == 40)
    batch.labels[0, 0, 2:] = NO_LABEL
    before = losses(drafter, hidden, batch, options(position_weights="exponential"), judged=False)
    batch.labels[0, 0, 2] = absent
    for judged in (False, True):
        after = losses(drafter, hidden, batch, options(position_weights="exponential"), judged=judged)
        torch.testing.assert_close(after.total, before.total)


def test_training_learns(target: TargetFile, data: Data, tmp_path: Path) -> None:
    trainer = Trainer(drafter_for(target, data), data, tmp_path, options(steps=60, lr=3e-3))
    before = trainer.evaluate(Meter("", 1.0, tmp_path / "log.jsonl"))["all"]
    after = trainer.train()["all"]
    assert before.acceptance_length < 2.0
    assert after.acceptance_length > 4.0
    assert after.oracle_acceptance_length >= after.acceptance_length
    assert all(0.9 < recall <= 1.0 for recall in after.recall_per_slot)


# --- figures


def random_picks(n: int = 400, n_slots: int = 5, k: int = 3) -> Iterator[Picks]:
    """Pools over six tokens with tables for every predecessor, judged in two ways: picks made
    after the true predecessor, and picks of the walk on its own choices."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(6, generator=rng)[:k] for _ in range(n * n_slots)])
    rows = rows.view(n, n_slots, k)
    tables = torch.randn(n, n_slots, 7, 6, generator=rng)
    labels = torch.randint(0, 6, (n, n_slots), generator=rng)
    anchors = torch.randint(0, 7, (n,), generator=rng)
    repeating = torch.rand(n, generator=rng) < 0.3
    for forced in (True, False):
        scores, before = torch.zeros(n, n_slots, k), anchors
        for slot in range(n_slots):
            after = tables[torch.arange(n), slot, before]
            scores[:, slot] = after.gather(-1, rows[:, slot])
            walked = rows[:, slot].gather(-1, scores[:, slot].argmax(-1, keepdim=True))[:, 0]
            before = labels[:, slot] if forced else walked
        yield judge(rows, scores, labels, labels, repeating)


def test_teacher_forced_acceptance_is_that_of_the_walk() -> None:
    forced, walked = (figures(picks) for picks in random_picks())
    assert forced.acceptance_length == walked.acceptance_length
    assert forced.accepted_per_slot == walked.accepted_per_slot


def test_figures_of_a_hand_made_pool() -> None:
    yes, no = True, False
    picks = Picks(
        valid=torch.tensor([[yes, yes, yes], [yes, yes, no], [no, no, no]]),
        scores=torch.tensor([[1.0, 2.0]]).expand(3, 3, 2),  # the second candidate is picked
        truth=torch.tensor([[1, 0, 1], [1, 1, -1], [-1, -1, -1]]),
        top1=torch.tensor([[no, yes, yes], [yes, no, no], [no, no, no]]),
        repeating=torch.tensor([no, yes, yes]),
    )
    result = by_text(join([picks]))
    assert result["all"].n_blocks == 2
    assert result["all"].acceptance_length == 1 + (1 + 2) / 2
    assert result["all"].top1_acceptance_length == 1 + (0 + 1) / 2
    assert result["all"].oracle_acceptance_length == 1 + (3 + 2) / 2
    assert result["all"].accepted_per_slot == [1.0, 0.5, 0.0]
    assert result["all"].recall_per_slot == [1.0, 1.0, 1.0]
    assert result["fresh"].acceptance_length == 2.0
    assert result["repeating"].n_blocks == 1


def test_the_best_temperature_undoes_a_wrong_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(20_000, 8, generator=generator)
    truth = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
    for scale in (0.5, 1.0, 3.0):
        assert best_temperature(scale * scores, truth) == pytest.approx(scale, rel=0.05)
    assert best_temperature(scores[:31], truth[:31]) == 1.0


# --- runs


def test_a_resumed_run_equals_an_unbroken_one(target: TargetFile, data: Data, tmp_path: Path) -> None:
    whole = Trainer(drafter_for(target, data), data, tmp_path / "whole", options(steps=6))
    whole.train()
    first = Trainer(drafter_for(target, data), data, tmp_path / "broken", options(steps=6))
    steps = first.steps()
    for _ in range(3):
        next(steps)
    first.save()
    second = Trainer(drafter_for(target, data, seed=9), data, tmp_path / "broken", options(steps=6))
    assert second.progress.step == 3
    second.train()
    for ours, theirs in zip(whole.drafter.parameters(), second.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_training_stops_where_nothing_improves_and_keeps_the_best(
    target: TargetFile, data: Data, tmp_path: Path
) -> None:
    settings = options(steps=400, lr=0.3, eval_every_s=0.0, patience=3, clip=1e6)
    trainer = Trainer(drafter_for(target, data), data, tmp_path, settings)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    lengths = {row["step"]: row["fresh"]["acceptance_length"] for row in rows if "eval_loss" in row}
    best = max(lengths, key=lambda step: lengths[step])
    assert trainer.progress.step == best + 3 < 400
    kept = Trained.read(tmp_path)
    assert kept.step == best
    assert kept.figures["fresh"]["acceptance_length"] == pytest.approx(lengths[best], abs=1e-3)
    again = Trainer(drafter_for(target, data), data, tmp_path, settings)
    again.train()
    assert again.progress.step == best + 3, "a run that has stopped stays so"


def test_a_finished_stage_is_not_done_again(target: TargetFile, data: Data, tmp_path: Path) -> None:
    with Store(tmp_path / "data", data.meta) as store:
        for chat in data.chats:
            rows = slice(chat.start, chat.start + chat.n)
            store.append(data.tokens[rows], data.features[rows], data.candidates[rows], chat.questions, chat.answers)
    stage = (target.path, tmp_path / "data", tmp_path / "run")
    train(*stage, shape=SHAPE, options=options(steps=2))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir() if path.name != ".lock"}
    train(*stage, shape=SHAPE, options=options(steps=2))
    assert before == {path: path.stat().st_mtime_ns for path in before}
    train(*stage, shape=SHAPE, options=options(steps=3))
    assert json.loads((tmp_path / "run" / "trained.json").read_text())["step"] == 3
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(OptionError, match="another process is training"):
        train(*stage, shape=SHAPE, options=options(steps=4))
    with pytest.raises(MissingError, match="no trained drafter"):
        Trained.read(tmp_path / "elsewhere")


def test_another_shape_does_not_resume(target: TargetFile, data: Data, tmp_path: Path) -> None:
    Trainer(drafter_for(target, data), data, tmp_path, options()).save()
    other = fresh_drafter(target, data, dataclasses.replace(SHAPE, n_layers=2))
    with pytest.raises(OptionError, match="n_layers = 1, this run wants 2"):
        Trainer(other, data, tmp_path, options())


def test_the_log_has_a_json_object_per_line(target: TargetFile, data: Data, tmp_path: Path) -> None:
    Trainer(drafter_for(target, data), data, tmp_path, options()).train()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4]
    assert {"loss", "base", "selector", "lr", "anchors_per_s"} <= rows[0].keys()
    assert {"eval_loss", "all", "fresh", "repeating"} <= rows[-1].keys()


def test_a_run_is_exported_with_its_figures(target: TargetFile, data: Data, tmp_path: Path) -> None:
    trainer = Trainer(drafter_for(target, data), data, tmp_path, options(steps=1))
    trainer.train()
    trained = Trained.read(tmp_path)
    facts = provenance(trained, data, target)
    export(trained.drafter(target), target.path, tmp_path / "drafter.gguf", encoding="q8_0", provenance=facts)
    fields = gguf.GGUFReader(tmp_path / "drafter.gguf").fields
    assert fields["localspec.calibration"].contents() == pytest.approx(trained.calibration)
    assert len(trained.calibration) == 4
    assert fields["localspec.training_steps"].contents() == 1
    assert fields["localspec.target_sha256"].contents() == data.meta.target_sha256
    assert fields["dflash.target_layers"].contents() == list(LAYERS)


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    settings = options()
    assert schedule(0.02, settings) == pytest.approx(0.5)
    assert schedule(0.04, settings) == pytest.approx(1.0)
    assert schedule(1.0, settings) == pytest.approx(0.1)


def test_a_budget_is_needed_and_only_one() -> None:
    for wrong in ({}, {"hours": 1.0, "steps": 5}):
        with pytest.raises(OptionError, match="exactly one budget"):
            Options(**wrong)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(OptionError, match="objective 'l2' is not one of ce, kl, mix"):
        options(objective="l2")
    with pytest.raises(OptionError, match="'linear' is not one of drawn, exponential, d-pace"):
        options(position_weights="linear")

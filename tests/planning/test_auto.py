"""The planner, against a simulated machine and drafter: it never loses much, and takes what there is to win."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localspec.engine import paths
from localspec.engine.lattice import Lattice
from localspec.engine.paths import NOTHING, Chain
from localspec.engine.plan import Drafting, Fixed, selector
from localspec.engine.sampling import Sampler, SamplingParams
from localspec.engine.stats import Round
from localspec.planning.auto import Auto
from localspec.planning.cost_model import CostModel
from localspec.planning.parking import Parking, State
from localspec.planning.profile import WHOLE, DraftLength, PairProfile
from localspec.planning.proposal import AutoChoice, Bounds

N_SLOTS, K, MOST = 7, 4, 16
FLAT = ([0, *[1.0 + 0.02 * n for n in range(MOST + 1)]], [0, *[0.15] * N_SLOTS])  # like a GPU
STEEP = ([0, *[1.0 + 0.7 * n for n in range(MOST + 1)]], [0, *[0.8] * N_SLOTS])  # like a weak CPU
CHAINS = Drafting(N_SLOTS, np.ones(N_SLOTS), 1, MOST, 1000)
TREES = Drafting(N_SLOTS, np.ones(N_SLOTS), 8, MOST, 1000)
Cost = tuple[list[float], list[float]]


def profile(cost: Cost) -> PairProfile:
    """Nothing is known but the costs, and they are right: the drafter may be asked at once."""
    known = PairProfile(CostModel(*cost), N_SLOTS)
    known.parking = Parking(State.DRAFTING)
    return known


def auto(
    cost: Cost,
    known: PairProfile | None = None,
    drafting: Drafting = CHAINS,
    bounds: Any = None,
    *,
    pool: bool = True,
    **sampling: Any,
) -> Auto:
    sampler = Sampler(SamplingParams(seed=0, **sampling))
    return Auto(known or profile(cost), drafting, bounds or Bounds(MOST), sampler, pool=pool)


def pool(confidence: float, n: int = N_SLOTS) -> Lattice:
    """A lattice whose greedy step has probability `confidence` in each slot."""
    scores = np.zeros((n, K, K), np.float32)
    scores[:, :, 0] = np.log(confidence / ((1 - confidence) / (K - 1)))
    return Lattice(np.arange(n * K, dtype=np.int32).reshape(n, K), scores)


def fresh(n: int = 5) -> list[int]:
    """A text that has never repeated itself."""
    return list(range(1000, 1000 + n))


def first(plan: Auto, lattice: Lattice) -> paths.Draft:
    proposal = plan.propose(fresh(), 100)
    assert proposal.n_slots == N_SLOTS
    return proposal.select(lattice).draft


def alone(plan: Auto, text: list[int]) -> AutoChoice:
    """What it sends where the drafter is not asked."""
    proposal = plan.propose(text, 100)
    assert proposal.n_slots == 0
    return proposal.select(None)


def run(
    cost: Cost,
    said: float,
    right: float,
    n_tokens: int,
    known: PairProfile | None = None,
    hidden: float = 0.0,
    **options: Any,
) -> tuple[float, PairProfile]:
    """Seconds a token over answers of 200, with a drafter that claims `said` a slot and is right with `right`; a draft
    takes `hidden` seconds more than its figure.
    """
    known, rng = known or profile(cost), np.random.default_rng(0)
    verify, drafts = cost
    spent, emitted = 0.0, 0
    while emitted < n_tokens:
        if pool_too := known.parking.admits(0.0):
            known.parking.admit(0.0)
        plan, text = auto(cost, known, pool=pool_too, **options), fresh()
        while len(text) < 200:
            proposal = plan.propose(text, 1000)
            n_slots = proposal.n_slots
            choice = proposal.select(pool(said, n_slots) if n_slots else None)
            draft, alive = choice.draft, [-1]
            for node, parent in enumerate(draft.parents):
                candidate = draft.tokens[node] % K  # 0 is right with `right`, the others share the rest
                chance = right if candidate == 0 else (1 - right) / (K - 1)
                if parent == alive[-1] and rng.random() < chance:
                    alive.append(node)
            n, seconds = len(alive) - 1, verify[len(draft.tokens) + 1]
            total = seconds + drafts[n_slots] + hidden * (n_slots > 0)
            spent += total
            emitted += n + 1
            text += range(2000 + emitted - n - 1, 2000 + emitted)
            plan.learn(choice, Round(list(range(n + 1)), len(draft.tokens), n, verify_s=seconds, total_s=total))
    return spent / emitted, known


def test_a_sure_drafter_on_a_flat_cost_model_sends_everything() -> None:
    assert len(first(auto(FLAT), pool(0.99)).tokens) == N_SLOTS


def test_an_unsure_drafter_on_a_steep_cost_model_sends_nothing() -> None:
    assert first(auto(STEEP), pool(0.3)).tokens == []


def test_where_trees_can_be_a_tree_is_sent() -> None:
    draft = first(auto(FLAT, drafting=TREES), pool(0.5))
    assert draft.parents != list(range(-1, len(draft.tokens) - 1))
    assert sum(draft.survival) > sum(first(auto(FLAT), pool(0.5)).survival)


@pytest.mark.parametrize("cost", [FLAT, STEEP])
@pytest.mark.parametrize("said", [0.5, 0.99])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_useless_drafter_costs_next_to_nothing(cost: Cost, said: float, temperature: float) -> None:
    seconds, known = run(cost, said, 0.0, 5000, temperature=temperature)
    assert seconds < 1.03 * cost[0][1]
    assert known.parking.is_resting


def test_what_was_learnt_survives_the_session() -> None:
    _, known = run(STEEP, 0.99, 0.0, 3000)
    again = PairProfile.from_json(known.to_json())
    assert again.to_json() == known.to_json()
    assert again.parking.is_resting
    assert auto(STEEP, again).propose(fresh(), 100).n_slots == 0
    seconds, _ = run(STEEP, 0.99, 0.0, 1000, again)
    assert seconds < 1.012 * STEEP[0][1]


def test_a_drafter_that_cannot_pay_by_its_own_figures_begins_at_rest() -> None:
    """Two tokens a round cannot pay for a block and a pass over two (0.8 + 1.7 against 1); six can."""
    poor, good = profile(STEEP), profile(STEEP)
    poor.expect(2.0)
    good.expect(6.0)
    assert (poor.parking.is_resting, good.parking.is_resting) == (True, False)
    assert auto(STEEP, poor).propose(fresh(), 100).n_slots == 0
    assert PairProfile.from_json(poor.to_json()).parking.is_resting
    seconds, _ = run(STEEP, 0.99, 0.0, 150, poor)
    assert seconds == pytest.approx(STEEP[0][1])
    assert run(STEEP, 0.99, 0.99, 4000, poor)[0] < STEEP[0][1], "and is tried all the same, later"


def test_it_parks_and_tries_again() -> None:
    _, known = run(STEEP, 0.99, 0.0, 300)
    plan = auto(STEEP, known)
    assert plan.is_parked
    assert plan.propose(fresh(), 100).n_slots == 0
    good, _ = run(STEEP, 0.99, 0.99, 3000, known)
    assert not known.parking.is_resting
    assert good < 0.95 * STEEP[0][1]


@pytest.mark.parametrize(("said", "right", "slack"), [(0.9, 0.9, 1.1), (0.95, 0.6, 1.1), (0.5, 0.8, 1.2)])
def test_it_comes_close_to_the_best_fixed_length(said: float, right: float, slack: float) -> None:
    def fixed(n: int) -> float:
        return (FLAT[1][n] + FLAT[0][n + 1]) / (1 + sum(right**k for k in range(1, n + 1)))

    assert run(FLAT, said, right, 5000)[0] < slack * min(fixed(n) for n in range(1, N_SLOTS + 1))


def test_over_confidence_is_learnt() -> None:
    _, known = run(STEEP, 0.95, 0.2, 60)
    known.parking, known.draft_length = Parking(State.DRAFTING), profile(STEEP).draft_length
    assert len(first(auto(STEEP, known), pool(0.95)).tokens) < len(first(auto(STEEP), pool(0.95)).tokens)


def test_cost_models_learn_what_passes_really_take() -> None:
    costs = CostModel(*STEEP)
    for _ in range(300):
        costs.learn(3, 3000, 1.3 * STEEP[0][3])
        costs.learn(2, 3000, 100.0)  # disturbed
    assert costs.at(3000)[3] == pytest.approx(1.3 * STEEP[0][3], rel=0.02)
    assert costs.at(100)[3] == STEEP[0][3]
    assert costs.at(9000)[3] == pytest.approx(costs.at(3000)[3])


def test_what_a_draft_really_takes_is_learnt_and_judged() -> None:
    """Rounds are judged by what they really take, before the cost model has learnt it."""
    spent, known = run(FLAT, 0.7, 0.7, 3000, hidden=4 * FLAT[0][1])
    assert known.costs.draft[1] > 2 * FLAT[1][1]
    assert known.parking.is_resting
    paid, unknown = run(FLAT, 0.7, 0.7, 3000)
    assert unknown.costs.draft == pytest.approx(FLAT[1], rel=0.01)
    assert not unknown.parking.is_resting
    assert paid < FLAT[0][1]
    assert spent < 1.03 * FLAT[0][1]


# --- how many slots to draft

LEAN = ([0, *[1.0 + 0.1 * n for n in range(MOST + 1)]], [0, *[0.05 + 0.1 * n for n in range(1, N_SLOTS + 1)]])


def turns(length: DraftLength, n: int) -> list[int]:
    """Slots of the next `n` blocks."""
    out = []
    for _ in range(n):
        out.append(length.n_slots)
        length.drafted()
    return out


@pytest.mark.parametrize("drafting", [CHAINS, TREES])
def test_slots_that_do_not_pay_are_not_drafted(drafting: Drafting) -> None:
    """But for the whole block that is drafted now and then, to see. If all were whole, none would pay."""
    verify, drafts = LEAN
    said = [1 + sum(0.55 ** np.arange(1, n + 1)) for n in range(N_SLOTS + 1)]
    whole = min((drafts[-1] + verify[n + 1]) / said[n] for n in range(1, N_SLOTS + 1))
    best = min(range(1, N_SLOTS + 1), key=lambda n: (drafts[n] + verify[n + 1]) / said[n])
    seconds, known = run(LEAN, 0.55, 0.55, 4000, drafting=drafting)
    taken = sorted(turns(known.draft_length, 2 * WHOLE))
    assert taken[-2:] == [N_SLOTS] * 2
    assert len(set(taken[:-2])) == 1
    assert abs(taken[0] - best) <= 1
    assert seconds < 0.9 < 1.0 < whole


def test_more_slots_are_drafted_when_the_text_becomes_easy() -> None:
    known = profile(LEAN)
    known.expect(1.2)
    assert turns(known.draft_length, WHOLE) == [N_SLOTS, *[1] * (WHOLE - 1)]
    _, known = run(LEAN, 0.98, 0.98, 4000, known)
    assert turns(known.draft_length, WHOLE) == [N_SLOTS] * WHOLE


def test_a_target_that_verifies_less_than_a_block_is_no_obstacle() -> None:
    slots = DraftLength.expecting(CostModel([0, 1.0, 1.0, 1.0], FLAT[1]), 0.9)
    assert turns(slots, 2) == [N_SLOTS, 2]


# --- text that repeats itself


def test_a_text_that_repeats_itself_is_continued_without_the_drafter() -> None:
    known = profile(STEEP)
    plan = auto(STEEP, known)
    run_of = list(range(50, 90))
    text = [*run_of, 7, *run_of[:20]]
    known._tokens, known._seconds, known._n_drafted = 10.0, 12.0, 20  # what drafting brings: less than that
    draft = alone(plan, text).draft
    assert draft.tokens == run_of[20 : 20 + len(draft.tokens)]
    assert len(draft.tokens) >= 2


def test_ngrams_are_learnt_before_any_is_sent() -> None:
    """Whether the text went on as before is seen in what was said, drafted or not."""
    known = profile(STEEP)
    known.ngrams.right[:] = 0.3 * known.ngrams.tried
    circle = [*range(50, 90), *range(50, 90)]
    sent = []
    for _ in range(20):
        for length in range(44, 80):
            plan = auto(STEEP, known, pool=False)
            choice = alone(plan, circle[:length])
            n = len(choice.draft.tokens)
            plan.learn(choice, Round(circle[length : length + n + 1], n, n, verify_s=STEEP[0][n + 1]))
            sent.append(n)
    assert sent[0] == 0 < sent[-1]


def test_a_text_that_differs_from_its_matches_lowers_their_probability() -> None:
    """The same match is less likely here than it would be in a new text."""
    known = profile(FLAT)
    runs = [list(range(start, start + 40)) for start in (100, 200, 300)]
    plan, text = auto(FLAT, known, pool=False), [token for run_of in runs for token in run_of]
    for run_of in runs[:2]:
        text += run_of[:20]
        choice = alone(plan, text)
        n = len(choice.draft.tokens)
        plan.learn(choice, Round([7], n, 0, verify_s=FLAT[0][n + 1]))
        text.append(7)
    text += runs[2][:20]
    elsewhere = auto(FLAT, known, pool=False)
    assert alone(plan, text).draft.survival[0] < 0.9 * alone(elsewhere, text).draft.survival[0]


def test_passes_that_still_settle_teach_nothing() -> None:
    cost = [0, *[0.004 + 0.001 * n for n in range(MOST + 1)]]
    known = PairProfile(CostModel(cost, [0, *[0.004] * N_SLOTS]), N_SLOTS)
    plan, seconds = auto(FLAT, known, pool=False), []
    for token in range(1000, 1020):
        plan.learn(alone(plan, [token]), Round([token], 0, 0, verify_s=0.006))
        seconds.append(known.costs.at(1)[1])
    assert seconds[:8] == [0.004] * 8, "the prompt was read just before"
    assert seconds[-1] > 0.004


def test_what_a_wide_pass_costs_afterwards_counts_unless_another_was_just_made() -> None:
    cost = [0, 1.0, *[1.5 + 0.05 * n for n in range(MOST)]]
    text = [*range(50, 90), 7, *range(50, 55)]
    known = PairProfile(CostModel(cost, [0, *[0.2] * N_SLOTS], settle=20.0), N_SLOTS)
    plan = auto(FLAT, known, pool=False)
    assert len(alone(plan, text).draft.tokens) > 0, "the prompt was such a pass"
    plan = auto(FLAT, known, pool=False)
    plan.learn(alone(plan, text[:-6]), Round([7], 0, 0, verify_s=1.0))
    assert alone(plan, text).draft == NOTHING


def test_ngrams_that_fail_are_no_longer_sent() -> None:
    known = profile(STEEP)
    run_of = list(range(50, 90))
    for _ in range(60):
        plan = auto(STEEP, known, pool=False)
        choice = alone(plan, [*run_of, 7, *run_of[:20]])
        n = len(choice.draft.tokens)
        plan.learn(choice, Round([1], n, 0, verify_s=STEEP[0][n + 1]))
    assert alone(plan, [*run_of, 7, *run_of[:20]]).draft == NOTHING


# --- what the user rules


def test_bounds_rule() -> None:
    assert len(first(auto(FLAT, bounds=Bounds(3)), pool(0.99)).tokens) == 3
    assert len(first(auto(STEEP, bounds=Bounds(MOST, 4)), pool(0.3)).tokens) == 4
    assert first(auto(FLAT, bounds=Bounds(MOST, 0, 0.6)), pool(0.5)).tokens == []


def test_a_floor_keeps_it_from_parking() -> None:
    _, known = run(STEEP, 0.99, 0.0, 300)
    plan = auto(STEEP, known, bounds=Bounds(MOST, 2))
    assert not plan.is_parked
    assert plan.propose(fresh(), 100).n_slots == N_SLOTS


def test_no_more_than_there_is_room_for() -> None:
    for temperature in (0.0, 1.0):
        plan = auto(FLAT, temperature=temperature)
        proposal = plan.propose(fresh(), 2)
        assert proposal.n_slots == 2
        assert len(proposal.select(pool(0.99, 2)).draft.tokens) == 2
    assert auto(FLAT).propose(fresh(), 0).n_slots == 0


# --- by hand


def test_a_fixed_plan_is_fixed() -> None:
    plan = Fixed(N_SLOTS, selector("greedy", 3, CHAINS, Sampler(SamplingParams())))
    whole, short = plan.propose(fresh(), 100), plan.propose(fresh(), 2)
    plan.learn(whole.select(None), Round([1], 3, 0))
    assert (whole.n_slots, short.n_slots, plan.is_parked) == (N_SLOTS, 2, False)
    assert whole.select(pool(0.5)).draft == paths.greedy(pool(0.5)).head(3)
    assert short.select(pool(0.5)).draft == paths.greedy(pool(0.5)).head(2)
    assert Fixed().propose(fresh(), 100).n_slots == 0
    assert Fixed().propose(fresh(), 100).select(None).draft == NOTHING


@pytest.mark.parametrize("kind", ["greedy", "expected", "tree", "sampled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_selectors_take_what_their_names_say(kind: str, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    draft = selector(kind, 5, TREES, sampler)(pool(0.4), 9)
    assert len(draft.tokens) == 5
    drawn = isinstance(draft, Chain) and draft.q is not None
    assert drawn == (kind == "sampled" and temperature > 0)
    assert isinstance(draft, Chain) == (kind != "tree")

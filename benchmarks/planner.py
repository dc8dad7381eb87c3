"""The planner on simulated machines: seconds a token of plain, n-gram and automatic decoding, over many settings.

Costs, acceptance, repetition, wrong measurements, noise and drift are set, texts and drafts are random; everything
runs in the planner itself, nothing in llama.cpp. Printed are speeds over plain decoding, and by how much `auto` is
worse than the better of the two others.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from localspec.engine.lattice import Lattice
from localspec.engine.paths import Draft
from localspec.engine.plan import Drafting
from localspec.engine.sampling import Sampler, SamplingParams
from localspec.engine.stats import Round
from localspec.planning.auto import Auto
from localspec.planning.cost_model import CostModel
from localspec.planning.profile import PairProfile
from localspec.planning.proposal import Bounds

N_SLOTS, K, MOST = 7, 4, 16
N_VOCAB = 5000
WRONG = 10_000  # tokens from here on are never right


@dataclass(frozen=True)
class Machine:
    """What passes and drafts take: 1 for a token, `slope` for each further one, `draft` + `slot` · n for a block.

    `wrong`: spread of the factors by which the profile's figures are wrong. `after`: a pass behind a draft takes so
    many times what one without takes. `noise`: spread of the factors of single passes; one in 25 takes five times as
    long where there is noise. `drift`: the machine's speed changes by up to this factor, by and by.
    """

    slope: float = 0.1
    draft: float = 0.2
    slot: float = 0.0
    after: float = 1.0
    wrong: float = 0.0
    noise: float = 0.0
    drift: float = 1.0

    def verify_s(self, n: int, *, drafted: bool) -> float:
        return (1 + self.slope * (n - 1)) * (self.after if drafted else 1.0)

    def draft_s(self, n_slots: int) -> float:
        return self.draft + self.slot * n_slots if n_slots else 0.0

    def costs(self, rng: np.random.Generator) -> CostModel:
        """As measured, wrongly perhaps."""
        verify = [self.verify_s(n, drafted=False) for n in range(1, MOST + 2)]
        draft = [self.draft_s(n) for n in range(1, N_SLOTS + 1)]
        off = np.exp(self.wrong * rng.standard_normal(len(verify)))
        drafts_off = float(np.exp(self.wrong * rng.standard_normal()))
        return CostModel([0.0, *np.maximum.accumulate(verify * off)], [0.0, *(drafts_off * np.array(draft))])


@dataclass(frozen=True)
class Texts:
    """Answers of `length` tokens. `right`: chance that the drafter has the next token, by text in turn; it says `said`
    (or the truth). `repeats`: share of the text that copies an earlier part, in pieces of about 25 tokens.
    """

    right: tuple[float, ...] = (0.7,)
    said: float | None = None
    repeats: float = 0.0
    length: int = 300

    def make(self, rng: np.random.Generator) -> list[int]:
        text = rng.integers(0, N_VOCAB, 30).tolist()
        while len(text) < 30 + self.length:
            n = int(rng.geometric(1 / 25))
            if rng.random() < self.repeats:
                start = int(rng.integers(0, max(1, len(text) - n)))
                text += text[start : start + n]
            else:
                text += rng.integers(0, N_VOCAB, n).tolist()
        return text


@dataclass
class World:
    """A machine that speaks; `spent` and `said` are what it took, without noise and drift, and for how many tokens."""

    machine: Machine
    texts: Texts
    seed: int = 0
    trees: bool = False
    spent: float = 0.0
    n_said: int = 0
    n_drafting: int = 0
    n_rounds: int = 0
    profile: PairProfile = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.profile = PairProfile(self.machine.costs(self._rng), N_SLOTS)
        self._drafting = Drafting(N_SLOTS, np.ones(N_SLOTS), 8 if self.trees else 1, MOST, N_VOCAB)
        self._sampler = Sampler(SamplingParams())

    def answer(self, number: int, *, pool: bool) -> None:
        rng = np.random.default_rng([self.seed, number])
        text, n = self.texts.make(rng), 30
        right = self.texts.right[number % len(self.texts.right)]
        parking = self.profile.parking
        if pool := pool and parking.admits(0.0):
            parking.admit(0.0)
        plan = Auto(self.profile, self._drafting, Bounds(MOST), self._sampler, pool=pool)
        while n < len(text):
            n += self._round(plan, text, n, right)

    def _round(self, plan: Auto, text: list[int], n: int, right: float) -> int:
        proposal = plan.propose(text[:n], len(text) - n)
        choice = proposal.select(self._pool(text[n:], right, proposal.n_slots) if proposal.n_slots else None)
        n_accepted = walk(choice.draft, text[n:])
        said = text[n : n + n_accepted + 1]
        verify = self.machine.verify_s(len(choice.draft.tokens) + 1, drafted=proposal.n_slots > 0)
        draft = self.machine.draft_s(proposal.n_slots)
        self.spent += verify + draft
        self.n_said += len(said)
        self.n_rounds += 1
        self.n_drafting += proposal.n_slots > 0
        verify, draft = verify * self._weather(), draft * self._weather()
        sent = len(choice.draft.tokens)
        plan.learn(choice, Round(said, sent, min(n_accepted, len(said)), verify_s=verify, total_s=verify + draft))
        return len(said)

    def _pool(self, truth: list[int], right: float, n_slots: int) -> Lattice:
        """Candidate 0 is right with `right`, candidate 1 with 0.4 of the rest, as long as the one before was."""
        said = right if self.texts.said is None else self.texts.said
        ids = WRONG + self._rng.integers(0, N_VOCAB, (n_slots, K))
        for slot, token in enumerate(truth[:n_slots]):
            draw = self._rng.random()
            if draw < right:
                ids[slot, 0] = token
            elif draw < right + 0.4 * (1 - right):
                ids[slot, 1] = token
        p = np.array([said, *(np.array([0.4, 0.3, 0.3]) * (1 - said))])
        scores = np.broadcast_to(np.log(np.maximum(p, 1e-6)), (n_slots, K, K))
        return Lattice(ids.astype(np.int32), scores.astype(np.float32))

    def _weather(self) -> float:
        """By how much longer something takes now than it should."""
        machine = self.machine
        slow = machine.drift ** np.sin(self.n_said / 700)
        if not machine.noise:
            return float(slow)
        disturbed = 5.0 if self._rng.random() < 0.04 else 1.0
        return float(slow * disturbed * np.exp(machine.noise * self._rng.standard_normal()))


def walk(draft: Draft, truth: list[int]) -> int:
    """How many tokens of `draft` the truth goes along."""
    node, n = -1, 0
    for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == node and n < len(truth) and token == truth[n]:
            node, n = i, n + 1
    return n


def speeds(machine: Machine, texts: Texts, n_answers: int, *, seed: int = 0, trees: bool = False) -> dict[str, float]:
    """Tokens by the time of one plain pass, of the ways to decode; `share`: of auto's rounds those that drafted."""
    out = {"plain": 1.0}
    for name, pool in (("ngram", False), ("auto", True)):
        world = World(machine, texts, seed, trees)
        for number in range(n_answers):
            world.answer(number, pool=pool)
        out[name] = world.n_said / world.spent
    return out | {"share": world.n_drafting / world.n_rounds}


def settings() -> Iterator[tuple[str, Machine, Texts, bool]]:
    """Machines by texts, with names."""
    gpu, lean, cpu = Machine(0.02, 0.15), Machine(0.15, 0.1, 0.06), Machine(0.6, 0.6)
    machines = {"gpu": gpu, "lean cpu": lean, "cpu": cpu}
    weathers = {
        "calm": {},
        "wrong": {"wrong": 0.2},
        "noise": {"noise": 0.15, "wrong": 0.1},
        "drift": {"noise": 0.1, "drift": 1.4},
        "after": {"after": 1.2, "noise": 0.05},
    }
    for (kind, machine), (weather, changes) in itertools.product(machines.items(), weathers.items()):
        for right, repeats in itertools.product(((0.0,), (0.3,), (0.5,), (0.7,), (0.9,), (0.8, 0.2)), (0.0, 0.3)):
            name = f"{kind}, {weather}, right {'/'.join(map(str, right))}, repeats {repeats}"
            yield name, replace(machine, **changes), Texts(right, repeats=repeats), kind == "gpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=20, help="answers of 300 tokens")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    args = parser.parse_args()
    worst = 0.0
    for name, machine, texts, trees in settings():
        if args.only not in name:
            continue
        for seed in range(args.seeds):
            found = speeds(machine, texts, args.answers, seed=seed, trees=trees)
            loss = 1 - found["auto"] / max(found["plain"], found["ngram"])
            worst = max(worst, loss)
            print(
                f"{name}: ngram {found['ngram']:.3f}, auto {found['auto']:.3f}, drafting in {found['share']:.0%} of "
                f"the rounds, auto worse by {max(loss, 0):.1%}",
                flush=True,
            )
    print(f"auto is worse than the better of plain and ngram by {worst:.2%} at most")


if __name__ == "__main__":
    main()

"""The planner on real texts and real pools under given costs: what it would bring on another machine.

Answers of the pair are recorded once, with the drafter's pool at every position; then plain, n-gram and automatic
decoding are replayed with the costs of several machines (a pass over 1, 2, 3, … tokens by one over one token). So it
says the same however busy the machine is that it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from common import arguments, load_pair, read_set
from planner import walk

from localspec.engine.lattice import Lattice
from localspec.engine.paths import NOTHING, Chain
from localspec.engine.plan import Drafting
from localspec.engine.sampling import Sampler, SamplingParams
from localspec.engine.stats import Round
from localspec.pair import Pair
from localspec.planning.auto import Auto
from localspec.planning.cost_model import CostModel
from localspec.planning.profile import PairProfile
from localspec.planning.proposal import Bounds

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
MACHINES = {  # ggml's kernels on two CPU cores by the target's encoding, a CPU kernel that unpacks weights once, a GPU
    "Q4_1": (1, 1.27, 1.67, 2.16, 2.88, 3.28, 4.62, 6.06, 11.7),
    "Q8_0": (1, 1.31, 1.57, 1.74, 2.42, 2.58, 3.53, 4.2, 7.9),
    "F16": (1, 1.34, 1.54, 1.70, 2.04, 2.26, 2.94, 3.55, 5.8),
    "Q4_1, wide kernel": (1, 1.12, 1.3, 1.5, 1.9, 2.5, 3.5, 4.6, 8.7),
    "GPU": (1, 1.02, 1.04, 1.06, 1.1, 1.14, 1.2, 1.3, 1.6),
}
TOKEN_S = 0.01  # a pass over one token
NOISE = 0.05  # spread of the factors of what the planner sees


@dataclass(frozen=True)
class Recording:
    """A prompt and its answer, and the pool drafted behind each position."""

    prompt: list[int]
    answer: list[int]
    pools: dict[int, Lattice]


def record(pair: Pair, prompt: str, n: int) -> Recording:
    """A greedy answer, a whole block drafted at every position and none sent."""
    ids, pools = pair.encode(prompt), dict[int, Lattice]()

    def watch(lattice: Lattice) -> Chain:
        pools[pair.n_tokens] = lattice
        return NOTHING

    return Recording(ids, pair.generate(ids, max_tokens=n, path=watch).tokens, pools)


class Replay:
    """One way of decoding on one machine; `spent_s` without noise for `n_said` tokens."""

    def __init__(self, verify: Sequence[float], draft: float, after: float, drafting: Drafting) -> None:
        self._verify = TOKEN_S * np.interp(np.arange(1, drafting.draft_max + 2), WIDTHS, verify)
        self._draft = TOKEN_S * draft * np.array([0, *np.linspace(0.7, 1, drafting.n_slots)])
        self._drafting, self._after, self._rng = drafting, after, np.random.default_rng(0)
        self.profile = PairProfile(CostModel([0, *self._verify], self._draft.tolist()), drafting.n_slots)
        self.spent_s, self.n_said = 0.0, 0

    def answer(self, recording: Recording, *, pool: bool) -> None:
        parking, text = self.profile.parking, recording.prompt + recording.answer
        if pool := pool and parking.admits(0.0):
            parking.admit(0.0)
        plan = Auto(
            self.profile, self._drafting, Bounds(self._drafting.draft_max), Sampler(SamplingParams()), pool=pool
        )
        n = len(recording.prompt)
        while n < len(text):
            proposal = plan.propose(text[:n], len(text) - n)
            k, whole = proposal.n_slots, recording.pools[n]
            choice = proposal.select(Lattice(whole.ids[:k], whole.scores[:k]) if k else None)
            n_accepted, n_sent = walk(choice.draft, text[n:]), len(choice.draft.tokens)
            said = text[n : n + n_accepted + 1]
            verify_s, draft_s = self._verify[n_sent] * (self._after if k else 1.0), self._draft[k]
            self.spent_s += verify_s + draft_s
            self.n_said += len(said)
            verify_s, draft_s = np.array([verify_s, draft_s]) * np.exp(NOISE * self._rng.standard_normal(2))
            plan.learn(choice, Round(said, n_sent, n_accepted, verify_s=verify_s, total_s=verify_s + draft_s))
            n += len(said)

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return TOKEN_S * self.n_said / self.spent_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", default="mt_bench,humaneval")
    parser.add_argument("--count", type=int, default=4, help="prompts of each set")
    parser.add_argument("--predict", type=int, default=120)
    parser.add_argument("--draft", type=float, default=0.5, help="a whole draft, by a pass over one token")
    parser.add_argument("--after", type=float, default=1.1, help="a pass behind a draft, by one that is not")
    parser.add_argument("--cycles", type=int, default=4, help="times that all answers are replayed")
    args = parser.parse_args()
    with load_pair(args) as pair:
        assert pair.drafting is not None
        texts = [text for name in args.sets.split(",") for text in read_set(args, name, args.count)]
        recordings, drafting = [record(pair, text, args.predict) for text in texts], pair.drafting
    print("| machine | n-gram | auto | auto by the better of plain and n-gram |\n|---|---|---|---|")
    for name, verify in MACHINES.items():
        ngram, auto = (Replay(verify, args.draft, args.after, drafting) for _ in range(2))
        for recording in recordings * args.cycles:
            ngram.answer(recording, pool=False)
            auto.answer(recording, pool=True)
        best = max(1.0, ngram.speed)
        print(f"| {name} | {ngram.speed:.3f} | {auto.speed:.3f} | {auto.speed / best:.3f} |", flush=True)


if __name__ == "__main__":
    main()

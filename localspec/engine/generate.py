"""The round, repeated: draft, select, verify, accept, roll back, inject.

Between rounds `tokens[-1]`, the anchor, has been emitted but is in neither KV cache; both hold exactly the positions
before it. Plain decoding is the same loop with an empty draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localspec.engine.accept import rejection, sample_and_match
from localspec.engine.drafter import Drafter
from localspec.engine.lattice import Lattice
from localspec.engine.paths import Chain, Draft, depths
from localspec.engine.plan import C, Plan
from localspec.engine.reading import Reading
from localspec.engine.sampling import Sampler
from localspec.engine.stats import Round
from localspec.engine.target import N_BATCH, Target
from localspec.engine.timer import Timer
from localspec.errors import OptionError

N_WAIT = 512  # rounds whose features may wait for their injection

Clip = Callable[[list[int]], tuple[int, bool]]  # emitted tokens -> how many to keep, and whether the answer ends


class Accepted(NamedTuple):
    """What a round emits: `tokens`, the first `n_drafted` of them drafted; the `rows` of the batch that decided on
    them; and whether the answer ends.
    """

    tokens: list[int]
    rows: list[int]
    n_drafted: int
    ends: bool


@dataclass(frozen=True)
class Prefill:
    """What reading the prompt took: `n_cached` tokens were in the KV cache, `n` were read in `total_s` seconds."""

    n_cached: int
    n: int
    total_s: float


class Engine:
    """Target, drafter and the tokens they have in common: the one place that holds a generation's state.

    `reading` says how prompts are read, `drafts` what each round since `start` has verified.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self.reading = Reading()
        self.tokens: list[int] = []
        self.drafts: list[Draft] = []
        self._n_read = 0  # of the target's positions, the first ones that come from reading a prompt
        self._spec = False  # whether the drafter keeps up with the target
        self._pending: list[NDArray[np.float32]] = []  # features of rounds that drafted nothing, not injected yet
        self._in_sync = True  # False while the KV caches change: after an interrupt they are not trusted

    @property
    def room(self) -> int:
        """How many tokens a draft may have before the context is full; negative when nothing fits any more."""
        return self.target.n_ctx - len(self.tokens)

    def lag(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that the target holds and would read again for the drafter's sake only."""
        if self.drafter is None or not self._in_sync:
            return 0
        known = self._known(prompt)
        held = self.drafter.n_past + sum(len(features) for features in self._pending)
        return self.target.reachable(known) - self.target.reachable(min(known, held))

    def start(
        self,
        prompt: Sequence[int],
        *,
        spec: bool,
        keep_at: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefill:
        """Bring both KV caches to the prompt, re-using what they hold; its last token becomes the anchor.

        `keep_at`: how many of its tokens the next prompt will begin with (None: all); a target that cannot go back
        freely keeps a checkpoint there. `progress(done, all)` is called after each chunk. With `spec` false the drafter
        stays behind.
        """
        began = perf_counter()
        known = self._known(prompt) if self._in_sync else 0
        keep, end = self._rewind_to_common(prompt, spec), len(prompt) - 1
        self.tokens, self.drafts = list(prompt), []
        self.target.expose_features(spec)
        self._spec = spec
        marks = {end if keep_at is None else self.reading.mark(keep_at, end)}
        if keep < known:  # where prompts have parted once, they will again: behind a system message, a turn undone
            marks.add(self.reading.mark(known, end))
        self._checkpoint_at(marks)
        for chunk in self.reading.chunks(keep, end, marks, N_BATCH):
            self.target.prefill(self.tokens[chunk])
            if spec and self.drafter:
                self.drafter.inject(self.target.features(slice(chunk.stop - chunk.start)))
            self._checkpoint_at(marks)
            if progress:
                progress(chunk.stop, end)
        self._n_read = end if keep <= self._n_read else self._n_read
        self._in_sync = True
        return Prefill(keep, end - keep, perf_counter() - began)

    def _checkpoint_at(self, marks: set[int]) -> None:
        if self.target.n_past in marks:
            self.target.checkpoint()

    def round(self, plan: Plan[C], sampler: Sampler, clip: Clip) -> tuple[Round, bool]:
        """One round as `plan` wants it. Returns it and whether the answer ends with it."""
        self._in_sync = False
        timer = Timer()
        proposal = plan.propose(self.tokens, self.room)
        if not proposal.keeps_up:
            self._leave_behind()
        lattice = timer.draft(self._draft, proposal.n_slots)
        choice = proposal.select(lattice)
        self.drafts.append(choice.draft)
        rows = timer.verify(self.target.verify, self.tokens[-1], choice.draft)
        accepted = self._accept(rows, choice.draft, sampler, clip)
        timer.inject(self._commit, accepted, wait=proposal.n_slots == 0)
        self._in_sync = True
        round = Round(
            tokens=accepted.tokens,
            n_drafted=len(choice.draft.tokens),
            n_deep=max(depths(choice.draft), default=0),
            n_accepted=accepted.n_drafted,
            draft_s=timer.draft_s,
            verify_s=timer.verify_s,
            inject_s=timer.inject_s,
            total_s=timer.total_s,
        )
        plan.learn(choice, round)
        return round, accepted.ends

    def _draft(self, n_slots: int) -> Lattice | None:
        if n_slots < 1 or self.drafter is None:
            return None
        self._inject_pending()
        return self.drafter.draft(self.tokens[-1], n_slots)

    def _accept(self, rows: NDArray[np.float32], draft: Draft, sampler: Sampler, clip: Clip) -> Accepted:
        """What of `draft` the target would have said itself, one token more, and what `clip` leaves of it."""
        emitted, visited = self._match(rows, draft, sampler)
        n, ends = clip(emitted)
        return Accepted(emitted[:n], visited[:n], min(len(emitted) - 1, n), ends)

    def _match(self, rows: NDArray[np.float32], draft: Draft, sampler: Sampler) -> tuple[list[int], list[int]]:
        """The tokens this round emits and the rows of the batch that decided on them."""
        recent = self.tokens[-sampler.window :] if sampler.window else []
        if isinstance(draft, Chain) and draft.q is not None and sampler.params.temperature > 0:
            return rejection(rows, draft, lambda row, said: sampler.distribution(row, recent + said), sampler)
        n = len(self.tokens)
        return sample_and_match(rows, draft, lambda row, said: sampler.choose(row, recent + said, n + len(said)))

    def _commit(self, accepted: Accepted, *, wait: bool) -> None:
        """Keep what was accepted, in both caches and in the text."""
        self.target.commit(accepted.rows)
        if self.drafter and self._spec:
            self._remember(self.target.features(accepted.rows), wait=wait)
        self.tokens += accepted.tokens

    def _leave_behind(self) -> None:
        """Let the drafter fall behind, which spares the target handing out its features; `start` catches up."""
        if self._spec:
            self._spec = False
            self.target.expose_features(False)

    def _remember(self, features: NDArray[np.float32], *, wait: bool) -> None:
        """Give the drafter the features of kept tokens: at once, or many together where it is not asked to draft."""
        self._pending.append(features.copy())
        if not wait or len(self._pending) >= N_WAIT:
            self._inject_pending()

    def _inject_pending(self, until: int | None = None) -> None:
        """Give the drafter what waits, up to position `until`."""
        if self.drafter and self._pending:
            wanted = None if until is None else max(0, until - self.drafter.n_past)
            self.drafter.inject(np.concatenate(self._pending)[:wanted])
        self._pending.clear()

    def forget(self) -> None:
        """Trust neither KV cache any more: the next `start` reads its whole prompt."""
        self.tokens, self._in_sync = [], False

    def _rewind_to_common(self, prompt: Sequence[int], spec: bool) -> int:
        if not self._in_sync:
            self._pending.clear()
            self.target.forget()
            if self.drafter:
                self.drafter.forget()
            self._n_read = 0
        self._in_sync = False
        keep = self._known(prompt)
        self._inject_pending(keep)
        if spec and self.drafter:
            keep = min(keep, self.drafter.n_past)
        keep = self._rewind(self.reading.keeps(keep, self._n_read, len(prompt) - 1), len(prompt) - 1)
        if self.drafter:
            self.drafter.rewind(min(keep, self.drafter.n_past))
        return keep

    def _rewind(self, n: int, end: int) -> int:
        """Go back to `n` positions, or where that is not possible to a place from which reading on is fresh reading."""
        kept = self.target.rewind(n)
        if kept < n and self.reading.strict and self.reading.keeps(kept, self._n_read, end) < kept:
            kept = self.target.rewind(0)
        return kept

    def _known(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` the target holds, all but the last at most."""
        return min(_common(self.tokens, prompt), len(prompt) - 1, self.target.n_past)


def generate(engine: Engine, *, plan: Plan[C], sampler: Sampler, clip: Clip) -> Iterator[Round]:
    """Rounds until `clip` ends the answer or the context is full. Call `engine.start` first.

    Raises OptionError when another answer has been started meanwhile: the KV caches are no longer this one's.
    """
    tokens, ends = engine.tokens, False
    while not ends and engine.room >= 0:
        if engine.tokens is not tokens:
            raise OptionError("another answer has begun on this pair; finish or close one before the next.")
        round, ends = engine.round(plan, sampler, clip)
        yield round


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n

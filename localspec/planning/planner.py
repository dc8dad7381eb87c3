"""The plans of one pair's answers: what they know of the machine, when it is measured, and what is kept of it."""

from __future__ import annotations

from localspec.engine.generate import Engine
from localspec.engine.plan import Drafting
from localspec.engine.sampling import Sampler
from localspec.planning.auto import Auto
from localspec.planning.cost_model import CostModel
from localspec.planning.measure import Measurement, Measuring
from localspec.planning.profile import PairProfile, Source
from localspec.planning.proposal import Bounds
from localspec.planning.quiet import Others
from localspec.planning.store import ProfileStore

WAIT_S = 20.0  # seconds of answers before the machine is measured between two of them; doubled after each attempt
MOST_ATTEMPTS = 6  # measurements that something else disturbed


class Planner:
    """Makes plans for the answers of `engine`, whose target and drafter can do `drafting`.

    The first answer begins at once, with costs that are guessed and corrected by its own rounds. They are measured
    later: by `settle` where nobody waits, before an answer once the answers so far have taken long enough to make it
    worth while, or by `tune`. What was measured while something else ran is used, and measured again another time.
    """

    def __init__(
        self, engine: Engine, drafting: Drafting, store: ProfileStore, acceptance_length: float | None = None
    ) -> None:
        self._engine, self._drafting, self._store = engine, drafting, store
        self._acceptance_length = acceptance_length  # of the drafter, by whoever made it
        self._profile: PairProfile | None = None
        self._others = Others()
        self._has_tried = False  # to measure, in this process

    @property
    def profile(self) -> PairProfile:
        """What is known of this pair on this machine."""
        if self._profile is None:
            target, n_slots = self._engine.target, self._drafting.n_slots
            known = self._store.load(target.draft_max, n_slots)
            costs = CostModel.prior(target.draft_max, n_slots, on_gpu=target.model.on_gpu)
            self._profile = known or self._fresh(costs, Source.PRIOR)
        return self._profile

    def plan(self, bounds: Bounds, sampler: Sampler, *, pool: bool) -> Auto:
        """The plan of one answer; `pool`: whether it may ask the drafter."""
        return Auto(self.profile, self._drafting, bounds, sampler, pool=pool)

    def admit(self, lag: int) -> bool:
        """Whether an answer may ask the drafter, which would have to read `lag` tokens first; if so it is charged.

        One that rests falls behind: reading out the target's features takes time. It is tried again where it can catch
        up at a price that its account covers, in a new conversation at the latest.
        """
        costs, parking = self.profile.costs.verify, self.profile.parking
        catch_up = lag * float(costs[-1] / (costs[1] * (len(costs) - 1)))  # a long pass is about as fast as reading
        if not parking.admits(catch_up):
            return False
        parking.admit(catch_up)
        return True

    def prepare(self) -> None:
        """Before an answer: measure what is worth it by now, in some seconds."""
        profile = self.profile
        if profile.unmeasured_s > WAIT_S * 2**profile.n_attempts and self._may_measure:
            self._measure()

    def settle(self) -> None:
        """While nobody waits: measure if that has not been done yet, or was disturbed, in some seconds.

        What the caches held is read again.
        """
        if self._may_measure:
            engine = self._engine
            tokens, lag = list(engine.tokens), engine.lag(engine.tokens)
            self._measure()
            if tokens:
                engine.start(tokens, spec=lag == 0)

    @property
    def _may_measure(self) -> bool:
        profile = self.profile
        is_open = profile.is_provisional and profile.n_attempts < MOST_ATTEMPTS and not self._has_tried
        return is_open and (profile.source is Source.PRIOR or not self._others.are_busy)

    def tune(self) -> PairProfile:
        """Measure this machine anew and forget what drafting has brought so far."""
        self._profile = self._fresh(self.profile.costs, Source.PRIOR)
        self._measure()
        return self.profile

    def _measure(self) -> None:
        """Measure, and keep what is known by then if that is interrupted. Empties both caches."""
        engine = self._engine
        assert engine.drafter is not None
        self._has_tried = True
        engine.forget()
        measuring = Measuring(engine.target, engine.drafter)
        try:
            measuring.run()
        finally:
            if found := measuring.result():
                self._take(found)

    def _take(self, found: Measurement) -> None:
        """Go on with measured costs; what is known of acceptances and n-grams stays."""
        old = self.profile
        self._profile = new = self._fresh(found.costs, Source.QUIET if found.is_quiet else Source.BUSY)
        new.acceptance, new.ngrams, new.n_attempts = old.acceptance, old.ngrams, old.n_attempts + 1
        self.keep()

    def _fresh(self, costs: CostModel, source: Source) -> PairProfile:
        profile = PairProfile(costs, self._drafting.n_slots, source)
        if self._acceptance_length:
            profile.expect(self._acceptance_length)
        return profile

    def keep(self) -> None:
        """Write the profile down for the next time."""
        if self._profile:
            self._store.keep(self._profile)

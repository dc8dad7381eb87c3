"""Holds the profile of one open pair: found in the store or begun with a guess, measured in time, and kept."""

from __future__ import annotations

from localspec.engine.generate import Engine
from localspec.errors import OptionError
from localspec.planning.cost_model import CostModel
from localspec.planning.measure import Measurement, Measuring
from localspec.planning.profile import PairProfile, Source
from localspec.planning.quiet import Others
from localspec.planning.store import ProfileStore

WAIT_S = 20.0  # seconds of answers before the machine is measured between two of them; doubled after each attempt
MOST_ATTEMPTS = 6  # measurements that something else disturbed


class ProfileKeeper:
    """The profile of the pair that `engine` runs, in `store` between sessions.

    The first answer begins at once, with costs that are guessed and corrected by its own rounds. They are measured
    later: by `settle` where nobody waits, by `prepare` once the answers so far have taken long enough to make it worth
    while, or by `measure`. What was measured while something else ran is used, and measured again another time.
    `acceptance_length`: what the drafter reached when it was made, if that is known.
    """

    def __init__(self, engine: Engine, store: ProfileStore, *, acceptance_length: float | None = None) -> None:
        self._engine, self._store, self.acceptance_length = engine, store, acceptance_length
        self.known: PairProfile | None = None  # so far
        self._others, self._has_tried = Others(), False  # to measure, in this process

    @property
    def is_possible(self) -> bool:
        """Whether there is something to know: a drafter, and a context large enough to measure in."""
        target = self._engine.target
        return self._engine.drafter is not None and target.n_ctx > 2 * (target.draft_max + 1)

    def get(self) -> PairProfile | None:
        """What is known, None where nothing can be."""
        drafter, target = self._engine.drafter, self._engine.target
        if self.known is None and drafter and self.is_possible:
            n_slots = drafter.block_size - 1
            guess = CostModel.prior(target.draft_max, n_slots, on_gpu=target.model.on_gpu)
            self.known = self._store.load(target.draft_max, n_slots) or self._fresh(guess, Source.PRIOR)
        return self.known

    def admit(self, lag: int) -> bool:
        """Whether an answer may ask the drafter, which would have to read `lag` tokens first; if so it is charged.

        One that rests falls behind: reading out the target's features takes time. It is tried again where it can catch
        up at a price that its account covers, in a new conversation at the latest.
        """
        if (profile := self.get()) is None:
            return True
        costs = profile.costs.verify
        catch_up = lag * float(costs[-1] / (costs[1] * (len(costs) - 1)))  # a long pass is about as fast as reading
        if not profile.parking.admits(catch_up):
            return False
        profile.parking.admit(catch_up)
        return True

    def prepare(self) -> None:
        """Before an answer: measure if that is worth it by now, in some seconds."""
        profile = self.get()
        if profile and profile.unmeasured_s > WAIT_S * 2**profile.n_attempts and self._may_measure(profile):
            self._measure(profile)

    def settle(self) -> None:
        """While nobody waits: measure if that has not been done yet, or was disturbed, in some seconds.

        What the caches held is read again.
        """
        profile, engine = self.get(), self._engine
        if profile and self._may_measure(profile):
            tokens, lag = list(engine.tokens), engine.lag(engine.tokens)
            self._measure(profile)
            if tokens:
                engine.start(tokens, spec=lag == 0)

    def measure(self) -> PairProfile:
        """Measure this machine anew and forget what drafting has brought so far. Empties both KV caches."""
        if (old := self.get()) is None:
            raise OptionError("there is nothing to tune without a drafter (-md) and some context (-c).")
        self._measure(self._fresh(old.costs, Source.PRIOR))
        assert self.known is not None
        return self.known

    def _may_measure(self, profile: PairProfile) -> bool:
        is_open = profile.is_provisional and profile.n_attempts < MOST_ATTEMPTS and not self._has_tried
        return is_open and (profile.source is Source.PRIOR or not self._others.are_busy)

    def _measure(self, old: PairProfile) -> None:
        """Measure, and keep what is known by then if that is interrupted. Empties both KV caches."""
        engine = self._engine
        assert engine.drafter is not None
        self._has_tried = True
        engine.forget()
        measuring = Measuring(engine.target, engine.drafter)
        try:
            measuring.run()
        finally:
            if found := measuring.result():
                self._take(found, old)

    def _take(self, found: Measurement, old: PairProfile) -> None:
        """Go on with measured costs; what is known of acceptances and n-grams stays."""
        self.known = new = self._fresh(found.costs, Source.QUIET if found.is_quiet else Source.BUSY)
        new.acceptance, new.ngrams, new.n_attempts = old.acceptance, old.ngrams, old.n_attempts + 1
        self.keep()

    def _fresh(self, costs: CostModel, source: Source) -> PairProfile:
        profile = PairProfile(costs, len(costs.draft) - 1, source)
        if self.acceptance_length:
            profile.expect(self.acceptance_length)
        return profile

    def keep(self) -> None:
        """Write down what is known for the next time."""
        if self.known:
            self._store.keep(self.known)

"""Holds the profile of one open pair: found in the store or measured when first wanted, and kept for the next time."""

from __future__ import annotations

from localspec.engine.generate import Engine
from localspec.errors import OptionError
from localspec.planning import measure
from localspec.planning.profile import PairProfile
from localspec.planning.store import ProfileStore


class ProfileKeeper:
    """The profile of the pair that `engine` runs, in `store` between sessions.

    `acceptance_length`: what the drafter reached when it was made, if that is known.
    """

    def __init__(self, engine: Engine, store: ProfileStore, *, acceptance_length: float | None = None) -> None:
        self._engine, self._store, self.acceptance_length = engine, store, acceptance_length
        self.known: PairProfile | None = None  # so far

    @property
    def is_possible(self) -> bool:
        """Whether there is something to know: a drafter, and a context large enough to measure in."""
        target = self._engine.target
        return self._engine.drafter is not None and target.n_ctx > 2 * (target.draft_max + 1)

    def get(self) -> PairProfile | None:
        """What is known, None where nothing can be. At first use it may measure for some seconds."""
        if self.known is None and self._engine.drafter and self.is_possible:
            self.known = self._store.load(self._engine.target, self._engine.drafter) or self.measure()
        return self.known

    def measure(self) -> PairProfile:
        """Measure this machine anew and forget what drafting has brought so far. Empties both KV caches."""
        target, drafter = self._engine.target, self._engine.drafter
        if drafter is None or not self.is_possible:
            raise OptionError("there is nothing to tune without a drafter (-md) and some context (-c).")
        self._engine.forget()
        profile = PairProfile(measure.measure(target, drafter), drafter.block_size - 1)
        if self.acceptance_length:
            profile.expect(self.acceptance_length)
        self._store.keep(profile)
        self.known = profile
        return profile

    def keep(self) -> None:
        """Write down what drafting has brought so far."""
        if self.known:
            self._store.keep(self.known)

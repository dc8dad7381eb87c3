"""Makes the plan of each answer, from its options and what is known of the pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localspec.engine.plan import Drafting, Fixed, Plan, selector
from localspec.engine.sampling import Sampler
from localspec.options import Settings
from localspec.planning.auto import Auto
from localspec.planning.exactness import LOSS, Exactness, ExactnessKeeper, Promise, loss
from localspec.planning.keeper import ProfileKeeper
from localspec.planning.proposal import Bounds

TREE = 16  # nodes of a tree whose size nobody said


class Plans:
    """Plans for a pair that can draft what `drafting` says (None: nothing)."""

    def __init__(self, drafting: Drafting | None, profile: ProfileKeeper, exactness: ExactnessKeeper) -> None:
        self._drafting, self.profile, self._exactness = drafting, profile, exactness

    @property
    def drafting(self) -> Drafting | None:
        """What can be drafted; where passes must be exact, no more than those hold."""
        if self._drafting is None or not self._exactness.strict:
            return self._drafting
        return replace(self._drafting, draft_max=min(self._drafting.draft_max, self.prepare().width - 1))

    def prepare(self) -> Exactness:
        """Find out which passes are exact, at first use by measuring, and have prompts read accordingly."""
        return self._exactness.get()

    @property
    def promise(self) -> Promise:
        """What holds for answers at default settings."""
        drafting = self.drafting
        widest = 1 + (self._most(drafting) if drafting else 0)
        return Promise(self.prepare(), widest, self._exactness.strict)

    def _most(self, drafting: Drafting) -> int:
        """The most tokens a draft has unless the user says so: exact passes are left only where that pays."""
        width, profile = self.prepare().width, self.profile.get()
        if width > drafting.draft_max or profile is None:
            return drafting.draft_max
        is_cheap = loss(profile.costs, width, self.profile.acceptance_length) < LOSS
        return width - 1 if is_cheap else drafting.draft_max

    def needs_pool(self, settings: Settings, lag: Callable[[], int]) -> bool:
        """Whether an answer may ask the drafter; `lag()` tokens would be read again for it. The machine is measured
        before, if that is worth it by now."""
        if not settings.drafts:
            return False
        if settings.path in ("auto", "ngram"):
            self.profile.prepare()
        if settings.path != "auto" or settings.draft_min:
            return settings.path != "ngram"
        return self.profile.admit(lag())

    def plan(self, settings: Settings, sampler: Sampler, *, pool: bool) -> Plan[Any]:
        """How an answer drafts; without `pool` it never asks the drafter."""
        drafting, path, n = self.drafting, settings.path, settings.draft_max
        if drafting is None or not settings.drafts:
            return Fixed()
        if callable(path):
            return Fixed(drafting.n_slots, lambda lattice, _: path(lattice))
        if path in ("auto", "ngram") and (profile := self.profile.get()):
            bounds = Bounds(n or self._most(drafting), settings.draft_min, settings.draft_p_min)
            return Auto(profile, drafting, bounds, sampler, pool=pool)
        if path == "ngram":
            return Fixed()
        n = n or min(TREE if path == "tree" else drafting.n_slots, drafting.draft_max)
        return Fixed(drafting.n_slots, selector(path, n, drafting, sampler))

"""Makes the plan of each answer, from its options and what is known of the pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localspec.engine.plan import Drafting, Fixed, Plan, selector
from localspec.engine.sampling import Sampler
from localspec.options import Settings
from localspec.planning.auto import Auto
from localspec.planning.keeper import ProfileKeeper
from localspec.planning.proposal import Bounds

TREE = 16  # nodes of a tree whose size nobody said


class Plans:
    """Plans for a pair that can draft what `drafting` says (None: nothing)."""

    def __init__(self, drafting: Drafting | None, profile: ProfileKeeper) -> None:
        self.drafting, self.profile = drafting, profile

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
            bounds = Bounds(n or drafting.draft_max, settings.draft_min, settings.draft_p_min)
            return Auto(profile, drafting, bounds, sampler, pool=pool)
        if path == "ngram":
            return Fixed()
        n = n or (min(TREE, drafting.draft_max) if path == "tree" else drafting.n_slots)
        return Fixed(drafting.n_slots, selector(path, n, drafting, sampler))

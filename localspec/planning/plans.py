"""Makes the plan of each answer, from its options and what is known of the pair."""

from __future__ import annotations

from collections.abc import Callable

from localspec.engine.plan import Drafting, Fixed, Plan, selector
from localspec.engine.sampling import Sampler
from localspec.options import Settings
from localspec.planning.auto import Auto, Bounds
from localspec.planning.keeper import ProfileKeeper

TREE = 16  # nodes of a tree whose size nobody said
CATCH_UP = 256  # tokens that may be read again for a drafter in doubt


class Plans:
    """Plans for a pair that can draft what `drafting` says (None: nothing)."""

    def __init__(self, drafting: Drafting | None, profile: ProfileKeeper) -> None:
        self.drafting, self.profile = drafting, profile

    def needs_pool(self, settings: Settings, lag: Callable[[], int]) -> bool:
        """Whether an answer may ask the drafter; `lag()` tokens would be read again for it.

        One that rests for long falls behind: reading out the target's features costs some per cent of a small model's
        time. It is tried again where it can catch up at little cost, in a new conversation at the latest.
        """
        if not settings.drafts:
            return False
        if settings.path != "auto" or settings.draft_min:
            return settings.path != "ngram"
        if (profile := self.profile.get()) is None:
            return True
        return not profile.rests_long and (not profile.is_doubted or lag() <= CATCH_UP)

    def plan(self, settings: Settings, sampler: Sampler, *, pool: bool) -> Plan:
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

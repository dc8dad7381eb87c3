"""Keeps the profile of a pair between sessions."""

from __future__ import annotations

import json

from localspec.planning.profile import PairProfile
from localspec.storage import recall, remember

KIND = "profiles"


class ProfileStore:
    """The profile of one `key` (files, build, threads) between sessions.

    A cache that cannot be used costs a measurement next time, no more.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def load(self, draft_max: int, n_slots: int) -> PairProfile | None:
        """What is kept, if it is for drafts of up to `draft_max` tokens from blocks of `n_slots`."""
        try:
            profile = PairProfile.from_json(json.loads(recall(KIND, self._key) or "null"))
        except (ValueError, KeyError, TypeError):
            return None
        lengths = {len(profile.costs.draft) - 1, len(profile.acceptance.promised), len(profile.draft_length.tokens)}
        return profile if profile.costs.most == draft_max and lengths == {n_slots} else None

    def keep(self, profile: PairProfile) -> None:
        """Write it down."""
        remember(KIND, self._key, json.dumps(profile.to_json()))

"""Keeps the profile of a pair between sessions."""

from __future__ import annotations

import hashlib
import json

from localspec.planning.profile import PairProfile
from localspec.storage import cache_dir


class ProfileStore:
    """Where the profile of one `key` (files, build, threads) lies between sessions."""

    def __init__(self, key: str) -> None:
        self.path = cache_dir() / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def load(self, draft_max: int, n_slots: int) -> PairProfile | None:
        """What is kept, if it is for drafts of up to `draft_max` tokens from blocks of `n_slots`."""
        try:
            profile = PairProfile.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        lengths = {len(profile.costs.draft) - 1, len(profile.acceptance.promised), len(profile.draft_length.tokens)}
        return profile if profile.costs.most == draft_max and lengths == {n_slots} else None

    def keep(self, profile: PairProfile) -> None:
        """Write it down; a cache that cannot be written costs a measurement next time, no more."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(profile.to_json()), encoding="utf-8")
            part.replace(self.path)
        except OSError:
            pass

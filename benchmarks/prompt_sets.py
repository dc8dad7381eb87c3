"""The prompt sets that figures are taken on, fetched once from where they are published: pinned and hashed.

    python benchmarks/prompt_sets.py            # fetches all of them into localspec's cache

Every script here does the same for the sets it needs; `--data FOLDER` takes NAME.jsonl from a folder instead. Prompts
of more than 1,500 characters are left out. Used for measuring only: no drafter may be trained on them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.storage import cache_dir, write_whole

RAW = "https://raw.githubusercontent.com"
LONGEST = 1500  # characters


@dataclass(frozen=True)
class PromptSet:
    """A file of a repository at one commit; `sha256` of the file as it is published there."""

    repository: str
    commit: str
    file: str
    sha256: str
    license: str

    def prompts(self, data: bytes) -> Iterator[str]:
        """The prompts of the published file: of questions in several turns the first."""
        text = gzip.decompress(data) if self.file.endswith(".gz") else data
        for line in text.decode().splitlines():
            fields: dict[str, Any] = json.loads(line)
            prompt = fields["turns"][0] if "turns" in fields else fields["prompt"]
            if len(prompt) <= LONGEST:
                yield prompt


FASTCHAT = ("lm-sys/FastChat", "0e6d3e4beaab66f4d3f93db72541a4abab8af28d")
SETS = {
    "mt_bench": PromptSet(
        *FASTCHAT,
        "fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        "Apache-2.0",
    ),
    "vicuna_bench": PromptSet(
        *FASTCHAT,
        "fastchat/llm_judge/data/vicuna_bench/question.jsonl",
        "c248c5c98ba45bb0c2aadae2f270e643bd32679c6c306a3b2a503ac4254cdaa5",
        "Apache-2.0",
    ),
    "humaneval": PromptSet(
        "openai/human-eval",
        "6d43fb980f9fee3c892a914eda09951f772ad10d",
        "data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        "MIT",
    ),
}


def path_of(name: str, folder: Path | None = None) -> Path:
    """NAME.jsonl in `folder`, or in the cache, where it is fetched into if it is not there."""
    if folder is not None:
        return folder / f"{name}.jsonl"
    path = cache_dir() / "prompts" / f"{name}-{SETS[name].sha256[:8]}.jsonl"
    if not path.exists():
        data = _fetch(SETS[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps({"prompt": text}) + "\n" for text in SETS[name].prompts(data)))
    return path


def _fetch(source: PromptSet) -> bytes:
    url = f"{RAW}/{source.repository}/{source.commit}/{source.file}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            data: bytes = response.read()
    except OSError as error:
        sys.exit(f"cannot fetch {url} ({error}); give a folder of prompt sets with --data.")
    if (found := hashlib.sha256(data).hexdigest()) != source.sha256:
        sys.exit(
            f"{url} has SHA-256 {found[:12]}…, not {source.sha256[:12]}…; give a folder of prompt sets with --data."
        )
    return data


if __name__ == "__main__":
    for name in SETS:
        print(path_of(name))

"""What `localspec distill` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DistillConfig:
    """All that a user may decide about making a drafter; the command's options carry the same names.

    n_tokens: tokens of chats the target writes.
    hours: training time.
    n_layers: layers of the drafter.
    block_size: tokens of a block, the anchor's included.
    vocab_size: tokens it can draft, the most frequent ones.
    objective: "ce" on the token that was said, "kl" to the target's distribution, or a "mix" of both.
    prompts: mixed in with the questions the target makes up, or all there is for one without chat template.
    chats: a data folder of another file of the same model; its chats are read again instead of writing new ones.
    begin: the folder of an earlier `distill` whose drafter training begins with, made for a model of the same shape
        and vocabulary: of this file's base model, or on fewer chats. If it has more layers, the first are taken.
    two_pass: write the chats first and collect the features afterwards, which takes less memory and more time.
    n_slots: chats written at a time.
    n_threads: CPU threads; None: physical cores.
    outtype: encoding of the weights, see `release`; "auto" is the smallest as good as Q8_0.
    hf: also write a Hugging Face checkpoint into this folder.
    seed: of everything random.
    """

    n_tokens: int = 1_000_000
    hours: float = 1.0
    n_layers: int = 2
    block_size: int = 8
    vocab_size: int = 8192
    objective: str = "ce"
    prompts: tuple[str, ...] = ()
    chats: Path | None = None
    begin: Path | None = None
    two_pass: bool = False
    n_slots: int = 96
    n_threads: int | None = None
    outtype: str = "auto"
    hf: Path | None = None
    seed: int = 0

"""The model card beside a drafter: whom it is for, how it was made, what it reaches; with a plot where there is
matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path

from localspec.distill.evaluate import Evaluation
from localspec.distill.export import provenance
from localspec.distill.meter import duration
from localspec.distill.start import TargetFile
from localspec.distill.store import Data
from localspec.distill.train import Trained
from localspec.storage import replacing, write_whole

PLOT = "acceptance.png"
MODES = {
    "plain": "plain text",
    "chat": "its chat template",
    "thinking": "its chat template, thinking before it answers",
}


def write(
    folder: Path, trained: Trained, data: Data, target: TargetFile, encoding: str, evaluation: Evaluation
) -> None:
    """Write `folder`/README.md for the drafter in it, and the plot."""
    text = _card(trained, data, target, encoding, evaluation, (folder / "drafter.gguf").stat().st_size)
    if importlib.util.find_spec("matplotlib"):
        plot(evaluation, folder / PLOT)
        text += f"\n![accepted and in the pool, slot by slot]({PLOT})\n"
    write_whole(folder / "README.md", text)


def _card(trained: Trained, data: Data, target: TargetFile, encoding: str, evaluation: Evaluation, n_bytes: int) -> str:
    facts, config = provenance(trained, data, target), trained.config
    n_sampled = sum(any(t > 0 for t in chat.figures.get("temperatures", ())) for chat in data.chats)
    n_file = sum(chat.figures.get("source") == "file" for chat in data.chats)
    licence = target.reader.fields.get("general.license")
    terms = f" The target's licence is {licence.contents()}; it may bind the drafter too." if licence else ""
    lengths = " · ".join(
        f"{text} {figures['acceptance_length']:.2f} ({figures['n_blocks']:,} blocks)"
        for text, figures in evaluation.figures.items()
    )
    parts = (
        f"# A drafter for {data.meta.target}",
        f"`drafter.gguf` is a DFlash 2 drafter for one file: **{data.meta.target}** (SHA-256 "
        f"`{data.meta.target_sha256}`). It guesses blocks of tokens which that model then checks; it changes how fast "
        f"the model speaks, never what it says.{terms}",
        f"    localspec chat -m {data.meta.target} -md drafter.gguf",
        _rows(
            ("", ""),
            (
                "architecture",
                f"`dflash`: {config.n_layers} layers, width {config.n_embd}, {config.n_heads} query and "
                f"{config.n_kv_heads} key-value heads of {config.head_dim}, feed-forward {config.n_ff:,}",
            ),
            ("block", f"{config.block_size}: drafts {config.n_slots} tokens behind the last one"),
            ("reads", f"the inputs of target layers {', '.join(map(str, config.target_layers))}"),
            (
                "drafts",
                f"{config.n_rows:,} of the target's {config.n_vocab:,} tokens, pools of {config.top_k}, selector of "
                f"rank {config.selector_rank}",
            ),
            ("size", f"{n_bytes / 1e6:.1f} MB, {encoding.upper()}"),
        ),
        "## How it was made",
        f"By `localspec distill` {facts['version']}, from that file alone: the target wrote {len(data.chats):,} chats "
        f"({len(data.tokens):,} tokens) in {MODES[facts['chat_mode']]}; {n_file:,} of them answer a given prompt, "
        f"{n_sampled:,} hold an answer drawn at a temperature, the others are greedy. Training took "
        f"{duration(trained.elapsed_s)}: {trained.step:,} steps over {trained.n_anchors:,} anchors. One chat in 50 was "
        "held out.",
        "## What it reaches",
        "Through llama.cpp, on the held-out chats, drafting a whole block at many tokens of the answers. Acceptance "
        f"length is the mean number of tokens a round, the target's own token included: {lengths}. Text repeats itself "
        "where its last 4 tokens occurred before in its last 64. None of this is speed, which depends on the machine: "
        "`localspec bench` measures it.",
        _table(evaluation),
        "The temperature is what the pool's scores are divided by to be log-odds, `localspec.calibration` in the file.",
    )
    return "\n\n".join(part if part[0] in " |" else _fill(part) for part in parts) + "\n"


def _fill(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _rows(*rows: Sequence[str]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join((lines[0], "|---" * len(rows[0]) + "|", *lines[1:]))


def _table(evaluation: Evaluation) -> str:
    whole, fresh = evaluation.figures["all"], evaluation.figures["fresh"]
    rows: list[tuple[str, Sequence[str]]] = [
        ("right token in the pool", [f"{x:.0%}" for x in whole["recall_per_slot"]]),
        ("kept by the greedy walk", [f"{x:.0%}" for x in whole["accepted_per_slot"]]),
        ("the same, fresh text", [f"{x:.0%}" for x in fresh["accepted_per_slot"]]),
        ("temperature", [f"{x:.2f}" for x in evaluation.calibration]),
    ]
    head = ["slot", *(str(slot) for slot in range(1, len(evaluation.calibration) + 1))]
    return _rows(head, *([name, *cells] for name, cells in rows))


def plot(evaluation: Evaluation, path: Path) -> None:
    """Accepted and in the pool, slot by slot, on fresh and repeating text, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for text, colour in (("fresh", "tab:blue"), ("repeating", "tab:orange")):
        figures = evaluation.figures[text]
        slots = range(1, len(figures["recall_per_slot"]) + 1)
        axes.plot(slots, figures["recall_per_slot"], color=colour, ls="--", label=f"in the pool, {text} text")
        axes.plot(slots, figures["accepted_per_slot"], color=colour, marker="o", label=f"accepted, {text} text")
    axes.set(xlabel="slot", ylabel="share of blocks", ylim=(0, 1), xticks=list(slots))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as part:
        figure.savefig(part, format="png")

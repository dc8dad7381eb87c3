"""What commands print as their result: tables and verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from localspec.cli.console import err, out

if TYPE_CHECKING:
    from localspec.evaluation.check import Report
    from localspec.evaluation.doctor import Finding
    from localspec.hub.find import Candidate
    from localspec.hub.registry import PairEntry
    from localspec.planning.cost_model import CostModel


def show_check(report: Report) -> None:
    """The outcome of `localspec check`, differences first."""
    console = out()
    for d in report.details:
        kind = "near-tie" if d.near_tie else "DIFFERENT, though bits were promised" if d.promised else "DIFFERENT"
        ways = [("alone", d.logits), (f"in a pass over {d.width}", d.logits_batched)]
        shown = ", ".join(f"{way} {pair[0]:.5f} and {pair[1]:.5f}" for way, pair in ways if pair)
        console.print(
            f"prompt {d.prompt}, token {d.position}: plain {d.plain_token}, spec {d.spec_token}; their logits "
            f"{shown or 'cannot be told'}: {kind}",
            markup=False,
            soft_wrap=True,
        )
    console.print(
        f"{report.prompts} prompts, {report.promised} of them promised to the last bit: {report.identical} identical, "
        f"{report.near_ties} near-ties, {report.different} different",
        soft_wrap=True,
    )
    console.print(f"by default {report.promise}", markup=False, soft_wrap=True)


def show_bench(figures: dict[str, Any]) -> None:
    """The outcome of `localspec bench`."""
    modes = figures["modes"]
    table = Table("", *modes, box=None, padding=(0, 2, 0, 0))
    table.add_row("tokens/s", *(f"{mode['predicted_per_second']:.1f}" for mode in modes.values()))
    table.add_row("speed-up", *(f"{mode['ratio']:.2f}" for mode in modes.values()))
    for kind in modes["plain"]["classes"]:
        table.add_row(kind, *(f"{mode['classes'][kind]:.2f}" for mode in modes.values()))
    table.add_row("a round", *(f"{mode['acceptance_length']:.2f}" for mode in modes.values()))
    table.add_row("accepted", *(f"{mode['accepted_share']:.0%}" if mode["draft_n"] else "" for mode in modes.values()))
    console = out()
    console.print(table)
    console.print(
        f"medians of {figures['repeats']}; an oracle in the drafter's pool would say "
        f"{figures['oracle_acceptance_length']:.2f} tokens a round, the greedy walk {figures['acceptance_length']:.2f}"
    )
    for name, mode in modes.items():
        if mode["accepted_per_slot"] and name != "ngram":
            console.print(f"{name}: kept per slot {' '.join(f'{share:.0%}' for share in mode['accepted_per_slot'])}")


def show_costs(costs: CostModel) -> None:
    """The outcome of `localspec tune`."""
    table = Table("tokens in a pass", "ms", "of one token", "ms behind 1,000 tokens", box=None, padding=(0, 2))
    empty, full = costs.verify, costs.at(1000)
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        if n < len(empty):
            table.add_row(str(n), f"{1e3 * empty[n]:.2f}", f"{empty[n] / empty[1]:.2f}", f"{1e3 * full[n]:.2f}")
    for n in sorted({1, len(costs.draft) - 1}):
        seconds = costs.draft[n]
        table.add_row(f"a draft of {n}", f"{1e3 * seconds:.2f}", f"{seconds / empty[1]:.2f}")
    out().print(table)


def show_finding(finding: Finding) -> None:
    """A line of `localspec doctor`, and under it what to do."""
    console, colour = out(), {"ok": "green", "warn": "yellow", "fail": "red"}[finding.status]
    console.print(finding.status.ljust(5), style=colour, end="")
    console.print(f"{finding.name}: {finding.detail}", markup=False, soft_wrap=True)
    if finding.next:
        console.print(f"     -> {finding.next}", style="dim", markup=False, soft_wrap=True)


def show_models(entries: list[PairEntry]) -> None:
    """The table of `localspec models`."""
    from localspec.hub.registry import fits

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "state", "size", "memory", "drafter", "target in"):
        table.add_column(heading, no_wrap=True)
    kinds = {"dflash1": "DFlash 1", "dflash2": "DFlash 2"}
    verdicts = {True: "fits", False: "too small", None: "?"}
    for entry in entries:
        state = "here" if entry.is_here() else "to pull"
        size = f"{entry.n_bytes / 1e9:.1f} GB" if entry.n_bytes else "?"
        verdict, kind = verdicts[fits(entry.n_bytes)], kinds[entry.drafter_kind]
        first, *others = entry.target.files
        table.add_row(entry.name, state, size, verdict, kind, first + (f" +{len(others)}" if others else ""))
    out().print(table)
    if not all(entry.is_here() for entry in entries):
        text = "localspec pull NAME fetches one, NAME:QUANT with another of its target files (--json lists them)"
        err().print(text, soft_wrap=True)


def show_found(candidates: list[Candidate]) -> None:
    """The outcome of `localspec find`: what fits first."""
    console = out()
    for candidate in sorted(candidates, key=lambda c: not c.fits):
        line = f"{candidate.name}: {candidate.refusal or candidate.note}"
        console.print(("fits     " if candidate.fits else "refused  ") + line, markup=False, soft_wrap=True)
    if not candidates:
        err().print("no drafter known or found here was made for this model", soft_wrap=True)

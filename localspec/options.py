"""The keyword options of an answer, checked before anything is spent on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from localspec.engine.lattice import Lattice
from localspec.engine.paths import Chain, Draft, Tree, leaves
from localspec.engine.plan import Drafting
from localspec.engine.sampling import SamplingParams
from localspec.errors import OptionError
from localspec.text import Limits

PATHS = ("auto", "ngram", "greedy", "expected", "tree", "sampled")
Select = Callable[[Lattice], Draft]
Progress = Callable[[int, int], None]
F = TypeVar("F", bound=Callable[..., Any])

MEANINGS = """
Options, with their defaults:
    max_tokens (None): the length at most, reasoning included; None goes on to the end of the context.
    stop (()): a text or several, at the first of which the answer ends; not part of it, not looked for in reasoning.
    temperature (0): 0 always takes the likeliest token; then the words are the same every time.
    top_k (40), top_p (0.95), min_p (0.05): llama.cpp's filters; 0, 1 and 0 switch them off. They count above 0 only.
    repeat_penalty (1), presence_penalty (0), frequency_penalty (0), penalty_last_n (64): llama.cpp's penalties.
    seed (None): the same seed gives the same words, with and without a drafter, except by path "sampled", whose words
        depend on what was drafted; None draws one.
    spec (None): False decodes plainly, True insists on a drafter; None drafts where there is one.
    path (None): how a draft is chosen: "auto" (what pays most on this machine), "ngram" (text that repeats itself, no
        drafter), "greedy", "expected", "tree", "sampled", or a function from a Lattice to a Chain or Tree. None is what
        `pair.path` says, "auto" at first.
    draft_max (None), draft_min (None): drafted tokens a round, at most and at least.
    draft_p_min (None): drafts no token less likely than this behind the one before it.
    progress (None): called as progress(read, all) after each batch of the prompt.
"""


class Options(TypedDict, total=False):
    """Keyword options of `Pair.generate`, `Pair.stream`, `Chat.send` and `Chat.stream`; see `MEANINGS`."""

    max_tokens: int | None
    stop: str | Sequence[str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    seed: int | None
    spec: bool | None
    path: str | Select | None
    draft_max: int | None
    draft_min: int | None
    draft_p_min: float | None
    progress: Progress | None


def with_options(method: F) -> F:
    """Have help() and inspect.signature name the keyword options of a method that takes `**options: Unpack[Options]`.

    Editors and type checkers read them from there themselves.
    """
    defaults = {f.name: f.default for f in fields(SamplingParams)} | {"stop": ()}
    named = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=hint.__forward_arg__
        )
        for name, hint in Options.__annotations__.items()
    ]
    own = inspect.signature(method)
    given = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    method.__signature__ = own.replace(parameters=[*given, *named])  # type: ignore[attr-defined]
    method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n{MEANINGS}"
    return method


@dataclass(frozen=True)
class Settings:
    """Options after checking. `drafts` is False for plain decoding; `path` is a name of `PATHS`, or a function."""

    sampling: SamplingParams
    limits: Limits
    drafts: bool
    path: str | Select
    draft_max: int | None
    draft_min: int
    draft_p_min: float
    progress: Progress | None

    @classmethod
    def of(cls, options: Options, drafting: Drafting | None) -> Settings:
        """Check `options` for a pair that can draft what `drafting` says; OptionError for what cannot be honoured."""
        given: dict[str, Any] = dict(options)
        if unknown := given.keys() - Options.__annotations__.keys():
            raise OptionError(f"unknown option {min(unknown)!r}; choose from {', '.join(Options.__annotations__)}.")
        if not callable(given.get("progress") or print):
            raise OptionError(f"progress must be a function of two numbers, not {given['progress']!r}.")
        stop = given.get("stop") or ()
        if not isinstance(stop, Sequence):
            raise OptionError(f"stop must be a text or a list of texts, not {stop!r}.")
        names = {f.name for f in fields(SamplingParams)}
        path = _path(given, drafting)
        return cls(
            SamplingParams(**{name: value for name, value in given.items() if name in names}),
            Limits(given.get("max_tokens"), (stop,) if isinstance(stop, str) else tuple(stop)),
            _drafts(given, path, drafting),
            path,
            given.get("draft_max"),
            given.get("draft_min") or 0,
            given.get("draft_p_min") or 0.0,
            given.get("progress"),
        )


def check_whole(name: str, value: object, low: int, high: int, why: str = "") -> None:
    """Refuse what is neither None nor a whole number from `low` to `high`; `why` says where the border comes from."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{name} must be a whole number, not {value!r}.")
    if not low <= value <= high:
        raise OptionError(f"{name} must be at least {low:,} and at most {high:,}{why}, not {value:,}.")


def _drafts(given: dict[str, Any], path: str | Select, drafting: Drafting | None) -> bool:
    """Whether anything is drafted, by `spec` and the bounds of a draft."""
    spec, most, least, p_min = (given.get(name) for name in ("spec", "draft_max", "draft_min", "draft_p_min"))
    if spec not in (None, True, False):
        raise OptionError(f"spec must be True, False or None, not {spec!r}.")
    wanted = next((f"{name} is {value}" for name, value in (("draft_max", most), ("draft_min", least)) if value), None)
    if drafting is None:
        if wanted := wanted or ("spec is on" if spec else None):
            raise OptionError(f"{wanted}, but there is no drafter; load one with draft (-md).")
        return False
    if spec is False and wanted:
        raise OptionError(f"{wanted}, but nothing is drafted with spec off; leave out one of the two.")
    chain = path in ("greedy", "expected", "sampled")  # through the pool: no longer than the block
    longest = min(drafting.n_slots, drafting.draft_max) if chain else drafting.draft_max
    why = (
        f" (a block of {drafting.n_slots + 1} tokens, the last one said included)"
        if chain and longest == drafting.n_slots
        else ""
    )
    check_whole("draft_max", most, 0, longest, why)
    check_whole("draft_min", least, 0, longest if most is None else most, why)
    if p_min is not None and not (isinstance(p_min, (int, float)) and 0 <= p_min <= 1):
        raise OptionError(f"draft_p_min must be a number from 0 to 1, not {p_min!r}.")
    if path != "auto" and (least or p_min):
        raise OptionError("draft_min and draft_p_min steer the planner; they go with path auto only.")
    return spec is not False and most != 0 and longest > 0


def _path(given: dict[str, Any], drafting: Drafting | None) -> str | Select:
    path = given.get("path") or "auto"
    if callable(path):
        if drafting is None:
            raise OptionError("path chooses from a drafter's pool, but there is no drafter; load one with draft (-md).")
        return _checked(path, drafting, given.get("draft_max"))
    if path in PATHS:
        return str(path)
    raise OptionError(f"path must be one of {', '.join(PATHS)}, or a function of a Lattice, not {path!r}.")


def _checked(select: Select, drafting: Drafting, most: int | None) -> Select:
    """`select`, its drafts checked and cut to `most` tokens: llama.cpp would abort over some a function may return."""

    def checked(lattice: Lattice) -> Draft:
        draft = select(lattice)
        if not isinstance(draft, (Chain, Tree)):
            raise OptionError(f"path returned {draft!r}; it must return a localspec.Chain or a localspec.Tree.")
        draft = _plain(draft)
        if bad := [token for token in draft.tokens if not 0 <= token < drafting.n_vocab]:
            raise OptionError(f"path drafted token {bad[0]}; the vocabulary has {drafting.n_vocab:,} tokens.")
        draft = draft if most is None else draft.head(most)
        if (n := len(draft.tokens)) > drafting.draft_max:
            raise OptionError(f"path drafted {n} tokens; one pass verifies {drafting.draft_max} at most.")
        _check_tree(draft.parents, drafting.max_leaves)
        return draft

    return checked


def _plain(draft: Draft) -> Draft:
    """The same made of plain lists; OptionError for one that is not whole."""
    try:
        tokens, parents = [index(token) for token in draft.tokens], [index(parent) for parent in draft.parents]
        survival = [float(chance) for chance in draft.survival]
    except TypeError as error:
        raise OptionError(f"path returned a draft whose tokens or parents are no whole numbers ({error}).") from error
    if not len(tokens) == len(parents) == len(survival):
        raise OptionError(
            f"path returned {len(tokens)} tokens, {len(parents)} parents and {len(survival)} probabilities; "
            "a draft has as many of each."
        )
    if isinstance(draft, Tree):
        return Tree(tokens, parents, survival)
    return Chain(tokens, survival, None if draft.q is None else _plain_q(draft.q, len(tokens)))


def _plain_q(q: Any, n: int) -> list[tuple[NDArray[np.int32], NDArray[np.float64]]]:
    try:
        whole = [(np.asarray(ids, np.int32), np.asarray(weights, np.float64)) for ids, weights in q]
    except (TypeError, ValueError) as error:
        raise OptionError(f"path returned a q that is no list of candidates and probabilities ({error}).") from error
    if len(whole) != n or any(ids.ndim != 1 or ids.shape != weights.shape for ids, weights in whole):
        raise OptionError(f"path returned {n} tokens and q for {len(whole)}; every drawn token has its candidates' q.")
    return whole


def _check_tree(parents: list[int], max_leaves: int) -> None:
    before = [-1]  # the way to the node before, from the anchor: in preorder a parent is one of these
    for node, parent in enumerate(parents):
        if parent not in before:
            raise OptionError(f"node {node} of the tree that path returned has parent {parent}: not in preorder.")
        before = [*before[: before.index(parent) + 1], node]
    n_leaves = 1 + max((leaf for under in leaves(parents) for leaf in under), default=-1)
    if n_leaves > max_leaves:
        raise OptionError(f"path drafted a tree of {n_leaves} leaves; this pair verifies {max_leaves} at most.")

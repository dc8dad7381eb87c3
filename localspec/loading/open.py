"""Opens the parts of a pair from two files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from localspec.dflash import compat
from localspec.engine.drafter import Drafter
from localspec.engine.generate import Engine
from localspec.engine.plan import Drafting
from localspec.engine.target import MAX_LEAVES, Target
from localspec.errors import PairError
from localspec.llama import Header, Model, native, read_header, system_info
from localspec.pair import Pair, Parts
from localspec.planning.exactness import ExactnessKeeper
from localspec.planning.keeper import ProfileKeeper
from localspec.planning.plans import Plans
from localspec.planning.store import ProfileStore
from localspec.template import ChatTemplate


def open_pair(
    target: Path,
    drafter: Path | None = None,
    *,
    n_ctx: int,
    gpu_layers: int = -1,
    draft_gpu_layers: int | None = None,
    n_threads: int | None = None,
    thinking: bool | None = None,
    exact: bool = False,
) -> Pair:
    """Open both files at these very settings, without a plan or a trial; `load` is for users.

    Raises ModelError, PairError, BackendError.
    """
    on_gpu = gpu_layers if draft_gpu_layers is None else draft_gpu_layers
    head, draft_head = check_files(target, drafter)
    identity = _identity((target, drafter), n_threads, gpu_layers, draft_gpu_layers)
    with ExitStack() as stack:
        speaker = _open_target(stack, head, draft_head, n_ctx, gpu_layers, n_threads)
        helper = _open_drafter(stack, draft_head, speaker, on_gpu, n_threads) if draft_head else None
        engine = Engine(speaker, helper)
        keeper = ProfileKeeper(engine, ProfileStore(identity), acceptance_length=_acceptance_length(draft_head))
        alone = _identity((target, None), n_threads, gpu_layers)
        exactness = ExactnessKeeper(engine, f"{alone} {speaker.draft_max}", strict=exact)
        if exact:
            exactness.get()  # what can be drafted depends on it
        vocab, source = speaker.model.vocab, speaker.model.chat_template
        return Pair(
            Parts(
                engine=engine,
                plans=Plans(_drafting(draft_head, speaker), keeper, exactness),
                vocab=vocab,
                template=ChatTemplate(source, vocab, thinking=thinking) if source else None,
                target_path=target,
                drafter_path=drafter,
                free=stack.pop_all().close,
            )
        )


def _open_target(
    stack: ExitStack, head: Header, draft_head: Header | None, n_ctx: int, gpu_layers: int, n_threads: int | None
) -> Target:
    model = stack.enter_context(Model(head.path, gpu_layers=gpu_layers))
    layers = draft_head.ints("dflash.target_layers") if draft_head else ()
    draft_max = compat.draft_max(draft_head, n_ctx, recurrent=model.is_recurrent)
    target = Target(model, n_ctx=n_ctx, layers=layers, draft_max=draft_max, n_threads=n_threads)
    stack.enter_context(closing(target))
    if draft_head and not target.can_roll_back:
        raise PairError(
            f"llama.cpp cannot roll back the recurrent state of {head.arch} models, so {head.name} cannot be "
            "drafted for; run it without -md."
        )
    return target


def _open_drafter(stack: ExitStack, head: Header, target: Target, gpu_layers: int, n_threads: int | None) -> Drafter:
    model = stack.enter_context(Model(head.path, gpu_layers=gpu_layers))
    causal = bool(head.get("dflash.attention.causal", False))
    drafter = Drafter(model, target, block_size=compat.block_size(head), causal=causal, n_threads=n_threads)
    return stack.enter_context(closing(drafter))


def _acceptance_length(head: Header | None) -> float | None:
    """What `localspec distill` measured."""
    reached = head.get("localspec.acceptance_length.all") if head else None
    return reached if isinstance(reached, float) else None


def check_files(target: Path, drafter: Path | None) -> tuple[Header, Header | None]:
    """Their headers, if the two files can work together; raises ModelError or PairError."""
    head = read_header(target)
    compat.check_target(head)
    if drafter is None:
        return head, None
    draft_head = read_header(drafter)
    compat.check_drafter(draft_head)
    compat.check_pair(head, draft_head)
    return head, draft_head


def _drafting(head: Header | None, target: Target) -> Drafting | None:
    """What can be drafted with a drafter whose header is `head`; the temperature of its scores is 1 if it says none."""
    if head is None:
        return None
    n_slots = compat.block_size(head) - 1
    stored = head.get("localspec.calibration")
    known = isinstance(stored, tuple) and len(stored) == n_slots and all(0 < float(t) < math.inf for t in stored)
    return Drafting(
        n_slots=n_slots,
        calibration=np.array(stored if known else [1.0] * n_slots, np.float64),
        max_leaves=MAX_LEAVES if target.can_branch else 1,
        draft_max=target.draft_max,
        n_vocab=target.model.vocab.n_tokens,
    )


def _identity(paths: Sequence[Path | None], *settings: int | None) -> str:
    """What a measured costs holds for: these very files on this build with these settings."""
    stats = [path.stat() for path in paths if path]
    return repr((system_info(), native.identity(), settings, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))

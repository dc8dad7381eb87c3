"""From names or files to a loaded pair: checked, planned, tried, opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from localspec import machine
from localspec.errors import OptionError
from localspec.hub import registry
from localspec.llama import with_shards
from localspec.loading import memory_plan, trial
from localspec.loading.open import check_files, open_pair
from localspec.options import check_whole
from localspec.pair import Pair

MAX_N_CTX = 2**24  # beyond any model; llama.cpp wraps at 2³² and tries to allocate what lies below
MAX_N_THREADS = 512  # GGML_MAX_N_THREADS; ggml writes past its tables with more


def load(
    pair: str | None = None,
    *,
    target: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    n_ctx: int | None = None,
    gpu_layers: int | None = None,
    draft_gpu_layers: int | None = None,
    n_threads: int | None = None,
    thinking: bool | None = None,
    exact: bool = False,
    explain: Callable[[str], None] | None = None,
) -> Pair:
    """Load a pair by name (`load("smollm2-135m")`, the default; `load("qwen3-4b:Q8_0")` for one quantisation of the
    target) or two GGUF files (`load(target=…, draft=…)`).

    `target` alone decodes plainly. `n_ctx` tokens of context, `gpu_layers` and `draft_gpu_layers` layers on the GPU
    (negative: all) are by default what fits into memory, see `memory_plan.settle`. `thinking` switches a model that
    can think on or off; by default a named pair does what its drafter was trained for, any other what its template
    does by itself. `exact` keeps every pass so narrow that each
    token gets the bits it has alone, as measured on this machine (`Pair.promise`), and reads again what was said in
    earlier turns where reading rounds differently: an answer then depends on token ids and seed alone, not on drafts
    nor on what was cached. Where only a pass over one token is so, nothing is drafted. `explain` is called with the
    memory plan, a table, before anything is loaded. Raises ModelError, PairError, OptionError (also for what does not
    fit), MissingError (run `localspec pull`), BackendError.
    """
    check_whole("n_ctx (-c)", n_ctx, 1, MAX_N_CTX)
    check_whole("n_threads (-t)", n_threads, 1, MAX_N_THREADS)
    check_whole("gpu_layers (-ngl)", gpu_layers, -(2**31), 2**31 - 1)
    check_whole("draft_gpu_layers (-ngld)", draft_gpu_layers, -(2**31), 2**31 - 1)
    if pair is not None and target is not None:
        raise OptionError(f"give either the pair {pair!r} or a target file, not both.")
    if target is None:
        entry = registry.get(pair or registry.DEFAULT)
        target_path = entry.target_path()
        drafter_path: Path | None = entry.drafter_path() if draft is None else Path(draft)
        if thinking is None and entry.thinking in ("on", "off"):
            thinking = entry.thinking == "on"
    else:
        target_path, drafter_path = Path(target), Path(draft) if draft else None
    heads = check_files(target_path, drafter_path)
    plan = memory_plan.settle(
        with_shards(heads[0]),
        heads[1],
        machine.pools(),
        n_ctx=n_ctx,
        gpu_layers=gpu_layers,
        draft_gpu_layers=draft_gpu_layers,
    )
    if explain:
        explain(plan.table())
    trial.check_that_it_loads(target_path, drafter_path, gpu_layers=plan.gpu_layers)
    return open_pair(
        target_path,
        drafter_path,
        n_ctx=plan.n_ctx,
        gpu_layers=plan.gpu_layers,
        draft_gpu_layers=plan.draft_gpu_layers,
        n_threads=n_threads,
        thinking=thinking,
        exact=exact,
    )

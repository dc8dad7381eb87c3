"""How much memory a pair takes, and what fits: arithmetic on the headers of its files, before llama.cpp loads them.

The formulas follow the llama.cpp in llama-cpp-python 0.3.36 (`create_memory`, `load_tensors`, `output_reserve`,
`sched_reserve`). Weights, caches and recurrent states come out to the byte. Compute buffers are an estimate: what was
seen to be alive at once in graphs of dense, mixture-of-experts and hybrid models, within a quarter of what llama.cpp
reserves on a CPU (`tests/loading/test_memory_plan.py` holds it to that).

Defaults and refusals ask different questions. A default (`-c`, `-ngl auto`) is chosen so that all of it fits into what
is free now, with room to spare. A refusal needs certainty: on a GPU nothing can be paged out, so what is free counts;
weights in RAM are mapped from the file and may be read in again at any time, so they count against all RAM and not
against what is free, and only caches and buffers need memory that is free or can be swapped to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from localspec.dflash import compat
from localspec.errors import OptionError
from localspec.llama import Header
from localspec.machine import Pool

GOAL_N_CTX = 8192  # the context everyone gets if it fits
MIN_N_CTX = 2048  # a default below that is of no use: better say that it does not fit
STEP = 1024  # contexts are proposed in multiples of this
SHARE = 8  # a context beyond GOAL_N_CTX by default takes at most this part of what the weights leave free
MARGIN = 512 * 2**20  # left free by defaults: cuBLAS workspaces, Python, what other programs take meanwhile

TARGET_BATCH, DRAFTER_BATCH = 512, 128  # target.N_BATCH, drafter.N_BATCH: a test holds them together
CHECKPOINTS, CHECKPOINTS_BYTES = 4, 512 * 2**20  # checkpoints.MAX_CHECKPOINTS, MAX_BYTES: the same test
CELLS = 256  # llama.cpp rounds a cache up to a multiple of this
F16, F32 = 2, 4  # K in f16 and V in f16 or (exact, on a CPU) bf16; states and activations in f32

# `set_swa_pattern` in src/models: of this many layers the last sees everything, where the file has no pattern itself.
SWA_PERIOD = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2, "muse-glimmer": 4, "olmo2": 4}
# `full_attention_interval` where the file is silent; other hybrids mark a recurrent layer by having no KV heads.
ATTENTION_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8}
INPUTS = ("token_embd", "per_layer_token_embd", "position_embd", "token_types")  # llama.cpp keeps these on the CPU


@dataclass(frozen=True)
class Part:
    """What one model of a pair takes, in bytes; entry i of `weights` and `memory` is layer i, the last one the head.

    `embeddings` and `outputs` (features, logits, checkpoints) lie in RAM wherever the layers do; `compute` is needed
    wherever layers lie; `tied` is what the head takes on a GPU when it shares its matrix with the embeddings, which
    stay in RAM. `largest` is the largest tensor of a layer: where some layers stay in RAM, a GPU that helps with long
    prompts gets their weights one after the other.
    """

    name: str
    weights: tuple[int, ...]
    memory: tuple[int, ...]
    embeddings: int
    tied: int
    outputs: int
    compute: int
    largest: int


@dataclass(frozen=True)
class Row:
    """Bytes a model needs in each pool; `kind` is "weights", "memory", "outputs" or "buffers"."""

    model: str
    kind: str
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A pair at `n_ctx` tokens of context with so many layers on the GPU, and what that takes in each of `pools`."""

    n_ctx: int
    gpu_layers: int
    draft_gpu_layers: int
    pools: tuple[Pool, ...]
    rows: tuple[Row, ...]

    def needs(self, pool: int, *kinds: str) -> int:
        """Bytes in a pool, of these kinds or of all."""
        return sum(row.bytes[pool] for row in self.rows if not kinds or row.kind in kinds)

    def has_room(self, pool: int, share: int = 1) -> bool:
        """Whether it fits into what is free of a pool now, with `MARGIN` and `share` times its caches and buffers."""
        weights = self.needs(pool, "weights")
        needed = weights + share * (self.needs(pool) - weights)
        return needed == 0 or needed + MARGIN <= self.pools[pool].free

    def is_comfortable(self, share: int = 1) -> bool:
        """Whether every pool has room."""
        return all(self.has_room(i, share) for i in range(len(self.pools)))

    def shortage(self) -> int | None:
        """The first pool that certainly is too small, if there is one."""
        return next((i for i in range(len(self.pools)) if not self._may_fit(i)), None)

    def _may_fit(self, i: int) -> bool:
        pool = self.pools[i]
        total = self.needs(i) - self.needs(i, "buffers") // 4  # the estimate may be a quarter too high
        if not pool.total:
            return True  # a driver that tells nothing: let llama.cpp try
        if i:
            return total <= pool.free
        unmapped = total - self.needs(i, "weights")
        return unmapped <= pool.free + pool.swap and total <= pool.total + pool.swap

    def table(self) -> str:
        """The plan as aligned text: a line for each row, a column for each pool that is used."""
        used = [i for i in range(len(self.pools)) if i == 0 or self.needs(i)]
        columns = [[self.pools[i].name, *(size(row.bytes[i]) for row in self.rows)] for i in used]
        for i, column in zip(used, columns, strict=True):
            column += [size(self.needs(i)), f"{size(self.pools[i].free)}, {size(self.pools[i].total)}"]
        names = ["", *(f"{row.model} {row.kind}" for row in self.rows), "needed", "free, in all"]
        widths = [max(map(len, column)) for column in (names, *columns)]
        lines = zip(names, *columns, strict=True)
        return "\n".join(
            "  ".join([name.ljust(widths[0]), *(text.rjust(n) for text, n in zip(texts, widths[1:], strict=True))])
            for name, *texts in lines
        )


def size(n_bytes: float) -> str:
    """Bytes for people, in the binary units that memory is sold in."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:,.1f} {unit}"
    return f"{n_bytes / 2**10:.0f} KiB" if n_bytes else "0"


# --- a plan


def settle(
    target: Header,
    drafter: Header | None,
    pools: Sequence[Pool],
    *,
    n_ctx: int | None = None,
    gpu_layers: int | None = None,
    draft_gpu_layers: int | None = None,
) -> Plan:
    """Choose what is left open (None) so that it fits; a negative number of layers means all.

    As many layers as fit beside the goal of 8,192 tokens go to the GPU, the drafter's first; then the context grows to
    at most the model's training length while that is cheap, or shrinks where even the goal does not fit. Raises
    OptionError, with the plan and the nearest setting that fits, for what certainly does not.
    """
    trained = target.number("{arch}.context_length") or GOAL_N_CTX
    n_all, n_own = _n_layer(target) + 1, _n_layer(drafter) + 1 if drafter else 0

    def at(n_ctx: int, n_layers: int) -> Plan:
        own = _draft_layers(n_layers, gpu_layers, draft_gpu_layers, n_own)
        return plan(target, drafter, pools, n_ctx=n_ctx, gpu_layers=n_layers, draft_gpu_layers=own)

    goal = n_ctx or min(trained, GOAL_N_CTX)
    if gpu_layers is None:
        gpus = range(1, len(pools))
        layers = _most_layers(n_all, lambda n: all(at(goal, n).has_room(i) for i in gpus)) if gpus else 0
    else:
        layers = min(gpu_layers, n_all) if gpu_layers >= 0 else n_all
    if n_ctx is None:
        n_ctx = _default_n_ctx(trained, goal, lambda n, share: at(n, layers).is_comfortable(share))
    chosen = at(n_ctx, layers)
    if chosen.shortage() is not None:
        raise OptionError(_refusal(target, chosen, at))
    return chosen


def plan(
    target: Header,
    drafter: Header | None,
    pools: Sequence[Pool],
    *,
    n_ctx: int,
    gpu_layers: int,
    draft_gpu_layers: int,
) -> Plan:
    """What a pair takes at these very settings."""
    recurrent = any(_is_recurrent(target, layer) for layer in range(_n_layer(target)))
    draft_max = compat.draft_max(drafter, n_ctx, recurrent=recurrent)
    exposed = len(drafter.ints("dflash.target_layers")) if drafter else 0
    rows = _rows(target_part(target, n_ctx, draft_max, exposed), gpu_layers, pools)
    if drafter:
        part = drafter_part(drafter, n_ctx, exposed * _n_embd(target), on_gpu=draft_gpu_layers > 0 and len(pools) > 1)
        rows += _rows(part, draft_gpu_layers, pools)
    return Plan(n_ctx, gpu_layers, draft_gpu_layers, tuple(pools), tuple(rows))


def place(n_layer: int, gpu_layers: int, free: Sequence[int]) -> list[int]:
    """The pool of each layer and of the head (0 is RAM), as llama.cpp splits them over GPUs by their `free` bytes."""
    n_there = min(gpu_layers, n_layer + 1) if free else 0
    start = n_layer + 1 - n_there
    splits = [part / (sum(free) or 1) for part in accumulate(free)]
    return [0] * start + [1 + min(bisect_right(splits, i / n_there), len(free) - 1) for i in range(n_there)]


def _rows(part: Part, gpu_layers: int, pools: Sequence[Pool]) -> list[Row]:
    """A model's lines, each summed by pool."""
    where = place(len(part.weights) - 1, gpu_layers, [pool.free for pool in pools[1:]])

    def summed(sizes: Iterable[int], in_ram: int) -> tuple[int, ...]:
        sums = [in_ram] + [0] * (len(pools) - 1)
        for pool, n_bytes in zip(where, sizes, strict=True):
            sums[pool] += n_bytes
        return tuple(sums)

    weights = list(summed(part.weights, part.embeddings))
    weights[where[-1]] += part.tied if where[-1] else 0
    lent = part.largest if 0 in where else 0
    buffers = [(part.compute + lent) * (i in where) for i in range(len(pools))]
    buffers[0] = part.compute  # the embeddings are looked up on the CPU, whatever else runs there
    return [
        Row(part.name, "weights", tuple(weights)),
        Row(part.name, "memory", summed(part.memory, 0)),
        Row(part.name, "outputs", summed([0] * len(where), part.outputs)),
        Row(part.name, "buffers", tuple(buffers)),
    ]


def _draft_layers(n_layers: int, asked: int | None, asked_draft: int | None, n_all: int) -> int:
    """Layers of the drafter on the GPU: as asked, else as the target's, else all where the target has any there."""
    wanted = asked if asked_draft is None else asked_draft
    if wanted is None:
        return n_all if n_layers else 0
    return min(wanted, n_all) if wanted >= 0 else n_all


def _most_layers(n_all: int, fits: Callable[[int], bool]) -> int:
    """The largest number of layers that fits, else 0. Tried one by one: fewer on the GPU are more in RAM."""
    return next((n for n in range(n_all, 0, -1) if fits(n)), 0)


def _most(candidates: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The last of ascending sizes that fits, else 0; whatever is smaller than one that fits does so too."""
    n_fitting = bisect_right(candidates, 0, key=lambda n: 0 if fits(n) else 1)
    return candidates[n_fitting - 1] if n_fitting else 0


def _default_n_ctx(trained: int, goal: int, comfortable: Callable[[int, int], bool]) -> int:
    if not comfortable(goal, 1):
        return _most(range(MIN_N_CTX, goal, STEP), lambda n: comfortable(n, 1)) or min(MIN_N_CTX, goal)
    if comfortable(trained, SHARE):
        return trained
    return _most(range(goal, trained, STEP), lambda n: comfortable(n, SHARE)) or goal


def _refusal(target: Header, chosen: Plan, at: Callable[[int, int], Plan]) -> str:
    """One sentence: what is needed, what is there, what would fit; and the plan under it."""
    short = chosen.shortage() or 0
    pool = chosen.pools[short]
    return (
        f"{target.path.name} with {chosen.n_ctx:,} tokens of context needs {size(chosen.needs(short))} of {pool.name}, "
        f"which has {size(pool.free)} free of {size(pool.total)}; what fits is {_what_fits(target, chosen, at)}.\n"
        f"{chosen.table()}"
    )


def _what_fits(target: Header, chosen: Plan, at: Callable[[int, int], Plan]) -> str:
    """The nearest settings that fit: one of the two changed, or both, or another file."""

    def fits(n_ctx: int, n_layers: int) -> bool:
        return at(n_ctx, n_layers).shortage() is None

    def context(n_layers: int) -> int:
        return _most(range(CELLS, chosen.n_ctx, CELLS), lambda n: fits(n, n_layers))

    def layers(n_ctx: int) -> int | None:
        n_all = _n_layer(target) + 1 if len(chosen.pools) > 1 else 0
        most = _most_layers(n_all, lambda n: fits(n_ctx, n))
        return most if most or fits(n_ctx, 0) else None

    shorter, fewer = context(chosen.gpu_layers), layers(chosen.n_ctx)
    ways = [f"-c {shorter}"] if shorter else []
    ways += [f"-ngl {fewer}"] if fewer is not None else []
    if ways:
        return " or ".join(ways)
    modest = min(chosen.n_ctx, MIN_N_CTX)
    if (both := layers(modest)) is not None:
        return f"-c {context(both)} -ngl {both}"
    return f"a smaller quantisation{_bits(target, at(modest, chosen.gpu_layers))}"


def _bits(target: Header, planned: Plan) -> str:
    """How many bits a weight would fit into the pool that is short, where there is an answer."""
    short = planned.shortage() or 0
    pool, weights = planned.pools[short], planned.needs(short, "weights")
    room = (pool.free if short else pool.total) - (planned.needs(short) - weights)
    n_weights = sum(_count(tensor.shape) for tensor in target.tensors.values())
    bits = 8 * sum(tensor.n_bytes for tensor in target.tensors.values()) / max(n_weights, 1)
    fitting = bits * room / max(weights, 1)
    return f" with about {fitting:.1f} bits a weight instead of {bits:.1f}" if fitting > 1 else ""


# --- one model


def target_part(head: Header, n_ctx: int, draft_max: int, n_exposed: int) -> Part:
    """The target's share, as `target.Target` opens it: `n_exposed` layer inputs are copied out for the drafter."""
    cells = _padded(n_ctx)
    tokens = min(TARGET_BATCH, cells)
    n_outputs = draft_max + 1
    weights, embeddings, tied = _weights(head)
    features = F32 * tokens * n_exposed * _n_embd(head)
    logits = F32 * n_outputs * n_vocab(head)
    compute = max(F32 * tokens * _activations(head, tokens, n_outputs), logits) + F16 * tokens * cells + features
    memory = _memory(head, cells, tokens, n_snapshots=n_outputs, whole_window=False)
    outputs = 2 * features + logits + _checkpoints(head, n_ctx)  # the features twice: llama.cpp's buffer and ours
    return Part("target", weights, memory, embeddings, tied, outputs, compute, _largest(head))


def drafter_part(head: Header, n_ctx: int, width: int, *, on_gpu: bool) -> Part:
    """The drafter's share, as `drafter.Drafter` opens it; it reads rows of `width` floats.

    On a CPU it runs without flash attention, whose scores [heads, tokens, cells] are then the largest buffer; else
    that is the logits of a whole batch, twice where a reduced vocabulary is scattered into the full one.
    """
    block = compat.block_size(head)
    cells, tokens = _padded(n_ctx + block), max(DRAFTER_BATCH, block)
    weights, embeddings, _ = _weights(head)
    kept = _rows_of(head, "output.weight") or n_vocab(head)
    logits = F32 * tokens * kept
    scores = 0 if on_gpu else F32 * tokens * cells * head.number("dflash.attention.head_count")
    largest = F32 * tokens * n_vocab(head) + max(scores, logits) if "d2t" in head.tensors else max(scores, logits)
    mask = (F16 if on_gpu else F32) * tokens * cells
    compute = largest + mask + F32 * tokens * (width + 3 * _n_embd(head))
    memory = _memory(head, cells, tokens, n_snapshots=1, whole_window=True)
    outputs = F32 * (tokens * (width + _n_embd(head)) + block * n_vocab(head))  # features in, lattice and logits out
    return Part("drafter", weights, memory, embeddings, 0, outputs, compute, _largest(head))


def n_vocab(head: Header) -> int:
    """Tokens of the vocabulary."""
    return head.n_vocab or _rows_of(head, "token_embd.weight")


def _weights(head: Header) -> tuple[tuple[int, ...], int, int]:
    """Bytes of each layer and the head, of what llama.cpp keeps on the CPU, and of that what a tied head needs again.

    MTP layers are not loaded.
    """
    n_layer, loaded = _n_layer(head), _n_layer(head) - head.number("{arch}.nextn_predict_layers")
    layers, embeddings = [0] * (n_layer + 1), 0
    for name, tensor in head.tensors.items():
        kind, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        if kind == "blk" and index.isdecimal():
            layers[min(int(index), n_layer)] += tensor.n_bytes if int(index) < loaded else 0
        elif kind in INPUTS:
            embeddings += tensor.n_bytes
        else:
            layers[n_layer] += tensor.n_bytes
    shared = None if "output.weight" in head.tensors else head.tensors.get("token_embd.weight")
    return tuple(layers), embeddings, shared.n_bytes if shared else 0


def _largest(head: Header) -> int:
    return max((tensor.n_bytes for name, tensor in head.tensors.items() if name.startswith("blk.")), default=0)


def _memory(head: Header, cells: int, tokens: int, *, n_snapshots: int, whole_window: bool) -> tuple[int, ...]:
    """Bytes of each layer's cache or recurrent state; 0 for the head."""
    n_layer = _n_layer(head)
    used = n_layer - head.number("{arch}.nextn_predict_layers")
    with_cache = n_layer - head.number("{arch}.attention.shared_kv_layers")
    window = min(_padded(head.number("{arch}.attention.sliding_window") + tokens), cells)
    state = F32 * n_snapshots * _state(head)
    loops = max(1, head.number("{arch}.num_loops"))
    sizes = []
    for layer in range(n_layer):
        if layer >= used:
            sizes.append(0)
        elif _is_recurrent(head, layer):
            sizes.append(state)
        elif layer >= with_cache:
            sizes.append(0)
        else:
            slides = _slides(head, layer)
            width = _kv_width(head, layer, slides)
            sizes.append(F16 * width * loops * (window if slides and not whole_window else cells))
    return (*sizes, 0)


def _checkpoints(head: Header, n_ctx: int) -> int:
    """Bytes of the states that a target keeps to go back to: recurrent ones, and windows that forget."""
    window = head.number("{arch}.attention.sliding_window")
    one = 0
    for layer in range(_n_layer(head) - head.number("{arch}.nextn_predict_layers")):
        if _is_recurrent(head, layer):
            one += F32 * _state(head)
        elif window < n_ctx and _slides(head, layer):
            one += F16 * window * _kv_width(head, layer, slides=True)
    return min(CHECKPOINTS, CHECKPOINTS_BYTES // one) * one if one else 0


def _kv_width(head: Header, layer: int, slides: bool) -> int:
    """Numbers of one token in a layer's cache: K and V of all heads; K alone with latent attention (MLA)."""
    n_head = _of_layer(head, "{arch}.attention.head_count", layer)
    n_kv = _of_layer(head, "{arch}.attention.head_count_kv", layer, n_head)
    usual = _n_embd(head) // max(n_head, 1)
    key, value = (head.number(f"{{arch}}.attention.{kind}_length", usual) for kind in ("key", "value"))
    if slides:
        key = head.number("{arch}.attention.key_length_swa", key)
        value = head.number("{arch}.attention.value_length_swa", value)
    if head.number("{arch}.attention.key_length_mla"):
        value = 0
    return n_kv * (key + value)


def _slides(head: Header, layer: int) -> bool:
    """Whether a layer's attention is a sliding window."""
    if not head.number("{arch}.attention.sliding_window"):
        return False
    pattern = head.ints("{arch}.attention.sliding_window_pattern")
    if len(pattern) > 1:
        return bool(pattern[layer]) if layer < len(pattern) else False
    if head.arch.startswith("lfm2"):
        return True
    if head.arch not in SWA_PERIOD:  # llama.cpp ignores the window, or has it for all: assume the larger cache
        return bool(pattern) and pattern[0] is True
    period = pattern[0] if pattern else SWA_PERIOD[head.arch]
    return period == 0 or layer % period < period - 1


def _is_recurrent(head: Header, layer: int) -> bool:
    marked = head.ints("{arch}.attention.recurrent_layers")
    if marked:
        return bool(marked[layer]) if layer < len(marked) else False
    if head.arch in ATTENTION_INTERVAL:
        interval = head.number("{arch}.full_attention_interval", ATTENTION_INTERVAL[head.arch])
        return interval > 0 and (layer + 1) % interval != 0
    without_ffn = not head.arch.startswith("nemotron_h") or not _of_layer(head, "{arch}.feed_forward_length", layer)
    return bool(_state(head)) and not _of_layer(head, "{arch}.attention.head_count_kv", layer) and without_ffn


def _state(head: Header) -> int:
    """Numbers of one recurrent state (`n_embd_r` + `n_embd_s`): convolution tail and matrix."""
    n_embd, n_head = _n_embd(head), head.number("{arch}.attention.head_count")
    kernel = head.number("{arch}.ssm.conv_kernel")
    if cache := head.number("{arch}.shortconv.l_cache"):
        return n_embd * (cache - 1)
    if kda := head.number("{arch}.kda.head_dim"):
        return 3 * max(kernel - 1, 0) * n_head * kda + n_head * kda**2
    if head.arch == "minimax-01":
        return n_head * head.number("{arch}.attention.key_length", n_embd // max(n_head, 1)) ** 2
    inner, state = head.number("{arch}.ssm.inner_size"), head.number("{arch}.ssm.state_size")
    return max(kernel - 1, 0) * _convolved(head) + inner * state


def _convolved(head: Header) -> int:
    """Channels of a gated delta net's convolution: queries, keys and values."""
    inner, state = head.number("{arch}.ssm.inner_size"), head.number("{arch}.ssm.state_size")
    return inner + 2 * head.number("{arch}.ssm.group_count") * state


def _activations(head: Header, tokens: int, n_snapshots: int) -> int:
    """Floats a token that are alive at once in the target's graph: three residual rows and the widest layer.

    Seen in llama.cpp's reserved graphs: a dense layer keeps its three FFN rows and the queries; a mixture of experts
    three rows for each expert used, or two model rows and one; a gated delta net its convolution's input, output and
    work space, and the states it hands out.
    """
    n_head = head.number("{arch}.attention.head_count")
    queries = n_head * head.number("{arch}.attention.key_length", _n_embd(head) // max(n_head, 1))
    dense = 3 * max(head.ints("{arch}.feed_forward_length"), default=0) + queries
    used = max(head.ints("{arch}.expert_used_count"), default=0)
    expert = max(head.ints("{arch}.expert_feed_forward_length"), default=0)
    mixed = used * max(3 * expert, 2 * _n_embd(head) + expert)
    inner, state = head.number("{arch}.ssm.inner_size"), head.number("{arch}.ssm.state_size")
    recurrent = 3 * _convolved(head) + inner + n_snapshots * inner * state // tokens
    return 3 * _n_embd(head) + max(mixed or dense, recurrent)


# --- header arithmetic


def _n_layer(head: Header) -> int:
    return head.number("{arch}.block_count")


def _n_embd(head: Header) -> int:
    return head.number("{arch}.embedding_length")


def _of_layer(head: Header, key: str, layer: int, default: int = 0) -> int:
    """A value that a file gives for all layers or for each."""
    values = head.ints(key)
    if not values:
        return default
    return values[layer] if layer < len(values) else values[0] if len(values) == 1 else default


def _rows_of(head: Header, tensor: str) -> int:
    info = head.tensors.get(tensor)
    return info.shape[1] if info and len(info.shape) > 1 else 0


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for length in shape:
        n *= length
    return n


def _padded(n: int) -> int:
    return -(-n // CELLS) * CELLS

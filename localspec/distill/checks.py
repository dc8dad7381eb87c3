"""What can be known before the work starts: whether memory and disk will do. Bytes, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal as size

from localspec.errors import ModelError, OptionError
from localspec.llama import Header
from localspec.machine import ram
from localspec.storage import free_bytes

if TYPE_CHECKING:
    from localspec.distill.options import Options
    from localspec.distill.start import Shape


def check_disk(folder: Path, need: int, what: str) -> None:
    """Raises OptionError if `what` takes more than is free where `folder` is or will be."""
    if need > (free := free_bytes(folder)):
        raise OptionError(
            f"{what} need {size(need)} more in {folder}, {size(free)} are free; ask for fewer tokens "
            "or choose another disk."
        )


def check_synthesis(target: Header, n_slots: int, n_ctx: int, n_tapped: int) -> None:
    """Raises OptionError if that many chats of up to `n_ctx` tokens do not fit into memory side by side."""
    a_slot = n_ctx * (memory_per_token(target) + 2 * n_tapped * target.number("{arch}.embedding_length"))
    logits = 4 * n_slots * target.n_vocab
    need, free = target.n_bytes + logits + n_slots * a_slot, ram().free
    if need > free:
        fit = max(int((free - target.n_bytes - logits) // a_slot), 1)
        raise OptionError(
            f"writing {n_slots} chats at a time takes about {size(need)} of memory, {size(free)} are free; use --slots "
            f"{fit}, or --two-pass, which keeps no features meanwhile."
        )


def check_training(target: Header, shape: Shape, options: Options, n_tapped: int) -> None:
    """Raises OptionError if a drafter of this shape cannot be trained in the memory there is."""
    need, free = training_bytes(target, shape, options, n_tapped), ram().free
    if need > free:
        raise OptionError(
            f"training takes about {size(need)} of memory, {size(free)} are free; use fewer --layers or a smaller "
            "--vocab-size."
        )


def check_shape(target: Header, shape: Shape) -> None:
    """Raises OptionError or ModelError if no drafter of this shape fits the target, or llama.cpp could not run it."""
    width = target.number("{arch}.embedding_length")
    if not shape.top_k <= shape.n_rows <= target.n_vocab:
        raise OptionError(
            f"a drafter for {target.name} can draft {shape.top_k} to {target.n_vocab:,} tokens, not "
            f"{shape.n_rows:,}; choose another --vocab-size."
        )
    if width < shape.top_k * (shape.top_k + 1) or width % shape.conv_group:
        raise ModelError(
            f"{target.name} has width {width}; llama.cpp runs DFlash 2 drafters with pools of {shape.top_k} from width "
            f"{shape.top_k * (shape.top_k + 1)} on, in multiples of {shape.conv_group}."
        )


def memory_per_token(target: Header) -> int:
    """Keys and values of one token, in float16 (an upper bound for windows and recurrent layers)."""
    n_layer, width = target.number("{arch}.block_count"), target.number("{arch}.embedding_length")
    heads = target.number("{arch}.attention.head_count", 1)
    kv_heads = target.ints("{arch}.attention.head_count_kv") or (heads,)
    size = target.number("{arch}.attention.key_length", width // max(heads, 1))
    per_layer = sum(kv_heads) if len(kv_heads) > 1 else n_layer * kv_heads[0]
    return 2 * 2 * per_layer * size


def n_parameters(target: Header, shape: Shape, n_tapped: int) -> int:
    """Weights of a drafter, about."""
    width, n_ff = target.number("{arch}.embedding_length"), target.number("{arch}.feed_forward_length")
    heads = target.number("{arch}.attention.head_count", 1)
    kv_heads = max(target.ints("{arch}.attention.head_count_kv") or (heads,))
    size = target.number("{arch}.attention.key_length", width // max(heads, 1))
    layer = width * (2 * (heads + kv_heads) * size + 3 * n_ff + 8 * width // shape.conv_group)
    rest = shape.n_rows * (width + 2 * shape.selector_rank) + width * (n_tapped * width + shape.selector_rank)
    return shape.n_layers * layer + rest


def training_bytes(target: Header, shape: Shape, options: Options, n_tapped: int) -> int:
    """Memory a training step takes, about: weights, gradients and the optimiser's two moments; the embeddings; what
    a step keeps of every slot for its gradient, its attention and its logits."""
    width, n_ff = target.number("{arch}.embedding_length"), target.number("{arch}.feed_forward_length")
    n_slots = options.n_windows * options.n_anchors * shape.block_size
    heads = target.number("{arch}.attention.head_count", 1)
    kept = shape.n_layers * (4 * (16 * width + 4 * n_ff) + 12 * heads * options.n_context) + 6 * shape.n_rows
    return 16 * n_parameters(target, shape, n_tapped) + 4 * target.n_vocab * width + n_slots * kept

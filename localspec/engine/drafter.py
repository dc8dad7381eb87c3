"""The drafter: a DFlash model that reads the target's features and proposes a block of tokens in one pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localspec.engine import lattice
from localspec.engine.lattice import Lattice
from localspec.engine.target import Target
from localspec.llama import Context, Model

N_BATCH = 128  # the widest inject; a token batch of that width would reserve N_BATCH rows of logits
POOL = 16  # candidates a slot taken from a DFlash 1 drafter's logits


class Drafter:
    """A drafter with its KV cache of `n_past` positions, written by `inject` only."""

    def __init__(
        self, model: Model, target: Target, *, block_size: int, causal: bool, n_threads: int | None = None
    ) -> None:
        self.model, self.block_size, self.n_past = model, block_size, 0
        self.top_k = model.selector_top_k()
        self.mask = model.vocab.mask
        self.context = Context(
            model,
            n_ctx=target.n_ctx + block_size,
            n_batch=max(N_BATCH, block_size),
            n_outputs=block_size,
            n_threads=n_threads,
            other=target.context,
            embd_width=len(target.layers) * target.model.n_embd,
            causal=causal,
            flash=None if model.on_gpu else False,  # on a CPU the faster way; a guess need not be exact to the last bit
            swa_full=True,  # a window that drops old cells could not go back
        )
        if self.top_k:
            self.context.want_lattice()

    def inject(self, features: NDArray[np.float32]) -> None:
        """Append the positions whose `features` [n, n_layers · n_embd] the target has computed."""
        for start in range(0, len(features), N_BATCH):
            rows = features[start : start + N_BATCH]
            self.context.decode_rows(rows, self.n_past)
            self.n_past += len(rows)

    def draft(self, anchor: int, n_slots: int) -> Lattice:
        """The pool of the next `n_slots` tokens behind `anchor`, the token at position `n_past`."""
        n = n_slots + 1
        block = np.full(n, self.mask, np.int32)
        block[0] = anchor
        if self.top_k:
            self.context.decode(block, self.n_past, output=False)
            pool = lattice.unpack(self.context.lattice_rows(n)[1:], self.top_k)
        else:
            self.context.decode(block, self.n_past)  # all of it: the graph of `dflash` does not leave rows out
            pool = lattice.from_logits(self.context.logits(n)[1:], POOL)
        self.context.remove(self.n_past)  # the noise block
        return pool

    def rewind(self, n: int) -> None:
        """Go back to the first `n` positions."""
        if n < self.n_past:
            self.context.remove(n)
            self.n_past = n

    def forget(self) -> None:
        """Empty the KV cache, whatever is in it."""
        self.context.clear()
        self.n_past = 0

    def close(self) -> None:
        self.context.close()

"""The target: the model the user wants to hear. It prefills, verifies, and goes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localspec.errors import BackendError
from localspec.llama import Context, Model

N_BATCH = 512


class Target:
    """A model with its memory, `n_past` positions of sequence 0.

    `layers`: the layers whose inputs a drafter reads (empty: none). `draft_max`: the longest draft to verify, which a
    recurrent model must be able to roll back. `can_roll_back` is False where it cannot.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        layers: Sequence[int] = (),
        draft_max: int = 0,
        n_threads: int | None = None,
    ) -> None:
        self.model, self.layers, self.n_ctx, self.n_past = model, list(layers), n_ctx, 0
        self.context = Context(
            model,
            n_ctx=n_ctx,
            n_batch=N_BATCH,
            n_outputs=draft_max + 1,
            n_rollback=draft_max if model.is_recurrent else 0,
            n_threads=n_threads,
            exact=True,
        )
        self.can_roll_back = not model.is_recurrent or self.context.n_rollback >= draft_max
        self._features = np.zeros((N_BATCH, len(self.layers) * model.n_embd), np.float32)
        self._exposing = False

    def expose_features(self, wanted: bool) -> None:
        """Have the following decodes copy out the drafter's layer inputs, or not."""
        if wanted != self._exposing:
            for layer in self.layers:
                self.context.want_layer_input(layer, wanted)
            self._exposing = wanted

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read up to `N_BATCH` tokens into memory, without logits."""
        self.context.decode(tokens, self.n_past, output=False)
        self.n_past += len(tokens)

    def verify(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Read the anchor and its draft; their logits [len(tokens), n_vocab], a view until the next decode."""
        self.context.decode(tokens, self.n_past)
        self.n_past += len(tokens)
        return self.context.logits(len(tokens))

    def features(self, n: int) -> NDArray[np.float32]:
        """Features of the first `n` tokens of the last decode, [n, n_layers · n_embd]; a buffer that is reused."""
        width = self.model.n_embd
        for i, layer in enumerate(self.layers):
            self._features[:n, i * width : (i + 1) * width] = self.context.layer_input(layer, n)
        return self._features[:n]

    def rollback(self, n: int) -> None:
        """Keep the first `n` positions of a memory the last decode has just grown. At most once per decode."""
        if n < self.n_past and not self.context.remove(n):
            raise BackendError(
                f"the memory of {self.model.path.name} cannot go back from {self.n_past} to {n} tokens; "
                "use --draft-max 0."
            )
        self.n_past = n

    def rewind(self, n: int) -> int:
        """Go back to the first `n` positions, however far; returns how many are really kept (perhaps none).

        Recurrent memories cannot go back far, and a sliding window has forgotten what lay before it.
        """
        if n < self.n_past:
            whole = self.context.remove(n) and 0 <= self.context.first_position() <= self._oldest_needed(n)
            if n == 0 or not whole:
                self.context.clear()
                n = 0
            self.n_past = n
        return n

    def _oldest_needed(self, n: int) -> int:
        return max(0, n - self.model.n_swa) if self.model.n_swa else 0

    def forget(self) -> None:
        """Empty the memory, whatever state it is in."""
        self.context.clear()
        self.n_past = 0

    def close(self) -> None:
        self.context.close()

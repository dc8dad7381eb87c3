"""The target: the model the user wants to hear. It prefills, verifies, and goes back.

A tree is verified in one batch: each path from the anchor to a leaf is a sequence of its own, the past belongs to all
of them, and afterwards so does the path that is kept.

Going back depends on the model. A KV cache drops its last tokens, any number of them. A recurrent state (alone, or
beside the KV cache of a hybrid model) is one sum over all tokens: llama.cpp keeps a snapshot of it behind each of the
last `n_rollback` tokens *of one batch*, and lets one of them be chosen once; it overwrites them with the next batch and
does not say which are stale. A sliding window has dropped the tokens before it. Where neither helps there are
checkpoints: states saved at places to which the next prompt is likely to return.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localspec.engine.checkpoints import MAX_BYTES, Checkpoints
from localspec.engine.paths import Draft, depths, leaves
from localspec.errors import BackendError
from localspec.llama import Context, Model, Sequences

N_BATCH = 512
MAX_LEAVES = 16
BURIED = MAX_LEAVES  # a sequence that is never decoded


class Target:
    """A model with its KV cache and recurrent state, which hold `n_past` positions.

    `layers`: the layers whose inputs a drafter reads (empty: none). `draft_max`: the longest draft to verify, which a
    recurrent model must be able to roll back; `can_roll_back` is False where it cannot. `can_branch` tells whether it
    can verify trees: a recurrent state has one past, and a sliding window may drop what another branch still needs.
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
        self.draft_max = draft_max
        self.n_verified = max(draft_max, MAX_LEAVES) + 1  # tokens of a pass with logits; llama.cpp wants one a sequence
        self.can_branch = draft_max > 1 and not model.is_recurrent and not model.n_swa
        self.context = Context(
            model,
            n_ctx=n_ctx,
            n_batch=N_BATCH,
            n_seq=MAX_LEAVES + 1 if self.can_branch else 1,
            n_outputs=self.n_verified,
            n_rollback=draft_max if model.is_recurrent else 0,
            n_threads=n_threads,
            layers=self.layers,
            exact=True,
        )
        self.can_roll_back = not model.is_recurrent or self.context.n_rollback >= draft_max
        self._features = np.zeros((N_BATCH, len(self.layers) * model.n_embd), np.float32)
        self._exposing = False
        self._n_batch = 0  # tokens of the last decode
        self._n_seq = 1  # sequences that share the past
        self._n_buried = 0
        self._tree: Draft | None = None  # the last verify's, if it was no chain
        self._oldest_snapshot = 0  # the fewest positions a recurrent state can be rolled back to
        self._checkpoints = Checkpoints()

    def expose_features(self, wanted: bool) -> None:
        """Have the following decodes copy out the drafter's layer inputs, or not."""
        if wanted != self._exposing:
            for layer in self.layers:
                self.context.want_layer_input(layer, wanted)
            self._exposing = wanted

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read up to `N_BATCH` tokens into the KV cache, without logits."""
        self._decode(tokens, output=False)
        self.n_past += len(tokens)

    def verify(self, anchor: int, draft: Draft) -> NDArray[np.float32]:
        """Read the anchor and its draft; their logits [1 + n_draft, n_vocab], a view until the next decode.

        `commit` must follow. Trees may have up to `MAX_LEAVES` leaves and need `can_branch`.
        """
        tokens = [anchor, *draft.tokens]
        chain = draft.parents == list(range(-1, len(draft.tokens) - 1))
        self._tree = None if chain else draft
        if self._tree:
            self._decode_tree(tokens, self._tree)
        else:
            self._decode(tokens)
        return self.context.logits(len(tokens))

    def features(self, rows: slice | list[int]) -> NDArray[np.float32]:
        """Features of `rows` of the last decode, [n, n_layers · n_embd]; a buffer that is reused."""
        if self._n_batch == 1:
            self.context.copy_layer_inputs(self.layers, self._features[0])
            return self._features[:1][rows]
        width, n = self.model.n_embd, 0
        for i, layer in enumerate(self.layers):
            inputs = self.context.layer_input(layer, self._n_batch)[rows]
            n = len(inputs)
            self._features[:n, i * width : (i + 1) * width] = inputs
        return self._features[:n]

    def commit(self, rows: Sequence[int]) -> None:
        """Of the last verify's batch keep `rows`, a path down from the anchor (row 0). Exactly once per verify.

        Raises BackendError if llama.cpp cannot roll the others back.
        """
        n = self.n_past + len(rows)
        if self._tree:
            self._prune(self._tree, rows)
        elif len(rows) < self._n_batch and not self._remove(n):
            raise BackendError(
                f"the KV cache of {self.model.path.name} cannot go back from {self.n_past + self._n_batch} to {n} "
                "tokens; use --draft-max 0."
            )
        self.n_past = n

    def checkpoint(self) -> None:
        """Save the state as it is, to come back to; does nothing where the KV cache can go back anywhere.

        Nor where a state is too large, as that of a window of 4,096 tokens may be.
        """
        forgets = self.model.is_recurrent or 0 < self.model.n_swa < self.n_ctx
        if forgets and 0 < self.n_past not in self._checkpoints and self.context.state_bytes() <= MAX_BYTES:
            self._checkpoints.add(self.n_past, self.context.save_state())

    def reachable(self, n: int) -> int:
        """The most positions, at most `n`, that `rewind(n)` can keep."""
        return n if self._can_go_back(n) else self._checkpoints.before(n)

    def rewind(self, n: int) -> int:
        """Go back to the first `n` positions; returns how many are really kept: all, those of a checkpoint, or none."""
        kept = self.reachable(n) if n < self.n_past else n
        if kept < self.n_past:
            whole = self._remove(kept) if self._can_go_back(kept) else self._restore(kept)
            if kept == 0 or not whole:
                self.forget()
                return 0
            self.n_past = kept
            self._checkpoints.truncate(kept)
        return kept

    def forget(self) -> None:
        """Empty the KV cache and the state, whatever is in them, and drop the checkpoints."""
        self.context.clear()
        self.n_past, self._n_seq, self._n_buried, self._oldest_snapshot = 0, 1, 0, 0
        self._checkpoints.truncate(0)

    def close(self) -> None:
        self.context.close()

    def _decode(self, tokens: Sequence[int], *, output: bool = True) -> None:
        self._make_room(len(tokens))
        everybody: Sequences = 0 if self._n_seq == 1 else [range(self._n_seq)] * len(tokens)
        self._n_batch = len(tokens)
        n_snapshots = min(len(tokens) - 1, self.context.n_rollback)  # none of the place before the batch
        self._oldest_snapshot = self.n_past + len(tokens) - n_snapshots
        self.context.decode(tokens, self.n_past, seq=everybody, output=output)

    def _decode_tree(self, tokens: Sequence[int], tree: Draft) -> None:
        under = leaves(tree.parents)
        self._make_room(len(tokens))
        self._branch(1 + max(under[-1]))
        positions = np.array([0, *depths(tree)], np.int32) + self.n_past
        self._n_batch = len(tokens)
        self.context.decode(tokens, positions, seq=[range(self._n_seq), *under])

    def _branch(self, n: int) -> None:
        """Have `n` sequences share the past."""
        for seq in range(self._n_seq, n):
            self.context.copy(0, seq)
        self._n_seq = max(n, self._n_seq)

    def _prune(self, tree: Draft, rows: Sequence[int]) -> None:
        """Leave `rows` in the KV cache, the common past of all sequences again, and nothing else of the tree."""
        under, start, n = leaves(tree.parents), self.n_past + 1, len(rows) - 1
        winner = under[rows[-1] - 1][0] if n else 0
        if self.context.exact:
            self._bury(tree, rows, under)
        for seq in range(self._n_seq):
            self.context.remove(start + (n if seq == winner else 0), seq=seq)
        for seq in range(self._n_seq if n else 0):
            if seq != winner:
                self.context.copy(winner, seq, start, start + n)

    def _bury(self, tree: Draft, rows: Sequence[int], under: list[list[int]]) -> None:
        """Keep the cells of rejected tokens that lie before a kept one: later tokens must not fill them.

        Attention adds up in the order of cells. Once a later token lies in front of an earlier one, logits differ from
        plain decoding in the last bits, for the rest of the text.
        """
        depth = depths(tree)
        for row in range(1, rows[-1]):
            if row not in rows:
                at = self.n_past + depth[row - 1]
                self.context.copy(under[row - 1][0], BURIED, at, at + 1)
                self._n_buried += 1

    def _make_room(self, n: int) -> None:
        """Give up buried cells when the KV cache would overflow; the order of cells is lost, the text is not."""
        if self._n_buried and self.n_past + self._n_buried + n > self.n_ctx:
            self.context.remove(0, seq=BURIED)
            self._n_buried = 0

    def _can_go_back(self, n: int) -> bool:
        """Whether all that the token behind the first `n` positions depends on is still there."""
        if self.model.is_recurrent:
            # a window beside a recurrent state cannot be asked for its oldest position: commit never needs to
            return n == self.n_past or (n >= self._oldest_snapshot and not self.model.n_swa)
        return not self.model.n_swa or 0 <= self.context.first_position() <= max(0, n - self.model.n_swa)

    def _remove(self, n: int) -> bool:
        """Drop all positions from `n` on; False if llama.cpp cannot."""
        self._oldest_snapshot = max(n, self._oldest_snapshot)  # a snapshot is chosen once: from here no farther back
        return all(self.context.remove(n, seq=seq) for seq in range(self._n_seq))  # only one that cannot go back fails

    def _restore(self, n: int) -> bool:
        """Go back to the checkpoint of `n` positions; the KV cache that it is no copy of still holds them all."""
        return n > 0 and self.context.load_state(self._checkpoints[n]) and self._remove(n)

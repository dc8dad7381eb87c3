"""The tensors of a drafter: their names in checkpoints and in llama.cpp's `dflash` architecture, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from localspec.convert.checkpoint import Checkpoint
from localspec.convert.drafter_keys import Shape
from localspec.convert.drafter_target import Matrix, Source
from localspec.convert.shard import Array
from localspec.convert.writer import Tensor
from localspec.dflash.format import OWN, axes, tensor_names
from localspec.errors import MissingError, ModelError, PairError

MASK_EMBEDDING = "mask_embedding.pt"


class Tensors:
    """The tensors of a drafter's file, those of its checkpoint and those it has to borrow.

    Raises ModelError for one that is missing, left over or of another shape than config.json says.
    """

    def __init__(self, checkpoint: Checkpoint, shape: Shape, source: Source) -> None:
        self._checkpoint, self._shape, self._source = checkpoint, shape, source
        self.place = {name.removeprefix("model."): name for name in checkpoint.names()}
        self._table = tensor_names(shape.n_layers, dflash2=shape.dflash2, sinks=shape.sinks)
        self._check_names("DFlash 2 drafter" if shape.dflash2 else "DFlash drafter")
        lengths = axes(shape)
        for name, (_, letters) in (self._table | {name: OWN[name] for name in OWN if name in self.place}).items():
            self._check_shape(name, tuple(lengths[axis] for axis in letters.split()))
        self._d2t = self._kept_tokens()
        self._mask = mask_embedding(checkpoint.folder, shape)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self._outer()
        for name, (ours, _) in self._table.items():
            matrix = self._own(name)
            yield Tensor(ours, matrix.shape, matrix.parts)

    def _check_names(self, what: str) -> None:
        folder = self._checkpoint.folder
        if missing := [name for name in self._table if name not in self.place]:
            raise ModelError(f"{folder} has no tensor {missing[0]!r}, which a {what} needs; download it again.")
        known = self._table.keys() | OWN.keys() | {"t2d"}  # t2d: d2t the other way round, which nobody reads
        if left := [theirs for name, theirs in self.place.items() if name not in known]:
            raise ModelError(
                f"{folder} has the tensor {left[0]!r}, which a {what} does not have and llama.cpp not read."
            )
        if len(self.place) < len(self._checkpoint.names()):
            raise ModelError(f"{folder} has tensors twice, with and without 'model.' before their names.")

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if (found := self._checkpoint.shape(self.place[name])) != expected:
            raise ModelError(
                f"{self._checkpoint.folder} has {self.place[name]!r} of shape {list(found)}, its config.json asks for "
                f"{list(expected)}."
            )

    def _own(self, name: str) -> Matrix:
        theirs = self.place[name]
        return Matrix(self._checkpoint.shape(theirs), lambda start, stop: self._checkpoint.rows(theirs, start, stop))

    def _borrowed(self, name: str) -> Matrix:
        matrix = self._source.matrix(name)
        if matrix.shape != (expected := (self._shape.n_vocab, self._shape.n_embd)):
            raise PairError(
                f"the drafter in {self._checkpoint.folder} borrows {name} of shape {list(expected)}, the target "
                f"{self._source.name} has it of shape {list(matrix.shape)}."
            )
        return matrix

    def _outer(self) -> Iterator[Tensor]:
        """Embeddings and head, where they are not simply the target's.

        llama.cpp takes the embeddings of a drafter for its head too if it has no other, so a head goes with them.
        """
        has_embeddings, has_head = "embed_tokens.weight" in self.place, "lm_head.weight" in self.place
        tied = self._shape.tied and has_embeddings and self._mask is None
        if has_embeddings or self._mask is not None:
            embeddings = self._own("embed_tokens.weight") if has_embeddings else self._borrowed("token_embd.weight")
            if self._mask is not None:
                embeddings = _with_row(embeddings, self._shape.mask_token, self._mask)
            yield Tensor("token_embd.weight", embeddings.shape, embeddings.parts)
            if not has_head and not tied:
                head = self._borrowed("output.weight")
                yield Tensor("output.weight", head.shape, head.parts)
        if has_head:
            head = self._own("lm_head.weight")
            yield Tensor("output.weight", head.shape, head.parts)
        if self._d2t is not None:
            yield Tensor.of("d2t", self._d2t)

    def _kept_tokens(self) -> Array | None:
        """The token of each row of a reduced head, int64; checkpoints have them less the number of their row."""
        folder, n_rows, n_vocab = self._checkpoint.folder, self._shape.n_rows, self._shape.n_vocab
        if "d2t" not in self.place:
            if n_rows < n_vocab:
                raise ModelError(f"{folder} keeps {n_rows:,} of {n_vocab:,} tokens but has no d2t, which says which.")
            return None
        if "lm_head.weight" not in self.place:
            raise ModelError(f"{folder} has d2t but no tensor 'lm_head.weight' with a row for each of its tokens.")
        table = self._checkpoint.tensor(self.place["d2t"])
        tokens = table + np.arange(n_rows)
        if (
            table.dtype != np.int64
            or len(np.unique(tokens)) < n_rows
            or not 0 <= tokens.min() <= tokens.max() < n_vocab
        ):
            raise ModelError(
                f"{folder} has a damaged d2t: it does not name {n_rows:,} different ones of {n_vocab:,} tokens."
            )
        return tokens


def _with_row(matrix: Matrix, index: int, row: Array) -> Matrix:
    def rows(start: int, stop: int) -> Array:
        block = matrix.rows(start, stop)
        if start <= index < stop:
            block = block.copy()
            block[index - start] = row
        return block

    return Matrix(matrix.shape, rows)


def mask_embedding(folder: Path, shape: Shape) -> Array | None:
    """The embedding of the mask token, float32 [n_embd], of a drafter that has it beside its checkpoint.

    A pickle, alas; torch's restricted reader makes tensors and numbers of it and runs none of its code. Raises
    ModelError for anything else in it.
    """
    path = folder / MASK_EMBEDDING
    if not path.is_file():
        return None
    try:
        import torch
    except ImportError:
        raise MissingError(f"{path} takes torch to be read: pip install 'localspec[distill]'.") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        token, row = (
            (state["mask_token_id"], state["embedding"]) if isinstance(state, dict) else (shape.mask_token, state)
        )
        embedding: Array = row.float().numpy().reshape(-1)
    except Exception as error:
        raise ModelError(
            f"{path} is damaged or holds more than an embedding; no code of a checkpoint is run to find out."
        ) from error
    if token != shape.mask_token or len(embedding) != shape.n_embd:
        raise ModelError(
            f"{path} holds {len(embedding)} numbers for token {token}, its config.json asks for {shape.n_embd} for "
            f"token {shape.mask_token}."
        )
    return embedding

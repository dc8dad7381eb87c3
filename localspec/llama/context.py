"""A llama.cpp context over a model: batches in, logits, layer inputs and lattice rows out, as numpy arrays."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.errors import BackendError
from localspec.llama import decode_thread
from localspec.llama.binding import C, Log, ext, uninterrupted
from localspec.llama.layer_inputs import NO_OUTPUT, HandedOut, LayerInputs, Named, hands_out
from localspec.llama.model import Model

Floats = NDArray[np.float32]
BF16 = 30  # GGML_TYPE_BF16

# EXACT: ggml's CPU flash attention goes through the keys token by token, so no token sees its neighbours, unless it
# may tile the queries or split the keys among threads, which it does where K and V have the same type (`ops.cpp`,
# `use_split_kv_path`, `use_tiled`). With V in bf16 it never does. Plain attention depends on the batch through its
# matrix products, and int8 activations make a difference of 1e-6 one of 0.9 (benchmarks/attention.py).


def default_threads() -> int:
    """Physical cores this process may use; hyper-threads slow matrix products down."""
    available = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    siblings = {
        path.read_text()
        for cpu in available
        if (path := Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).exists()
    }
    return len(siblings) or len(available)


# Which sequences tokens belong to: all to one, each to its own [n], or each to several.
Sequences = int | NDArray[np.int32] | Sequence[Sequence[int]]


class _Batch:
    """A `llama_batch` whose pointers stay fixed on numpy buffers: filling it is slicing, sending it one call."""

    def __init__(self, capacity: int, *, n_seq: int = 1, n_embd: int = 0, n_pos: int = 1) -> None:
        self.n_pos = n_pos
        self.token = np.zeros(capacity, np.int32)
        self.embd = np.zeros((capacity, n_embd), np.float32)
        self.pos = np.zeros(capacity * n_pos, np.int32)
        self.n_seq = np.ones(capacity, np.int32)
        self.seq = np.zeros((capacity, n_seq), np.int32)
        self.output = np.zeros(capacity, np.int8)
        self._seq_rows = self.seq.ctypes.data + self.seq.strides[0] * np.arange(capacity, dtype=np.uint64)
        self.struct = C.llama_batch(
            n_tokens=0,
            token=None if n_embd else self.token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=self.embd.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if n_embd else None,
            pos=self.pos.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self.n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._seq_rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self.output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def place(self, n: int, pos: NDArray[np.int32], seq: Sequences, output: Any) -> Any:
        """Set positions [n], sequence ids and output flags [n]; returns the struct to send."""
        self.pos[:n] = pos
        for section in range(1, self.n_pos):  # M-RoPE embeddings: section-major, the last one unused
            self.pos[section * n : (section + 1) * n] = pos if section < 3 else 0
        if isinstance(seq, Sequence):
            for i, ids in enumerate(seq):
                self.n_seq[i] = len(ids)
                self.seq[i, : len(ids)] = ids
        else:
            self.n_seq[:n] = 1
            self.seq[:n, 0] = seq
        self.output[:n] = output
        self.struct.n_tokens = n
        return self.struct


class Context:
    """KV cache and compute buffers of one model; a context manager that frees them.

    `n_ctx` tokens of KV cache in all, `n_batch` tokens a decode at most, `n_outputs` of them with logits (0: all),
    `n_seq` independent sequences, `n_rollback` recurrent snapshots (the longest rollback of a hybrid model), `other`
    the target's context for a drafter, `embd_width` floats a row of the embedding batches it will take (0: none),
    `layers` the layers whose inputs will be wanted, `flash` whether to use flash attention (None: llama.cpp decides).
    `exact` asks that a token's logits be the same to
    the last bit in whatever batch it is decoded; only CPU kernels can promise that, a GPU is left as it is.
    Raises BackendError when llama.cpp cannot allocate it, PairError when it cannot give the inputs of `layers`.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_seq: int = 1,
        n_threads: int | None = None,
        n_outputs: int = 0,
        n_rollback: int = 0,
        other: Context | None = None,
        embd_width: int = 0,
        layers: Sequence[int] = (),
        causal: bool = True,
        swa_full: bool = False,
        unified: bool = True,
        flash: bool | None = None,
        exact: bool = False,
        offload: bool = True,
    ) -> None:
        self.model = model
        params = C.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_rs_seq = n_ctx, n_seq, n_rollback
        params.n_batch = params.n_ubatch = n_batch
        params.n_outputs_max = n_outputs
        params.n_threads = params.n_threads_batch = n_threads or default_threads()
        self.exact = exact and not model.on_gpu
        if self.exact:
            flash, params.type_v = True, BF16  # see EXACT
        if flash is not None:
            params.flash_attn_type = int(flash)
        params.kv_unified, params.swa_full, params.no_perf = unified, swa_full, True
        params.offload_kqv = params.op_offload = offload
        if other is not None:
            params.ctx_other = other.pointer
        named = Named(layers, model.n_embd, n_batch) if layers and not hands_out(model) else None
        if named:
            params.cb_eval, params.cb_eval_user_data = named.callback, named.user_data
        Log.clear()
        with uninterrupted():
            self._ctx = C.llama_init_from_model(model.pointer, params)
        if not self._ctx:
            raise BackendError(
                f"llama.cpp cannot open a context of {n_ctx:,} tokens for {model.path.name} ({Log.reason()}); "
                "try a smaller one with -c."
            )
        self.n_ctx = int(C.llama_n_ctx(self._ctx))
        self.n_rollback = int(C.llama_n_rs_seq(self._ctx)) if n_rollback else 0
        self.n_batch, self.n_threads = n_batch, int(params.n_threads)
        self._tokens = _Batch(n_batch, n_seq=n_seq if unified else 1)
        self._rows = _Batch(n_batch, n_embd=embd_width, n_pos=model.n_pos) if embd_width else None
        self._inputs: LayerInputs = named or HandedOut(self._ctx)
        if not causal:
            C.llama_set_causal_attn(self._ctx, False)
        if named:
            self._check(named, layers)

    def _check(self, named: Named, layers: Sequence[int]) -> None:
        """Have one token computed, to see whether the graph names what is wanted of it."""
        try:
            for layer in layers:
                named.want(layer, True)
            self.decode([0], 0)
            named.check(self.model)
        except BaseException:
            self.close()
            raise
        for layer in layers:
            named.want(layer, False)
        self.clear()

    @property
    def pointer(self) -> Any:
        if not self._ctx:
            raise BackendError("this context is closed; load the pair again.")
        return self._ctx

    @property
    def _memory(self) -> Any:
        return C.llama_get_memory(self.pointer)

    # -- in -------------------------------------------------------------------------------------------------------

    def decode(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        pos: int | NDArray[np.int32],
        *,
        seq: Sequences = 0,
        output: bool | NDArray[np.int8] = True,
    ) -> None:
        """Run tokens [n] at `pos` (the first position, or all [n]) of sequences `seq`.

        A token of several sequences is the common past of all of them (unified KV cache only). `output` marks the rows
        to compute logits for.
        """
        n = len(tokens)
        self._tokens.token[:n] = tokens
        self._send(self._tokens.place(n, _positions(pos, n), seq, output))

    def decode_rows(self, rows: Floats, pos: int) -> None:
        """Run embedding rows [n, embd_width] at positions pos … pos + n - 1 of sequence 0, without outputs."""
        n = len(rows)
        if self._rows is None or rows.shape[1] != self._rows.embd.shape[1]:
            raise BackendError(f"{self.model.path.name} does not take rows of {rows.shape[1]} floats.")
        self._rows.embd[:n] = rows
        self._send(self._rows.place(n, _positions(pos, n), 0, False))

    def _send(self, batch: Any) -> None:
        pointer = self.pointer
        with self._inputs.begin():
            status = decode_thread.run(lambda: C.llama_decode(pointer, batch))
        if status != 0:
            why = {1: "its KV cache is full", 2: "it was aborted"}.get(status, f"status {status}")
            raise BackendError(f"llama.cpp could not decode {batch.n_tokens} tokens: {why}.")

    # -- out ------------------------------------------------------------------------------------------------------

    def logits(self, n: int) -> Floats:
        """Logits of the last decode's `n` output rows, [n, n_vocab]; a view that the next decode overwrites."""
        pointer = C.llama_get_logits(self.pointer)
        return _view(ctypes.cast(pointer, ctypes.c_void_p).value, n, self.model.vocab.n_tokens)

    def want_hidden(self, wanted: bool) -> None:
        """Have each decode copy out what the head reads, or not; meanwhile every row of a batch is an output row."""
        C.llama_set_embeddings(self.pointer, wanted)

    def hidden(self, n: int) -> Floats:
        """What the head has read in the last decode's `n` rows, [n, n_embd]; a view."""
        pointer = C.llama_get_embeddings(self.pointer)
        return _view(ctypes.cast(pointer, ctypes.c_void_p).value, n, self.model.n_embd)

    def want_layer_input(self, layer: int, wanted: bool) -> None:
        """Have each decode copy out the input of `layer`, one of `layers`."""
        self._inputs.want(layer, wanted)

    def layer_input(self, layer: int, n: int) -> Floats:
        """Input of `layer` for all `n` tokens of the last decode, in batch order, [n, n_embd]; a view."""
        return _view(self._inputs.address(layer, n), n, self.model.n_embd)

    def copy_layer_inputs(self, layers: Sequence[int], out: Floats) -> None:
        """Write the inputs of `layers` for the one token of the last decode side by side into `out` [n · n_embd].

        For rounds of plain decoding, where views in numpy take longer than the copies themselves.
        """
        to, size = out.ctypes.data, 4 * self.model.n_embd
        for i, layer in enumerate(layers):
            ctypes.memmove(to + i * size, self._inputs.address(layer, 1), size)

    def want_lattice(self) -> None:
        """Have each token batch of a DFlash 2 drafter pack its lattice, one row a token."""
        ext.set_embeddings_nextn(self.pointer, True, False)

    def lattice_rows(self, n: int) -> Floats:
        """The packed lattice of the last decode, [n, n_embd]; a view (layout: `lattice.unpack`)."""
        return _view(ext.get_embeddings_nextn(self.pointer), n, self.model.n_embd)

    # -- KV cache -------------------------------------------------------------------------------------------------

    def remove(self, start: int, *, seq: int = 0) -> bool:
        """Drop positions `start` … of a sequence; False if llama.cpp cannot.

        True does not mean that a recurrent state is right: llama.cpp keeps its snapshots of the last batch only and
        takes an older one without a word (see `engine.target`).
        """
        return bool(C.llama_memory_seq_rm(self._memory, seq, start, -1))

    def copy(self, source: int, seq: int, start: int = 0, end: int = -1) -> None:
        """Let positions `start` … `end` - 1 of sequence `source` belong to `seq` as well (unified: no copy)."""
        C.llama_memory_seq_cp(self._memory, source, seq, start, end)

    def clear(self) -> None:
        """Drop everything."""
        C.llama_memory_clear(self._memory, False)

    def first_position(self, *, seq: int = 0) -> int:
        """The oldest position still held (sliding windows drop old ones); -1 if there is none."""
        return int(C.llama_memory_seq_pos_min(self._memory, seq))

    def state_bytes(self) -> int:
        """Size of what `save_state` would return now."""
        return int(C.llama_state_seq_get_size_ext(self.pointer, 0, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY))

    def save_state(self) -> NDArray[np.uint8]:
        """A copy of what sequence 0 keeps besides an ordinary KV cache: recurrent state and sliding windows [bytes]."""
        n = self.state_bytes()
        state = np.empty(n, np.uint8)
        address = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if C.llama_state_seq_get_data_ext(self.pointer, address, n, 0, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != n:
            raise BackendError(f"llama.cpp could not save the state of {self.model.path.name}.")
        return state

    def load_state(self, state: NDArray[np.uint8]) -> bool:
        """Put a copy made by `save_state` back; False, with nothing left in its place, if llama.cpp refuses."""
        address = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n = state.nbytes
        return bool(C.llama_state_seq_set_data_ext(self.pointer, address, n, 0, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY))

    def synchronize(self) -> None:
        """Wait until the device has finished; needed only around timings."""
        C.llama_synchronize(self.pointer)

    def close(self) -> None:
        if self._ctx:
            C.llama_free(self._ctx)
            self._ctx = None

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _positions(pos: int | NDArray[np.int32], n: int) -> NDArray[np.int32]:
    return np.arange(pos, pos + n, dtype=np.int32) if isinstance(pos, (int, np.integer)) else pos


def _view(address: int | None, n: int, width: int) -> Floats:
    """`n` rows of `width` floats at a C address, without a copy."""
    if not address:
        raise BackendError(NO_OUTPUT)
    buffer = (ctypes.c_float * (n * width)).from_address(address)
    return np.ctypeslib.as_array(buffer).reshape(n, width)

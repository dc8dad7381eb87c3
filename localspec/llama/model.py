"""A loaded GGUF model and its vocabulary."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from localspec.errors import BackendError, ModelError
from localspec.llama import native
from localspec.llama.binding import C, Log, ext, gpu_offload, uninterrupted
from localspec.llama.selftest import safe_to_repack


class Model:
    """Weights and vocabulary of one GGUF file; a context manager that frees them.

    `gpu_layers`: layers to put on the GPU, negative for all. `repack`: whether weights may be rearranged for ggml's
    fastest kernels and ours; None lets them unless those crash here (`selftest`, `native`). Raises ModelError when
    llama.cpp refuses the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, gpu_layers: int = -1, repack: bool | None = None) -> None:
        self.path = Path(path)
        self.on_gpu = gpu_layers != 0 and gpu_offload()
        params = C.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        if repack is None:
            native.state()
            repack = safe_to_repack()
        params.use_extra_bufts = repack
        Log.clear()
        with uninterrupted():
            self._model = C.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {self.path}: {Log.reason()}.")
        self.vocab = Vocab(self)
        self.n_embd = int(C.llama_model_n_embd(self._model))
        self.n_layer = int(C.llama_model_n_layer(self._model))
        self.n_swa = int(C.llama_model_n_swa(self._model))
        self.n_ctx_train = int(C.llama_model_n_ctx_train(self._model))
        self.is_recurrent = bool(C.llama_model_is_recurrent(self._model) or C.llama_model_is_hybrid(self._model))
        self.n_pos = 4 if C.llama_model_rope_type(self._model) in _MROPE else 1

    @property
    def pointer(self) -> Any:
        if not self._model:
            raise BackendError(f"{self.path.name} is closed; load it again.")
        return self._model

    @property
    def arch(self) -> str:
        """The architecture its file names."""
        text = ctypes.create_string_buffer(256)
        C.llama_model_meta_val_str(self.pointer, b"general.architecture", text, len(text))
        return text.value.decode()

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template in the file, if there is one."""
        text = C.llama_model_chat_template(self.pointer, None)
        return text.decode("utf-8", "replace") if text else None

    @property
    def n_bytes(self) -> int:
        """Size of all tensors, bytes."""
        return int(C.llama_model_size(self.pointer))

    def target_layers(self) -> list[int]:
        """A drafter's `dflash.target_layers`: the target layers whose inputs it reads."""
        n = ext.model_target_layer_ids_n(self.pointer)
        if n == 0:
            return []
        address = ext.model_target_layer_ids(self.pointer)
        return list((ctypes.c_int32 * n).from_address(address))

    def selector_top_k(self) -> int:
        """Candidates a slot in a DFlash 2 drafter's lattice; 0 for DFlash 1."""
        return int(ext.model_dflash_selector_top_k(self.pointer))

    def close(self) -> None:
        if self._model:
            C.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_FENCE = "\x01"
_MROPE = (C.LLAMA_ROPE_TYPE_MROPE, C.LLAMA_ROPE_TYPE_IMROPE)


class Vocab:
    """Tokens of a model: text to ids and ids to bytes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.n_tokens = int(C.llama_vocab_n_tokens(self._vocab))
        self.bos = int(C.llama_vocab_bos(self._vocab))
        self.eos = int(C.llama_vocab_eos(self._vocab))
        self.mask = int(C.llama_vocab_mask(self._vocab))
        self.add_bos = bool(C.llama_vocab_get_add_bos(self._vocab))
        self._pieces: dict[int, bytes] = {}
        self._buffer = ctypes.create_string_buffer(256)

    @property
    def _vocab(self) -> Any:
        return C.llama_model_get_vocab(self._model.pointer)

    def tokenize(
        self, text: str, *, parse_special: bool = False, add_special: bool = False, continues: bool = False
    ) -> list[int]:
        """Token ids of `text`. Only with `parse_special` do texts like `<|im_end|>` become special tokens.

        `continues`: other text stands before this one, so SentencePiece may not put a space between them.
        """
        if continues and self._adds_space:  # there is no option for it; no token but a byte's holds this character
            ids = self.tokenize(_FENCE + text, parse_special=parse_special)
            return ids[len(self.tokenize(_FENCE)) :]
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 16
        while True:
            out = (C.llama_token * capacity)()
            n = C.llama_tokenize(self._vocab, data, len(data), out, capacity, add_special, parse_special)
            if n >= 0:
                return list(out[:n])
            capacity = -n

    @cached_property
    def _adds_space(self) -> bool:
        return b"".join(map(self.piece, self.tokenize("x"))) == b" x"

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; empty for control tokens."""
        if token not in self._pieces:
            n = C.llama_token_to_piece(self._vocab, token, self._buffer, 256, 0, False)
            if n < 0:
                self._buffer = ctypes.create_string_buffer(-n)
                n = C.llama_token_to_piece(self._vocab, token, self._buffer, -n, 0, False)
            self._pieces[token] = self._buffer.raw[:n]
        return self._pieces[token]

    def text(self, token: int) -> str:
        """A token's name in the vocabulary, special tokens included."""
        raw = C.llama_vocab_get_text(self._vocab, token)
        return raw.decode("utf-8", "replace") if raw else ""

    def is_eog(self, token: int) -> bool:
        """True if the token ends a generation (end of text, end of turn)."""
        return bool(C.llama_vocab_is_eog(self._vocab, token))

    def is_control(self, token: int) -> bool:
        """True for tokens that carry structure, not text."""
        return bool(C.llama_vocab_is_control(self._vocab, token))

    def special_texts(self) -> list[str]:
        """Texts that become control tokens with `parse_special` only (user-defined tokens are parsed in any text)."""
        return self._texts(C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN)

    def user_defined_texts(self) -> list[str]:
        """Texts that become a token of their own wherever they stand."""
        return self._texts(C.LLAMA_TOKEN_ATTR_USER_DEFINED)

    def _texts(self, kind: int) -> list[str]:
        return [self.text(token) for token, attribute in enumerate(self._attributes) if attribute & kind]

    @cached_property
    def _attributes(self) -> list[int]:
        return [int(C.llama_vocab_get_attr(self._vocab, token)) for token in range(self.n_tokens)]


def knows_architecture(arch: str) -> bool:
    """Whether this llama.cpp can run models of an architecture; it is asked to load a file that only names one."""
    key, value = (struct.pack("<Q", len(text)) + text for text in (b"general.architecture", arch.encode()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "named.gguf")
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 8) + value)
        Log.clear()
        C.llama_model_load_from_file(os.fsencode(path), C.llama_model_default_params())
    return "unknown model architecture" not in Log.reason()


def quantize(source: str | os.PathLike[str], destination: str | os.PathLike[str], encoding: str) -> None:
    """Re-encode a GGUF file with llama.cpp's quantiser (`encoding`: f16, bf16, q8_0, q4_0, q4_k_m ...).

    Raises ModelError when llama.cpp refuses, OSError never: the caller checks disk space.
    """
    import gguf

    file_type = gguf.LlamaFileType.__members__.get(f"MOSTLY_{encoding.upper()}")
    if file_type is None:
        raise ModelError(
            f"cannot encode as {encoding!r}; choose f16, bf16, q8_0, q4_0, q4_k_m or another of llama.cpp's."
        )
    params = C.llama_model_quantize_default_params()
    params.ftype = file_type
    params.allow_requantize = True
    Log.clear()
    status = C.llama_model_quantize(os.fsencode(source), os.fsencode(destination), ctypes.byref(params))
    if status != 0:
        raise ModelError(f"cannot re-encode {source} as {encoding}: {Log.reason()}.")

"""A GGUF file written tensor by tensor, and each tensor row by row: whole under its name, or not there at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType

from localspec.convert.shard import Array
from localspec.errors import ModelError, OptionError
from localspec.storage import free_bytes

Report = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
PLAIN = {
    "f32": (F32, LlamaFileType.ALL_F32),
    "f16": (F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (GGMLQuantizationType.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": (GGMLQuantizationType.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": (GGMLQuantizationType.Q5_1, LlamaFileType.MOSTLY_Q5_1),
}
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
OUTTYPES = (*PLAIN, *K_QUANTS)
ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight")  # as in llama.cpp's conversion/base.py
SLACK = 1 << 26  # bytes of a file beside its tensors: the vocabulary, mostly


@dataclass(frozen=True)
class Tensor:
    """One tensor to be written.

    `shape` in numpy's order; `parts()` yields its values as consecutive blocks (float32, the last axis whole), so that
    no tensor has to be in memory as a whole; `kind` fixes the type for those that must not follow `--outtype`.
    """

    name: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Array]]
    kind: GGMLQuantizationType | None = None

    @classmethod
    def of(cls, name: str, array: Array, kind: GGMLQuantizationType | None = None) -> Tensor:
        """A small tensor that is already in memory; integers are kept as int64."""
        kind = GGMLQuantizationType.I64 if array.dtype == np.int64 else kind
        return cls(name, array.shape, lambda: [array], kind)

    def encoding(self, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
        """Vectors, norms, routers and what is no weight stay float32; rows that do not divide become float16."""
        if self.kind is not None:
            return self.kind
        if len(self.shape) < 2 or self.name.endswith(ALWAYS_F32) or not self.name.endswith(".weight"):
            return F32
        return F16 if self.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def check_options(out: Path, outtype: str, *, force: bool) -> None:
    """OptionError, before any work is done, for an unknown type or a place that cannot be written."""
    if outtype not in OUTTYPES:
        raise OptionError(f"Output type {outtype!r} is not one of {', '.join(OUTTYPES)}.")
    if out.is_dir():
        raise OptionError(f"{out} is a folder; give -o the name of a file.")
    if not out.parent.is_dir():
        raise OptionError(f"{out.parent} is not a folder; create it, or choose another place with -o.")
    if out.exists() and not out.is_file():
        raise OptionError(f"{out} is a device or a pipe; give -o the name of a file.")
    if out.exists() and not force:
        raise OptionError(f"{out} exists; choose another name with -o, or overwrite it with --force.")


def write(
    writer: GGUFWriter,
    tensors: Sequence[Tensor],
    out: Path,
    *,
    outtype: str,
    precision: str = "f32",
    force: bool = False,
    progress: Report | None = None,
) -> None:
    """Write the keys of `writer` (made without a path) and `tensors` to `out`.

    K-quants are made by llama.cpp from a file in `precision`, which stands beside `out` for that time. Raises
    OptionError as `check_options` does, and for a disk that is full or not writable; nothing is left behind then.
    """
    check_options(out, outtype, force=force)
    for name, entry in writer.kv_data[0].items():
        if not _fits(entry.value, entry.type):
            raise ModelError(f"{name} would be {str(entry.value)[:200]!r}, which no {entry.type.name} holds; mend it.")
    progress, out = progress or (lambda what, done, total: None), out.resolve()  # a link stays a link
    with parts(out) as (part, plain):
        if outtype in PLAIN:
            _write_plain(writer, tensors, part, outtype, 1.0, progress)
        else:
            _write_plain(writer, tensors, plain, precision, 1.5, progress)
            requantize(plain, part, outtype, progress)
        part.replace(out)


def _fits(value: Any, kind: GGUFValueType) -> bool:
    """What README.md and generation_config.json say goes through gguf unchecked."""
    match kind:
        case GGUFValueType.STRING:
            return isinstance(value, str | bytes)
        case GGUFValueType.FLOAT32:
            return type(value) in (int, float) and abs(value) < 3e38
        case GGUFValueType.INT32:
            return isinstance(value, int) and abs(value) < 1 << 31
        case GGUFValueType.ARRAY if isinstance(value, list | tuple) and isinstance(value[0], str | bytes | int | float):
            return all(_fits(item, GGUFValueType.get_type(value[0])) for item in value)
    return kind != GGUFValueType.ARRAY


@contextmanager
def parts(out: Path) -> Iterator[tuple[Path, Path]]:
    """Two names beside `out`, neither of which exists afterwards; trouble with the disk as one sentence."""
    paths = out.with_name(out.name + ".part"), out.with_name(out.name + ".plain.part")
    try:
        yield paths
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"cannot write {out} ({reason}); make room or choose another place with -o.") from error
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _write_plain(
    writer: GGUFWriter, tensors: Sequence[Tensor], path: Path, outtype: str, n_copies: float, progress: Report
) -> None:
    wanted, file_type = PLAIN[outtype]
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = [tensor.encoding(wanted) for tensor in tensors]
    sizes = [_n_bytes(tensor.shape, kind) for tensor, kind in zip(tensors, kinds, strict=True)]
    for tensor, kind, size in zip(tensors, kinds, sizes, strict=True):
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    _check_room(path, int(n_copies * sum(sizes)) + SLACK)
    try:
        writer.write_header_to_file(path=path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _stream(writer, tensors, kinds, sizes, progress)
    finally:
        writer.close()


def _stream(
    writer: GGUFWriter,
    tensors: Sequence[Tensor],
    kinds: Sequence[GGMLQuantizationType],
    sizes: Sequence[int],
    progress: Report,
) -> None:
    assert writer.fout is not None
    file, done, total = writer.fout[0], 0, sum(sizes)
    writer.write_padding(file, file.tell())
    for tensor, kind, size in zip(tensors, kinds, sizes, strict=True):
        before = done
        for part in tensor.parts():
            data = _encode(tensor.name, part, kind)
            file.write(data.data)  # unlike `tofile` it says why it failed
            done += data.nbytes
            progress("Converting", done, total)
        if done - before != size:
            raise ValueError(f"{tensor.name} of {tensor.shape} came as {done - before} bytes instead of {size}")
        writer.write_padding(file, size)


def _encode(name: str, part: Array, kind: GGMLQuantizationType) -> Array:
    if kind == GGMLQuantizationType.I64:
        return np.ascontiguousarray(part, np.int64)
    with np.errstate(over="ignore"):
        data: Array = gguf.quants.quantize(np.ascontiguousarray(part, np.float32), kind)
    if kind == F16 and not np.isfinite(data).all():
        raise ModelError(f"{name} has values that f16 cannot hold (or that are no numbers); choose --outtype bf16.")
    return np.ascontiguousarray(data)


def _n_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // n_values * n_bytes


def _check_room(path: Path, needed: int) -> None:
    free = free_bytes(path)
    if free < needed:
        raise OptionError(
            f"{path.parent} has {free / 1e9:.1f} GB free, this takes {needed / 1e9:.1f} GB; make room or choose "
            "another place with -o."
        )


def requantize(source: Path, path: Path, outtype: str, progress: Report) -> None:
    """Re-encode a GGUF file with llama.cpp's own quantiser, which does not say how far it is."""
    from localspec.llama import quantize

    what, size = f"Quantising as {outtype}", source.stat().st_size
    progress(what, 0, size)
    quantize(source, path, outtype)
    progress(what, size, size)

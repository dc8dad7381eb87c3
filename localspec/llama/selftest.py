"""Does this build's AMX code work? Tried once in a child process, because where it does not, it kills the process.

GCC 12 and older believe that `ldtilecfg` reads 8 of its 64 bytes and drop the other stores as dead: the first decode of
two tokens then dies in ggml's AMX kernels. Working, they are worth three times the speed on a CPU that has AMX; models
opened with `use_extra_bufts = False` stay clear of them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from localspec.cache import cache_dir
from localspec.llama.binding import has_amx, library_folder

N_EMBD = 256


@cache
def safe_to_repack() -> bool:
    """True unless ggml would repack weights for AMX code that crashes. The verdict on a library is kept."""
    if not has_amx():
        return True
    verdict = _verdict_file()
    if not verdict.exists():
        child = subprocess.run(
            [sys.executable, "-m", "localspec.llama.selftest"], capture_output=True, stdin=subprocess.DEVNULL
        )
        if child.returncode > 0 and child.returncode < 128:
            return False  # it could not even try: stay clear of AMX, but keep no verdict
        try:
            verdict.parent.mkdir(parents=True, exist_ok=True)
            part = verdict.with_suffix(f".{os.getpid()}")
            part.write_text("works" if child.returncode == 0 else "crashes", encoding="ascii")
            part.replace(verdict)
        except OSError:
            return child.returncode == 0  # a read-only home only means to try again next time
    return verdict.read_text(encoding="ascii") == "works"


def _verdict_file() -> Path:
    libraries = sorted(library_folder().glob("*ggml-cpu*"))
    key = "\0".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in libraries)
    return cache_dir() / "amx" / hashlib.sha256(key.encode()).hexdigest()[:32]


def write_model(path: Path) -> None:
    """A one-layer llama of random Q8_0 weights and no vocabulary, 1 MB: enough to reach the matrix kernels."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * N_EMBD)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_EMBD)
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(0)
    square, wide = (N_EMBD, N_EMBD), (2 * N_EMBD, N_EMBD)
    shapes = {f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": wide, "blk.0.ffn_up": wide, "blk.0.ffn_down": wide[::-1]}
    for name, shape in (shapes | {"token_embd": square, "output": square}).items():
        weights = random.normal(0, 0.05, shape).astype(np.float32)
        data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _decode() -> None:
    """What the child does: decode 1, 2 and 33 tokens with repacked weights."""
    from localspec.llama.context import Context
    from localspec.llama.model import Model

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path)
        with Model(path, repack=True) as model, Context(model, n_ctx=64, n_batch=64, n_threads=1) as context:
            for n in (1, 2, 33):
                context.decode(range(n), 0)
                if not np.isfinite(context.logits(n)).all():
                    sys.exit("the AMX kernels return numbers that are not finite")
                context.clear()


if __name__ == "__main__":
    _decode()

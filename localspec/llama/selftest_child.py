"""The child process of `selftest`: a tiny model through ggml's AMX kernels."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from localspec.llama.context import Context
from localspec.llama.model import Model

N_EMBD = 256


def write_model(path: Path, encoding: gguf.GGMLQuantizationType) -> None:
    """A one-layer llama of random weights and no vocabulary, 1 MB: enough to reach the matrix kernels."""
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
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, encoding), raw_dtype=encoding)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _decode() -> None:
    """What the child does: decode 1, 2 and 33 tokens with repacked weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, gguf.GGMLQuantizationType.Q8_0)
        with Model(path, repack=True) as model, Context(model, n_ctx=64, n_batch=64, n_threads=1) as context:
            for n in (1, 2, 33):
                context.decode(range(n), 0)
                if not np.isfinite(context.logits(n)).all():
                    sys.exit("the AMX kernels return numbers that are not finite")
                context.clear()


if __name__ == "__main__":
    _decode()

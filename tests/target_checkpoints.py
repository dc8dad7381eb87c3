"""Tiny checkpoints of every architecture `convert target` knows, and what llama.cpp's own converter makes of them.

As a script, with a llama.cpp source tree of commit 0c1e57098, torch, transformers and sentencepiece installed:

    python tests/target_checkpoints.py PATH/TO/llama.cpp

writes target_checkpoints.json anew: for each form the keys, and each tensor's type, shape and SHA-256. The one thing
changed in that converter is the table of tokenizer hashes, which cannot know the tokenizers made here.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

EXPECTED = Path(__file__).with_suffix(".json")
INEXACT = ("ssm_a", "rope_freqs.weight")  # exp and pow round differently in torch and numpy: values, not hashes
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHATML = (
    "{%- for message in messages %}\n{{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}\n"
    "{{- '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
HEADERS = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog; don't you think it's 12,345.67 times better than they're saying?",
    "def main(argv: list[str]) -> int:\n    for i in range(10):\n        print(i, end='')\n\treturn 0\n\n\n",
    "Größe, façade, naïve, œuvre, mañana, ČĆŽŠĐ, ąęłńóśźż. Был светлый холодный день, и часы пробили тринадцать.",
    "我想在apple工作1314151天。吾輩は猫である。名前はまだ無い。나는 고양이로소이다. हिन्दी में पाठ। ภาษาไทย العربية עברית",
    "🚀 (normal) 😶\u200d🌫️ ✅ 🦙🦙 ////====---- ......!!!!!!?????? ''''''```````\"\"\"\" [x](https://example.org/a?b=c&d=%20e)",
    "I've told him he'll be there, I'm sure, she'd say we're late, WE'RE LATE, I'VE TOLD YOU; the then there these",
]


@dataclass(frozen=True)
class Form:
    """One kind of checkpoint: transformers' classes and settings, its tokenizer, and how it is written."""

    model: str
    config: str
    settings: dict[str, Any]
    pre: str
    dtype: torch.dtype = torch.float32
    shard_size: str = "1GB"
    also: dict[str, Any] = field(default_factory=dict)  # keys of published config.json files
    mtp: bool = False


BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3 = {**BASE, "head_dim": 32}
QWEN35 = {
    **QWEN3,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
FORMS = {
    "smollm": Form(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**BASE, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        "smollm",
        also={"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    ),
    "llama3": Form(
        "LlamaForCausalLM", "LlamaConfig", {**BASE, "head_dim": 16, "rope_parameters": LLAMA_3_ROPE}, "llama-bpe"
    ),
    "llama_f16": Form(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**BASE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "smollm",
        torch.float16,
    ),
    "qwen3": Form(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**QWEN3, "rope_parameters": YARN},
        "qwen2",
        shard_size="60KB",
        also={"max_window_layers": 28, "rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False},
    ),
    "qwen3moe": Form(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**QWEN3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "qwen2",
    ),
    "qwen35": Form("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", QWEN35, "qwen35"),
    "qwen35_vision": Form(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": QWEN35, "vision_config": VISION, "tie_word_embeddings": False},
        "qwen35",
        torch.bfloat16,
        "200KB",
        {
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "output_gate_type": "swish",
            "partial_rotary_factor": 0.5,
        },
        mtp=True,
    ),
}


def tokenizer_of(pre: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on CORPUS, with the rules, special tokens and chat template of a real family."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.decoder = decoders.ByteLevel()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        pattern = {"llama-bpe": LLAMA_3, "qwen2": QWEN_2, "qwen35": QWEN_35}[pre]
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    first = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if pre == "smollm" else []
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=440, special_tokens=first, initial_alphabet=alphabet, show_progress=False),
    )
    if pre == "llama-bpe":
        special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
        bos = special[0]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
                ),
            ]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=bos, eos_token="<|eot_id|>", chat_template=HEADERS
        )
    if pre.startswith("qwen"):
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def write_checkpoint(name: str, folder: Path) -> None:
    """Write one of FORMS to `folder`."""
    form, tokenizer = FORMS[name], tokenizer_of(FORMS[name].pre)
    settings = json.loads(json.dumps(form.settings))
    text = settings.get("text_config", settings)
    text["vocab_size"] = 32 * math.ceil((len(tokenizer) + 1) / 32)  # a few ids without a token, as published ones have
    config = getattr(transformers, form.config)(**settings)
    model = getattr(transformers, form.model)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values(key, tuple(parameter.shape))))
    model = model.to(form.dtype)
    model.save_pretrained(folder, max_shard_size=form.shard_size)
    tokenizer.save_pretrained(folder)
    _amend(folder, form)
    if form.mtp:
        _add_mtp(folder, text)


def values(key: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random numbers that depend on a parameter's name only, large enough that every layer matters."""
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    noise = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in key:
        return (0.5 if "q_norm" in key or "k_norm" in key else 1.0) + 0.2 * noise
    if key.endswith(("A_log", "dt_bias")):
        return 0.5 * noise
    scale = 1.0 if "embed_tokens" in key else 1.5 / math.sqrt(shape[-1])
    return np.float32(scale) * noise


def _amend(folder: Path, form: Form) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config).update(form.also)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _add_mtp(folder: Path, text: dict[str, Any]) -> None:
    """What transformers does not know: one attention layer for multi-token prediction, in a shard of its own."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {shard: load_file(folder / shard) for shard in set(index["weight_map"].values())}
    prefix = f"model.language_model.layers.{text['num_hidden_layers'] - 1}."
    tensors = {
        f"mtp.layers.0.{name.removeprefix(prefix)}": tensor
        for shard in shards.values()
        for name, tensor in shard.items()
        if name.startswith(prefix)
    }
    n_embd = text["hidden_size"]
    tensors |= {
        f"mtp.{name}.weight": torch.empty(n_embd) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    tensors["mtp.fc.weight"] = torch.empty(n_embd, 2 * n_embd)
    tensors = {name: torch.from_numpy(values(name, tuple(t.shape))).to(torch.bfloat16) for name, t in tensors.items()}
    save_file(tensors, folder / "mtp.safetensors")
    index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def summary(path: Path) -> dict[str, dict[str, Any]]:
    """Keys (type, value) and tensors (type, shape, data) of a GGUF file; long lists and data as SHA-256."""
    reader = gguf.GGUFReader(path)
    fields = [found for found in reader.fields.values() if not found.name.startswith("GGUF.")]
    return {
        "keys": {found.name: [found.types[-1].name, _short(found.contents())] for found in fields},
        "tensors": {
            tensor.name: [tensor.tensor_type.name, [int(n) for n in tensor.shape], _data(tensor)]
            for tensor in reader.tensors
        },
    }


def _short(value: Any) -> Any:
    if isinstance(value, list) and len(value) > 64:
        return [len(value), _hash(json.dumps(value).encode())]
    return value


def _data(tensor: gguf.ReaderTensor) -> str | list[float]:
    return [float(x) for x in tensor.data] if tensor.name.endswith(INEXACT) else _hash(tensor.data.tobytes())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def run_llama_cpp(llama_cpp: Path) -> Callable[[str, Path], Path]:
    """llama.cpp's converter, as (form, checkpoint folder) -> file."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        del sys.modules[name]
    import gguf as theirs
    from conversion import get_model_class

    def convert(name: str, folder: Path) -> Path:
        form, out = FORMS[name], folder.with_suffix(".gguf")
        model_class: Any = get_model_class(form.model)
        model_class.get_vocab_base_pre = lambda self, tokenizer: form.pre
        model_class.no_mtp = not form.mtp
        kind = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}[form.dtype]
        with torch.inference_mode():
            model_class(folder, theirs.LlamaFileType[kind], out).write()
        return out

    return convert


def main() -> None:
    convert = run_llama_cpp(Path(sys.argv[1]))
    expected = {}
    for name in FORMS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "tiny-model"
            write_checkpoint(name, folder)
            expected[name] = summary(convert(name, folder))
    EXPECTED.write_text(_lines(expected) + "\n", encoding="utf-8")


def _lines(value: Any, depth: int = 3) -> str:
    """JSON with a line for each key and tensor."""
    if not depth:
        return json.dumps(value)
    inside = ",\n".join(f"{json.dumps(key)}: {_lines(inner, depth - 1)}" for key, inner in value.items())
    return f"{{\n{inside}\n}}"


if __name__ == "__main__":
    main()

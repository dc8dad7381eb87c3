"""Targets: what llama.cpp computes from a converted checkpoint is what transformers computes from the original."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import target_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file
from target_checkpoints import FORMS, INEXACT, QWEN35, summary, write_checkpoint
from transformers import AutoTokenizer

from localspec.convert.target import convert
from localspec.errors import LocalspecError, ModelError
from localspec.llama import Context, Model
from localspec.llama.binding import C
from localspec.template import ChatTemplate

TOLERANCE = 1e-4  # of the logits' standard deviation, both sides in float32; found: 3e-6 to 4e-5
# Keys that llama.cpp's converter leaves to llama.cpp's defaults if a tokenizer has no post-processor.
KNOWN_DIFFERENCES = {f"tokenizer.ggml.add_{kind}_token": ["BOOL", False] for kind in ("bos", "eos")}
EXPECTED = json.loads(target_checkpoints.EXPECTED.read_text(encoding="utf-8"))


@dataclass
class Made:
    """A checkpoint, transformers' model and tokenizer of it, and the GGUF file made of it."""

    name: str
    folder: Path
    reference: Any
    tokenizer: Any
    path: Path
    exact: Path  # the same in float32: ggml multiplies bf16 weights with activations in bf16


@pytest.fixture(scope="module", params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param) / "tiny-model"
    write_checkpoint(request.param, folder)
    reference = getattr(transformers, FORMS[request.param].model).from_pretrained(folder, dtype=torch.float32)
    path = folder.with_suffix(".gguf")
    exact = folder.with_suffix(".f32.gguf")
    convert(folder, path)
    convert(folder, exact, outtype="f32")
    return Made(request.param, folder, reference, AutoTokenizer.from_pretrained(folder), path, exact)


@pytest.fixture(scope="module")
def model(made: Made) -> Iterator[Model]:
    with Model(made.exact, gpu_layers=0, repack=False) as model:
        yield model


def test_logits_are_those_of_transformers(made: Made, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = C.llama_context_default_params

    def in_float32() -> Any:
        params = defaults()
        params.type_k = params.type_v = int(gguf.GGMLQuantizationType.F32)
        return params

    monkeypatch.setattr(C, "llama_context_default_params", in_float32)
    tokens = np.random.default_rng(5).integers(0, 400, 160)
    with torch.no_grad():
        expected = made.reference(torch.from_numpy(tokens)[None]).logits[0].numpy()
    with Context(model, n_ctx=256, n_batch=160, n_threads=1, flash=False) as context:
        context.decode(tokens.astype(np.int32), 0)
        found = context.logits(len(tokens)).copy()
    assert expected.std() > 1  # something is computed
    assert abs(found - expected).max() < TOLERANCE * expected.std()


# ---- vocabulary


def nasty_strings() -> list[str]:
    """200 texts that tell rules of splitting apart."""
    by_hand = [
        *(
            "",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            " \n \n",
            "\n\n\n x",
            "a\n\nb",
            "   a   b",
            "\u00a0x\u3000y\u2003z",
            "\x00\x01\x7f",
        ),
        *(
            "'s 'S 'T't I'll WE'RE they'Ve d'D",
            "don’t can´t",
            "''''''````",
            '"""...---===',
            "a_b-c.d,e;f:g!h?i",
            "$€£¥₹ ©®™",
        ),
        *(
            "0 1 12 123 1234 12345 123456789",
            "1,234.56e-7",
            "٣٤٥ ४५६ ⅧⅨ ½ ²³ ①②",
            "3.14.15..92...6",
            "x1y22z333",
            "0x1F 0b101 1_000",
        ),
        *("naïve façade Größe ŒUVRE ñ", "été", "Ǆ ǆ ﬁ ﬀ", "İstanbul ıI ß ẞ", "Привет, мир! Ёлка", "καλημέρα Ω ώ"),
        *(
            "你好，世界。「漢字」",
            "日本語カタカナひらがな",
            "한국어 텍스트",
            "हिन्दी क्षत्रिय",
            "ภาษาไทย",
            "العربيّة",
            "עִבְרִית",
        ),
        *(
            "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
            "🚀🚀🚀 😶‍🌫️",
            "e\u0301 \u0301 a\u0308\u0323",
            "\u200b\u200d\ufeff",
            "\U0001f9ff\U00020000",
            "\ufffd",
        ),
        *(
            "<|im_start|>user\nhi<|im_end|>",
            "<|endoftext|><|endoftext|>",
            "< |im_end|>",
            "<|im_end",
            "<think>\n</think>",
            "<tool_call>",
        ),
        *("<|begin_of_text|><|eot_id|>x", "<s></s><unk>", "[PAD440]", "<0x0A>", "Ġthe Ċ ĉ", "▁the", "ÄÂ é"),
        *(
            "http://example.org/a?b=c&d=%20#e",
            "C:\\dir\\file.txt",
            "if (x != y) { return -1; }\n\t\t// end",
            "a" * 300,
            "ha" * 100,
        ),
        *(
            "the then there these those",
            "The THE tHe",
            "x" + " " * 50 + "y",
            "\n" * 20,
            "\t \t \n\t",
            " \u00a0 \n",
            "-" * 80,
            "= = =\r\r\n",
        ),
    ]
    pieces = "".join(by_hand) + " \n\t'’.,0123456789abcXYZéß中あ🚀\u0301\u200d<|>"
    rng = random.Random(7)
    return by_hand + ["".join(rng.choices(pieces, k=rng.randint(1, 60))) for _ in range(200 - len(by_hand))]


def test_token_ids_are_those_of_tokenizers(made: Made, model: Model) -> None:
    texts = nasty_strings()
    assert len(texts) == 200
    if FORMS[made.name].pre.startswith("qwen"):  # composes; llama.cpp does not (see `add_vocabulary`)
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    for text in texts:
        expected = made.tokenizer(text)["input_ids"]
        assert model.vocab.tokenize(text, parse_special=True, add_special=True) == expected, repr(text)


def test_decoding_gives_the_text_back(made: Made, model: Model) -> None:
    text = "Größe 12345 — don't 🚀\n\n  你好"
    assert b"".join(model.vocab.piece(token) for token in model.vocab.tokenize(text)).decode() == text


def test_chat_template_renders_as_in_transformers(made: Made, model: Model) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi 🚀\n"}]
    template = ChatTemplate(str(model.chat_template), model.vocab)
    for variables in ({}, {"enable_thinking": False}):
        for generate in (True, False):
            expected = made.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **variables
            )
            assert template.render(messages, generate=generate, **variables) == expected


# ---- llama.cpp's own converter


def test_file_is_what_llama_cpp_writes(made: Made) -> None:
    found, expected = summary(made.path), EXPECTED[made.name]
    assert found["keys"] == (KNOWN_DIFFERENCES if FORMS[made.name].pre == "smollm" else {}) | expected["keys"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, (kind, shape, data) in found["tensors"].items():
        assert [kind, shape] == expected["tensors"][name][:2]
        if name.endswith(INEXACT):
            assert data == pytest.approx(expected["tensors"][name][2], rel=1e-6)
        else:
            assert data == expected["tensors"][name][2], name


# ---- other forms of the same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint to be changed."""
    write_checkpoint("llama3", tmp_path / "tiny-model")
    return tmp_path / "tiny-model"


def edit(folder: Path, **changes: Any) -> None:
    """Set keys of config.json (None: remove)."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def converted(folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
    out = folder.with_suffix(".gguf")
    convert(folder, out, force=True, **options)
    return summary(out)


def test_config_of_transformers_4(folder: Path) -> None:
    new = converted(folder)
    rope = {key: value for key, value in target_checkpoints.LLAMA_3_ROPE.items() if key != "rope_theta"}
    edit(folder, rope_parameters=None, rope_scaling=rope, rope_theta=5e5, torch_dtype="float32", dtype=None)
    assert converted(folder) == new
    edit(folder, head_dim=None)
    old = converted(folder)
    assert old["tensors"] == new["tensors"]
    assert new["keys"].keys() - old["keys"].keys() == {"llama.attention.key_length", "llama.attention.value_length"}


def test_tied_head_that_is_stored_again(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        converted(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "output.weight" not in converted(folder)["tensors"]


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-model"
    write_checkpoint("qwen3moe", folder)
    apart = converted(folder)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(2):
            at = f"model.layers.{i}.mlp.experts."
            gate, up, down = (
                torch.stack([tensors.pop(f"{at}{e}.{kind}_proj.weight") for e in range(4)])
                for kind in ("gate", "up", "down")
            )
            tensors |= {f"{at}gate_up_proj": torch.cat((gate, up), dim=1), f"{at}down_proj": down}

    rewrite(folder, fuse)
    assert converted(folder) == apart


def test_multi_token_prediction_that_fine_tuning_has_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-model"
    write_checkpoint("qwen35", folder)
    before = converted(folder)
    edit(folder, mtp_num_hidden_layers=1)
    assert converted(folder) == before


def test_k_quants_run(tmp_path: Path) -> None:
    folder, out = tmp_path / "tiny-model", tmp_path / "tiny-model.gguf"
    write_checkpoint("qwen35", folder)
    convert(folder, out, outtype="q4_k_m")
    with Model(out, gpu_layers=0, repack=False) as model, Context(model, n_ctx=64, n_batch=8) as context:
        context.decode([1, 2, 3], 0)
        assert np.isfinite(context.logits(3)).all()


# ---- bad input

KNOWN = "LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "another architecture": (
        lambda d: edit(d, architectures=["GemmaForCausalLM"]),
        f"is a GemmaForCausalLM; localspec converts {KNOWN}",
    ),
    "and how to go on": (lambda d: edit(d, architectures=["X"]), "convert_hf_to_gguf.py do it: --llama-cpp DIR"),
    "no architecture": (lambda d: edit(d, architectures=[]), "names no architecture"),
    "a drafter": (lambda d: edit(d, architectures=["DFlashDraftModel"]), "localspec convert drafter"),
    "an unknown key": (lambda d: edit(d, attention_sinks=4), "has 'attention_sinks' (1 such keys)"),
    "an unknown rope key": (
        lambda d: edit(d, rope_parameters=target_checkpoints.LLAMA_3_ROPE | {"mscale": 1.0}),
        "has 'rope_parameters.mscale'",
    ),
    "a quantised checkpoint": (lambda d: edit(d, quantization_config={"bits": 4}), "has 'quantization_config'"),
    "an unknown rope": (lambda d: edit(d, rope_parameters={"rope_type": "dynamic"}), "is of type 'dynamic'"),
    "a rope without sense": (
        lambda d: edit(d, rope_parameters=target_checkpoints.LLAMA_3_ROPE | {"high_freq_factor": 1}),
        "factors that make no sense",
    ),
    "a bias": (lambda d: edit(d, attention_bias=True), "True as 'attention_bias'"),
    "another activation": (lambda d: edit(d, hidden_act="gelu"), "'gelu' as 'hidden_act'"),
    "a missing key": (lambda d: edit(d, rms_norm_eps=None), "has no 'rms_norm_eps'"),
    "a key of another kind": (lambda d: edit(d, hidden_size="64"), "'64' as 'hidden_size'"),
    "no heads": (lambda d: edit(d, num_attention_heads=0), "without layers, width, heads or context"),
    "heads that do not divide": (lambda d: edit(d, num_attention_heads=5), "5 heads for 2 key-value heads"),
    "too many layers": (lambda d: edit(d, num_hidden_layers=1 << 30), "claims 1,073,741,824 layers"),
    "one layer more": (lambda d: edit(d, num_hidden_layers=3), "no tensor 'model.layers.2.input_layernorm.weight'"),
    "one layer less": (lambda d: edit(d, num_hidden_layers=1), "has 9 tensors that no LlamaForCausalLM has"),
    "another width": (lambda d: edit(d, intermediate_size=97), "mlp.gate_proj.weight has the shape [96, 64]"),
    "another vocabulary": (lambda d: edit(d, vocab_size=1 << 30), "model.embed_tokens.weight has the shape"),
    "a tensor too many": (
        lambda d: rewrite(d, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        "has 1 tensors that no LlamaForCausalLM has, 'model.layers.0.self_attn.q_proj.bias'",
    ),
    "no head": (lambda d: rewrite(d, lambda t: t.pop("lm_head.weight")), "no tensor 'lm_head.weight'"),
    "eight bits": (
        lambda d: rewrite(d, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)})),
        "holds F8_E4M3 tensors",
    ),
    "a broken model card": (lambda d: (d / "README.md").write_text("---\na: [\n---\n"), "README.md cannot be read"),
    "a model card of numbers": (
        lambda d: (d / "README.md").write_text("---\nlicense: 5\n---\n"),
        "general.license would be '5', which no STRING holds",
    ),
    "a temperature that is text": (
        lambda d: (d / "generation_config.json").write_text('{"temperature": "hot"}'),
        "general.sampling.temp would be 'hot', which no FLOAT32 holds",
    ),
    "a rope without base": (
        lambda d: edit(d, rope_parameters=target_checkpoints.LLAMA_3_ROPE | {"rope_theta": -1}),
        "-1.0 as",
    ),
    "a word for a truth value": (lambda d: edit(d, tie_word_embeddings="no"), "'no' as 'tie_word_embeddings'"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "a damaged file": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]),
        "cut off",
    ),
}


QWEN_WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts without norm": ("qwen3moe", {"norm_topk_prob": False}, "False as 'norm_topk_prob'"),
    "experts without a word on it": ("qwen3moe", {"norm_topk_prob": None}, "has no 'norm_topk_prob'"),
    "dense layers among them": ("qwen3moe", {"mlp_only_layers": [0]}, "[0] as 'mlp_only_layers'"),
    "sliding layers": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "as 'layer_types'"),
    "layer types of another model": ("qwen35", {"layer_types": ["full_attention"]}, "it takes 4 of"),
    "layer types that are none": ("qwen35", {"layer_types": [3, [], None, 1]}, "as 'layer_types'"),
    "an attention for a delta net": (
        "qwen35",
        {"layer_types": ["full_attention"] * 4},
        "no tensor 'model.layers.0.self",
    ),
    "no gate": ("qwen35", {"attn_output_gate": False}, "False as 'attn_output_gate'"),
    "values of another width": ("qwen35", {"linear_value_head_dim": 16}, "16 as 'linear_value_head_dim'"),
    "heads that do not divide": ("qwen35", {"linear_num_value_heads": 3}, "3 value heads for 2 key heads"),
    "no base for the rope": ("qwen3", {"rope_parameters": {"rope_type": "default"}}, "0.0 as 'rope_theta'"),
    "a factor of nothing": ("qwen3", {"rope_parameters": target_checkpoints.YARN | {"factor": 0}}, "0.0 as 'factor'"),
    "sections that do not add up": (
        "qwen35",
        {"rope_parameters": QWEN35["rope_parameters"] | {"mrope_section": [3, 3, 3]}},
        "[3, 3, 3] as 'mrope_section' for 8 pairs",
    ),
}


@pytest.mark.parametrize("what", QWEN_WRONG)
def test_what_llama_cpp_cannot_compute_is_named(tmp_path: Path, what: str) -> None:
    form, changes, words = QWEN_WRONG[what]
    write_checkpoint(form, tmp_path / "tiny-model")
    edit(tmp_path / "tiny-model", **changes)
    with pytest.raises(ModelError) as caught:
        converted(tmp_path / "tiny-model")
    assert words in str(caught.value)


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_sentence_and_leaves_nothing(folder: Path, what: str) -> None:
    change, words = WRONG[what]
    change(folder)
    out = folder.with_suffix(".gguf")
    with pytest.raises(LocalspecError) as caught:
        convert(folder, out)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-model"]


def test_code_of_a_checkpoint_is_not_run(folder: Path) -> None:
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    converted(folder)

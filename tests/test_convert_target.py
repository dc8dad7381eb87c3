"""Targets: what llama.cpp computes from a converted checkpoint is what transformers computes from the original."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import target_checkpoints
import torch
import transformers
from target_checkpoints import FORMS, INEXACT, summary, write_checkpoint
from transformers import AutoTokenizer

from localspec.convert.target import convert
from localspec.llama import Context, Model
from localspec.llama.binding import C
from localspec.text import ChatTemplate

TOLERANCE = 1e-4  # of the logits' standard deviation, both sides in float32; found: 3e-6 to 4e-5
KNOWN_DIFFERENCES = {  # keys that llama.cpp's converter leaves to llama.cpp's defaults
    "smollm": {f"tokenizer.ggml.add_{kind}_token": ["BOOL", False] for kind in ("bos", "eos")},
}
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
    assert found["keys"] == expected["keys"] | KNOWN_DIFFERENCES.get(made.name, {})
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, (kind, shape, data) in found["tensors"].items():
        assert [kind, shape] == expected["tensors"][name][:2]
        if name.endswith(INEXACT):
            assert data == pytest.approx(expected["tensors"][name][2], rel=1e-6)
        else:
            assert data == expected["tensors"][name][2], name

"""Vocabularies: a real one against what llama.cpp's converter made of it, and what llama.cpp could not imitate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGUFWriter
from target_checkpoints import LLAMA_3, QWEN_2, QWEN_35, tokenizer_of
from tokenizers import Tokenizer

from localspec.convert.tokenizer import PRE_TOKENIZERS, add_vocabulary
from localspec.errors import LocalspecError
from localspec.hub import registry

N_VOCAB = 480
# llama.cpp's conversion/base.py, get_vocab_base_pre: the sample text, and what the ids of a smollm tokenizer hash to
SAMPLE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ "
    "------======= нещо на Български ''''''```````"
    '""""......!!!!!!?????? '
    "I've been 'told he's there, "
    "'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
SMOLLM = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"


def keys(folder: Path, n_vocab: int = N_VOCAB, arch: str = "llama") -> dict[str, Any]:
    writer = GGUFWriter(None, arch)
    add_vocabulary(writer, folder, n_vocab, arch=arch)
    return {name: value.value for name, value in writer.kv_data[0].items() if name.startswith("tokenizer.")}


def test_smollm2_as_published(tmp_path: Path) -> None:
    """The default target's vocabulary, put back into the form of its checkpoint and converted again."""
    fields = gguf.GGUFReader(registry.get(registry.DEFAULT).target_path()).fields
    published = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    tokens, types = published["tokenizer.ggml.tokens"], published["tokenizer.ggml.token_type"]
    special = [i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    merges = [merge.split(" ") for merge in published["tokenizer.ggml.merges"]]
    tokenizer = {
        "added_tokens": [{"id": i, "content": tokens[i], "special": True, **flags} for i in special],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(tokens)}, "merges": merges},
    }
    named = {"bos": "<|im_start|>", "eos": "<|im_end|>", "unk": "<|endoftext|>", "pad": "<|im_end|>"}
    config = {f"{kind}_token": text for kind, text in named.items()}
    config |= {"add_prefix_space": False, "chat_template": published["tokenizer.chat_template"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(SAMPLE).ids
    assert hashlib.sha256(str(ids).encode()).hexdigest() == SMOLLM
    assert keys(tmp_path, len(tokens)) == published | {"tokenizer.ggml.add_eos_token": False}


# ---- what llama.cpp could not imitate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer_of("llama-bpe").save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / name).read_text(encoding="utf-8"))
    change(values)
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


def test_ids_without_a_token_are_unused(folder: Path) -> None:
    found = keys(folder)
    n_known = len(tokenizer_of("llama-bpe"))
    assert found["tokenizer.ggml.token_type"].count(gguf.TokenType.UNUSED) == N_VOCAB - n_known
    assert found["tokenizer.ggml.tokens"][-1] == f"[PAD{N_VOCAB - 1}]"


@pytest.mark.parametrize(
    ("special", "text", "kind"),
    [
        (True, "<x>", gguf.TokenType.CONTROL),
        (False, "<x>", gguf.TokenType.USER_DEFINED),
        (False, "<|x|>", gguf.TokenType.CONTROL),
    ],
)
def test_kinds_of_added_tokens(folder: Path, special: bool, text: str, kind: gguf.TokenType) -> None:
    entry = {"id": N_VOCAB - 1, "content": text, "special": special}
    edit(folder, "tokenizer.json", lambda t: t["added_tokens"].append(entry))
    found = keys(folder)
    assert found["tokenizer.ggml.tokens"][-1] == text
    assert found["tokenizer.ggml.token_type"][-1] == kind


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a model of another kind": (lambda t: t["model"].update(type="Unigram"), "is a Unigram tokenizer"),
    "byte fallback": (lambda t: t["model"].update(byte_fallback=True), "BPE with byte fallback"),
    "no model": (lambda t: t.pop("model"), "is a None tokenizer"),
    "dropout": (lambda t: t["model"].update(dropout=0.1), "0.1 as 'dropout'"),
    "merges first": (lambda t: t["model"].update(ignore_merges=False), "False as 'ignore_merges'"),
    "another regex": (lambda t: split(t)["pattern"].update(Regex="\\s+"), "splits text in a way"),
    "removed separators": (lambda t: split(t).update(behavior="Removed"), "splits text in a way"),
    "an unknown step": (lambda t: t["pre_tokenizer"]["pretokenizers"].append({"type": "Punctuation"}), "splits text"),
    "a step without type": (lambda t: t.update(pre_tokenizer={"pretokenizers": [3]}), "splits text in a way"),
    "no pre-tokenizer": (lambda t: t.update(pre_tokenizer=None), "splits text in a way"),
    "lower case": (lambda t: t.update(normalizer={"type": "Lowercase"}), "normalises text (Lowercase)"),
    "stripping": (lambda t: t["added_tokens"][0].update(rstrip=True), "'rstrip' on its token '<|begin_of_text|>'"),
    "an id too high": (lambda t: t["added_tokens"][0].update(id=N_VOCAB), "the id 480, but config.json has 480 tokens"),
    "an id that is text": (lambda t: t["added_tokens"][0].update(id="7"), "the id 7"),
    "an id twice": (lambda t: t["added_tokens"][0].update(id=3), "two tokens with the id 3"),
    "no vocabulary": (lambda t: t["model"].update(vocab={}), "has no vocabulary"),
    "an added token that is none": (lambda t: t["added_tokens"].append(3), "is damaged (AttributeError"),
    "merges that are none": (lambda t: t["model"].update(merges=[[1, 2]]), "is damaged (ValueError"),
    "a number for steps": (lambda t: t.update(pre_tokenizer={"pretokenizers": 3}), "splits text in a way"),
    "two tokens in front": (
        lambda t: template(t).insert(0, template(t)[0]),
        "a post_processor that llama.cpp does not",
    ),
    "another token in front": (
        lambda t: template(t)[0]["SpecialToken"].update(id="<|eot_id|>"),
        "puts '<|eot_id|>' around a text, but tokenizer_config.json has another bos token",
    ),
}


def split(tokenizer: dict[str, Any]) -> Any:
    return tokenizer["pre_tokenizer"]["pretokenizers"][0]


def template(tokenizer: dict[str, Any]) -> Any:
    return tokenizer["post_processor"]["processors"][1]["single"]


@pytest.mark.parametrize("what", WRONG)
def test_what_llama_cpp_does_not_do_is_named(folder: Path, what: str) -> None:
    change, words = WRONG[what]
    edit(folder, "tokenizer.json", change)
    with pytest.raises(LocalspecError) as caught:
        keys(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_files_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(LocalspecError, match=f"has no {name}; download it"):
        keys(folder)


def test_sentencepiece_is_left_to_llama_cpp(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(LocalspecError, match=r"SentencePiece.*--llama-cpp DIR"):
        keys(folder)


# ---- chat templates


def test_templates_are_found_where_transformers_finds_them(folder: Path) -> None:
    jinja = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    edit(folder, "tokenizer_config.json", lambda c: c.update(chat_template="old"))
    assert keys(folder)["tokenizer.chat_template"] == jinja
    (folder / "chat_template.jinja").unlink()
    assert keys(folder)["tokenizer.chat_template"] == "old"
    edit(folder, "tokenizer_config.json", lambda c: c.pop("chat_template"))
    assert "tokenizer.chat_template" not in keys(folder)
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert keys(folder)["tokenizer.chat_template"] == "json"


def test_several_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    both = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    edit(folder, "tokenizer_config.json", lambda c: c.update(chat_template=both))
    found = keys(folder)
    assert found["tokenizer.chat_template"] == "a"
    assert found["tokenizer.chat_template.tool_use"] == "b"


@pytest.mark.parametrize("template", [3, ["a"], [{"name": "default"}]])
def test_a_template_that_is_none(folder: Path, template: object) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder, "tokenizer_config.json", lambda c: c.update(chat_template=template))
    with pytest.raises(LocalspecError, match="a chat_template that is neither text nor a list"):
        keys(folder)


def test_a_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(LocalspecError, match="is not UTF-8 text"):
        keys(folder)


def test_the_expressions_are_those_of_the_published_tokenizers() -> None:
    """As quoted in llama.cpp's src/llama-vocab.cpp, "original regex from tokenizer.json"."""
    known = {steps[0][1] for steps in PRE_TOKENIZERS if steps[0][0] == "Split"}
    assert known == {LLAMA_3, QWEN_2, QWEN_35}

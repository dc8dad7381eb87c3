"""The vocabulary of a checkpoint, from tokenizer.json and tokenizer_config.json: byte-level BPE, as in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFWriter, TokenType

from localspec.convert.checkpoint import read_json
from localspec.errors import MissingError, ModelError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_BYTES = ("ByteLevel", False, False)
PRE_TOKENIZERS = {
    (("Split", _LLAMA3, "Isolated", False), _BYTES): "llama-bpe",
    (("Split", _QWEN2, "Isolated", False), _BYTES): "qwen2",
    (("Split", _QWEN35, "Isolated", False), _BYTES): "qwen35",
    (("Digits", True), ("ByteLevel", False, True)): "smollm",
    (("ByteLevel", False, True),): "gpt-2",
}
"""The steps of a tokenizer.json's pre-tokenizer -> the name under which llama.cpp has the same ones.

llama.cpp's converter looks the name up by a hash of what the tokenizer makes of a sample text.
"""
_PARTS: dict[str, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    "Split": lambda step: ("Split", step.get("pattern", {}).get("Regex"), step.get("behavior"), step.get("invert")),
    "Digits": lambda step: ("Digits", step.get("individual_digits")),
    "ByteLevel": lambda step: ("ByteLevel", step.get("add_prefix_space"), step.get("use_regex", True)),
}
IGNORES_MERGES = {"llama-bpe"}  # takes a piece that is a token as it is (src/llama-vocab.cpp)


def add_vocabulary(writer: GGUFWriter, folder: Path, n_vocab: int, *, arch: str) -> None:
    """Write the keys `tokenizer.*` of a checkpoint folder for a model of `n_vocab` tokens.

    Raises MissingError without tokenizer files, ModelError for a tokenizer that llama.cpp would not imitate to the
    token. Texts that are not in Unicode's NFC form are the one exception: Qwen's tokenizer composes them, llama.cpp
    does not.
    """
    tokenizer, config = _read(folder, "tokenizer.json"), _read(folder, "tokenizer_config.json")
    try:
        _add(writer, folder, n_vocab, arch, tokenizer, config)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # it may hold anything anywhere
        raise ModelError(f"the tokenizer in {folder} is damaged ({type(error).__name__}: {error}).") from error


def _add(
    writer: GGUFWriter, folder: Path, n_vocab: int, arch: str, tokenizer: dict[str, Any], config: dict[str, Any]
) -> None:
    where = str(folder / "tokenizer.json")
    pre, (tokens, types) = _pre_tokenizer(tokenizer, where), _tokens(tokenizer, n_vocab, where)
    ends, template = _ends(tokenizer, where), _chat_template(folder, config)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=n_vocab)
    for kind, text in zip(("bos", "eos"), ends, strict=True):
        special.add_special_token[kind] = text is not None
        if text is not None and text != tokens[special.special_token_ids.get(kind, 0)]:
            raise ModelError(
                f"{where} puts {text!r} around a text, but tokenizer_config.json has another {kind} token."
            )
    special.chat_template = template
    prefix = config.get("add_prefix_space")
    if arch == "llama" and prefix is not None:
        writer.add_add_space_prefix(bool(prefix))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special.add_to_gguf(writer, quiet=True)


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if path.is_file():
        return read_json(path)
    if (folder / "tokenizer.model").is_file() and name == "tokenizer.json":
        raise ModelError(
            f"{folder} has a SentencePiece tokenizer (tokenizer.model), which localspec does not convert; let "
            "llama.cpp's own convert_hf_to_gguf.py do it: --llama-cpp DIR, the folder that holds it."
        )
    raise MissingError(f"{folder} has no {name}; download it into that folder.")


def _pre_tokenizer(tokenizer: dict[str, Any], where: str) -> str:
    """llama.cpp's name for the tokenizer's rules; ModelError if it has none."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback" if model.get("byte_fallback") else model.get("type")
        raise ModelError(
            f"{where} is a {kind} tokenizer; localspec converts byte-level BPE, for others use --llama-cpp."
        )
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    try:
        name = PRE_TOKENIZERS[tuple(_PARTS[step["type"]](step) for step in steps)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{where} splits text in a way localspec does not know ({str(steps)[:200]}); it knows that of "
            f"{', '.join(PRE_TOKENIZERS.values())}, for others use --llama-cpp."
        ) from error
    if (normalizer := (tokenizer.get("normalizer") or {}).get("type")) not in (None, "NFC"):
        raise ModelError(f"{where} normalises text ({normalizer}), which llama.cpp does not do for {name} tokenizers.")
    off = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"), False)
    for key, on in {"ignore_merges": name in IGNORES_MERGES, **off}.items():
        if bool(model.get(key)) != on:
            raise ModelError(
                f"{where} has {model.get(key)!r} as {key!r}, which llama.cpp does not do for {name} tokenizers."
            )
    return name


def _tokens(tokenizer: dict[str, Any], n_vocab: int, where: str) -> tuple[list[str], list[TokenType]]:
    """Text and type of every id; ids that the tokenizer leaves out are unused."""
    tokens = [f"[PAD{i}]" for i in range(n_vocab)]
    types = [TokenType.UNUSED] * n_vocab
    vocabulary = tokenizer["model"].get("vocab")
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise ModelError(f"{where} has no vocabulary.")
    added = {entry.get("content"): entry for entry in tokenizer.get("added_tokens") or []}
    ids = vocabulary | {text: entry.get("id") for text, entry in added.items()}
    for text, i in ids.items():
        if type(i) is not int or not 0 <= i < n_vocab:
            raise ModelError(f"{where} gives token {text!r} the id {i}, but config.json has {n_vocab:,} tokens.")
        if types[i] != TokenType.UNUSED:
            raise ModelError(f"{where} has two tokens with the id {i}: {tokens[i]!r} and {text!r}.")
        tokens[i], types[i] = _added(added[text], where) if text in added else (text, TokenType.NORMAL)
    return tokens, types


def _added(entry: dict[str, Any], where: str) -> tuple[str, TokenType]:
    """A token that is found before text is split; llama.cpp shows control tokens only when asked."""
    text = str(entry["content"])
    for key in ("lstrip", "rstrip", "single_word"):
        if entry.get(key):
            raise ModelError(f"{where} has {key!r} on its token {text!r}, which llama.cpp does not do.")
    looks_special = (text[:2], text[-2:]) in (("<|", "|>"), ("<｜", "｜>")) or text in ("<pad>", "<mask>")
    if entry.get("special") or looks_special or (text.startswith("<unused") and text.endswith(">")):
        return text, TokenType.CONTROL
    return text.replace("▁", " "), TokenType.USER_DEFINED


def _ends(tokenizer: dict[str, Any], where: str) -> tuple[str | None, str | None]:
    """The special tokens that the tokenizer puts before and behind every text."""
    before = behind = None
    processor = tokenizer.get("post_processor") or {"type": "ByteLevel"}
    for step in processor.get("processors", [processor]):
        match step:
            case {"type": "ByteLevel"}:
                pass
            case {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}:
                pass
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": first}, {"Sequence": {"id": "A"}}]}:
                before = first["id"]
            case {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": last}]}:
                behind = last["id"]
            case _:
                raise ModelError(f"{where} has a post_processor that llama.cpp does not have: {str(step)[:200]}.")
    return before, behind


def _chat_template(folder: Path, config: dict[str, Any]) -> Any:
    """As transformers finds it: chat_template.jinja first, then tokenizer_config.json, then chat_template.json."""
    if (folder / "chat_template.jinja").is_file():
        return _text(folder / "chat_template.jinja")
    found = config.get("chat_template")
    if found is None and (folder / "chat_template.json").is_file():
        found = read_json(folder / "chat_template.json").get("chat_template")
    named = isinstance(found, list) and all(
        isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str) for t in found
    )
    if found is not None and not isinstance(found, str) and not named:
        raise ModelError(
            f"{folder.name}/tokenizer_config.json has a chat_template that is neither text nor a list of them."
        )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error

"""Text from outside, as its writer meant it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from localspec.errors import OptionError
from localspec.evaluation import prompts
from localspec.textfile import read_prompt, read_text


def file(folder: Path, data: bytes) -> Path:
    path = folder / "prompt.txt"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"say hi", "say hi"),
        (b"say hi\n", "say hi"),
        (b"say hi\r\n", "say hi"),
        (b"say hi\n\n", "say hi\n"),
        (b" say\r\nhi ", " say\nhi "),
        (b"\xef\xbb\xbfsay hi\n", "say hi"),
        ("né 🙂\u2028\x0c\x85\n".encode(), "né 🙂\u2028\x0c\x85"),
        (b"a\xef\xbb\xbfb", "a\ufeffb"),
        (b"", ""),
        (b"\n", ""),
    ],
)
def test_a_prompt_has_neither_mark_nor_last_line_end(tmp_path: Path, data: bytes, prompt: str) -> None:
    assert read_prompt(file(tmp_path, data)) == prompt
    assert read_prompt(io.TextIOWrapper(io.BytesIO(data), encoding="ascii")) == prompt
    assert read_prompt(io.StringIO(data.decode().replace("\r\n", "\n"))) == prompt


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    data = "say hi".encode(encoding)
    if encoding.endswith(("le", "be")):
        data = "\ufeff".encode(encoding) + data
    name = encoding[:6].upper()
    with pytest.raises(OptionError, match=rf"prompt\.txt is {name} text; save or send it as UTF-8\."):
        read_text(file(tmp_path, data))
    with pytest.raises(OptionError, match=f"standard input is {name}"):
        read_prompt(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"is not UTF-8 text \(byte 2\); save it as UTF-8\."):
        read_text(file(tmp_path, b"ab\xff"))
    assert read_prompt(io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="latin-1")) == "café"
    assert read_prompt(io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")) == "caf\ufffd"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(OptionError, match="cannot read"):
            read_text(path)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_prompt_files_have_no_mark_either(tmp_path: Path, mark: bytes) -> None:
    lines = '{"prompt": "a\u2028b", "class": "x"}\r\n\n{"prompt": "c\\n"}\n'.encode()
    assert prompts.by_class(file(tmp_path, mark + lines)) == {"x": ["a\u2028b"], "file": ["c\n"]}
    assert prompts.read(file(tmp_path, mark + b"a\r\nb\x0cc\n")) == ["a", "b\x0cc"]

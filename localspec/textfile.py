"""Text from outside, as its writer meant it: without byte-order mark, and prompts without the line's end."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import TextIO

from localspec.errors import OptionError

OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins like UTF-16, so it comes first
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, with `\\n` for each end of a line. OptionError if it cannot be read or is none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        return _decoded(data, str(path))
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text (byte {error.start:,}); save it as UTF-8.") from error


def read_prompt(source: str | os.PathLike[str] | TextIO) -> str:
    """The prompt in a file or a stream, without the line's end that an editor or `echo` puts behind it.

    Bytes of a stream that are not UTF-8 are read in the stream's own encoding, and what that does not know becomes the
    replacement character. Raises OptionError as `read_text`.
    """
    text = read_text(source) if isinstance(source, (str, os.PathLike)) else _read_stream(source)
    return text.removesuffix("\n")


def without_mark(text: str) -> str:
    """`text` without a byte-order mark before it."""
    return text.removeprefix("\ufeff")


def _read_stream(stream: TextIO) -> str:
    buffer = getattr(stream, "buffer", None)
    if buffer is None:  # a text stream without bytes
        return without_mark(stream.read())
    data: bytes = buffer.read()
    try:
        return _decoded(data, "standard input")
    except UnicodeDecodeError:
        return data.decode(stream.encoding, "replace").replace("\r\n", "\n")


def _decoded(data: bytes, name: str) -> str:
    if other := next((known for mark, known in OTHER_ENCODINGS.items() if data.startswith(mark)), None):
        raise OptionError(f"{name} is {other} text; save or send it as UTF-8.")
    return without_mark(data.decode("utf-8")).replace("\r\n", "\n")

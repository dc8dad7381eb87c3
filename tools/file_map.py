"""Writes the map of files in docs/architecture.md from the modules' first lines: `python tools/file_map.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- file map: tools/file_map.py -->\n", "<!-- end -->\n"


def file_map() -> str:
    """A Markdown table: a line a file, folder by folder."""
    lines = ["| file | what it holds |", "|---|---|"]
    package = ROOT / "localspec"
    for path in sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        name = path.relative_to(ROOT).as_posix()
        if path.name == "__init__.py" and path.parent != package:
            lines.append(f"| **`{name.removesuffix('__init__.py')}`** | {first_sentence(path)} |")
        else:
            lines.append(f"| `{name}` | {first_sentence(path)} |")
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r"\s+", " ", text.split("\n\n")[0]).replace("|", "\\|")


def updated(document: str) -> str:
    """The document with the map of now."""
    before, _, rest = document.partition(BEGIN)
    return before + BEGIN + file_map() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")

"""llama.cpp's own converter, for everything that `families` does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from localspec.convert.writer import Report, parts, requantize
from localspec.errors import BackendError, MissingError

SCRIPT = "convert_hf_to_gguf.py"
ITS_OUTTYPES = ("f32", "f16", "bf16", "q8_0")


def convert_with_llama_cpp(
    llama_cpp: Path, folder: Path, out: Path, *, outtype: str, precision: str, progress: Report | None = None
) -> None:
    """Run `llama_cpp`/convert_hf_to_gguf.py offline in a child process, with this Python and its packages.

    Types it does not know are made from its file in `precision` by llama.cpp's quantiser. Raises MissingError without
    the script, BackendError with its last words when it fails. Nothing but `out` is left.
    """
    script, report = llama_cpp / SCRIPT, progress or (lambda what, done, total: None)
    if not script.is_file():
        raise MissingError(f"{llama_cpp} has no {SCRIPT}; give --llama-cpp the top folder of llama.cpp's source.")
    out = out.resolve()
    with parts(out) as (part, plain):
        direct = outtype in ITS_OUTTYPES
        made = part if direct else plain
        report("Converting with llama.cpp", 0, 0)
        _run(script, folder, made, outtype if direct else precision)
        report("Converting with llama.cpp", made.stat().st_size, made.stat().st_size)
        if not direct:
            requantize(plain, part, outtype, report)
        part.replace(out)


def _run(script: Path, folder: Path, made: Path, outtype: str) -> None:
    command: list[str | Path] = [sys.executable, script, folder, f"--outfile={made}", f"--outtype={outtype}"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode or not made.is_file():
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1].rstrip(".")
        raise BackendError(f"{script} cannot convert {folder} ({last}).")

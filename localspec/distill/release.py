"""From a trained run to what is handed out: the weights encoded, evaluated through llama.cpp, and described."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localspec.distill import card
from localspec.distill.evaluate import Evaluation, evaluate
from localspec.distill.export import COARSER, ENCODINGS, export, provenance
from localspec.distill.meter import Meter
from localspec.distill.start import TargetFile
from localspec.distill.store import Data, read
from localspec.distill.train import Trained
from localspec.distill.windows import split
from localspec.errors import OptionError
from localspec.storage import write_whole

REFERENCE = "q8_0"
TOLERANCE = 0.01  # of the acceptance length a coarser encoding may lose


def check_outtype(outtype: str) -> None:
    """Raises OptionError for an unknown encoding."""
    if outtype != "auto" and outtype not in ENCODINGS:
        raise OptionError(f"--outtype {outtype!r} is not auto or one of {', '.join(ENCODINGS)}.")


def release(
    target: Path,
    data: Path,
    run: Path,
    folder: Path,
    *,
    outtype: str = "auto",
    n_anchors: int = 2000,
    n_threads: int | None = None,
    hf: Path | None = None,
) -> Path:
    """Write `folder`/drafter.gguf, evaluation.json and README.md for the best weights of `run`; returns the drafter.

    `outtype` names an encoding, or is "auto": the smallest whose acceptance length through llama.cpp, on the held-out
    chats of `data`, is within 1 % of that of Q8_0. What a killed call has evaluated is not evaluated again. `hf` also
    gets a Hugging Face checkpoint.
    """
    check_outtype(outtype)
    work = _Work(target, TargetFile(target), read(data), run, Trained.read(run), n_anchors, n_threads)
    drafter, marker = folder / "drafter.gguf", folder / "evaluation.json"
    wanted = {"outtype": outtype, **work.identity}
    is_new = not (drafter.exists() and marker.exists() and wanted.items() <= json.loads(marker.read_text()).items())
    if is_new:
        encoding, evaluation = work.choose(outtype)
        work.encode(drafter, encoding, evaluation)
        (run / "candidate.gguf").unlink(missing_ok=True)  # of a killed call
        card.write(folder, work.trained, work.data, TargetFile(target), encoding, evaluation)
        _write_json(marker, {**wanted, "encoding": encoding, **asdict(evaluation), "tried": work.tried()})
    if hf is not None and (is_new or not hf.exists()):
        from localspec.distill.hf import write_hf

        write_hf(work.trained.drafter(work.file), hf, target_name=work.data.meta.target)
    return drafter


@dataclass
class _Work:
    """A trained drafter, and what its encodings were found to be worth so far (`run`/tried.json)."""

    target: Path
    file: TargetFile
    data: Data
    run: Path
    trained: Trained
    n_anchors: int
    n_threads: int | None

    @property
    def identity(self) -> dict[str, Any]:
        made = {"step": self.trained.step, "elapsed_s": self.trained.elapsed_s, "data_tokens": len(self.data.tokens)}
        return made | {"n_anchors": self.n_anchors}

    def choose(self, outtype: str) -> tuple[str, Evaluation]:
        """The encoding to hand out."""
        if outtype != "auto":
            return outtype, self.evaluation(outtype)
        reference = self.evaluation(REFERENCE)
        for encoding in COARSER:
            found = self.evaluation(encoding)
            if found.acceptance_length >= (1 - TOLERANCE) * reference.acceptance_length:
                return encoding, found
        return REFERENCE, reference

    def evaluation(self, encoding: str) -> Evaluation:
        """What an encoding is worth through llama.cpp."""
        tried = self.tried()
        if encoding not in tried:
            tried[encoding] = asdict(self._evaluate(encoding))
            _write_json(self.run / "tried.json", {**self.identity, "tried": tried})
        return Evaluation(**tried[encoding])

    def tried(self) -> dict[str, Any]:
        path = self.run / "tried.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        tried: dict[str, Any] = found["tried"] if self.identity.items() <= found.items() else {}
        return tried

    def _evaluate(self, encoding: str) -> Evaluation:
        _, held_out = split(self.data)
        with self._encoded(encoding) as path, Meter(f"evaluating {encoding}", 1.0, self.run / "log.jsonl") as meter:
            found = evaluate(
                self.target,
                path,
                self.data,
                held_out,
                n_anchors=self.n_anchors,
                n_threads=self.n_threads,
                progress=meter.advance,
            )
            note = f"{path.stat().st_size / 1e6:.1f} MB, acceptance length {found.acceptance_length:.3f}"
            meter.report(1.0, note, {"encoding": encoding, **asdict(found)})
        return found

    @contextmanager
    def _encoded(self, encoding: str) -> Iterator[Path]:
        path = self.run / "candidate.gguf"
        export(self.trained.drafter(self.file), self.target, path, encoding=encoding)
        try:
            yield path
        finally:
            path.unlink()

    def encode(self, path: Path, encoding: str, evaluation: Evaluation) -> None:
        """Write the weights with where they come from and what they are worth."""
        facts = provenance(self.trained, self.data, self.file)
        for text, figures in evaluation.figures.items():
            facts[f"acceptance_length.{text}"] = figures["acceptance_length"]
        facts["calibration"] = evaluation.calibration
        name = f"DFlash 2 drafter for {self.data.meta.target}"
        export(self.trained.drafter(self.file), self.target, path, encoding=encoding, name=name, provenance=facts)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")

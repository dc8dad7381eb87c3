"""Is everything here that localspec needs? Small checks, each of which says what to do where something is missing.

A check that touches llama.cpp runs in a child process (`python -m localspec.evaluation.doctor NAME`): a broken build
may kill the process it is loaded into. So nothing here imports `localspec.llama` outside the functions that only a
child runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.errors import LocalspecError, OptionError
from localspec.storage import cache_dir, free_bytes, nearest

if TYPE_CHECKING:
    from localspec.hub.registry import PairEntry

GB = 10**9
TIMEOUT_S = 180.0
SELF_TEST_TOKENS = 32
PIP_BUILD = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36"
REBUILD = f"run `make setup` in a checkout, or: {PIP_BUILD}"
# What llama.cpp calls a CPU feature, and what Linux does (/proc/cpuinfo), where it decides about speed.
CPU_FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: `status` is "ok", "warn" or "fail", `next` what to do about it."""

    name: str
    status: str
    detail: str
    next: str | None = None


@dataclass(frozen=True)
class Check:
    """A named check. `run` yields its findings, in a child if `is_risky`, once the check called `needs` has passed."""

    name: str
    run: Callable[[], Iterator[Finding]]
    is_risky: bool = False
    needs: str | None = None


def examine() -> Iterator[Finding]:
    """Run every check in turn; whatever happens in one becomes a finding."""
    failed = set()
    for check in CHECKS:
        if check.needs in failed:
            findings = [Finding(check.name, "warn", f"not checked: {check.needs} does not work")]
        else:
            findings = _in_child(check) if check.is_risky else _findings(check)
        failed |= {finding.name for finding in findings if finding.status == "fail"}
        yield from findings


def _findings(check: Check) -> list[Finding]:
    try:
        return list(check.run())
    except LocalspecError as error:
        detail, _, step = _first_line(error).rpartition("; ")
        return [Finding(check.name, "fail", detail or step, step if detail else None)]
    except Exception as error:  # a report about a broken machine must not break off
        return [Finding(check.name, "fail", f"{type(error).__name__}: {error}")]


def _first_line(error: LocalspecError) -> str:
    return str(error).partition("\n")[0]


def _in_child(check: Check) -> list[Finding]:
    """The findings of a check run in a child process; a child that dies is a finding, too."""
    command = [sys.executable, "-m", "localspec.evaluation.doctor", check.name]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=TIMEOUT_S
        )
        return [Finding(**fields) for fields in json.loads(child.stdout.splitlines()[-1])]
    except subprocess.TimeoutExpired:
        return [Finding(check.name, "fail", f"no answer in {TIMEOUT_S:.0f} seconds")]
    except OSError as error:
        return [Finding(check.name, "fail", f"cannot start {sys.executable}: {error.strerror or error}")]
    except (IndexError, TypeError, ValueError):
        return [Finding(check.name, "fail", f"the process died: {_last_words(child)}", REBUILD)]


def _last_words(child: subprocess.CompletedProcess[str]) -> str:
    if child.returncode < 0:
        return signal.Signals(-child.returncode).name
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    return lines[-1][:200] if lines else f"exit status {child.returncode}"


# --- the checks


def python() -> Iterator[Finding]:
    detail = f"{platform.python_version()} at {sys.executable}, {platform.platform(terse=True)} {platform.machine()}"
    if sys.maxsize < 2**32:
        yield Finding("python", "fail", f"{detail}, 32 bits", "install a 64-bit Python")
    else:
        yield Finding("python", "ok", detail)


def backend() -> Iterator[Finding]:
    from localspec.llama import binding

    symbols = [name for name in vars(binding.ext) if not name.startswith("_")]
    detail = f"{binding.PINNED} with all {len(symbols)} symbols that localspec calls, in {binding.library_folder()}"
    yield Finding("llama-cpp-python", "ok", detail)


def build() -> Iterator[Finding]:
    from localspec.llama import gpu_offload

    built, card = _backends(), nvidia_card()
    detail = f"built for {', '.join(built)}"
    if card and "cuda" not in built:
        rebuild = f'run `make chat CUDA=1` in a checkout, or: CMAKE_ARGS="-DGGML_CUDA=on" {PIP_BUILD}'
        yield Finding("build", "warn", f"{detail}; the NVIDIA card here ({card}) is not used", rebuild)
    elif "cuda" in built and not gpu_offload():
        step = "install NVIDIA's driver, and see whether nvidia-smi lists the card"
        yield Finding("build", "warn", f"{detail}, but CUDA sees no card", step)
    else:
        yield Finding("build", "ok", detail)


def cpu() -> Iterator[Finding]:
    from localspec.llama import default_threads, system_info

    used = set(re.findall(r"(\w+) = 1", system_info()))
    unused = [name for name, flag in CPU_FEATURES.items() if flag in cpu_flags() and name not in used]
    shown = [name for name in CPU_FEATURES if name in used]
    detail = f"{default_threads()} threads, {' '.join(shown) or 'no vector instructions'}"
    if unused:
        detail += f"; this CPU also has {' '.join(unused)}, which the build leaves out"
        yield Finding("cpu", "warn", detail, REBUILD)
    else:
        yield Finding("cpu", "ok", detail)


def amx() -> Iterator[Finding]:
    from localspec.llama import has_amx, safe_to_repack

    if not has_amx():
        yield Finding("amx", "ok", "not used")
    elif safe_to_repack():
        yield Finding("amx", "ok", "works")
    else:
        flags = '"-fno-tree-dse -fno-dse"'
        detail = "crashes in this build (GCC 12 and older compile it wrongly), so models run without it, more slowly"
        yield Finding("amx", "warn", detail, f"CFLAGS={flags} CXXFLAGS={flags} {PIP_BUILD}")


def kernels() -> Iterator[Finding]:
    from localspec.llama import native

    state = native.state()
    yield Finding("kernels", "warn" if state.step else "ok", state.detail, state.step)


def devices() -> Iterator[Finding]:
    from localspec.llama import devices as found
    from localspec.loading.memory_plan import size
    from localspec.machine import ram

    memory = ram()
    swap = f", {size(memory.swap)} of swap" if memory.swap else ""
    detail = f"{size(memory.free)} free of {size(memory.total)}{swap}"
    if memory.free < GB:
        yield Finding("memory", "warn", detail, "close other programs, or use a small model")
    else:
        yield Finding("memory", "ok", detail)
    for device in found():
        room = f", {size(device.free)} free of {size(device.total)}" if device.kind in ("gpu", "igpu") else ""
        yield Finding(f"device {device.name}", "ok", f"{device.description} ({device.kind}){room}")


def cache() -> Iterator[Finding]:
    from huggingface_hub import constants

    yield _folder("cache", cache_dir(), "LOCALSPEC_CACHE")
    yield _folder("Hugging Face cache", Path(constants.HF_HUB_CACHE), "HF_HOME")


def _folder(name: str, folder: Path, variable: str) -> Finding:
    """A folder that is written to: its size, the room on its disk; `variable` moves it."""
    elsewhere = f"set {variable} to a folder that can be written"
    existing, free = nearest(folder), free_bytes(folder)
    size = sum(map(_n_bytes, folder.rglob("*")))
    detail = f"{folder}: {size / GB:.2f} GB in it, {free / GB:.1f} GB free on the disk"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Finding(name, "fail", f"cannot write to {existing}: {error.strerror}", elsewhere)
    if free < GB:
        return Finding(name, "warn", detail, f"make room, or {elsewhere}")
    return Finding(name, "ok", detail if folder.exists() else f"{folder}, made when it is needed")


def _n_bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    except OSError:
        return 0  # gone meanwhile: another process may be at work here


def pairs() -> Iterator[Finding]:
    from localspec.hub import registry

    entries = [registry.get(name) for name in registry.names()]
    shown = [entry for entry in entries if entry.is_here() or entry.name == registry.DEFAULT]
    for entry in shown:
        try:
            yield _pair(entry)
        except LocalspecError as error:
            yield Finding(f"pair {entry.name}", "fail", _first_line(error), f"localspec pull {entry.name}")
    if more := len(entries) - len(shown):
        yield Finding("pairs", "ok", f"{more} more can be pulled, see localspec models")


def _pair(entry: PairEntry) -> Finding:
    from localspec import machine
    from localspec.dflash import compat
    from localspec.llama import read_header, with_shards
    from localspec.loading import memory_plan

    if not entry.is_here():
        return Finding(f"pair {entry.name}", "warn", "not here", f"localspec pull {entry.name}")
    heads = with_shards(read_header(entry.target_path())), read_header(entry.drafter_path())
    compat.check_pair(*heads)
    try:
        plan = memory_plan.settle(*heads, machine.pools())
    except OptionError as error:
        return Finding(f"pair {entry.name}", "warn", f"here and complete, but {_first_line(error)}")
    needed = memory_plan.size(sum(plan.needs(i) for i in range(len(plan.pools))))
    return Finding(f"pair {entry.name}", "ok", f"here and complete; {needed} of memory for {plan.n_ctx:,} tokens")


def torch() -> Iterator[Finding]:
    try:
        yield Finding("torch", "ok", f"{importlib.metadata.version('torch')}, for localspec distill")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "ok", "not here; only localspec distill needs it", "pip install 'localspec[distill]'")


def self_test() -> Iterator[Finding]:
    """The default pair says the same words with and without its drafter, drafting whole blocks."""
    from localspec.evaluation.check import compare
    from localspec.hub import registry
    from localspec.loading.load import load

    if not registry.get(registry.DEFAULT).is_here():
        yield Finding(
            "self-test", "warn", f"not run: {registry.DEFAULT} is not here", f"localspec pull {registry.DEFAULT}"
        )
        return
    prompt, n = "Why is the sky blue?", SELF_TEST_TOKENS
    with load(n_ctx=512) as loaded:
        plain = loaded.generate(prompt, max_tokens=n, spec=False)
        drafted = loaded.generate(prompt, max_tokens=n, path="greedy")
        speeds = f"{plain.stats.predicted_per_second:.0f} and {drafted.stats.predicted_per_second:.0f} tokens/s"
        checked = compare(loaded, 0, prompt, max_tokens=n)
    detail = f"{n} tokens without and with the drafter, {speeds}"
    if checked.is_different:
        yield Finding("self-test", "fail", f"{detail}, other words", "localspec check")
    elif checked.differences:
        yield Finding(
            "self-test", "ok", f"{detail}, the same words but for near-ties, as wider passes round differently"
        )
    else:
        yield Finding("self-test", "ok", f"{detail}, the same words")


# --- what this machine says of itself


def _backends() -> list[str]:
    """What llama.cpp was built for, such as cpu, cuda, metal, vulkan: by its libraries, and by its own words."""
    from localspec.llama import system_info
    from localspec.llama.binding import library_folder

    files = (path.name for path in library_folder().iterdir())
    named = [match[1] for name in files if (match := re.match(r"(?:lib)?ggml-([a-z]+)", name))]
    said = [name.lower() for name in re.findall(r"(\w+) : ", system_info())]
    return sorted({*named, *said} - {"base"})


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """CPU features as Linux names them; empty elsewhere."""
    try:
        match = re.search(r"^(?:flags|Features)\s*: (.*)$", path.read_text(), re.MULTILINE)
    except OSError:
        return set()
    return set(match[1].split()) if match else set()


def nvidia_card(root: Path = Path("/")) -> str | None:
    """The NVIDIA card here, with or without its driver; None if there is none to be seen."""
    for information in root.glob("proc/driver/nvidia/gpus/*/information"):
        if match := re.search(r"Model:\s*(.+)", information.read_text(errors="replace")):
            return match[1].strip()
    if smi := shutil.which("nvidia-smi"):
        done = subprocess.run([smi, "-L"], capture_output=True, text=True, errors="replace", timeout=30)
        if done.returncode == 0 and (match := re.search(r"GPU \d+: (.+?)(?: \(UUID.*)?$", done.stdout, re.MULTILINE)):
            return match[1]
    for device in root.glob("sys/bus/pci/devices/*"):
        kind, vendor = ((device / name).read_text().strip() for name in ("class", "vendor"))
        if vendor == "0x10de" and kind.startswith("0x03"):
            return "its driver is missing"
    return None


CHECKS = (
    Check("python", python),
    Check("llama-cpp-python", backend, is_risky=True),
    Check("build", build, is_risky=True, needs="llama-cpp-python"),
    Check("cpu", cpu, is_risky=True, needs="llama-cpp-python"),
    Check("amx", amx, is_risky=True, needs="llama-cpp-python"),
    Check("kernels", kernels, is_risky=True, needs="llama-cpp-python"),
    Check("devices", devices, is_risky=True, needs="llama-cpp-python"),
    Check("cache", cache),
    Check("pairs", pairs, is_risky=True, needs="llama-cpp-python"),
    Check("torch", torch),
    Check("self-test", self_test, is_risky=True, needs="llama-cpp-python"),
)


if __name__ == "__main__":
    asked = next(check for check in CHECKS if check.name == sys.argv[1])
    print(json.dumps([asdict(finding) for finding in _findings(asked)]))
